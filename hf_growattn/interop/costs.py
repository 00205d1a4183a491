"""What serving a model costs in each form that it can be written in: bytes of the KV cache, and weights."""

import contextlib
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..growable.growths import attentions, cache_bytes, extra_parameters
from .stock import empty_stock


@dataclass(frozen=True)
class Cost:
    """What one form of a model takes.

    Attributes:
        cache_bytes: of a token's keys and values over all layers, in the precision of the weights; an encoder has none.
        parameters: how many the model holds.
    """

    cache_bytes: int
    parameters: int


def costs_of(model: PreTrainedModel) -> dict[str, Cost]:
    """What a patched model costs, form by form.

    Returns:
        Costs by name: "before growth"; "grown", as `save_pretrained` writes it; "exported", as `export_model` does.
        The last one only where the family has a stock form.
    """
    size = next(model.parameters()).element_size()
    before = model.num_parameters() - sum(parameter.numel() for parameter in extra_parameters(model))
    costs = {
        "before growth": Cost(_stock_bytes(model, size), before),
        "grown": Cost(cache_bytes(model), model.num_parameters()),
    }
    with contextlib.suppress(ValueError):  # no stock class fits
        stock, _ = empty_stock(model)
        costs["exported"] = Cost(_stock_bytes(stock, size), stock.num_parameters())
    return costs


def _stock_bytes(model: PreTrainedModel, size: int) -> int:
    """Bytes of a token's keys and values at the stock widths, by the bytes of a number."""
    shapes = [attention.shape for attention in attentions(model) if attention.caches]
    return size * sum(shape.num_key_value_heads * (shape.qk_head_dim + shape.v_head_dim) for shape in shapes)
