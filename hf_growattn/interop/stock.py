"""A grown model as a stock one: the class of its family, and the config and weights that compute the same.

A stock class has one width for queries, keys and values of all layers, rotates all of it, and takes its softmax scale
from it. So every head is padded with zeros to the widest, rounded up to a multiple of 8; dims that growth added rotate
with frequency zero, which is not at all; and queries carry `s / s'`, the scale over the one that the stock class
computes.
"""

import copy
import dataclasses
import math
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..growable.attention import GrowableAttention, quantization
from ..growable.growths import attentions, is_grown
from ..growable.models import patch_model, unpatch_model
from ..model.configuration import PREFIX
from ..model.extra import ROLES, read_shape
from ..model.modeling import find_attentions

MULTIPLE = 8  # of the head width that flash kernels take
_NORM_OFFSETS = {"gemma3_text": 1.0}  # what a family adds to the weight of a norm of queries or keys


def why_not_exportable(model: PreTrainedModel) -> str | None:
    """What keeps a grown model from having a stock form; None where it has one."""
    every = attentions(model)
    for attention in every:
        for role in ROLES:
            if not attention.is_known(role):
                return attention.why_unreadable(role)
        if _norms(attention) and attention.width_of("query") > attention.shape.qk_head_dim:
            return "its norm of queries or keys runs over all dims, and the new ones are outside the norm"
        if attention.rotate is not None and not _rotates_halves(attention):
            return "its stock class rotates neighbouring dims in pairs"
    for parameters in _rope_parameters(model.config).values():
        if parameters["rope_type"] in ("dynamic", "longrope"):
            kind = parameters["rope_type"]
            return f"it rotates by frequencies that follow the length of the text ({kind})"
    config = copy.deepcopy(model.config)
    config.__class__ = type(config).__bases__[1]  # pyright: ignore[reportAttributeAccessIssue]
    config.head_dim = wider = 2 * every[0].shape.qk_head_dim
    with torch.device("meta"):
        try:
            wide = find_attentions(type(model).__bases__[1](config))
        except Exception:
            wide = []
    if len(wide) != len(every) or any(read_shape(module).qk_head_dim != wider for module, *_ in wide):
        return "the width of its heads is no field of its config"
    return None


def _rotates_halves(attention: GrowableAttention) -> bool:
    """Whether the rotation pairs dim `i` with `i + d / 2`, as in Llama."""
    half = torch.zeros(1, 1, 1, 4)
    half[..., 0] = 1.0
    quarter_turn = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)  # cos and sin
    return bool(attention.rotate(half, half, *quarter_turn)[0][..., 2] == 1.0)


