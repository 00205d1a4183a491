"""What serving a model costs in each form that it can be written in: bytes of the KV cache, and weights."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..growable.models import attentions, cache_bytes
from ..model.attention import ROLES
from ..model.configuration import stock_head_dim
from .stock import padded_config, stock_form


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
        form, stock_class = stock_form(model)
    except ValueError:  # no stock class fits
        return costs
    config, _ = padded_config(model, form, stock_class)
    with torch.device("meta"):
        parameters = stock_class(config).num_parameters()
    return costs | {"padded": Cost(size * heads * 2 * stock_head_dim(config), parameters)}
