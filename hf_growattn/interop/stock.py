"""A grown model as a stock one: the class of its family, and the config and weights that compute the same.

A stock class has one width for queries, keys and values of all layers, rotates all of it, and takes its softmax scale
from it. So every head is padded with zeros to the widest, rounded up to a multiple of 8; dims that growth added rotate
with frequency zero; and queries carry `s / s'`, the scale over the one that the stock class computes.
"""

import contextlib
import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention, attentions
from ..growable.growths import is_grown
from ..growable.models import patch_model, unpatch_model
from ..growable.projections import quantization
from ..model.new_dims import ROLES

MULTIPLE = 8  # of the head width that flash kernels take
ROPE_TYPES = "default", "llama3"  # that a grown model may have
ZERO_TO_ALL = 1e-6  # weights of padded dims: no logit shows them, and DoRA divides by the norm of each row


@torch.no_grad()
def stock_model(model: PreTrainedModel) -> PreTrainedModel:
    """Build the stock model. Tensors that need not change are the model's own ones, and new ones lie on the CPU."""
    stock, places = _empty_stock(model)
    for source, target in zip(attentions(model), attentions(stock)) if is_grown(model) else ():
        _write_attention(source, target, places)
    unpatch_model(stock)

    names = stock.state_dict()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".extra.growths." not in name}
    unknown = [name for name in state if name not in names]
    if unknown:
        raise ValueError(
            f"The model holds {unknown[0]}, which {type(stock).__name__} does not. Merge adapters into the weights "
            "first, with merge_and_unload() of peft, make parametrized or pruned weights plain, with "
            "remove_parametrizations or prune.remove of torch, and load the model without quantization."
        )
    for name, written in names.items():
        if written.is_meta:
            path, _, leaf = name.rpartition(".")
            module, tensor = stock.get_submodule(path), state[name].detach()
            setattr(module, leaf, nn.Parameter(tensor, False) if leaf in module._parameters else tensor)
    stock.tie_weights()
    if model.can_generate():
        stock.generation_config = copy.deepcopy(model.generation_config)
    return stock


def _empty_stock(model: Any) -> tuple[PreTrainedModel, Tensor]:
    """The stock model, patched and on the meta device, and where it has the dims of a query or key."""
    for name, module in model.named_modules():
        problem = quantization(module)
        if problem:
            raise ValueError(f"{name} is {problem}")
    stock_class: Any = type(model).stock_class
    ours = ("model_type", "growable_submodels", "extra_dims", "attention_count", "architectures")
    fields = stock_class.config_class.to_dict(model.config)
    values = {name: value for name, value in fields.items() if name not in ours}
    width = _padded_width(model)
    places = torch.arange(width)
    if not is_grown(model):
        return _build(stock_class, values), places
    reason = _why_not_exportable(model, width)
    if reason is None:
        with contextlib.suppress(Exception):  # a config that refuses this width or this rotation
            if values.get("rope_parameters"):
                values["rope_parameters"], places = _rope(model, width)
            stock = _build(stock_class, values | {"head_dim": width})
            if all(attention.shape.qk_head_dim == width for attention in attentions(stock)):
                return stock, places
        reason = "its config takes no other width of heads"
    raise ValueError(
        f"This grown {stock_class.config_class.model_type} model has no exact stock form: {reason}. Save it as it is, "
        "with model.save_pretrained: transformers loads that with `import hf_growattn`."
    )


def _build(stock_class: Any, values: dict) -> PreTrainedModel:
    with torch.device("meta"):
        return patch_model(stock_class(stock_class.config_class(**values)))


def _padded_width(model: PreTrainedModel) -> int:
    """The width of all heads of the stock model: of the widest one, rounded up for flash kernels."""
    widest = max(attention.width_of(role) for attention in attentions(model) for role in ("key", "value"))
    return widest + -widest % MULTIPLE


def _why_not_exportable(model: PreTrainedModel, width: int) -> str | None:
    """What keeps a grown model from having a stock form with heads of a width; None where nothing is known to."""
    for attention in attentions(model):
        for role in ROLES:
            if reason := attention.why_unreadable(role):
                return reason
        if attention.normalizes and attention.shape.qk_head_dim != width:
            return "it normalizes queries or keys over all dims of a head, new and padded ones too"
        if attention.rotate is not None and not _rotates_halves(attention):
            return "its stock class does not rotate dims as Llama's does"
    parameters = getattr(model.config, "rope_parameters", None)
    if not parameters:
        return None
    if "rope_theta" not in parameters:
        return "it rotates each type of layer in a way of its own"
    if parameters["rope_type"] not in ROPE_TYPES:
        return f"it rotates by frequencies of type {parameters['rope_type']}"
    return "it rotates only a part of each head" if parameters.get("partial_rotary_factor", 1.0) != 1.0 else None


