"""`GrowableAttention`: self-attention of a live model, whose widths can grow, with or without an extension."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..model.attention import ROLES, GrownAttention, weight_axis
from .adapters import (
    added_by_adapters,
    computed_weight,
    note_all_sizes,
    parameters_along,
    plain,
    why_not_readable,
    why_not_resizable,
)
from .resize import Resize
from .sharding import fill_whole, heads_mesh, is_sharded, parameter_like, put, whole


@dataclass
class Widening:
    """What `GrowableAttention.widen` did, so that it can be kept or undone."""

    attention: "GrowableAttention"
    resizes: list[Resize]
    qk_before: int
    v_before: int

    def undo(self) -> None:
        """Put the very same old parameters back."""
        for resize in self.resizes:
            put(resize.module, resize.name, resize.old)
        self.attention._set_widths(self.qk_before, self.v_before)


class GrowableAttention(GrownAttention):
    """Mixin for a stock self-attention class: its projections seen head by head, resized, and lengthened for a while.

    Attributes:
        extension: None, or a module that lengthens queries, keys and values for as long as it is set, and whose
            `output` turns what comes out of the added value dims into an addition to this module's output.
    """

    extension: Any  # of a module

    def adopt(self, surroundings: dict[str, Any]) -> None:
        """Fill the attributes of a module whose class was just swapped from the stock one, at the stock widths."""
        super().adopt(surroundings)
        self.extension = None
        self._renew_old_forward(type(self))

    def release(self) -> None:
        """Drop what `adopt` added, before the stock class is put back."""
        ours = {"qk_head_dim", "v_head_dim", "extension", "eager_attention", "rotate", "_heads_in_group"}
        ours |= {"kernel_scaling", "surroundings", "_covered", *self.surroundings, *dict(self.architecture.aliases)}
        ours |= set() if self.architecture.scaling is None else {"scaling"}
        covered = self._covered
        for name in ours & vars(self).keys():
            delattr(self, name)
        vars(self).update({name: value for name, value in covered.items() if name not in vars(self)})
        self._renew_old_forward(type(self).__bases__[1])

    def _renew_old_forward(self, cls: type) -> None:
        if "_old_forward" in vars(self):  # accelerate's hooks hold the bound forward of the former class
            self._old_forward = types.MethodType(cls.forward, self)

    def _heads(self, hidden_states: torch.Tensor, position_embeddings) -> tuple[torch.Tensor, ...]:
        heads = super()._heads(hidden_states, position_embeddings)
        if self.extension is None:
            return heads
        (query, *others), own = self.extension(hidden_states, *heads), heads[0].shape[-1]
        if self.architecture.scales_query:
            query = torch.cat((query[..., :own], query[..., own:] * self.scaling), dim=-1)
        return query, *others

    def _joined(self, attn_output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        added = attn_output.shape[-1] - self.v_head_dim
        if self.extension is None or not added:
            return super()._joined(attn_output, shape)
        attn_output, read = attn_output.split((self.v_head_dim, added), dim=-1)
        joined, addition = super()._joined(attn_output, shape), self.extension.output(read)
        if not self.architecture.output_sibling:
            return joined + addition
        # Another module projects what this one returns: the addition waits for that.
        hook = self.projection_of("output").register_forward_hook(lambda *call: (hook.remove(), call[-1] + addition)[1])
        return joined

    @property
    def caches(self) -> bool:
        """Whether generation keeps this module's keys and values: no encoder's."""
        return getattr(self, "is_causal", True)

    def all_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this module and of the sibling that projects its output, by name."""
        found = dict(self.named_parameters())
        if self.architecture.output_sibling:
            start = f"{self.architecture.output_sibling}."
            found |= {start + name: parameter for name, parameter in self.output_sibling[0].named_parameters()}
        return found

    @property
    def heads_mesh(self) -> Any:
        """The processes over which tensor parallelism spreads the heads, in order; None if this one has them all."""
        return heads_mesh(getattr(plain(self.projection_of("query")), "weight", None))

    @property
    def normalises(self) -> bool:
        """Whether old dims are normalised, so that their logits are no bilinear form of the input."""
        return self._norm(self.architecture.query_norm) is not None

    def is_plain(self, role: str) -> bool:
        """Whether a role's weight holds the numbers that it computes with: a quantized one does not."""
        return why_not_readable(self.projection_of(role)) is None

    def empty_like(self, role: str) -> Tensor:
        """An empty tensor in the precision and on the device of a role's new dims: fp32 if the weight is quantized."""
        inside = plain(self.projection_of(role))
        like = next(chain(inside.parameters(), inside.buffers()))  # quantized, it need not be the weight
        return torch.empty(0, dtype=like.dtype if self.is_plain(role) else torch.float32, device=like.device)

    def weight_of(self, role: str) -> Tensor:
        """A view on a role's live weight, (heads, width, hidden_size); for "output" that is `W_O` itself per head.

        Of a quantized one it is a copy in fp32, of the numbers that it computes with; of a sharded one a copy that all
        ranks gather together.
        """
        return self._read(role, "weight", Tensor.detach)

    def weight_gradient(self, role: str) -> Tensor:
        """A view on the gradient of a role's weight, in the shape of `weight_of`."""
        return self._read(role, "weight", attrgetter("grad"))

    def effective_weight(self, role: str, dtype: torch.dtype) -> Tensor:
        """A role's weight with what active adapters add to it, in the shape of `weight_of`."""
        return self._effective(role, "weight", dtype)

    def bias_of(self, role: str) -> Tensor | None:
        """A view on a role's live bias, (heads, width); None where the dims have none, as those of "output"."""
        return self._read(role, "bias", Tensor.detach)

    def bias_gradient(self, role: str) -> Tensor | None:
        """A view on the gradient of a role's bias, in the shape of `bias_of`; None without a bias."""
        return self._read(role, "bias", attrgetter("grad"))

    def effective_bias(self, role: str, dtype: torch.dtype) -> Tensor | None:
        """A role's bias with what active adapters add to it, in the shape of `bias_of`; None where that is None."""
        return self._effective(role, "bias", dtype)

    def _effective(self, role: str, name: str, dtype: torch.dtype) -> Any:
        added = added_by_adapters(self.projection_of(role), name, dtype)
        return self._read(role, name, lambda own: whole(own.detach()).to(dtype) + sum(added))

    def _read(self, role: str, name: str, read: Callable[[Any], Any]) -> Any:
        parameter = getattr(plain(self.projection_of(role)), name, None)
        if name == "weight" and not self.is_plain(role):
            output = role == "output"
            inputs = self.heads_of(role) * self.width_of(role) if output else self.config.hidden_size
            parameter = computed_weight(self.projection_of(role), inputs)
        tensor = None if parameter is None else whole(read(parameter))
        return None if tensor is None or (role, name) == ("output", "bias") else self.view_of(role, tensor)

    def write(self, role: str, start: int, weight: Tensor, bias: Tensor | None) -> None:
        """Write weights (heads, n, hidden_size) and biases (heads, n) into a role's dims from `start` on.

        Raises:
            ValueError: the weight is quantized; the message names the fix.
        """
        if problem := why_not_readable(self.projection_of(role)):
            raise ValueError(f"{self.name_of(role)} is {problem}")
        inside = plain(self.projection_of(role))
        for live, new in ((inside.weight, weight), (inside.bias, bias)):
            if live is not None and new is not None:
                entries = whole(live.detach())
                self.view_of(role, entries)[:, start : start + new.shape[1]] = new
                if is_sharded(live):
                    fill_whole(live.detach(), entries)

    def view_of(self, role: str, tensor: Tensor) -> Tensor:
        """A view on what is laid out as a role's weight or bias: its heads split in (heads, width), and first."""
        axis, groups = self._axis(role) if tensor.dim() > 1 else 0, self._groups(role)
        before = ROLES[: ROLES.index(role)] if self.architecture.fused and role != "output" else ()
        start, size = (sum(self.heads_of(r) * self.width_of(r) for r in of) // groups for of in (before, (role,)))
        block = tensor.unflatten(axis, (groups, -1)).narrow(axis + 1, start, size)
        heads = block.view(*tensor.shape[:axis], self.heads_of(role), self.width_of(role), *tensor.shape[axis + 1 :])
        return heads.permute(1, 2, 0) if axis == 1 else heads

    def widen(self, qk_dims: int = 0, v_dims: int = 0) -> Widening:
        """Append zero dims to every head: the function stays, and new parameters take the old ones' place.

        Those of LoRA adapters around the projections are widened along, by zeros too.

        Args:
            qk_dims: dims to append to each head's queries and keys; a negative number cuts the last ones off.
            v_dims: dims to append to each head's values, and inputs to the output projection, or to cut.

        Returns:
            What was done; `Widening.undo` reverts it.

        Raises:
            ValueError: `parameters_along` knows no way to resize a projection; nothing has changed then.
        """
        grown = {"query": qk_dims, "key": qk_dims, "value": v_dims, "output": v_dims}
        resizes = []
        for projection, roles in self._resized(grown):
            entries, layout = self.parameters_along(roles[0]), self._layout(projection, roles, grown)
            resizes += [_resize(*entry, *layout) for entry in entries]
        widening = Widening(self, resizes, self.qk_head_dim, self.v_head_dim)
        for resize in resizes:
            put(resize.module, resize.name, resize.new)
        self._set_widths(self.qk_head_dim + qk_dims, self.v_head_dim + v_dims)
        return widening

    def old_entries(self) -> dict[nn.Parameter, Tensor]:
        """Which entries of the parameters that grew are old: masks of size 1 along other axes."""
        grown = {role: self.head_dim - self.width_of(role) for role in ROLES}
        masks = {}
        for projection, roles in self._resized(grown):
            entries = self.parameters_along(roles[0])
            old, *_ = self._layout(projection, roles, grown)
            for module, name, axis in entries:
                if module is plain(projection):
                    parameter = getattr(module, name)
                    shape = [size if i == axis else 1 for i, size in enumerate(parameter.shape)]
                    mask = torch.zeros(shape, dtype=torch.bool, device=old.device)
                    masks[parameter] = mask.index_fill_(axis, old, True)
        return masks

    def fit(self, state: dict[str, Tensor], prefix: str) -> bool:
        """Take the widths that a state dict holds for this module, so that it can be loaded; its values come with it.

        Parameters that this replaces name their successors as `_grown_into`, for optimizers that hold them.

        Returns:
            Whether the widths changed.
        """
        qk_head_dim, v_head_dim = self._widths_in(state, prefix)
        widening = self.widen(qk_head_dim - self.qk_head_dim, v_head_dim - self.v_head_dim)
        for resize in widening.resizes:
            vars(resize.old)["_grown_into"] = resize.new
            resize.mark_frozen()
            resize.hand_over_hooks()
        return bool(widening.resizes)

    def _widths_in(self, state: dict[str, Tensor], prefix: str) -> tuple[int, int]:
        """The widths in a state dict; this module's own where that says nothing that fits."""
        sizes, own_widths = {}, (self.qk_head_dim, self.v_head_dim)
        for role in ("query", "output"):
            module = self.projection_of(role)
            if why_not_readable(module) is not None:
                return own_widths
            weight, axis = plain(module).weight, self._axis(role)
            inside = role == "output" and self.architecture.output_sibling
            place = f"{prefix.removesuffix('.').rpartition('.')[0]}.{inside}." if inside else prefix
            named = module.named_modules(prefix=place + getattr(self.architecture, role))
            saved = state.get(next(f"{name}.weight" for name, inside in named if inside is plain(module)), weight)
            if saved.dim() != weight.dim() or saved.shape[1 - axis] != weight.shape[1 - axis]:
                return own_widths
            sizes[role] = saved.shape[axis]
        heads, key_heads = self.heads_of("query"), self.heads_of("key")
        v_head_dim, rest = divmod(sizes["output"], heads)
        if self.architecture.fused:
            sizes["query"], heads = sizes["query"] - key_heads * v_head_dim, heads + key_heads
        qk_head_dim, more = divmod(sizes["query"], heads)
        return own_widths if rest or more or min(qk_head_dim, v_head_dim) < self.head_dim else (qk_head_dim, v_head_dim)

    def parameters_along(self, role: str, if_quantized: str = "") -> list[tuple[nn.Module, str, int]]:
        """The parameters that lie along a role's heads, the projection's and its adapters': module, name and axis.

        `if_quantized` is one more sentence for the error of a quantized projection: what else the caller can do.

        Raises:
            ValueError: the projection is neither a plain one nor one under plain LoRA; the message names the fix.
        """
        problem = why_not_resizable(self.projection_of(role))
        if problem is not None:
            more = "" if self.is_plain(role) else f" {if_quantized}"
            raise ValueError(f"{self.name_of(role)} is {problem}{more}".rstrip())
        return parameters_along(self.projection_of(role), outputs=role != "output")

    def name_of(self, role: str) -> str:
        """What to call a role's projection in a message."""
        return f"{getattr(self.architecture, role)} of layer {self.layer_idx}"

    def _axis(self, role: str) -> int:
        """Axis of the weight along which a role's heads lie."""
        return weight_axis(plain(self.projection_of(role)), outputs=role != "output")

    def _resized(self, grown: dict[str, int]) -> list[tuple[nn.Module, list[str]]]:
        """The projections that change size when each role grows by these dims, with their roles."""
        by_module: dict[nn.Module, list[str]] = {}
        for role in grown:
            by_module.setdefault(self.projection_of(role), []).append(role)
        return [(module, roles) for module, roles in by_module.items() if any(grown[role] for role in roles)]

    def _layout(self, projection: nn.Module, roles: list[str], grown: dict[str, int]) -> tuple[Tensor, Tensor, int]:
        """Which old entries of a projection stay once its roles have grown, where they land, and the new size."""
        stay, land, groups = [], [], self._groups(roles[0])
        for role in roles:
            heads, old, new = self.heads_of(role) // groups, self.width_of(role), self.width_of(role) + grown[role]
            for entries, width in ((stay, old), (land, new)):
                entries.append((torch.arange(width) < min(old, new)).repeat(heads))
        stays, lands = (
            torch.cat(entries).repeat(groups).to(plain(projection).weight.device) for entries in (stay, land)
        )
        return stays.nonzero().flatten(), lands.nonzero().flatten(), len(lands)

    def _set_widths(self, qk_head_dim: int, v_head_dim: int) -> None:
        """Record the widths, here and where the projections note their sizes."""
        self.qk_head_dim, self.v_head_dim = qk_head_dim, v_head_dim
        for role in ROLES:
            if why_not_resizable(self.projection_of(role)) is None:
                note_all_sizes(self.projection_of(role))


def _resize(module: nn.Module, name: str, axis: int, kept, positions, new_size: int) -> Resize:
    """Make the resized parameter: kept entries at `positions` of `axis`, zeros elsewhere, and its gradient likewise."""
    old = getattr(module, name)
    shape = [*old.shape[:axis], new_size, *old.shape[axis + 1 :]]
    new = parameter_like(old, torch.zeros(shape, dtype=old.dtype, device=old.device))
    # Marks that other libraries left on the parameter go along; this one says "weights are final", and they are not.
    marks = {key: value for key, value in vars(old).items() if key != "_is_hf_initialized"}
    vars(new).update({**marks, **vars(new)})
    resize = Resize(module, name, old, new, axis, kept, positions)
    resize.fill()
    return resize
