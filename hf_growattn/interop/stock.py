"""A grown model as a stock one: the row of its family in `FORMS`, and the weights and config that compute the same.

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
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..growable.adapters import quantization
from ..growable.attention import GrowableAttention
from ..growable.models import attentions, is_grown
from ..growable.patching import patch_model, unpatch_model
from ..model.configuration import PREFIX, stock_head_dim

MULTIPLE = 8  # of the head width that flash kernels take


@dataclass(frozen=True)
class StockForm:
    """How wider heads fit into the stock classes of a family. What a row leaves out is as in Llama.

    Attributes:
        targets: the model types that a model of this family can be written as, best first.
        partial: the family honours `partial_rotary_factor` under every rope type.
        norm_offset: what the family adds to the weight of a norm of queries or keys.
        refusal: why a grown model of this family has no stock form; "" where it has one.
    """

    targets: tuple[str, ...]
    partial: bool = False
    norm_offset: float = 0.0
    refusal: str = ""


# A Llama with biases is what vLLM and llama.cpp can read of a grown Qwen2: their own Qwen2 knows no head_dim.
FORMS = {
    "llama": StockForm(("llama", "granite")),
    "mistral": StockForm(("mistral", "llama", "granite")),
    "qwen2": StockForm(("llama", "qwen2", "granite")),
    "phi3": StockForm(("phi3",), partial=True),
    "gemma3_text": StockForm(("gemma3_text",), norm_offset=1.0),
    "cohere2": StockForm(("cohere2",), refusal="its stock class rotates neighbouring dims in pairs"),
}
for _type in "dinov2 eurobert gemma gemma2 granite mixtral olmo2 qwen3 qwen3_moe smollm3 starcoder2 vit".split():
    FORMS[_type] = StockForm((_type,))
for (
    _type
) in "bert distilbert electra esm falcon gpt2 gpt_neo gpt_neox modernbert opt roberta stablelm xlm-roberta".split():
    FORMS[_type] = StockForm((_type,), refusal="the width of its heads follows from the hidden size")
_NATIVE = "Save it as it is, with model.save_pretrained: transformers loads that with `import hf_growattn`."


def stock_types(model: PreTrainedModel) -> list[str]:
    """The model types that a model can be written as, best first.

    Raises:
        ValueError: no type fits, or the model is quantized; the message says why and what to do.
    """
    for name, module in model.named_modules():
        if problem := quantization(module):
            raise ValueError(f"{name} is {problem}")
    own, config = model.config.model_type.removeprefix(PREFIX), model.config
    form = FORMS.get(own, StockForm((own,), refusal="it is not known whether its classes take heads of another width"))
    problem = form.refusal
    outside_norms = [a for a in attentions(model) if _norms(a) and a.qk_head_dim > a.head_dim]
    if outside_norms:
        problem = "its norm of queries or keys runs over all dims, and the new ones are outside the norm"
    if problem and is_grown(model):
        raise ValueError(f"This grown {own} model has no exact stock form: {problem}. {_NATIVE}")
    if getattr(config, "sliding_window", None) is not None:  # the other families have no window of attention
        return [own]
    if not is_grown(model):
        return sorted(form.targets, key=lambda model_type: model_type != own)
    return list(form.targets)


def stock_form(model: PreTrainedModel, target: str | None = None) -> tuple[StockForm, type[PreTrainedModel]]:
    """Return the row and the stock class to write a model as.

    Raises:
        ValueError: the model cannot be written so; the message names the types that fit.
    """
    stock_class, types = type(model).__bases__[1], stock_types(model)
    own = stock_class.config_class.model_type
    form = FORMS.get(own, StockForm((own,)))
    choice = target or types[0]
    if choice not in types:
        raise ValueError(
            f"This {own} model can be written as {' or '.join(types)}, not as {target!r}. Leave out `target` for the "
            f"best. {_NATIVE}"
        )
    if choice == own:
        return form, stock_class
    name = stock_class.config_class.__name__.removesuffix("Config")
    other = CONFIG_MAPPING[choice].__name__.removesuffix("Config")
    target_class = getattr(transformers, stock_class.__name__.replace(name, other, 1), None)
    if target_class is None:
        raise ValueError(f"transformers has no {choice} class for {stock_class.__name__}: choose another target.")
    return form, target_class


@torch.no_grad()
def stock_model(model: PreTrainedModel, form: StockForm, target_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Build the stock model. Tensors that need not change are the model's own ones, and new ones lie on the CPU."""
    config, ropes = padded_config(model, form, target_class)
    with torch.device("meta"):
        stock = patch_model(target_class(config))
    layer_types = getattr(model.config, "layer_types", None)
    for source, target in zip(attentions(model), attentions(stock)):
        rope = ropes.get(layer_types[source.layer_idx] if layer_types else None, ropes.get(None))
        _write_attention(source, target, rope, form.norm_offset)
    unpatch_model(stock)

    state = model.state_dict()
    names = stock.state_dict()
    unknown = [name for name in state if name not in names]
    if unknown:
        raise ValueError(
            f"The model holds {unknown[0]}, which {target_class.__name__} does not. Merge adapters into the weights "
            "first, with merge_and_unload() of peft, and load the model without quantization."
        )
    for name, written in names.items():
        if not written.is_meta:
            continue
        path, _, leaf = name.rpartition(".")
        module, tensor = stock.get_submodule(path), state[name].detach()
        if tensor.is_meta:
            raise ValueError(f"{name} is offloaded. Load the model without offloading to export it.")
        setattr(module, leaf, nn.Parameter(tensor, False) if leaf in module._parameters else tensor)
    stock.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        stock.generation_config = copy.deepcopy(model.generation_config)
    return stock