def _rotates_halves(attention: GrowableAttention) -> bool:
    """Whether the rotation pairs dim `i` with `i + d / 2`, as in Llama."""
    half = torch.zeros(1, 1, 1, 4)
    half[..., 0] = 1.0
    quarter_turn = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)  # cos and sin
    with contextlib.suppress(RuntimeError):  # of other shapes
        return bool(attention.rotate(half, half, *quarter_turn)[0][..., 2] == 1.0)
    return False


def fresh_rotary(rotary) -> Any:
    """A rotary embedding as loading would build it: the live one follows the lengths it met, and `model.to(dtype)`."""
    return type(rotary)(copy.deepcopy(rotary.config))


def _rope(model: PreTrainedModel, width: int) -> tuple[dict, Tensor]:
    """Let the dims that rotate do so as before, among `width` ones, and all others stand still.

    Stock rotation pairs dim `i` with `i + width / 2`. Default frequencies `theta^(-2 i / d)` are continued to the wider
    head by `theta' = theta^(width / d)`, and rope type "llama3" divides those of long wavelengths by `factor`: its two
    borders are put into the gap between the last old wavelength and the first new one, which leaves a turn of 1e-20 a
    token. vLLM and llama.cpp read it by the same formula, the latter at 8192 positions only, hence that number. A
    model that is of type "llama3" itself needs that one `factor`: its frequencies are written out one by one, as the
    factors of "longrope" over `rope_theta` 1.

    Returns:
        The config's parameters, and the place of each dim of a query or key, (width,).
    """
    rotary = fresh_rotary(next(module.rotary_emb for module in model.modules() if hasattr(module, "rotary_emb")))
    frequencies, theta = rotary.inv_freq.double(), rotary.config.rope_parameters["rope_theta"]
    rotated, places = 2 * len(frequencies), torch.arange(width)
    turning = places % (width // 2) < rotated // 2
    places = torch.cat((places[turning], places[~turning]))
    if rotary.config.rope_parameters["rope_type"] == "default":
        longest, next_one = 2 * math.pi * theta ** ((rotated - 2) / rotated), 2 * math.pi * theta
        step = (next_one / longest) ** (1 / 3)
        exported = {
            "rope_type": "llama3",
            "rope_theta": theta ** (width / rotated),
            "factor": 1e20,
            "high_freq_factor": 8192 / (longest * step),
            "low_freq_factor": 8192 / (longest * step**2),
            "original_max_position_embeddings": 8192,
        }
        return exported, places

    factors = [1 / max(frequency, 1e-30) for frequency in frequencies.tolist()] + [1e30] * ((width - rotated) // 2)
    exported = {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": rotary.config.max_position_embeddings,
    }
    return exported, places


def _write_attention(source: GrowableAttention, target: GrowableAttention, places: Tensor) -> None:
    """Give the stock attention its weights: each role's, per head, at their places among zeros."""
    dtype, features = source.empty_like().dtype, source.shape.in_features
    for role in ROLES:
        projection = target.projection_of(role)
        # A bias of the output is carried over whole; where the target alone has one, it is zero.
        carried = role == "output" and source.projection_of(role).bias is not None
        for name in ("weight",) if carried else ("weight", "bias"):
            written = getattr(projection, name)
            if written is not None and written.is_meta:
                padding = ZERO_TO_ALL if name == "weight" and role != "output" else 0.0
                setattr(projection, name, nn.Parameter(torch.full(written.shape, padding, dtype=dtype), False))
    for role in ROLES[:3]:
        factors = source.factors_of(role, torch.float64, adapters=False).cpu()
        if role == "query":
            factors *= source.softmax_scale / target.softmax_scale
        dims = factors.shape[-1]
        at = torch.arange(dims) if role == "value" else places[:dims]
        target.weight_of(role)[:, at] = factors[:, :features].transpose(1, 2).to(dtype)
        written = target.bias_of(role)
        if factors.shape[1] > features and written is not None:
            written[:, at] = factors[:, features].to(dtype)
    output = source.factors_of("output", torch.float64, adapters=False).cpu().transpose(1, 2)
    target.weight_of("output")[:, : output.shape[1]] = output.to(dtype)
