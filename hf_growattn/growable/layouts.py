"""`AttentionLayout`: how the projections of an attention class are called and laid out, and `register_architecture`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..model.configuration import PREFIX
from ..model.families import REGISTERED, find_projections

# Families of which some layers do not rotate.
_ROTATES: dict[str, Callable[[Any], bool]] = {
    "cohere2": lambda attention: attention.sliding_window is not None,
    "esm": lambda attention: attention.position_embedding_type == "rotary",
    "smollm3": lambda attention: attention.use_rope,
}


@dataclass(frozen=True)
class AttentionLayout:
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


def register_architecture(model_type: str, layout: AttentionLayout) -> None:
    """Describe the projections of a model family whose names or layout are unusual.

    Raises:
        ValueError: the layout names a role that does not exist.
    """
    unknown = set(layout.names) - {"query", "key", "value", "output"}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is no role; roles are query, key, value and output.")
    REGISTERED[model_type] = layout


def layout_of(module: Any) -> AttentionLayout:
    """The layout of an attention module: as registered, or by the usual names."""
    model_type = module.config.model_type.removeprefix(PREFIX)
    if model_type in REGISTERED:
        return REGISTERED[model_type]
    names = find_projections(module)
    layout = AttentionLayout(names, grouped_by_head=names.get("query") == "query_key_value")
    return replace(layout, rotates=_ROTATES[model_type]) if model_type in _ROTATES else layout
