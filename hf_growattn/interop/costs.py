"""What serving a model costs in each form that it can be written in: bytes of the KV cache, and weights."""

import contextlib
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..growable.growths import attentions, cache_bytes, extra_parameters
from ..model.extra import HeadShape, read_shape
from ..model.modeling import find_attentions
from .stock import find_stock_class, padded_config


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
        Costs by name: "before growth"; "native", as `save_pretrained` writes it; "padded", the stock form, with one
        width for all heads, a multiple of 8 where they grew. The last one only where the family has such a form.
    """
    size, grown = next(model.parameters()).element_size(), extra_parameters(model)
    shapes = [attention.shape for attention in attentions(model) if attention.caches]
    costs = {
        "before growth": Cost(size * _cached(shapes), model.num_parameters() - sum(p.numel() for p in grown)),
        "native": Cost(cache_bytes(model), model.num_parameters()),
    }
    with contextlib.suppress(ValueError):  # no stock class fits
        stock_class = find_stock_class(model)
        config, _ = padded_config(model, stock_class)
        with torch.device("meta"):
            stock = stock_class(config)
        padded = [read_shape(module) for module, *_ in find_attentions(stock)] if shapes else []
        costs["padded"] = Cost(size * _cached(padded), stock.num_parameters())
    return costs


def _cached(shapes: list[HeadShape]) -> int:
    """Numbers in the keys and values of a token."""
    return sum(shape.num_key_value_heads * (shape.qk_head_dim + shape.v_head_dim) for shape in shapes)
