"""The weights of an attention module head by head, and how its widths change.

`Widths` is the half of `GrowableAttention` that does not compute. Per head the weights are laid out
`[old dims | new dims]`, and so are their biases.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .adapters import effective, hindrance, note_sizes, parameters_along, plain, weight_axis
from .architectures import Architecture


@dataclass
class Resize:
    """One parameter of a projection before and after a change of width.

    Attributes:
        module, name: where the parameter lives.
        old, new: the parameters; `new` holds at `positions` along `axis` what `old` holds at `kept`, zeros elsewhere.
        axis: the axis whose size changed.
        kept: (n,) indices along `axis` of `old`: all of them, unless dims were cut.
        positions: (n,) indices along `axis` of `new`.
        steepness: (entries of `new` along `axis`,) largest squared gradients of a few batches, in units of what is
            usual at `positions`; None where nobody measured them.
    """

    module: nn.Module
    name: str
    old: nn.Parameter
    new: nn.Parameter
    axis: int
    kept: torch.Tensor
    positions: torch.Tensor
    steepness: torch.Tensor | None = None

    def carry(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Copy what is kept of a tensor of the old parameter's shape into one of the new one's, and return that."""
        kept = old.index_select(self.axis, self.kept.to(old.device))
        return new.index_copy_(self.axis, self.positions.to(new.device), kept)

    def hand_over_hooks(self) -> None:
        """Let hooks on the old parameter's gradient run for the new one; the handles that remove them stay valid."""
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(self.old, hooks):
                setattr(self.new, hooks, getattr(self.old, hooks))


@dataclass
class Widening:
    """What `Widths.widen` did, so that it can be kept or undone."""

    attention: "Widths"
    resizes: list[Resize]
    qk_before: int
    v_before: int

    def undo(self) -> None:
        """Put the very same old parameters back."""
        for resize in self.resizes:
            setattr(resize.module, resize.name, resize.old)
        self.attention._set_widths(self.qk_before, self.v_before)


