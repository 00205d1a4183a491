"""A grown model as a stock one: the class of its family, and the config and weights that compute the same.

A stock class has one width for queries, keys and values of all layers, rotates all of it, and takes its softmax scale
from it. So every head is padded with zeros to the widest, rounded up to a multiple of 8; dims that growth added rotate
with frequency zero; and queries carry `s / s'`, the scale over the one that the stock class computes.
"""

import contextlib
import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..growable.attention import GrowableAttention, attentions
from ..growable.growths import is_grown
from ..growable.models import patch_model, unpatch_model
from ..growable.projections import quantization
from ..model.new_dims import ROLES

MULTIPLE = 8  # of the head width that flash kernels take
ROPE_TYPES = "default", "llama3"  # that a grown model may have
ZERO_TO_ALL = 1e-6  # weights of padded dims: no logit shows them, and DoRA divides by the norm of each row


@dataclass(frozen=True)
class Rope:
    """Rotation of the exported heads: config parameters, and where each old dim goes."""

    parameters: dict
    places: Tensor


@torch.no_grad()
def stock_model(model: PreTrainedModel) -> PreTrainedModel:
    """Build the stock model. Tensors that need not change are the model's own ones, and new ones lie on the CPU."""
    stock, ropes = empty_stock(model)
    layer_types = getattr(model.config, "layer_types", None)
    for source, target in zip(attentions(model), attentions(stock)) if is_grown(model) else ():
        kind = layer_types[source.layer] if layer_types else None
        _write_attention(source, target, ropes.get(kind, ropes.get(None)) if source.rotate else None)
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


def empty_stock(model: Any) -> tuple[PreTrainedModel, dict[str | None, Rope]]:
    """The stock model, patched and on the meta device, and how its heads rotate, by layer type if that matters."""
    for name, module in model.named_modules():
        problem = quantization(module)
        if problem:
            raise ValueError(f"{name} is {problem}")
    stock_class: Any = type(model).stock_class
    ours = ("model_type", "growable_submodels", "extra_dims", "attention_count", "architectures")
    fields = stock_class.config_class.to_dict(model.config)
    values = {name: value for name, value in fields.items() if name not in ours}
    if not is_grown(model):
        return _build(stock_class, values), {}
    reason = _why_not_exportable(model)
    if reason is None:
        values["head_dim"] = width = padded_width(model)
        with contextlib.suppress(Exception):  # a config that refuses this width or this rotation
            ropes = _ropes(model, width)
            if ropes:
                written = _rope_parameters(model.config) | {kind: rope.parameters for kind, rope in ropes.items()}
                values["rope_parameters"] = written.get(None, written)
                values.pop("partial_rotary_factor", None)
            stock = _build(stock_class, values)
            if all(attention.shape.qk_head_dim == width for attention in attentions(stock)):
                return stock, ropes
        reason = "its config takes no other width of heads"
    raise ValueError(
        f"This grown {stock_class.config_class.model_type} model has no exact stock form: {reason}. Save it as it is, "
        "with model.save_pretrained: transformers loads that with `import hf_growattn`."
    )


def _build(stock_class: Any, values: dict) -> PreTrainedModel:
    with torch.device("meta"):
        return patch_model(stock_class(stock_class.config_class(**values)))


def padded_width(model: PreTrainedModel) -> int:
    """The width of all heads of the stock model: of the widest one, in a grown model rounded up for flash kernels."""
    widest = max(attention.width_of(role) for attention in attentions(model) for role in ("key", "value"))
    return widest + -widest % MULTIPLE if is_grown(model) else widest


def _why_not_exportable(model: PreTrainedModel) -> str | None:
    """What keeps a grown model from having a stock form; None where nothing is known to."""
    for attention in attentions(model):
        for role in ROLES:
            if reason := attention.why_unreadable(role):
                return reason
        if _norms(attention) and attention.width_of("query") > attention.shape.qk_head_dim:
            return "its norm of queries or keys runs over all dims, and the new ones are outside the norm"
        if attention.rotate is not None and not _rotates_halves(attention):
            return "its stock class rotates neighbouring dims in pairs"
    for parameters in _rope_parameters(model.config).values():
        if parameters["rope_type"] not in ROPE_TYPES:
            return f"it rotates by frequencies of type {parameters['rope_type']}"
    return None


def _rotates_halves(attention: GrowableAttention) -> bool:
    """Whether the rotation pairs dim `i` with `i + d / 2`, as in Llama."""
    half = torch.zeros(1, 1, 1, 4)
    half[..., 0] = 1.0
    quarter_turn = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)  # cos and sin
    return bool(attention.rotate(half, half, *quarter_turn)[0][..., 2] == 1.0)


