"""What serving a model costs in each form that it can be written in: bytes of the KV cache, and weights."""

import contextlib
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..growable.models import attentions, cache_bytes
from ..model.configuration import stock_head_dim
from .stock import find_stock_class, padded_config, stock_fields


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
    own_class = type(model).__bases__[1]
    costs = {
        "before growth": _cost_of_stock(model, own_class, own_class.config_class(**stock_fields(model.config))),
        "native": Cost(cache_bytes(model), model.num_parameters()),
    }
    with contextlib.suppress(ValueError):  # no stock class fits
        stock_class = find_stock_class(model)
        config, _ = padded_config(model, stock_class)
        costs["padded"] = _cost_of_stock(model, stock_class, config)
    return costs


def _cost_of_stock(model: PreTrainedModel, stock_class: type[PreTrainedModel], config: PreTrainedConfig) -> Cost:
    """What a model costs in the form of a stock class, whose heads have one width."""
    with torch.device("meta"):
        parameters = stock_class(config).num_parameters()
    heads = sum(attention.heads_of("key") for attention in attentions(model) if attention.caches)
    size = next(model.parameters()).element_size()
    return Cost(size * heads * 2 * stock_head_dim(config), parameters)
