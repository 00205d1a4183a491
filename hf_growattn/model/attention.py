"""`GrownAttention`: self-attention whose query/key and value widths can differ, layer by layer.

The class is mixed into a family's own attention class and swapped in per instance, so parameters, hooks and
`isinstance` checks stay as they were. Per head the weights are laid out `[old dims | new dims]`: old dims rotate where
the family rotates, new dims never do. So the logits are `s (q_old k_old^T + q_new k_new^T)`, and dims whose query or
key weights are zero change nothing.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import nn
from transformers import EncoderDecoderCache, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from .architectures import Architecture

ROLES = ("query", "key", "value", "output")

# Implementations that take values of another width than the keys; all others get equal widths by zero padding.
_UNEQUAL_WIDTHS = ("eager", "flex_attention")
# Keywords by which a family's attention may be given its cache, the newest first: transformers 5.24 renamed the others.
_CACHES = ("cache", "past_key_values", "layer_past")
# Implementations, by prefix, with a cache of one width, which would read wider heads as more tokens.
_ONE_WIDTH = {
    "paged|": ("Continuous batching", "Use model.generate instead."),
    "vllm": ("vLLM", "Load what hf_growattn.export_model writes of this model instead."),
}


class GrownAttention(nn.Module):
    """Mixin for a stock self-attention class: one forward for all families, with widths of its own.

    A role is "query", "key", "value" or "output".

    Attributes:
        architecture: the family's row.
        qk_head_dim: width `d_k` of one head's queries and keys.
        v_head_dim: width `d_v` of one head's values.
        head_dim: width of one head before any growth.
        scaling: the softmax scale `s`, kept from the stock module: it never follows a width.
        cache_keywords: the keyword by which the stock forward takes the cache, and the one that all families had once.
        rotate: the family's rotation of `(query, key, cos, sin)`; None where the layer has none.
        kernel_scaling: what the attention function scales by, the softmax scale unless the queries carry it.
        surroundings: what the module knows of its place in the model, see `surroundings_of`.
    """

    architecture: Architecture
    config: PreTrainedConfig
    layer_idx: int
    qk_head_dim: int
    v_head_dim: int
    head_dim: int
    scaling: float
    cache_keywords: tuple[str, str]
    rotate: Any  # a function, or None
    eager_attention: Callable
    kernel_scaling: float
    surroundings: dict[str, Any]
    output_sibling: tuple[nn.Module]  # a tuple keeps it from being a child
    _covered: dict[str, Any]  # stock values that ours may hide

    @classmethod
    @cache
    def mixed_into(cls, stock: type[nn.Module], row: Architecture) -> type["GrownAttention"]:
        """Return the subclass of a family's stock attention class that has this mixin."""
        name = f"Growable{stock.__name__}"
        rotate = staticmethod(getattr(row.modeling_file, row.rotate)) if row.rotate else None
        parameters = inspect.signature(stock.forward).parameters
        keyword = next((keyword for keyword in _CACHES if keyword in parameters), _CACHES[1])
        own = {"architecture": row, "rotate": rotate, "cache_keywords": (keyword, _CACHES[1])}
        made = type(name, (cls, stock), {"__module__": cls.__module__, **own})
        setattr(sys.modules[cls.__module__], name, made)  # so that pickle finds it
        return made

    def adopt(self, surroundings: dict[str, Any]) -> None:
        """Fill the attributes of a module whose class was just swapped from the stock one, at the stock widths."""
        row, self.surroundings = self.architecture, surroundings
        self._covered = {name: vars(self)[name] for name in ("layer_idx", "scaling") if name in vars(self)}
        for name, value in surroundings.items():
            setattr(self, name, value)
        for name, source in row.aliases:
            setattr(self, name, getattr(self, source))
        if row.scaling is not None:
            self.scaling = row.scaling(self) if callable(row.scaling) else row.scaling
        self.kernel_scaling = 1.0 if row.scales_query else self.scaling
        if row.rotates is not None and not (row.rotates(self) if callable(row.rotates) else self._at(row.rotates)):
            self.rotate = None
        self.qk_head_dim = self.v_head_dim = self.head_dim
        # Reading a config is slow, and the forward needs these each time.
        self._heads_in_group = [self.heads_of(role) // self._groups(role) for role in ("query", "key", "value")]
        self.eager_attention = row.eager(self) if row.eager else row.modeling_file.eager_attention_forward

    def begin_at(self, qk_head_dim: int, v_head_dim: int) -> list[nn.Linear]:
        """Take widths before anything was trained or loaded: the projections concerned begin as zeros of their sizes.

        Returns:
            Those projections, whose weights are to be drawn or loaded.
        """
        changed = [role for role in ROLES[:2] if qk_head_dim != self.qk_head_dim]
        changed += [role for role in ROLES[2:] if v_head_dim != self.v_head_dim]
        self.qk_head_dim, self.v_head_dim = qk_head_dim, v_head_dim
        projections = {self.projection_of(role): role != "output" for role in changed}
        for projection, outputs in projections.items():
            roles = [role for role in ROLES if self.projection_of(role) is projection]
            size = sum(self.heads_of(role) * self.width_of(role) for role in roles)
            shape = list(projection.weight.shape)
            shape[weight_axis(projection, outputs)] = size
            projection.weight = nn.Parameter(projection.weight.new_zeros(shape))
            if outputs and projection.bias is not None:
                projection.bias = nn.Parameter(projection.bias.new_zeros(size))
            note_sizes(projection)
        return list(projections)

    def heads_of(self, role: str) -> int:
        """Number of heads of a role: `num_key_value_heads` for keys and values, `num_attention_heads` otherwise."""
        if role in ("key", "value"):
            return self.architecture.key_value_heads(self.config)
        return self.config.num_attention_heads

    def width_of(self, role: str) -> int:
        """Width of one head of a role."""
        return self.qk_head_dim if role in ("query", "key") else self.v_head_dim

    def projection_of(self, role: str) -> nn.Linear:
        """The module that computes a role: a linear one, or what stands for it."""
        holder: Any = self.output_sibling[0] if role == "output" and self.architecture.output_sibling else self
        return getattr(holder, getattr(self.architecture, role))

    def _groups(self, role: str) -> int:
        """Into how many groups the axis falls along which a role's heads lie."""
        return self.architecture.fused_groups(self.config) if self.architecture.fused and role != "output" else 1

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, as the stock module does.

        Args:
            hidden_states: (batch, tokens, hidden_size).
            attention_mask: whatever the chosen attention implementation takes.
            position_embeddings: `(cos, sin)`, each (batch, tokens, rotated dims), for families that rotate.
            **kwargs: among them the cache, by the family's keyword for it; keys and values may differ in width there,
                and layers too. The others are passed on to the attention implementation.

        Returns:
            The output, (batch, tokens, hidden_size), or what the heads read if a sibling projects that; and the
            attention weights if the implementation gives them.

        Raises:
            ValueError: this layer is wider than the implementation's or the cache's one width (continuous batching,
                vLLM, ExecuTorch's export); the message names the way out.
        """
        row = self.architecture
        query, key, value = self._heads(hidden_states, position_embeddings)
        implementation: Any = self.config._attn_implementation
        kept = self._kept_width(implementation, kwargs.get("attention_instances"))  # of vLLM's own layers
        given = [kwargs.pop(keyword, None) for keyword in self.cache_keywords]
        cache = next((cache for cache in given if cache is not None), None)
        if cache is not None:
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            if not key.shape[-1] == value.shape[-1] == self.head_dim:
                self._check_cache(cache, key, value)
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)

        v_width = value.shape[-1]
        query, key, value = self._padded(implementation, kept, query, key, value)
        kwargs |= {keyword: self._at(path) for keyword, path in row.passes}
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self.eager_attention)
        attn_output, attn_weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self._dropout(row.attention_dropout),
            scaling=self.kernel_scaling,  # of this form: vLLM reads this call's source
            **kwargs,
        )
        if value.shape[-1] > v_width:  # padding; vLLM gives back joined heads
            attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1, value.shape[-1])[..., :v_width]
        attn_output = self._joined(attn_output, hidden_states.shape)
        if row.output_dropout is not None and self.training:
            attn_output = nn.functional.dropout(attn_output, self._dropout(row.output_dropout))
        return attn_output, attn_weights

    def _dropout(self, named: str | Callable[[Any], float]) -> float:
        if not self.training:
            return 0.0
        dropout = named(self) if callable(named) else getattr(self, named)
        return dropout.p if isinstance(dropout, nn.Dropout) else dropout

    def _heads(self, hidden_states: torch.Tensor, position_embeddings) -> tuple[torch.Tensor, ...]:
        """(batch, tokens, hidden_size) -> queries, keys and values, each (batch, its heads, tokens, its width)."""
        query, key, value = self._project(hidden_states)
        if self.architecture.scales_query:
            query = query * self.scaling
        if self.rotate is not None:
            query, key = self._rotate_old_dims(query, key, *position_embeddings)
        return query, key, value

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same before rotation."""
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

    def _joined(self, attn_output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What the heads read, (batch, tokens, heads, v_head_dim), as an output of (batch, tokens, hidden_size)."""
        joined = attn_output.reshape(*shape[:-1], -1).contiguous()
        return joined if self.architecture.output_sibling else self.projection_of("output")(joined)

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

    def _check_cache(self, cache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise a ValueError if a cache was built for other widths than these, (batch, heads, tokens, width)."""
        layers = getattr(cache, "layers", ())
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        for name, states in (("keys", key), ("values", value)):
            built = getattr(layer, name, None)
            if built is not None and built.dim() == states.dim() and built.shape[-1] != states.shape[-1]:
                raise ValueError(
                    f"The cache was built for {name} {built.shape[-1]} wide, and those of layer {self.layer_idx} are "
                    f"{states.shape[-1]} wide. Let generate build the cache. To export with one, as for ExecuTorch, "
                    "take the stock model that hf_growattn.export_model writes."
                )

    def _kept_width(self, implementation: str | None, instances) -> int | None:
        """The one width at which an implementation keeps keys and values; None where it keeps them as they are.

        vLLM's layers, `instances` by number, say their own width.
        """
        width = max(self.qk_head_dim, self.v_head_dim)
        if implementation is None or (width == self.head_dim and instances is None):
            return None
        for prefix, (name, instead) in _ONE_WIDTH.items():
            if implementation.startswith(prefix):
                kept = instances[self.layer_idx].head_size if instances else self.head_dim
                if width > kept:
                    raise ValueError(
                        f"{name} keeps keys and values {kept} wide, but layer {self.layer_idx} has qk_head_dim="
                        f"{self.qk_head_dim} and v_head_dim={self.v_head_dim}. {instead}"
                    )
                return kept
        return None

    @staticmethod
    def _padded(implementation: str | None, kept: int | None, query, key, value) -> tuple[torch.Tensor, ...]:
        """Zero-pad heads to the width that is kept, or to one width: flash would cut wider values."""
        widths = query.shape[-1], value.shape[-1]
        if kept is None and (widths[0] == widths[1] or implementation in _UNEQUAL_WIDTHS):
            return query, key, value
        return tuple(_wider(heads, kept or max(widths)) for heads in (query, key, value))

    def _norm(self, name: str | None) -> nn.Module | None:
        return getattr(self, name, None) if name else None

    def _at(self, path: str):
        """The value at a dotted path from this module; None where that is missing."""
        return reduce(lambda found, name: getattr(found, name, None), path.split("."), self)


def _side_by_side(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Join dims of (batch, heads, tokens, width), tokens before heads in memory as projections lay them out."""
    return torch.cat((old.transpose(1, 2), new.transpose(1, 2)), dim=-1).transpose(1, 2)


def _wider(heads: torch.Tensor, width: int) -> torch.Tensor:
    """Zero-pad (.., width) to another width."""
    gap = width - heads.shape[-1]
    return nn.functional.pad(heads, (0, gap)) if gap else heads


def weight_axis(linear: nn.Module, outputs: bool) -> int:
    """Axis of a weight along which its outputs lie, or its inputs; Conv1D stores its weight transposed."""
    return int(outputs == isinstance(linear, Conv1D))


def note_sizes(linear: Any) -> None:
    """Keep true what a projection notes of its sizes: peft and repr read it."""
    outputs, inputs = (linear.weight.shape[weight_axis(linear, side)] for side in (True, False))
    if isinstance(linear, Conv1D):
        linear.nf, linear.nx = outputs, inputs
    else:
        linear.out_features, linear.in_features = outputs, inputs