def find_stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the stock class to write a model as.

    Raises:
        ValueError: the model is quantized, or cannot be written so; the message says why and what to do.
    """
    for name, module in model.named_modules():
        problem = quantization(module)
        if problem:
            raise ValueError(f"{name} is {problem}")
    stock_class = type(model).__bases__[1]
    own = stock_class.config_class.model_type
    reason = why_not_exportable(model) if is_grown(model) else None
    if reason:
        raise ValueError(
            f"This grown {own} model has no exact stock form: {reason}. Save it as it is, with model.save_pretrained: "
            "transformers loads that with `import hf_growattn`."
        )
    if not is_grown(model) or own != "qwen2" or model.config.sliding_window is not None:  # a Llama has no windows
        return stock_class
    # As a Llama with biases: the Qwen2 of vLLM and of llama.cpp knows no head_dim.
    family = stock_class.config_class.__name__.removesuffix("Config")
    return getattr(transformers, stock_class.__name__.replace(family, "Llama", 1))


@torch.no_grad()
def stock_model(model: PreTrainedModel, target_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Build the stock model. Tensors that need not change are the model's own ones, and new ones lie on the CPU."""
    config, ropes = padded_config(model, target_class)
    with torch.device("meta"):
        stock = patch_model(target_class(config))
    layer_types = getattr(model.config, "layer_types", None) or [None] * config.num_hidden_layers
    for source, target in zip(attentions(model), attentions(stock)):
        rope = ropes.get(layer_types[source.layer], ropes.get(None))
        _write_attention(source, target, rope if source.rotate else None)
    unpatch_model(stock)

    names = stock.state_dict()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".extra.parts." not in name}
    unknown = [name for name in state if name not in names]
    if unknown:
        raise ValueError(
            f"The model holds {unknown[0]}, which {target_class.__name__} does not. Merge adapters into the weights "
            "first, with merge_and_unload() of peft, and load the model without quantization."
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


def widest_head(model: PreTrainedModel) -> int:
    """Width of the widest head of a model, of queries and keys or of values."""
    return max(a.width_of(role) for a in attentions(model) for role in ("key", "value"))


def stock_fields(config: PreTrainedConfig) -> dict:
    """The fields of a config without ours, for a config of the stock class."""
    ours = ("model_type", "per_layer_config", "extra_dims", "architectures", "auto_map")
    return {name: value for name, value in config.to_dict().items() if name not in ours}


@dataclass(frozen=True)
class Rope:
    """Rotation of the exported heads: config parameters, where each old dim goes, and what queries and keys carry."""

    parameters: dict
    places: Tensor
    gains: Tensor


def padded_config(model: PreTrainedModel, target_class) -> tuple[PreTrainedConfig, dict[str | None, Rope]]:
    """The config of a stock class with one width for all heads, and how these rotate, by layer type if that matters."""
    config_class, values = target_class.config_class, stock_fields(model.config)
    own = model.config.model_type.removeprefix(PREFIX)
    if config_class.model_type != own:
        known = {field.name for field in dataclasses.fields(config_class)} | {"head_dim"}
        values = {name: value for name, value in values.items() if name in known}
        values["attention_bias"] = "query" in attentions(model)[0].shape.biased
    if not is_grown(model):
        return config_class(**values), {}

    widest = widest_head(model)
    values["head_dim"] = width = widest + -widest % MULTIPLE
    ropes = _ropes(model, width)
    if ropes:
        written = {layer_type: rope.parameters for layer_type, rope in ropes.items()}
        values["rope_parameters"] = written.get(None, written)
        values.pop("partial_rotary_factor", None)
    return config_class(**values), ropes


def _rope_parameters(config: PreTrainedConfig) -> dict[str | None, dict]:
    """How a config says that heads rotate, by layer type; by None where all layers share it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return {None: parameters} if "rope_type" in parameters else parameters


def _ropes(model: PreTrainedModel, width: int) -> dict[str | None, Rope]:
    """The rotation of each type of layer; by None where all layers share it."""
    parameters = _rope_parameters(model.config)
    dims = max(attention.width_of("query") for attention in attentions(model))
    rotaries = [fresh_rotary(module.rotary_emb) for module in model.modules() if hasattr(module, "rotary_emb")]
    return {layer_type: _rope(rotaries[0], layer_type, of, dims, width) for layer_type, of in parameters.items()}


def fresh_rotary(rotary) -> nn.Module:
    """A rotary embedding as loading would build it: the live one follows the lengths it met, and `model.to(dtype)`."""
    return type(rotary)(copy.deepcopy(rotary.config))


def _rope(rotary, layer_type: str | None, parameters: dict, dims: int, width: int) -> Rope:
    """Let the dims that rotate do so as before, among `width` ones, and all others stand still.

    Stock rotation pairs dim `i` with `i + width / 2`. Default frequencies `theta^(-2 i / d)` are continued to the wider
    head by `theta' = theta^(width / d)`, and rope type "llama3" divides those of long wavelengths by `factor`: its two
    borders are put into the gap between the last old wavelength and the first new one, which leaves a turn of 1e-20 a
    token. vLLM and llama.cpp read it by the same formula, the latter at 8192 positions only, hence that number. Other
    frequencies are written out, as the factors of "longrope" over `rope_theta` 1.
    """
    prefix = f"{layer_type}_" if layer_type else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq").double()  # (rotated / 2,)
    rotated, kind, theta = 2 * len(frequencies), parameters["rope_type"], parameters["rope_theta"]
    ones = torch.ones(dims).double()
    if rotary.config.model_type.removeprefix(PREFIX) == "phi3":  # rotates the first dims alone
        # Readers cut `factor * width` down to a whole number.
        exported = parameters | {"partial_rotary_factor": math.nextafter(rotated / width, 1)}
        return Rope(exported, torch.arange(dims), ones)

    places = torch.arange(width)
    turning = places % (width // 2) < rotated // 2
    places = torch.cat((places[turning], places[~turning]))[:dims]
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
        return Rope(exported, places, ones)

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
    ones[:rotated] *= getattr(rotary, f"{prefix}attention_scaling")  # of cos and sin
    return Rope(exported, places, ones)


def _norms(attention: GrowableAttention) -> dict[str, str]:
    """By role, the attribute that holds the norm of queries or keys, where there is one."""
    names = [name for name in attention.row.norms if getattr(attention, name, None) is not None]
    return {"query" if name.startswith("q") else "key": name for name in names}


def _write_attention(source: GrowableAttention, target: GrowableAttention, rope: Rope | None) -> None:
    """Give the stock attention its weights: each role's, per head, at their places among zeros."""
    width, old_width = target.shape.qk_head_dim, source.shape.qk_head_dim
    dtype, exact = source.empty_like().dtype, torch.float64
    dims = source.width_of("query")
    places, gains = torch.arange(dims), torch.ones(dims).double()
    if rope is not None:
        places, gains = rope.places[:dims], rope.gains[:dims]
    at = {"query": places, "key": places, "value": torch.arange(source.width_of("value"))}
    factors = {"query": gains * (source.softmax_scale / target.softmax_scale), "key": gains}
    if width > old_width:  # the mean square over padded dims is the old one once they are that much larger
        model_type = source.config.model_type.removeprefix(PREFIX)
        growth, offset = math.sqrt(width / old_width), _NORM_OFFSETS.get(model_type, 0.0)
        for role, name in _norms(source).items():
            weight = getattr(source, name).weight.cpu().double().unflatten(0, (-1, old_width)) + offset
            new = torch.zeros(len(weight), width, dtype=dtype)
            new[:, places] = (weight * factors[role] / growth - offset).to(dtype)
            getattr(target, name).weight = nn.Parameter(new.flatten(), False)
            factors[role] = torch.full_like(gains, growth)

    for role in ROLES:
        projection = target.projection_of(role)
        # A bias of the output is carried over whole; where the target alone has one, it is zero.
        carried = role == "output" and source.projection_of(role).bias is not None
        for name in ("weight",) if carried else ("weight", "bias"):
            written = getattr(projection, name)
            if written is not None and written.is_meta:
                setattr(projection, name, nn.Parameter(torch.zeros(written.shape, dtype=dtype), False))
    features = source.shape.in_features
    for role, positions in at.items():
        scaled = source.factors_of(role, exact, adapters=False).cpu() * factors.get(role, 1.0)
        target.weight_of(role)[:, positions] = scaled[:, :features].transpose(1, 2).to(dtype)
        written = target.bias_of(role)
        if scaled.shape[1] > features and written is not None:
            written[:, positions] = scaled[:, features].to(dtype)
    output = source.factors_of("output", exact, adapters=False).cpu().transpose(1, 2)
    target.weight_of("output")[:, : output.shape[1]] = output.to(dtype)
