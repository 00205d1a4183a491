"""How wide a model's heads are, and how much of that width they use, as figures and as tables."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from ..growable.models import is_grown
from ..interop.costs import Cost, costs_of
from ..measure.kinds import KINDS
from ..measure.views import FactoredMatrix, attention_views
from ..model.configuration import PREFIX
from ..model.shapes import read_shape
from ..report.words import format_table

FULL = 0.9  # a head whose effective rank exceeds this share of its width has hardly a direction to spare
KIND_NAMES = {"patterns": "queries and keys", "messages": "values"}


@torch.no_grad()
def inspect_model(model: PreTrainedModel, tick: Callable[[], object] = lambda: None) -> dict:
    """The widths of a model's heads, and how much of them each head uses.

    Args:
        model: stock, patched or grown.
        tick: called after each layer.

    Returns:
        JSON-ready figures. For each layer and kind: the width, the effective rank of every query head, and which heads
        are full. Rotated heads are read at equal positions. The ranks are None where the model normalises queries and
        keys, since their product is then no fixed matrix. `costs` holds what `costs_of` gives.

    Raises:
        ValueError: the family of the model is unknown.
    """
    config, layers, caches = model.config, [], False
    growable = config.model_type.startswith(PREFIX)
    for view in attention_views(model):
        module: Any = view.module
        shape = module.shape if growable else read_shape(module)
        widths = (module.qk_head_dim, module.v_head_dim) if growable else (shape.qk_head_dim, shape.v_head_dim)
        caches |= getattr(view.module, "is_causal", True)
        layers.append(
            {
                "layer": view.layer,
                "heads": view.heads,
                "key_value_heads": view.groups,
                "stock_widths": [shape.qk_head_dim, shape.v_head_dim],
                "patterns": _measure_ranks(view.pattern, view.heads, widths[0]),
                "messages": _measure_ranks(view.message, view.heads, widths[1]),
            }
        )
        tick()
    dims = sum(layer["key_value_heads"] * sum(layer[kind]["width"] for kind in KINDS) for layer in layers)
    present = Cost(caches * dims * next(model.parameters()).element_size(), model.num_parameters())
    costs = costs_of(model) if is_grown(model) else {"native": present}
    return {
        "model": config.name_or_path,
        "class": type(model).__name__,
        "family": config.model_type.removeprefix(PREFIX),
        "parameters": model.num_parameters(),
        "hidden_size": config.hidden_size,
        "grown": is_grown(model),
        "costs": {form: asdict(cost) for form, cost in costs.items()},
        "layers": layers,
    }


def _measure_ranks(matrix: Callable[[int], FactoredMatrix], heads: int, width: int) -> dict:
    try:
        ranks = [matrix(head).effective_rank.item() for head in range(heads)]
    except ValueError:  # normalised queries and keys have no fixed product
        return {"width": width, "effective_rank": None, "full_heads": None}
    return {
        "width": width,
        "effective_rank": ranks,
        "full_heads": [head for head, rank in enumerate(ranks) if rank >= FULL * width],
    }


def format_layers(figures: dict) -> str:
    """The figures of `inspect_model` as a table, a row for each layer and kind."""
    rows = []
    for layer in figures["layers"]:
        for stock_width, (kind, name) in zip(layer["stock_widths"], KIND_NAMES.items()):
            cells = _format_cells(layer[kind], layer["heads"], stock_width)
            rows.append([str(layer["layer"]), name, *cells])
    return format_table(["layer", "kind", "width", "effective rank: mean (range)", "full heads"], rows)


def format_costs(costs: dict[str, dict]) -> str:
    """The cost of each form of a model as a table."""
    rows = [[form, f"{cost['cache_bytes']:,}", f"{cost['parameters']:,}"] for form, cost in costs.items()]
    return format_table(["form", "KV cache, bytes a token", "weights"], rows)


def _format_cells(used: dict, heads: int, stock_width: int) -> list[str]:
    width = str(stock_width)
    if used["width"] > stock_width:
        width += f" -> {used['width']}"
    ranks, full = used["effective_rank"], used["full_heads"]
    if ranks is None:
        return [width, "none: they are normalised", "-"]
    names = "all" if len(full) == heads > 1 else ", ".join(map(str, full)) or "none"
    return [width, f"{sum(ranks) / heads:.1f} ({min(ranks):.1f} to {max(ranks):.1f})", names]
