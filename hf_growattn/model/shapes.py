"""What an attention module looks like: its sizes, and which of its children project queries, keys, values and outputs.

Sizes are read from what modules note of themselves. Names of projections are those that families commonly use; without
them new dims work all the same, and only what reads old weights does not.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .extra import ROLES, HeadShape

_NAMES = {
    "query": ("q_proj", "query", "q_lin", "q"),
    "key": ("k_proj", "key", "k_lin", "k"),
    "value": ("v_proj", "value", "v_lin", "v"),
    "output": ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "Wo", "wo", "proj", "projection_layer"),
}
REGISTERED: dict[str, Mapping[str, str]] = {}  # by model type, the names of families that have others
_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_attention_heads_per_partition")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")


def find_projections(module: nn.Module) -> dict[str, str]:
    """The names of a module's children that project each role; a role whose name is unusual is missing.

    One name for queries, keys and values is a fused projection.
    """
    config: Any = getattr(module, "config", None)
    registered = REGISTERED.get(getattr(config, "model_type", "").removeprefix("growattn_"))
    if registered is not None:
        return dict(registered)
    children = dict(module.named_children())
    found = {role: name for role in ROLES for name in reversed(_NAMES[role]) if name in children}
    fused = next((name for name in _FUSED if name in children), None)
    if fused is not None and "query" not in found:
        found |= dict.fromkeys(ROLES[:3], fused)
    return found


def read_shape(module: Any) -> HeadShape:
    """The sizes of a stock attention module.

    Raises:
        ValueError: it has no linear projection, so nothing tells the size of its input.
    """
    config, names = module.config, find_projections(module)
    heads = _first_number(module, _HEADS) or config.num_attention_heads
    groups = getattr(module, "num_key_value_groups", None)
    key_heads = heads // groups if groups else _first_number(module, ("num_key_value_heads",)) or heads
    width = _first_number(module, _WIDTHS) or getattr(config, "head_dim", None) or config.hidden_size // heads
    linear = [child for child in module.children() if _sizes_of(child) is not None]
    if not linear:
        raise ValueError(f"{type(module).__name__} has no linear projection, so its input has no known size.")
    first, last = linear[0], getattr(module, names.get("output", ""), None)
    in_features = _sizes_of(first)[0]
    out_features = _sizes_of(last)[1] if last is not None and _sizes_of(last) else in_features
    biased = tuple(role for role in ROLES[:3] if _has_bias(getattr(module, names.get(role, ""), first)))
    return HeadShape(
        heads, key_heads, width, _first_number(module, ("v_head_dim",)) or width, in_features, out_features, biased
    )


def _first_number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _sizes_of(module: Any) -> Any:
    """Sizes of a linear module's inputs and outputs, quantized or under an adapter, too; None for other modules."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if None not in sizes else None


def _has_bias(module: Any) -> bool:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return getattr(module, "bias", None) is not None