def widest_head(model: PreTrainedModel) -> int:
    """Width of the widest head of a model, of queries and keys or of values."""
    return max(max(a.qk_head_dim, a.v_head_dim) for a in attentions(model))


def padded_config(model: PreTrainedModel, form: StockForm, target_class) -> tuple[PreTrainedConfig, dict]:
    """The config of a stock class with one width for all heads, and how these rotate, by layer type."""
    width = widest_head(model)
    if width != stock_head_dim(model.config):
        width += -width % MULTIPLE
    ropes = _ropes(model, form, width)
    return _padded_config(model, target_class, width, ropes), ropes


def _padded_config(model, target_class, width: int, ropes: dict) -> PreTrainedConfig:
    config_class, values = target_class.config_class, model.config.to_dict()
    for ours in ("model_type", "per_layer_config", "qk_head_dim", "v_head_dim", "architectures", "auto_map"):
        values.pop(ours, None)
    own = model.config.model_type.removeprefix(PREFIX)
    if config_class.model_type != own:
        known = {field.name for field in dataclasses.fields(config_class)} | {"head_dim"}
        values = {name: value for name, value in values.items() if name in known}
        values["attention_bias"] = attentions(model)[0].bias_of("query") is not None
    if config_class.model_type == "granite" != own:
        values["attention_multiplier"] = attentions(model)[0].scaling
        values |= {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    if width == stock_head_dim(model.config):
        return config_class(**values)

    values["head_dim"] = width
    if ropes:
        written = {layer_type: rope.parameters for layer_type, rope in ropes.items()}
        values["rope_parameters"] = written.get(None, written)
        values.pop("partial_rotary_factor", None)
    return config_class(**values)


@dataclass(frozen=True)
class _Rope:
    """Rotation of the exported heads: config parameters, where each old dim goes, and what queries and keys carry."""

    parameters: dict
    places: Tensor
    gains: Tensor


def rope_parameters(config: PreTrainedConfig) -> dict[str | None, dict]:
    """The rope parameters by layer type; by None where all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    return nested or ({None: parameters} if "rope_type" in parameters else {})


def _ropes(model: PreTrainedModel, form: StockForm, width: int) -> dict[str | None, _Rope]:
    if attentions(model)[0].architecture.rotate is None:
        return {}
    rotary = fresh_rotary(next(module.rotary_emb for module in model.modules() if hasattr(module, "rotary_emb")))
    dims = max(attention.qk_head_dim for attention in attentions(model))
    return {
        layer_type: _rope(rotary, layer_type, parameters, form, dims, width)
        for layer_type, parameters in rope_parameters(model.config).items()
    }


def fresh_rotary(rotary) -> nn.Module:
    """A rotary embedding as loading would build it: the live one follows the lengths it met, and `model.to(dtype)`."""
    return type(rotary)(copy.deepcopy(rotary.config))


def _rope(rotary, layer_type, parameters, form: StockForm, dims: int, width: int) -> _Rope:
    """Let the dims that rotate do so as before, among `width` ones, and all others stand still.

    Stock rotation pairs dim `i` with `i + width / 2`. Default frequencies `theta^(-2 i / d)` are continued to the wider
    head by `theta' = theta^(width / d)`, and rope type "llama3" divides those of long wavelengths by `factor`: its two
    borders are put into the gap between the last old wavelength and the first new one, which leaves a turn of 1e-20 a
    token. vLLM and llama.cpp read it by the same formula, the latter at 8192 positions only, hence that number. Other
    frequencies are written out, as the factors of "longrope" over `rope_theta` 1.
    """
    prefix = f"{layer_type}_" if layer_type else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq").double()  # (rotated / 2,)
    scaling = getattr(rotary, f"{prefix}attention_scaling")  # of cos and sin
    rotated, kind, theta = 2 * len(frequencies), parameters["rope_type"], parameters["rope_theta"]
    if width == stock_head_dim(rotary.config) or form.partial:
        if width != stock_head_dim(rotary.config):
            # Readers cut `factor * width` down to a whole number.
            parameters = parameters | {"partial_rotary_factor": math.nextafter(rotated / width, 1)}
        return _Rope(parameters, torch.arange(dims), torch.ones(dims).double())

    half = rotated // 2
    turning = torch.cat((torch.arange(half), width // 2 + torch.arange(half)))
    still = torch.tensor([place for place in range(width) if place not in set(turning.tolist())])
    places = torch.cat((turning, still))[:dims]
    if kind in ("default", "dynamic") and theta ** (width / rotated) < 1e37:  # fp32 ends at 3e38
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
        return _Rope(exported, places, torch.ones(dims).double())

    config, long = rotary.config, frequencies
    positions, attention_factor = config.max_position_embeddings, 1.0
    if kind == "longrope":  # two sets of frequencies, and a scaling that other readers recompute: both are kept
        positions, attention_factor = parameters["original_max_position_embeddings"], scaling
        long = ROPE_INIT_FUNCTIONS[kind](config, seq_len=positions + 1, layer_type=layer_type)[0].double()

    def factors(values: Tensor) -> list[float]:
        return [1 / max(value, 1e-30) for value in values.tolist()] + [1e30] * (width // 2 - half)

    exported = {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": factors(frequencies),
        "long_factor": factors(long),
        "factor": max(config.max_position_embeddings / positions, 1.0),
        "attention_factor": attention_factor,
        "original_max_position_embeddings": positions,
    }
    gains = torch.full((dims,), 1 / attention_factor).double()
    gains[:rotated] *= scaling
    return _Rope(exported, places, gains)


def _norms(attention: GrowableAttention) -> dict[str, str]:
    """By role, the attribute that holds the norm of queries or keys, where there is one."""
    row = attention.architecture
    names = {"query": row.query_norm, "key": row.key_norm}
    return {role: name for role, name in names.items() if name and getattr(attention, name, None) is not None}


def _write_attention(source: GrowableAttention, target: GrowableAttention, rope: _Rope | None, norm_offset) -> None:
    """Give the stock attention its weights: each role's, per head, at their places among zeros."""
    width, old_width, dtype = target.qk_head_dim, source.head_dim, source.weight_of("query").dtype
    places, gains = torch.arange(source.qk_head_dim), torch.ones(source.qk_head_dim).double()
    if rope is not None and source.rotate is not None:
        places, gains = rope.places[: source.qk_head_dim], rope.gains[: source.qk_head_dim]
    at = {"query": places, "key": places, "value": torch.arange(source.v_head_dim)}
    factors = {"query": gains * (source.scaling / target.scaling), "key": gains, "value": torch.ones(1).double()}
    if width > old_width:  # the mean square over padded dims is the old one once they are that much larger
        growth = math.sqrt(width / old_width)
        for role, name in _norms(source).items():
            weight = getattr(source, name).weight.cpu().double().unflatten(0, (-1, old_width)) + norm_offset
            new = torch.zeros(len(weight), width, dtype=dtype)
            new[:, places] = (weight * factors[role] / growth - norm_offset).to(dtype)
            getattr(target, name).weight = nn.Parameter(new.flatten(), False)
            factors[role] = torch.full_like(gains, growth)

    for role in ("query", "key", "value", "output"):
        projection = target.projection_of(role)
        # A bias of the output is carried over whole; where the target alone has one, it is zero.
        carried = role == "output" and source.projection_of(role).bias is not None
        for name in ("weight",) if carried else ("weight", "bias"):
            written = getattr(projection, name)
            if written is not None and written.is_meta:
                setattr(projection, name, nn.Parameter(torch.zeros(written.shape, dtype=dtype), False))
    for role, positions in at.items():
        weight, bias = source.weight_of(role).cpu().double(), source.bias_of(role)
        target.weight_of(role)[:, positions] = (weight * factors[role][:, None]).to(dtype)
        written = target.bias_of(role)
        if bias is not None and written is not None:
            written[:, positions] = (bias.cpu().double() * factors[role]).to(dtype)
    output = source.weight_of("output").cpu()
    target.weight_of("output")[:, : output.shape[1]] = output
