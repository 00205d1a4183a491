"""Rows: how a family calls and lays out the projections of its attention, for what reads old weights.

Most families need none: usual names are found by themselves. A row serves `attention_views`, export, and knowing what
old dims can follow; growth itself needs none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..model.configuration import PREFIX
from ..model.shapes import REGISTERED, find_projections


@dataclass(frozen=True)
class Row:
    """How the projections of an attention class are called and laid out.

    Attributes:
        names: by role, the attribute that projects it; one name for queries, keys and values is a fused projection.
        grouped_by_head: a fused projection's outputs are laid out `[query | key | value]` head by head, instead of all
            queries, all keys, all values.
        norms: attributes that normalize queries or keys.
        rotate: name of the function of the modeling file that rotates `(query, key, cos, sin)`.
        rotates: whether a module of the class rotates at all.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    grouped_by_head: bool = False
    norms: tuple[str, ...] = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "qk_norm")
    rotate: str = "apply_rotary_pos_emb"
    rotates: Callable[[Any], bool] = lambda attention: True

    @property
    def is_fused(self) -> bool:
        """Whether queries, keys and values come out of one projection."""
        return "query" in self.names and self.names["query"] == self.names.get("key")

    @staticmethod
    def axis(linear: nn.Module, outputs: bool) -> int:
        """Axis of a weight along which its outputs lie, or its inputs; Conv1D stores its weight transposed."""
        return int(outputs == isinstance(linear, Conv1D))


ROWS: dict[str, Row] = {}  # by model type, those that were registered
# Families of which some layers do not rotate.
_ROTATES: dict[str, Callable[[Any], bool]] = {
    "cohere2": lambda attention: attention.sliding_window is not None,
    "esm": lambda attention: attention.position_embedding_type == "rotary",
    "smollm3": lambda attention: attention.use_rope,
}


def row_of(attention: Any) -> Row:
    """The row of an attention module: a registered one, or what the usual names tell."""
    model_type = attention.config.model_type.removeprefix(PREFIX)
    if model_type in ROWS:
        return ROWS[model_type]
    names = find_projections(attention)
    row = Row(names, grouped_by_head=names.get("query") == "query_key_value")
    return replace(row, rotates=_ROTATES[model_type]) if model_type in _ROTATES else row


def register_architecture(model_type: str, row: Row) -> None:
    """Describe the projections of a model family whose names or layout are unusual.

    Raises:
        ValueError: the row names a role that does not exist.
    """
    unknown = set(row.names) - {"query", "key", "value", "output"}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is no role; roles are query, key, value and output.")
    ROWS[model_type] = row
    REGISTERED[model_type] = row.names