class Widths(nn.Module):
    """Mixin for a self-attention module: its projections by role, seen head by head, and resized.

    A role is "query", "key", "value" or "output".

    Attributes:
        architecture: the family's row.
        qk_head_dim: width `d_k` of one head's queries and keys, after growth.
        v_head_dim: width `d_v` of one head's values, after growth.
    """

    architecture: Architecture
    qk_head_dim: int
    v_head_dim: int

    def heads_of(self, role: str) -> int:
        """Number of heads of a role: `num_key_value_heads` for keys and values, `num_attention_heads` otherwise."""
        if role in ("key", "value"):
            return self.architecture.key_value_heads(self.config)
        return self.config.num_attention_heads

    def width_of(self, role: str) -> int:
        """Width of one head of a role."""
        return self.qk_head_dim if role in ("query", "key") else self.v_head_dim

    def projection_of(self, role: str) -> nn.Module:
        """The module that computes a role: a linear one, or what peft has put around it."""
        return getattr(self, getattr(self.architecture, role))

    def weight_of(self, role: str) -> torch.Tensor:
        """A view on a role's live weight, (heads, width, hidden_size); for "output" that is `W_O` itself per head."""
        return self._weight_view(role, plain(self.projection_of(role)).weight.detach())

    def weight_gradient(self, role: str) -> torch.Tensor:
        """A view on the gradient of a role's weight, in the shape of `weight_of`."""
        return self._weight_view(role, plain(self.projection_of(role)).weight.grad)

    def effective_weight(self, role: str, dtype: torch.dtype) -> torch.Tensor:
        """A role's weight with what active adapters add to it, in the shape of `weight_of`."""
        return self._weight_view(role, effective(self.projection_of(role), "weight", dtype))

    def _weight_view(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = self._axis(role)
        view = self._heads_view(role, tensor, axis)
        return view.permute(1, 2, 0) if axis == 1 else view

    def bias_of(self, role: str) -> torch.Tensor | None:
        """A view on a role's live bias, (heads, width); None where the dims have none, as those of "output"."""
        bias = plain(self.projection_of(role)).bias
        return None if bias is None or role == "output" else self._bias_view(role, bias.detach())

    def bias_gradient(self, role: str) -> torch.Tensor | None:
        """A view on the gradient of a role's bias, in the shape of `bias_of`; None where there is no such bias."""
        bias = plain(self.projection_of(role)).bias
        return None if bias is None or role == "output" else self._bias_view(role, bias.grad)

    def effective_bias(self, role: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A role's bias with what active adapters add to it, in the shape of `bias_of`; None where that is None."""
        bias = effective(self.projection_of(role), "bias", dtype)
        return None if bias is None or role == "output" else self._bias_view(role, bias)

    def _bias_view(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._heads_view(role, tensor, axis=0)

    def _heads_view(self, role: str, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Split an axis along which a role's heads lie into (heads, width)."""
        start, size = self._block(role)
        grouped = tensor.unflatten(axis, (self._groups(role), -1)).narrow(axis + 1, start, size)
        shape = (*tensor.shape[:axis], self.heads_of(role), self.width_of(role), *tensor.shape[axis + 1 :])
        return grouped.view(shape)

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
            layout = self._layout(roles, grown, plain(projection).weight.device)
            resizes += [_resize(*entry, *layout) for entry in self.parameters_along(roles[0])]
        widening = Widening(self, resizes, self.qk_head_dim, self.v_head_dim)
        for resize in resizes:
            setattr(resize.module, resize.name, resize.new)
        self._set_widths(self.qk_head_dim + qk_dims, self.v_head_dim + v_dims)
        return widening

    def begin_at(self, qk_head_dim: int, v_head_dim: int) -> list[nn.Module]:
        """Take widths before anything was trained or loaded: the projections concerned begin as zeros of their sizes.

        Returns:
            Those projections, whose weights are to be drawn or loaded.
        """
        qk_dims, v_dims = qk_head_dim - self.qk_head_dim, v_head_dim - self.v_head_dim
        changed = self._resized({"query": qk_dims, "key": qk_dims, "value": v_dims, "output": v_dims})
        self.qk_head_dim, self.v_head_dim = qk_head_dim, v_head_dim
        for _, roles in changed:
            size = sum(self.heads_of(role) * self.width_of(role) for role in roles)
            for module, name, axis in self.parameters_along(roles[0]):
                shape = list(getattr(module, name).shape)
                shape[axis] = size
                setattr(module, name, nn.Parameter(getattr(module, name).new_zeros(shape)))
        self._set_widths(qk_head_dim, v_head_dim)
        return [projection for projection, _ in changed]

    def new_entries(self) -> dict[nn.Parameter, torch.Tensor]:
        """Which entries of the projections' own parameters growth has added: a boolean mask for each that it resized.

        Training just those keeps a base frozen: multiply the gradients by the masks, with a weight decay of zero.
        """
        grown = {role: self.head_dim - self.width_of(role) for role in ("query", "key", "value", "output")}
        masks = {}
        for projection, roles in self._resized(grown):
            old, *_ = self._layout(roles, grown, plain(projection).weight.device)
            for module, name, axis in self.parameters_along(roles[0]):
                if module is plain(projection):
                    parameter = getattr(module, name)
                    masks[parameter] = torch.ones_like(parameter, dtype=torch.bool).index_fill_(axis, old, False)
        return masks

    def fit(self, state: dict[str, torch.Tensor], prefix: str) -> bool:
        """Take the widths that a state dict holds for this module, so that it can be loaded; its values come with it.

        Parameters that this replaces name their successors as `_grown_into`, for optimizers that hold them.

        Returns:
            Whether the widths changed.
        """
        qk_head_dim, v_head_dim = self._widths_in(state, prefix)
        widening = self.widen(qk_head_dim - self.qk_head_dim, v_head_dim - self.v_head_dim)
        for resize in widening.resizes:
            resize.old._grown_into = resize.new
            resize.hand_over_hooks()
        return bool(widening.resizes)

    def _widths_in(self, state: dict[str, torch.Tensor], prefix: str) -> tuple[int, int]:
        """The widths in a state dict; this module's own where that says nothing that fits."""
        sizes = {}
        for role in ("query", "output"):
            module = self.projection_of(role)
            weight, name = plain(module).weight, getattr(self.architecture, role)
            inside = next(n for n, m in module.named_modules(prefix=name) if m is plain(module))
            saved, axis = state.get(f"{prefix}{inside}.weight", weight), self._axis(role)
            if saved.dim() != weight.dim() or saved.shape[1 - axis] != weight.shape[1 - axis]:
                return self.qk_head_dim, self.v_head_dim
            sizes[role] = saved.shape[axis]
        query_heads, key_heads = self.heads_of("query"), self.heads_of("key")
        v_head_dim, rest = divmod(sizes["output"], query_heads)
        if self.architecture.fused:
            qk_head_dim, more = divmod(sizes["query"] - key_heads * v_head_dim, query_heads + key_heads)
        else:
            qk_head_dim, more = divmod(sizes["query"], query_heads)
        if rest or more or min(qk_head_dim, v_head_dim) < self.head_dim:
            return self.qk_head_dim, self.v_head_dim
        return qk_head_dim, v_head_dim

    def parameters_along(self, role: str) -> list[tuple[nn.Module, str, int]]:
        """The parameters that lie along a role's heads, the projection's and its adapters': module, name and axis.

        Raises:
            ValueError: the projection is neither a plain one nor one under plain LoRA; the message names the fix.
        """
        problem = hindrance(self.projection_of(role))
        if problem is not None:
            raise ValueError(
                f"{getattr(self.architecture, role)} of layer {self.layer_idx} is {problem}, which growth cannot "
                "resize. Merge adapters other than plain LoRA into the weights (merge_and_unload() of peft), and load "
                "the model without quantization."
            )
        return parameters_along(self.projection_of(role), outputs=role != "output")

    def _axis(self, role: str) -> int:
        """Axis of the weight along which a role's heads lie."""
        return weight_axis(plain(self.projection_of(role)), outputs=role != "output")

    def _groups(self, role: str) -> int:
        """Into how many groups the axis falls along which a role's heads lie."""
        return self.architecture.fused_groups(self.config) if self.architecture.fused and role != "output" else 1

    def _block(self, role: str) -> tuple[int, int]:
        """Start and size of a role's entries inside each group of its projection."""
        before = {"key": ("query",), "value": ("query", "key")}.get(role, ()) if self.architecture.fused else ()
        groups = self._groups(role)
        start, size = (
            sum(self.heads_of(r) * self.width_of(r) for r in before),
            self.heads_of(role) * self.width_of(role),
        )
        return start // groups, size // groups

    def _resized(self, grown: dict[str, int]) -> list[tuple[nn.Module, list[str]]]:
        """The projections whose size so many more dims for each role change, each with its roles."""
        by_module: dict[nn.Module, list[str]] = {}
        for role in grown:
            by_module.setdefault(self.projection_of(role), []).append(role)
        return [(module, roles) for module, roles in by_module.items() if any(grown[role] for role in roles)]

    def _layout(self, roles, grown, device) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Which old entries of a projection stay once its roles have grown, where they land, and the new size."""
        kept, positions, old_start, new_start = [], [], 0, 0
        groups = self._groups(roles[0])
        for role in roles:
            heads = torch.arange(self.heads_of(role) // groups, device=device)
            old, new = self.width_of(role), self.width_of(role) + grown[role]
            dims = torch.arange(min(old, new), device=device)
            kept.append((old_start + old * heads[:, None] + dims).flatten())
            positions.append((new_start + new * heads[:, None] + dims).flatten())
            old_start, new_start = old_start + len(heads) * old, new_start + len(heads) * new
        group = torch.arange(groups, device=device)[:, None]
        kept, positions = torch.cat(kept) + old_start * group, torch.cat(positions) + new_start * group
        return kept.flatten(), positions.flatten(), groups * new_start

    def _set_widths(self, qk_head_dim: int, v_head_dim: int) -> None:
        """Record the widths, here and where the projections note their sizes."""
        self.qk_head_dim, self.v_head_dim = qk_head_dim, v_head_dim
        for role in ("query", "key", "value", "output"):
            if hindrance(self.projection_of(role)) is None:
                note_sizes(self.projection_of(role))


def _resize(module: nn.Module, name: str, axis: int, kept, positions, new_size: int) -> Resize:
    """Make the resized parameter: kept entries at `positions` of `axis`, zeros elsewhere, and its gradient likewise."""
    old = getattr(module, name)
    shape = list(old.shape)
    shape[axis] = new_size
    new = nn.Parameter(old.detach().new_zeros(shape), requires_grad=old.requires_grad)
    resize = Resize(module, name, old, new, axis, kept, positions)
    resize.carry(old.detach(), new.detach())
    if old.grad is not None:
        new.grad = resize.carry(old.grad, old.grad.new_zeros(shape))
    # Marks that other libraries left on the parameter go along; this one says "weights are final", and they are not.
    vars(new).update({key: value for key, value in vars(old).items() if key != "_is_hf_initialized"})
    return resize