def _rope_parameters(config: PreTrainedConfig) -> dict[str | None, dict]:
    """How a config says that heads rotate, by layer type; by None where all layers share it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = {kind: of for kind, of in parameters.items() if isinstance(of, dict)}
    # transformers 5.16 puts a stray "rope_type" next to the types of layers where the model lacks one of them.
    return by_type or ({None: parameters} if parameters else {})


def _ropes(model: PreTrainedModel, width: int) -> dict[str | None, Rope]:
    """The exported rotation, by layer type as `_rope_parameters`."""
    used = {None, *(getattr(model.config, "layer_types", None) or ())}  # a short model may lack a type
    parameters = {kind: of for kind, of in _rope_parameters(model.config).items() if kind in used}
    rotaries = [module.rotary_emb for module in model.modules() if hasattr(module, "rotary_emb")]
    return {kind: _rope(fresh_rotary(rotaries[0]), kind, of, width) for kind, of in parameters.items()}


def fresh_rotary(rotary) -> nn.Module:
    """A rotary embedding as loading would build it: the live one follows the lengths it met, and `model.to(dtype)`."""
    return type(rotary)(copy.deepcopy(rotary.config))


def _rope(rotary, layer_type: str | None, parameters: dict, width: int) -> Rope:
    """Let the dims that rotate do so as before, among `width` ones, and all others stand still.

    Stock rotation pairs dim `i` with `i + width / 2`. Default frequencies `theta^(-2 i / d)` are continued to the wider
    head by `theta' = theta^(width / d)`, and rope type "llama3" divides those of long wavelengths by `factor`: its two
    borders are put into the gap between the last old wavelength and the first new one, which leaves a turn of 1e-20 a
    token. vLLM and llama.cpp read it by the same formula, the latter at 8192 positions only, hence that number. A
    model that is of type "llama3" itself needs that one `factor`: its frequencies are written out one by one, as the
    factors of "longrope" over `rope_theta` 1.
    """
    prefix = f"{layer_type}_" if layer_type else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq").double()  # (rotated / 2,)
    rotated, kind, theta = 2 * len(frequencies), parameters["rope_type"], parameters["rope_theta"]
    places = torch.arange(width)
    if "partial_rotary_factor" in (type(rotary.config)().rope_parameters or {}):  # of a family: the first dims rotate
        # Readers cut `factor * width` down to a whole number.
        exported = parameters | {"partial_rotary_factor": math.nextafter(rotated / width, 1)}
        return Rope(exported, places)
    turning = places % (width // 2) < rotated // 2
    places = torch.cat((places[turning], places[~turning]))
    if kind == "default":
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
        return Rope(exported, places)

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
    return Rope(exported, places)


def _norms(attention: GrowableAttention) -> dict[str, str]:
    """By role, the attribute that holds the norm of queries or keys, where there is one."""
    names = [name for name in attention.layout.norms if getattr(attention.module, name, None) is not None]
    return {"query" if name.startswith("q") else "key": name for name in names}


def _write_attention(source: GrowableAttention, target: GrowableAttention, rope: Rope | None) -> None:
    """Give the stock attention its weights: each role's, per head, at their places among zeros."""
    width, old_width = target.shape.qk_head_dim, source.shape.qk_head_dim
    dtype, exact = source.empty_like().dtype, torch.float64
    dims = source.width_of("query")
    places = torch.arange(dims) if rope is None else rope.places[:dims]
    at = {"query": places, "key": places, "value": torch.arange(source.width_of("value"))}
    factors = {"query": source.softmax_scale / target.softmax_scale}
    if width > old_width:  # the mean square over padded dims is the old one once they are that much larger
        growth = math.sqrt(width / old_width)
        for role, name in _norms(source).items():
            norm = getattr(source.module, name)
            offset = round((norm(torch.ones_like(norm.weight)) - norm.weight).mean().item())  # 1 in Gemma 3
            weight = norm.weight.cpu().double().unflatten(0, (-1, old_width)) + offset
            new = torch.zeros(len(weight), width, dtype=dtype)
            new[:, places] = (weight * factors.get(role, 1.0) / growth - offset).to(dtype)
            getattr(target.module, name).weight = nn.Parameter(new.flatten(), False)
            factors[role] = growth

    for role in ROLES:
        projection = target.projection_of(role)
        # A bias of the output is carried over whole; where the target alone has one, it is zero.
        carried = role == "output" and source.projection_of(role).bias is not None
        for name in ("weight",) if carried else ("weight", "bias"):
            written = getattr(projection, name)
            if written is not None and written.is_meta:
                padding = ZERO_TO_ALL if name == "weight" and role != "output" else 0.0
                setattr(projection, name, nn.Parameter(torch.full(written.shape, padding, dtype=dtype), False))
    features = source.shape.in_features
    for role, positions in at.items():
        scaled = source.factors_of(role, exact, adapters=False).cpu() * factors.get(role, 1.0)
        target.weight_of(role)[:, positions] = scaled[:, :features].transpose(1, 2).to(dtype)
        written = target.bias_of(role)
        if scaled.shape[1] > features and written is not None:
            written[:, positions] = scaled[:, features].to(dtype)
    output = source.factors_of("output", exact, adapters=False).cpu().transpose(1, 2)
    target.weight_of("output")[:, : output.shape[1]] = output.to(dtype)
