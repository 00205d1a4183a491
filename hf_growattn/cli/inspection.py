"""What a checkpoint's heads use of their width, and what a measurement says, in figures."""

from collections.abc import Callable
from dataclasses import asdict

import torch
from rich.table import Table
from transformers import PreTrainedModel

from ..growable.models import is_grown
from ..interop.costs import Cost, costs_of
from ..measure.kinds import KINDS
from ..measure.views import FactoredMatrix, attention_views
from ..model.configuration import PREFIX, layer_widths, stock_head_dim
from ..report.report import GrowthReport
from ..report.words import facts

FULL = 0.9  # of its width: a head whose effective rank is beyond has hardly a direction to spare


@torch.no_grad()
def inspected(model: PreTrainedModel, tick: Callable[[], object] = lambda: None) -> dict:
    """Gather the widths of a model's heads, and how much of them each head uses.

    Args:
        model: stock, patched or grown.
        tick: called after each layer.

    Returns:
        What `json.dumps` takes. For each layer and kind: the width, the effective rank of every query head, and which
        heads are full. Patterns of rotated heads are taken at equal positions; where a family normalises queries and
        keys there is no pattern, and the ranks are None. What it costs, as it is and in other forms: see `costs_of`.

    Raises:
        ValueError: the family of the model is unknown.
    """
    config, layers, caches = model.config, [], False
    growable = config.model_type.startswith(PREFIX)
    for view in attention_views(model):
        widths = layer_widths(config, view.layer_idx) if growable else (stock_head_dim(config),) * 2
        caches |= getattr(view.module, "is_causal", True)
        layers.append(
            {
                "layer": view.layer_idx,
                "heads": view.heads,
                "key_value_heads": view.groups,
                "patterns": _used(view.pattern, view.heads, widths[0]),
                "messages": _used(view.message, view.heads, widths[1]),
            }
        )
        tick()
    dims = sum(layer["key_value_heads"] * sum(layer[kind]["width"] for kind in KINDS) for layer in layers)
    as_it_is = Cost(caches * dims * next(model.parameters()).element_size(), model.num_parameters())
    costs = costs_of(model) if is_grown(model) else {"native": as_it_is}
    return {
        "model": config.name_or_path,
        "class": type(model).__name__,
        "family": config.model_type.removeprefix(PREFIX),
        "parameters": model.num_parameters(),
        "hidden_size": config.hidden_size,
        "stock_width": stock_head_dim(config),
        "grown": is_grown(model),
        "costs": {form: asdict(cost) for form, cost in costs.items()},
        "layers": layers,
    }


def _used(matrix: Callable[[int], FactoredMatrix], heads: int, width: int) -> dict:
    try:
        ranks = [matrix(head).effective_rank.item() for head in range(heads)]
    except ValueError:  # queries and keys are normalised: there is no pattern
        return {"width": width, "effective_rank": None, "full_heads": None}
    return {
        "width": width,
        "effective_rank": ranks,
        "full_heads": [head for head, rank in enumerate(ranks) if rank >= FULL * width],
    }


def table_of(figures: dict) -> Table:
    """What `inspected` gathered, for people."""
    table = Table("layer", "kind", "width", "effective rank: mean (range)", "full heads")
    for layer in figures["layers"]:
        for kind in KINDS:
            table.add_row(str(layer["layer"]), kind, *_cells(layer[kind], layer["heads"], figures["stock_width"]))
    return table


def costs_table(costs: dict[str, dict]) -> Table:
    """What each form of a model costs, for people."""
    table = Table("form", "KV cache, bytes a token", "weights")
    for form, cost in costs.items():
        table.add_row(form, f"{cost['cache_bytes']:,}", f"{cost['parameters']:,}")
    return table


def _cells(used: dict, heads: int, stock: int) -> list[str]:
    width = f"{stock} -> {used['width']}" if used["width"] > stock else str(stock)
    ranks, full = used["effective_rank"], used["full_heads"]
    if ranks is None:
        return [width, "none: they are normalised", "-"]
    named = "all" if len(full) == heads > 1 else ", ".join(map(str, full)) or "none"
    return [width, f"{sum(ranks) / heads:.1f} ({min(ranks):.1f} to {max(ranks):.1f})", named]


def measured(report: GrowthReport) -> dict:
    """A report as what `json.dumps` takes."""
    return {
        "applied": report.applied,
        "verdict": " ".join(text for _, text in facts([report])),
        "validated_gain": report.predicted_gain,
        "loss_before": report.loss_before,
        "loss_after": report.loss_after,
        "added_parameters": report.added_parameters,
        "cache_bytes": list(report.cache_bytes),
        "layers": [
            {
                "layer": layer.layer,
                "kind": layer.kind,
                "width": list(layer.width),
                "starvation": layer.starvation,
                "validated_gain": layer.predicted_gain,
                "step_size": layer.step_size,
                "price": dict(zip(("weights", "cache_bytes"), layer.price)),
                "left": layer.left or None,
            }
            for layer in report.layers
        ],
        "seconds": report.seconds,
    }
