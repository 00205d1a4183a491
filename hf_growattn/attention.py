"""`GrowableAttention`: self-attention whose query/key and value widths can differ, layer by layer, and can grow.

The class is mixed into a family's own attention class and swapped in per instance, so parameters, hooks and
`isinstance` checks stay as they were. Per head the weights are laid out `[old dims | new dims]`: old dims rotate where
the family rotates, new dims never do. So the logits are `s (q_old k_old^T + q_new k_new^T)`, and dims whose query or
key weights are zero change nothing.
"""

import types
from collections.abc import Callable
from functools import cache, reduce

import torch
from torch import nn
from transformers import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .architectures import Architecture
from .widths import Widths

# Implementations that take values of another width than the keys; all others get equal widths by zero padding.
_UNEQUAL_WIDTHS = ("eager", "flex_attention")
# Implementations, by prefix, that size their cache by the config and would read wider heads as more tokens.
_ONE_WIDTH_FOR_ALL = {
    "paged|": ("Continuous batching", "Use model.generate instead."),
    "vllm": ("vLLM", "Load what hf_growattn.export_model writes of this model instead."),
}


class GrowableAttention(Widths):
    """Mixin for a stock self-attention class: one forward for all families, with widths of its own.

    Attributes:
        rotate: the family's rotation of `(query, key, cos, sin)`; None where the layer has none.
        scaling: the softmax scale `s`, kept from the stock module: it never follows a width (draft 004).
        extension: None, or a module that lengthens queries, keys and values for as long as it is set, and whose
            `output` turns what comes out of the added value dims into an addition to this module's output.
    """

    rotate: Callable | None
    extension: nn.Module | None

    def adopt(self) -> None:
        """Fill the attributes of a module whose class was just swapped from the stock one, at the stock widths."""
        row = self.architecture
        for name, source in row.aliases:
            setattr(self, name, getattr(self, source))
        if row.scaling is not None:
            self.scaling = row.scaling
        if row.rotates is not None and not self._at(row.rotates):
            self.rotate = None
        self.qk_head_dim = self.v_head_dim = self.head_dim
        self.extension = None
        # Reading a config is slow, and the forward needs these each time.
        self._heads_in_group = [self.heads_of(role) // self._groups(role) for role in ("query", "key", "value")]
        self.eager_attention = row.eager(self) if row.eager else row.modeling_file.eager_attention_forward
        if "_old_forward" in vars(self):  # accelerate's hooks hold the bound forward of the former class
            self._old_forward = types.MethodType(type(self).forward, self)

    def release(self) -> None:
        """Drop what `adopt` added, before the stock class is put back."""
        ours = {"qk_head_dim", "v_head_dim", "extension", "eager_attention", "rotate", "_heads_in_group"}
        ours |= {name for name, _ in self.architecture.aliases}
        if self.architecture.scaling is not None:
            ours.add("scaling")
        for name in ours & vars(self).keys():
            delattr(self, name)
        if "_old_forward" in vars(self):
            self._old_forward = types.MethodType(type(self).__bases__[1].forward, self)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, as the stock module does.

        Args:
            hidden_states: (batch, tokens, hidden_size).
            position_embeddings: `(cos, sin)`, each (batch, tokens, rotated dims), for families that rotate.
            attention_mask: whatever the chosen attention implementation takes.
            **kwargs: among them the cache, by the family's keyword for it; keys and values may differ in width there,
                and layers too. The others are passed on to the attention implementation.

        Returns:
            The output, (batch, tokens, hidden_size), and the attention weights where the implementation gives them.
        """
        row = self.architecture
        query, key, value = self._project(hidden_states)
        if self.rotate is not None:
            query, key = self._rotate_old_dims(query, key, *position_embeddings)
        if self.extension is not None:
            query, key, value = self.extension(hidden_states, query, key, value)
        scaling = self.scaling
        if row.scales_query:
            query, scaling = query * scaling, 1.0
        past_key_values = kwargs.pop(row.cache, None)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)

        implementation = self.config._attn_implementation
        v_width = value.shape[-1]
        query, key, value = self._pad_to_equal_widths(implementation, query, key, value)
        named = row.attention_dropout
        dropout = named(self) if callable(named) else getattr(self, named)
        dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        kwargs |= {keyword: self._at(path) for keyword, path in row.passes}
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self.eager_attention)
        attn_output, attn_weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout if self.training else 0.0,
            scaling=scaling,
            **kwargs,
        )
        # (batch, tokens, heads, v_head_dim), and beside it what an extension added, and padding
        if attn_output.shape[-1] > self.v_head_dim:
            attn_output, added = attn_output[..., :v_width].split((self.v_head_dim, v_width - self.v_head_dim), dim=-1)
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        attn_output = self.projection_of("output")(attn_output)
        if v_width > self.v_head_dim:
            attn_output = attn_output + self.extension.output(added)
        if row.output_dropout is not None:
            attn_output = getattr(self, row.output_dropout)(attn_output)
        return attn_output, attn_weights

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(batch, tokens, hidden_size) -> queries, keys and values, each (batch, its heads, tokens, its width)."""
        row, roles, batch_shape = self.architecture, ("query", "key", "value"), hidden_states.shape[:-1]
        if row.fused:
            sizes = [heads * self.width_of(role) for heads, role in zip(self._heads_in_group, roles)]
            projected = self.projection_of("query")(hidden_states).view(*batch_shape, -1, sum(sizes))
            projected = projected.split_with_sizes(sizes, dim=-1)
        else:
            projected = [self.projection_of(role)(hidden_states) for role in roles]
        query, key, value = (x.view(*batch_shape, -1, self.width_of(role)) for x, role in zip(projected, roles))
        query, key = self._normed(row.query_norm, query), self._normed(row.key_norm, key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _normed(self, name: str | None, heads: torch.Tensor) -> torch.Tensor:
        """Normalise the dims that a layer had before any growth, (batch, tokens, heads, width); new dims stay."""
        norm = self._norm(name)
        if norm is None:
            return heads
        if heads.shape[-1] == self.head_dim:
            return self.architecture.norm(norm, heads)
        old, new = heads.split((self.head_dim, heads.shape[-1] - self.head_dim), dim=-1)
        return torch.cat((self.architecture.norm(norm, old), new), dim=-1)

    def _rotate_old_dims(self, query, key, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the leading dims that the family's rotary embedding covers; new dims stay as they are."""
        rotated = cos.shape[-1]
        if rotated == query.shape[-1]:
            return self.rotate(query, key, cos, sin)
        # Plain `split` takes twice as long to say the same.
        query_old, query_new = query.split_with_sizes((rotated, query.shape[-1] - rotated), dim=-1)
        key_old, key_new = key.split_with_sizes((rotated, key.shape[-1] - rotated), dim=-1)
        query_old, key_old = self.rotate(query_old, key_old, cos, sin)
        return _side_by_side(query_old, query_new), _side_by_side(key_old, key_new)

    def _pad_to_equal_widths(self, implementation, query, key, value):
        """Zero-pad the narrower of (query, key) and value: fused kernels want one width, and flash would cut values."""
        qk_width, v_width = query.shape[-1], value.shape[-1]
        if qk_width == v_width == self.head_dim:
            return query, key, value
        for prefix, (name, instead) in _ONE_WIDTH_FOR_ALL.items():
            if implementation is not None and implementation.startswith(prefix):
                raise ValueError(
                    f"{name} gives the keys and values of all layers one width, head_dim={self.head_dim}, but layer "
                    f"{self.layer_idx} has qk_head_dim={self.qk_head_dim} and v_head_dim={self.v_head_dim}. {instead}"
                )
        gap = qk_width - v_width
        if gap == 0 or implementation in _UNEQUAL_WIDTHS:
            return query, key, value
        if gap > 0:
            return query, key, nn.functional.pad(value, (0, gap))
        return nn.functional.pad(query, (0, -gap)), nn.functional.pad(key, (0, -gap)), value

    @property
    def window(self) -> int | None:
        """How many tokens a query sees back to itself; None for all of them."""
        path = dict(self.architecture.passes).get("sliding_window")
        if path is None and self._at("attention_type") == "local":  # GPT-Neo keeps its window in its mask
            path = "config.window_size"
        return self._at(path) if path else None

    @property
    def normalises(self) -> bool:
        """Whether old dims are normalised, so that their logits are no bilinear form of the input."""
        return self._norm(self.architecture.query_norm) is not None

    def _norm(self, name: str | None) -> nn.Module | None:
        return getattr(self, name, None) if name else None

    def _at(self, path: str):
        """The value at a dotted path from this module; None where that is missing."""
        return reduce(lambda found, name: getattr(found, name, None), path.split("."), self)


def _side_by_side(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Join dims of (batch, heads, tokens, width), tokens before heads in memory as projections lay them out."""
    return torch.cat((old.transpose(1, 2), new.transpose(1, 2)), dim=-1).transpose(1, 2)


@cache
def growable_attention_class(stock: type[nn.Module], row: Architecture) -> type[GrowableAttention]:
    """Return the growable subclass of a family's stock attention class."""
    name = f"Growable{stock.__name__}"
    rotate = staticmethod(getattr(row.modeling_file, row.rotate)) if row.rotate else None
    cls = type(name, (GrowableAttention, stock), {"__module__": __name__, "architecture": row, "rotate": rotate})
    globals()[name] = cls  # so that pickle finds it
    return cls
