"""`GrowableAttention`: self-attention whose query/key and value widths can differ, layer by layer, and can grow.

The class is mixed into a family's own attention class and swapped in per instance, so parameters, hooks and
`isinstance` checks stay as they were. Per head the weights are laid out `[old dims | new dims]`: old dims rotate where
the family rotates, new dims never do. So the logits are `s (q_old k_old^T + q_new k_new^T)`, and dims whose query or
key weights are zero change nothing.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from transformers import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .adapters import effective, hindrance, note_sizes, parameters_along, plain, weight_axis
from .architectures import Architecture

# Implementations that take values of another width than the keys; all others get equal widths by zero padding.
_UNEQUAL_WIDTHS = ("eager", "flex_attention")


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
            setattr(resize.module, resize.name, resize.old)
        self.attention._set_widths(self.qk_before, self.v_before)


class GrowableAttention(nn.Module):
    """Mixin for a stock self-attention class: one forward for all families, with widths of its own.

    Attributes:
        architecture: the family's row.
        qk_head_dim: width `d_k` of one head's queries and keys, after growth.
        v_head_dim: width `d_v` of one head's values, after growth.
        scaling: the softmax scale `s`, kept from the stock module: it never follows a width (draft 004).
        extension: None, or a module that lengthens queries, keys and values for as long as it is set, and whose
            `output` turns what comes out of the added value dims into an addition to this module's output.
    """

    architecture: Architecture
    rotate: Callable | None
    qk_head_dim: int
    v_head_dim: int
    extension: nn.Module | None

    def adopt(self) -> None:
        """Fill the attributes of a module whose class was just swapped from the stock one, at the stock widths."""
        row = self.architecture
        self.qk_head_dim = self.v_head_dim = self.head_dim
        self.extension = None
        self.eager_attention = row.eager(self) if row.eager else row.modeling_file.eager_attention_forward
        if "_old_forward" in vars(self):  # accelerate's hooks hold the bound forward of the former class
            self._old_forward = types.MethodType(type(self).forward, self)

    def release(self) -> None:
        """Drop what `adopt` added, before the stock class is put back."""
        del self.qk_head_dim, self.v_head_dim, self.extension, self.eager_attention
        if "_old_forward" in vars(self):
            self._old_forward = types.MethodType(type(self).__bases__[1].forward, self)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, as the stock module does.

        Args:
            hidden_states: (batch, tokens, hidden_size).
            position_embeddings: `(cos, sin)`, each (batch, tokens, rotated dims), for families that rotate.
            attention_mask: whatever the chosen attention implementation takes.
            past_key_values: a transformers cache; keys and values may differ in width, and layers too.
            **kwargs: passed on to the attention implementation.

        Returns:
            The output, (batch, tokens, hidden_size), and the attention weights where the implementation gives them.
        """
        row = self.architecture
        query, key, value = self._project(hidden_states)
        if self.rotate is not None:
            query, key = self._rotate_old_dims(query, key, *position_embeddings)
        if self.extension is not None:
            query, key, value = self.extension(hidden_states, query, key, value)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)

        implementation = self.config._attn_implementation
        v_width = value.shape[-1]
        query, key, value = self._pad_to_equal_widths(implementation, query, key, value)
        dropout = getattr(self, row.attention_dropout)
        dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self.eager_attention)
        attn_output, attn_weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        # (batch, tokens, heads, v_head_dim), and beside it what an extension added
        attn_output, added = attn_output[..., :v_width].split((self.v_head_dim, v_width - self.v_head_dim), dim=-1)
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        attn_output = self.projection("output")(attn_output)
        if added.shape[-1]:
            attn_output = attn_output + self.extension.output(added)
        if row.output_dropout is not None:
            attn_output = getattr(self, row.output_dropout)(attn_output)
        return attn_output, attn_weights

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(batch, tokens, hidden_size) -> queries, keys and values, each (batch, its heads, tokens, its width)."""
        roles, batch_shape = ("query", "key", "value"), hidden_states.shape[:-1]
        if self.architecture.fused:
            sizes = [self.heads(role) * self.width(role) for role in roles]
            projected = self.projection("query")(hidden_states).split(sizes, dim=-1)
        else:
            projected = [self.projection(role)(hidden_states) for role in roles]
        return tuple(x.view(*batch_shape, -1, self.width(role)).transpose(1, 2) for x, role in zip(projected, roles))

    def _rotate_old_dims(self, query, key, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the leading dims that the family's rotary embedding covers; new dims stay as they are."""
        rotated = cos.shape[-1]
        if rotated == query.shape[-1]:
            return self.rotate(query, key, cos, sin)
        query_old, query_new = query[..., :rotated], query[..., rotated:]
        key_old, key_new = key[..., :rotated], key[..., rotated:]
        query_old, key_old = self.rotate(query_old, key_old, cos, sin)
        return torch.cat((query_old, query_new), dim=-1), torch.cat((key_old, key_new), dim=-1)

    def _pad_to_equal_widths(self, implementation, query, key, value):
        """Zero-pad the narrower of (query, key) and value: fused kernels want one width, and flash would cut values."""
        gap = query.shape[-1] - value.shape[-1]
        if gap == 0 or implementation in _UNEQUAL_WIDTHS:
            return query, key, value
        if implementation is not None and implementation.startswith("paged|"):
            raise ValueError(
                f"Continuous batching keeps one head width for keys and values, but layer {self.layer_idx} has "
                f"qk_head_dim={self.qk_head_dim} and v_head_dim={self.v_head_dim}. Use model.generate instead."
            )
        if gap > 0:
            return query, key, nn.functional.pad(value, (0, gap))
        return nn.functional.pad(query, (0, -gap)), nn.functional.pad(key, (0, -gap)), value

    # Widths and weights. A role is "query", "key", "value" or "output".

    def heads(self, role: str) -> int:
        """Number of heads of a role: `num_key_value_heads` for keys and values, `num_attention_heads` otherwise."""
        heads = self.config.num_attention_heads
        if role in ("key", "value"):
            return getattr(self.config, "num_key_value_heads", None) or heads
        return heads

    def width(self, role: str) -> int:
        """Width of one head of a role."""
        return self.qk_head_dim if role in ("query", "key") else self.v_head_dim

    def projection(self, role: str) -> nn.Module:
        """The module that computes a role: a linear one, or what peft has put around it."""
        return getattr(self, getattr(self.architecture, role))

    def weight(self, role: str) -> torch.Tensor:
        """A view on a role's live weight, (heads, width, hidden_size); for "output" that is `W_O` itself per head."""
        return self._weight_view(role, plain(self.projection(role)).weight.detach())

    def weight_gradient(self, role: str) -> torch.Tensor:
        """A view on the gradient of a role's weight, in the shape of `weight`."""
        return self._weight_view(role, plain(self.projection(role)).weight.grad)

    def effective_weight(self, role: str, dtype: torch.dtype) -> torch.Tensor:
        """A role's weight with what active adapters add to it, in the shape of `weight`."""
        return self._weight_view(role, effective(self.projection(role), "weight", dtype))

    def _weight_view(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = self._axis(role)
        start, size = self._block(role)
        view = tensor.narrow(axis, start, size).unflatten(axis, (self.heads(role), self.width(role)))
        return view.permute(1, 2, 0) if axis == 1 else view

    def bias(self, role: str) -> torch.Tensor | None:
        """A view on a role's live bias, (heads, width); None where the dims have none, as those of "output"."""
        bias = plain(self.projection(role)).bias
        return None if bias is None or role == "output" else self._bias_view(role, bias.detach())

    def bias_gradient(self, role: str) -> torch.Tensor | None:
        """A view on the gradient of a role's bias, in the shape of `bias`; None where there is no such bias."""
        bias = plain(self.projection(role)).bias
        return None if bias is None or role == "output" else self._bias_view(role, bias.grad)

    def effective_bias(self, role: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A role's bias with what active adapters add to it, in the shape of `bias`; None where that is None."""
        bias = effective(self.projection(role), "bias", dtype)
        return None if bias is None or role == "output" else self._bias_view(role, bias)

    def _bias_view(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        start, size = self._block(role)
        return tensor.narrow(0, start, size).unflatten(0, (self.heads(role), self.width(role)))

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
        by_module: dict[nn.Module, list[str]] = {}
        for role in grown:
            by_module.setdefault(self.projection(role), []).append(role)
        resizes = []
        for projection, roles in by_module.items():
            if not any(grown[role] for role in roles):
                continue
            layout = self._layout(roles, grown, plain(projection).weight.device)
            resizes += [_resize(*entry, *layout) for entry in self.parameters_along(roles[0])]
        widening = Widening(self, resizes, self.qk_head_dim, self.v_head_dim)
        for resize in resizes:
            setattr(resize.module, resize.name, resize.new)
        self._set_widths(self.qk_head_dim + qk_dims, self.v_head_dim + v_dims)
        return widening

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
        return bool(widening.resizes)

    def _widths_in(self, state: dict[str, torch.Tensor], prefix: str) -> tuple[int, int]:
        """The widths in a state dict; this module's own where that says nothing that fits."""
        sizes = {}
        for role in ("query", "output"):
            module = self.projection(role)
            weight, name = plain(module).weight, getattr(self.architecture, role)
            inside = next(n for n, m in module.named_modules(prefix=name) if m is plain(module))
            saved, axis = state.get(f"{prefix}{inside}.weight", weight), self._axis(role)
            if saved.dim() != weight.dim() or saved.shape[1 - axis] != weight.shape[1 - axis]:
                return self.qk_head_dim, self.v_head_dim
            sizes[role] = saved.shape[axis]
        query_heads, key_heads = self.heads("query"), self.heads("key")
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
        problem = hindrance(self.projection(role))
        if problem is not None:
            raise ValueError(
                f"{getattr(self.architecture, role)} of layer {self.layer_idx} is {problem}, which growth cannot "
                "resize. Merge adapters other than plain LoRA into the weights (merge_and_unload() of peft), and load "
                "the model without quantization."
            )
        return parameters_along(self.projection(role), outputs=role != "output")

    def _axis(self, role: str) -> int:
        """Axis of the weight along which a role's heads lie."""
        return weight_axis(plain(self.projection(role)), outputs=role != "output")

    def _block(self, role: str) -> tuple[int, int]:
        """Start and size of a role's rows inside its projection."""
        before = {"key": ("query",), "value": ("query", "key")}.get(role, ()) if self.architecture.fused else ()
        return sum(self.heads(r) * self.width(r) for r in before), self.heads(role) * self.width(role)

    def _layout(self, roles, grown, device) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Which old entries of a projection stay once its roles have grown, where they land, and the new size."""
        kept, positions, old_start, new_start = [], [], 0, 0
        for role in roles:
            heads = torch.arange(self.heads(role), device=device)
            old, new = self.width(role), self.width(role) + grown[role]
            dims = torch.arange(min(old, new), device=device)
            kept.append((old_start + old * heads[:, None] + dims).flatten())
            positions.append((new_start + new * heads[:, None] + dims).flatten())
            old_start, new_start = old_start + len(heads) * old, new_start + len(heads) * new
        return torch.cat(kept), torch.cat(positions), new_start

    def _set_widths(self, qk_head_dim: int, v_head_dim: int) -> None:
        """Record the widths, here and where the projections note their sizes."""
        self.qk_head_dim, self.v_head_dim = qk_head_dim, v_head_dim
        for role in ("query", "key", "value", "output"):
            if hindrance(self.projection(role)) is None:
                note_sizes(self.projection(role))


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


@cache
def growable_attention_class(stock: type[nn.Module], row: Architecture) -> type[GrowableAttention]:
    """Return the growable subclass of a family's stock attention class."""
    name = f"Growable{stock.__name__}"
    rotate = staticmethod(getattr(row.modeling_file, row.rotate)) if row.rotate else None
    cls = type(name, (GrowableAttention, stock), {"__module__": __name__, "architecture": row, "rotate": rotate})
    globals()[name] = cls  # so that pickle finds it
    return cls
