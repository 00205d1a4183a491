"""`GrowableAttention`: what is known of an attention module of a live model, whose old weights can be read by heads.

Reading takes projections under the names that families commonly use, or those of a registered `AttentionLayout`.
Without them growth works all the same: it takes the whole gradient, since nobody knows what old dims can do about it.

Quantized projections are read as the numbers that they compute with, and adapters count in.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..model.families import (
    FoundAttention,
    add_extra,
    base_layer,
    find_attentions,
    interface_caller,
    linear_sizes,
    parameter_names,
    read_shape,
    remove_extra,
)
from ..model.hooks import UNEQUAL_WIDTHS, Arguments, common_width
from ..model.new_dims import ROLES, ExtraDims, HeadShape, NewDims, full_tensor
from .projections import (
    MERGE_ADAPTERS,
    AttentionLayout,
    added_by_adapters,
    answers,
    has_other_adapters,
    is_plain,
    layout_of,
)

_SCALED_BEFORE = ("esm", "evolla")  # families that scale queries before they rotate, and call that a scale of 1


class GrowableAttention:
    """What is known of an attention module of a patched model; two of the same module are equal.

    A role is "query", "key", "value" or "output".

    Attributes:
        module: the stock attention module, which this leaves as it is until there are new dims.
        layer: number of the layer, by which the config knows it.
        name: path of the module in the model.
        sibling: the module that projects the output, as in BERT's family; None where the module does so itself.
    """

    def __init__(self, found: FoundAttention):
        self.found = found
        self.name, self.module, self.layer, self.sibling = found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GrowableAttention) and self.module is other.module

    def __hash__(self) -> int:
        return hash(self.module)

    @property
    def config(self) -> Any:
        """The config of the module."""
        return self.module.config

    @property
    def extra(self) -> ExtraDims | None:
        """The child that holds new dims; None for a module without any."""
        return self.module._modules.get("extra")

    @functools.cached_property
    def shape(self) -> HeadShape:
        """The stock sizes."""
        return read_shape(self.module) if self.extra is None else self.extra.shape

    @functools.cached_property
    def arguments(self) -> Arguments:
        """How the module's forward calls what it is given."""
        return Arguments(tuple(parameter_names(self.module)))

    @property
    def growths(self) -> dict[str, NewDims]:
        """The new dims that are kept, by the name of their growth."""
        return {} if self.extra is None else dict(self.extra.growths.items())

    def make_extra(self) -> ExtraDims:
        """The child that holds new dims, which is made, with its hooks, at the first call."""
        return add_extra(self.found)

    def drop_if_empty(self) -> None:
        """Take the child and its hooks off if it holds no new dims."""
        if self.extra is not None and self.extra.is_empty:
            remove_extra(self.module)

    def width_of(self, role: str) -> int:
        """Width of one head of a role, kept new dims included."""
        return self.stock_width_of(role) + sum(dims.dims_of(role) for dims in self.growths.values())

    def stock_width_of(self, role: str) -> int:
        """Width of one head of a role before any growth."""
        return self.shape.qk_head_dim if role in ("query", "key") else self.shape.v_head_dim

    def features_of(self, role: str) -> int:
        """Features that a head's factor of a role has: of the input and one for a bias, or of the output."""
        return self.shape.out_features if role == "output" else self.shape.in_features + (role in self.shape.biased)

    @property
    def caches(self) -> bool:
        """Whether generation keeps this module's keys and values: no encoder's."""
        return getattr(self.module, "is_causal", True)

    def cached_numbers(self, new_dims: Sequence[NewDims]) -> int:
        """How many numbers a cache keeps of a token with these new dims: most kernels want equal widths.

        Multi-head latent attention keeps one latent and one rotated key for all heads.
        """
        new = sum(dims.qk_dims for dims in new_dims), sum(dims.v_dims for dims in new_dims)
        latent: Any = getattr(self.module, "kv_lora_rank", None), getattr(self.module, "qk_rope_head_dim", None)
        if None not in latent:
            return sum(latent) + self.shape.num_key_value_heads * sum(new)
        key, value = self.shape.qk_head_dim + new[0], self.shape.v_head_dim + new[1]
        if new_dims and self.config._attn_implementation not in UNEQUAL_WIDTHS:
            key = value = common_width(key, value, self.empty_like().device)
        return self.shape.num_key_value_heads * (key + value)

    @property
    def layout(self) -> AttentionLayout:
        """How the projections are called and laid out."""
        return layout_of(self.module)

    @property
    def rotate(self) -> Any:
        """The family's rotation of `(query, key, cos, sin)`; None where this layer does not rotate."""
        forward: Any = interface_caller(self.module)
        name = self.layout.rotate
        rotates = name in forward.__code__.co_names and self.layout.rotates(self.module)
        return forward.__globals__.get(name) if rotates else None

    @property
    def softmax_scale(self) -> float:
        """What logits are scaled by, in the queries or in the attention function: 1 in T5."""
        scale = getattr(self.module, "scaling", None)
        is_before = self.config.model_type in _SCALED_BEFORE
        return self.shape.qk_head_dim**-0.5 if scale is None or is_before else float(scale)

    @property
    def normalizes(self) -> bool:
        """Whether old queries or keys are normalized, so that their logits are no bilinear form of the input."""
        return any(getattr(self.module, name, None) is not None for name in self.layout.norms)

    def projection_of(self, role: str) -> Any:
        """The module that computes a role; None where its name is unusual."""
        name = self.layout.names.get(role)
        if name is None:
            return self.sibling.dense if role == "output" and self.sibling is not None else None
        return getattr(self.module, name)

    def why_unreadable(self, role: str) -> str | None:
        """Why a role's weight cannot be read by heads, with the fix; None where it can.

        Of a quantized projection it can: as the numbers that it computes with.
        """
        projection = self.projection_of(role)
        if projection is None:
            return f"The {role} projection of layer {self.layer} is not known: describe it by register_architecture."
        inside, expected = base_layer(projection), self._rows_of(role)
        if has_other_adapters(projection) or linear_sizes(inside) is None:
            return f"{self.name_of(role)} is a {type(projection).__name__}, no plain linear layer. {MERGE_ADAPTERS}."
        if is_plain(projection) and inside.weight.shape[self._axis(role)] != expected:
            return (
                f"{self.name_of(role)} has {inside.weight.shape[self._axis(role)]} rows for heads that need "
                f"{expected}: describe its layout by register_architecture."
            )
        return None

    def is_known(self, *roles: str) -> bool:
        """Whether these roles' weights can be read."""
        return not any(map(self.why_unreadable, roles))

    def name_of(self, role: str) -> str:
        """What to call a role's projection in a message."""
        return f"{self.layout.names.get(role, role)} of layer {self.layer}"

    def trains(self, *roles: str) -> bool:
        """Whether training moves the old dims of any of these roles: their weights, or adapters on them."""
        modules = [self.projection_of(role) for role in roles]
        if None in modules:
            modules = [self.module]
        return any(parameter.requires_grad for module in modules for parameter in module.parameters())

    def empty_like(self, role: str = "query") -> Tensor:
        """An empty tensor in the precision and on the device of new dims: fp32 if old weights are quantized."""
        projection = self.projection_of(role)
        inside = self.module if projection is None else base_layer(projection)
        with align_module_device(inside):  # accelerate brings offloaded weights to where they are used
            like: Any = next(iter([*inside.parameters(), *inside.buffers()]))
        has_dtype = like.is_floating_point() and (projection is None or is_plain(projection))
        dtype = like.dtype if has_dtype else torch.float32
        return torch.empty(0, dtype=dtype, device=like.device)

    def make_new_dims(self, qk_dims: int, v_dims: int) -> NewDims:
        """New dims for this module that it does not have yet, zeros, in the precision of its weights."""
        like = self.empty_like()
        return NewDims(self.shape, qk_dims, v_dims, dtype=like.dtype, device=like.device)

    def add_new_dims(self, name: str, qk_dims: int, v_dims: int) -> NewDims:
        """Let the module keep new dims, zeros, as the growth of a name."""
        self.make_extra().growths[name] = new_dims = self.make_new_dims(qk_dims, v_dims)
        return new_dims

    def weight_of(self, role: str) -> Tensor:
        """A role's old weight, (heads, stock width, features); for "output" that is `W_O` itself per head.

        It is a view, but a copy in fp32 of a quantized weight, and one that all ranks gather of a sharded weight.
        """
        return self._read(role, "weight", None)

    def bias_of(self, role: str) -> Tensor | None:
        """A role's old bias, (heads, stock width); None where the dims have none, as those of "output"."""
        return None if role == "output" else self._read(role, "bias", None)

    def factors_of(self, role: str, dtype: torch.dtype, adapters: bool = True) -> Tensor:
        """What all dims of a role compute, (heads, features, width), a bias as the last feature.

        With `adapters`, what active ones do to the old dims counts in.
        """
        read_as = dtype if adapters else None
        # New logits are always scaled, where old ones may not be.
        scale = self.shape.qk_head_dim**-0.5 if role == "query" and self.softmax_scale == 1.0 else 1.0
        new = [scale * dims.weight_of(role).detach() for dims in self.growths.values()]
        weights = [self._read(role, "weight", read_as), *new]
        factors = torch.cat([weight.to(dtype) for weight in weights], 1).transpose(-1, -2)
        if role not in self.shape.biased:
            return factors
        given: list[Any] = [dims.bias_of(role) for dims in self.growths.values()]
        biases = [self._read(role, "bias", read_as), *(scale * bias.detach() for bias in given if bias is not None)]
        return torch.cat([factors, torch.cat([bias.to(dtype) for bias in biases], 1).unsqueeze(-2)], -2)

    def _read(self, role: str, name: str, dtype: torch.dtype | None) -> Any:
        projection = self.projection_of(role)
        with align_module_device(base_layer(projection)):
            tensor = getattr(base_layer(projection), name, None)
            if name == "weight" and not is_plain(projection):
                inputs = self._rows_of("output") if role == "output" else self.shape.in_features
                tensor = answers(projection, torch.eye(inputs)).T  # what it computes with, such as when quantized
        if tensor is None:
            return None
        tensor = full_tensor(tensor.detach())
        if dtype is not None:
            tensor = tensor.to(dtype) + sum(added_by_adapters(projection, name, dtype))
        return self.view_of(role, tensor)

    def view_of(self, role: str, tensor: Tensor) -> Tensor:
        """A view on what is laid out as a role's weight or bias: its heads split in (heads, width), and first."""
        axis = self._axis(role) if tensor.dim() > 1 else 0
        groups, before = 1, 0
        if self.layout.is_fused and role != "output":
            groups = self.shape.num_heads if self.layout.grouped_by_head else 1
            before = sum(self._size_of(other) for other in ROLES[: ROLES.index(role)])
        block = tensor.unflatten(axis, (groups, -1)).narrow(axis + 1, before // groups, self._size_of(role) // groups)
        heads, width = self.shape.heads_of(role), self.stock_width_of(role)
        split = block.view(*tensor.shape[:axis], heads, width, *tensor.shape[axis + 1 :])
        return split.permute(1, 2, 0) if axis == 1 else split

    def _size_of(self, role: str) -> int:
        return self.shape.heads_of(role) * self.stock_width_of(role)

    def _rows_of(self, role: str) -> int:
        """Entries of the role's projection along its heads: of all three roles where they share one."""
        roles = ROLES[:3] if self.layout.is_fused and role != "output" else (role,)
        return sum(map(self._size_of, roles))

    def _axis(self, role: str) -> int:
        """Axis of the weight along which a role's heads lie; Conv1D stores its weight transposed."""
        transposed = isinstance(base_layer(self.projection_of(role)), Conv1D)
        return int((role != "output") == transposed)


def set_trial(attention: GrowableAttention, trial: nn.Module | None) -> None:
    """Let new dims be tried in an attention module, or none; those that are kept stay."""
    if trial is not None:
        attention.make_extra()._modules["trial"] = trial
    elif attention.extra is not None:
        attention.extra._modules.pop("trial", None)
        attention.drop_if_empty()


def attentions(model: nn.Module) -> list[GrowableAttention]:
    """The attention modules of a patched model that can have new dims, by layer."""
    return sorted(map(GrowableAttention, find_attentions(model)), key=lambda attention: attention.layer)
