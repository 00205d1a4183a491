"""How wide a model's heads are, and how much of that width they use, as figures and as tables."""

from collections.abc import Callable

import torch
from tqdm.auto import tqdm

from ..growable.growths import cache_bytes, is_grown
from ..growable.models import GrowableModelMixin
from ..measure.views import FactoredMatrix, attention_views
from ..model.configuration import PREFIX
from ..report.words import KINDS, format_table, format_width


@torch.no_grad()
def inspect_model(model: GrowableModelMixin) -> dict:
    """The widths of a patched model's heads, and how much of them each head uses.

    Returns:
        JSON-ready figures. Rotated heads are read at equal positions. The ranks are None where the model normalizes
        queries and keys, since their product is then no fixed matrix, and where the layout of its weights is not known.
    """
    config, layers = model.config, []
    for view in tqdm(attention_views(model), desc="inspecting", unit="layer", leave=False, disable=None):
        attention = view.attention
        layers.append(
            {
                "layer": view.layer,
                "heads": view.heads,
                "key_value_heads": view.groups,
                "stock_widths": [attention.shape.qk_head_dim, attention.shape.v_head_dim],
                "qk": _measure_ranks(view.pattern, view.heads, attention.width_of("query")),
                "v": _measure_ranks(view.message, view.heads, attention.width_of("value")),
            }
        )
    return {
        "model": config.name_or_path,
        "family": config.model_type.removeprefix(PREFIX),
        "grown": is_grown(model),
        "cache_bytes": cache_bytes(model),
        "parameters": model.num_parameters(),
        "layers": layers,
    }


def _measure_ranks(matrix: Callable[[int], FactoredMatrix], heads: int, width: int) -> dict:
    try:
        ranks = [matrix(head).effective_rank.item() for head in range(heads)]
    except ValueError:  # the view says why there is no fixed matrix
        return {"width": width, "effective_rank": None}
    return {"width": width, "effective_rank": ranks}


def format_inspection(figures: dict) -> str:
    """The figures of `inspect_model` as text: a table of layers and kinds, and costs."""
    rows = []
    for layer in figures["layers"]:
        for stock_width, (kind, title) in zip(layer["stock_widths"], KINDS.items()):
            used, ranks = layer[kind], "none: normalized, or of unknown layout"
            if used["effective_rank"]:
                mean = sum(used["effective_rank"]) / layer["heads"]
                ranks = f"{mean:.1f} ({min(used['effective_rank']):.1f} to {max(used['effective_rank']):.1f})"
            width = format_width((stock_width, used["width"]))
            rows.append([str(layer["layer"]), title, width, ranks])
    return (
        format_table(["layer", "kind", "width", "effective rank: mean (range)"], rows)
        + f"{figures['family']}, {'grown' if figures['grown'] else 'stock widths'}: {figures['parameters']:,} weights, "
        f"and a KV cache of {figures['cache_bytes']:,} bytes a token.\n"
        "The effective rank is the number of directions that a head uses, at most its width.\n"
    )
