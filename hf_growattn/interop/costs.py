"""What serving a model costs in each form that it can be written in: bytes of the KV cache, and weights."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..growable.models import attentions, cache_bytes
from ..model.attention import ROLES
from ..model.configuration import stock_head_dim
from .stock import padded_config, stock_form, stock_types
from .unequal import MODEL_TYPE, unequal_config, widths


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
        Costs by name: "before growth"; "native", as `save_pretrained` writes it; "padded", a stock form with one width
        for all heads; "unequal", a stock form with one width for queries and keys and another for values. The last two
        only where there is such a form.
    """
    found, size, native = attentions(model), next(model.parameters()).element_size(), model.num_parameters()
    heads, added = sum(a.heads_of("key") for a in found if a.caches), 0
    for attention in found:
        for role in ROLES:
            inputs = model.config.hidden_size + (attention.bias_of(role) is not None)
            added += attention.heads_of(role) * (attention.width_of(role) - attention.head_dim) * inputs
    costs = {
        "before growth": Cost(size * heads * 2 * found[0].head_dim, native - added),
        "native": Cost(cache_bytes(model), native),
    }
    try:
        types = stock_types(model)
    except ValueError:  # no stock class fits
        return costs
    form, stock_class = stock_form(model, types[0])
    config, _ = padded_config(model, form, stock_class)
    costs["padded"] = Cost(size * heads * 2 * stock_head_dim(config), _parameters(stock_class, config))
    if MODEL_TYPE in types:
        stock_class = stock_form(model, MODEL_TYPE)[1]
        costs["unequal"] = Cost(size * heads * sum(widths(model)), _parameters(stock_class, unequal_config(model)))
    return costs


def _parameters(stock_class: type[PreTrainedModel], config) -> int:
    with torch.device("meta"):
        return stock_class(config).num_parameters()
