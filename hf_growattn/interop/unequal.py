"""A grown model as MiMo V2 Flash, the stock class that has one width for queries and keys and another for values.

It rotates the leading dims and leaves the others alone, as growth lays heads out, so nothing but zeros is added: every
head's queries and keys are padded to the widest of all layers, and values likewise. Its block is Llama's, with biases
on queries, keys and values alone; windows, sinks and experts of the original model stay switched off.
"""

import dataclasses
import math
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..growable.attention import GrowableAttention
from ..growable.models import attentions
from ..model.configuration import stock_head_dim

MODEL_TYPE = "mimo_v2_flash"
MULTIPLE = 8  # flash kernels, vLLM's among them, take heads of such widths


def hindrance(model: PreTrainedModel) -> str | None:
    """Say why this class cannot hold a model whose family has Llama's block; None where it can."""
    config = model.config
    ropes = (getattr(config, "rope_parameters", None) or {}).values()
    if MODEL_TYPE not in CONFIG_MAPPING:
        return "this version of transformers does not have it"
    if not type(model).__bases__[1].__name__.endswith(("ForCausalLM", "Model")):
        return "it has no class for this task"
    if getattr(config, "sliding_window", None) is not None:
        return "its windows come with sinks"
    if getattr(config, "mlp_bias", False) or attentions(model)[0].projection_of("output").bias is not None:
        return "it has biases on queries, keys and values alone"
    if any(isinstance(rope, dict) for rope in ropes) or config.rope_parameters["rope_type"] != "default":
        return "vLLM reads no scaled rotation of it"
    return None


def widths(model: nn.Module) -> tuple[int, int]:
    """Width of queries and keys, and of values, that all layers fit in; what grew is rounded up for the kernels."""
    found = attentions(model)
    widest = max(a.qk_head_dim for a in found), max(a.v_head_dim for a in found)
    qk, v = (width if width == found[0].head_dim else width + -width % MULTIPLE for width in widest)
    return qk, v


def pays(model: PreTrainedModel) -> bool:
    """Whether the cache comes out smaller than with one width for all.

    The readers of this class keep no tied head, so a tied embedding is written twice: once, where the cache is paid for
    with every token.
    """
    qk, v = widths(model)
    return qk != v


def _untied(model: PreTrainedModel) -> int:
    """How many weights a head of its own adds."""
    head = model.get_output_embeddings()
    return cast(nn.Linear, head).weight.numel() if head is not None and model.config.tie_word_embeddings else 0


def unequal_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of this class for a model, with the widths of `widths`."""
    config, (qk, v) = model.config, widths(model)
    config_class = CONFIG_MAPPING[MODEL_TYPE]
    known = {field.name for field in dataclasses.fields(cast(Any, config_class))}
    values = {name: value for name, value in config.to_dict().items() if name in known}
    for name in ("architectures", "model_type"):
        values.pop(name, None)
    rope = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    # Readers cut `factor * width` down to a whole number.
    rope["partial_rotary_factor"] = math.nextafter(stock_head_dim(config) / qk, 1)
    layers = config.num_hidden_layers
    return config_class(
        **values
        | {
            "head_dim": qk,
            "v_head_dim": v,
            "num_key_value_heads": attentions(model)[0].heads_of("key"),
            "attention_bias": attentions(model)[0].bias_of("query") is not None,
            "attention_value_scale": 1.0,
            "layer_types": ["full_attention"] * layers,
            "mlp_layer_types": ["dense"] * layers,
            "rope_parameters": {"full_attention": rope},
            "sliding_window": config.max_position_embeddings,  # vLLM would put a shorter one on every layer
            "tie_word_embeddings": False,
        }
    )


def names_of_other_readers(config: dict) -> dict:
    """What a config of this class is called in the first release of MiMo, whose names vLLM and SGLang read."""
    rope, layers = config["rope_parameters"]["full_attention"], config["num_hidden_layers"]
    return {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": False,
        "hybrid_layer_pattern": [0] * layers,  # 1 means a window
        "layernorm_epsilon": config["rms_norm_eps"],
        "moe_layer_freq": [0] * layers,  # 1 means experts
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_theta": rope["rope_theta"],
        "sliding_window_size": config["sliding_window"] - 1,
        # Of layers with windows, of which there are none; SGLang looks their sizes up all the same.
        "swa_head_dim": config["head_dim"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": config["num_key_value_heads"],
        "swa_rope_theta": rope["rope_theta"],
        "swa_v_head_dim": config["v_head_dim"],
    }


def with_attention(model: PreTrainedModel, target_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Build the stock model on the meta device, but for its attention and an untied head, which are on the CPU."""
    with torch.device("meta"):
        stock = target_class(unequal_config(model))
    layers = cast(nn.ModuleList, stock.base_model.layers)
    for source, layer in zip(attentions(model), layers):
        _write(source, cast(nn.Module, layer.self_attn), *widths(model))
    if _untied(model):
        embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
        cast(nn.Linear, stock.get_output_embeddings()).weight = nn.Parameter(embedding.detach().cpu().clone(), False)
    return stock


def _write(source: GrowableAttention, target: Any, qk: int, v: int) -> None:
    """Give the stock attention its weights: each role's, per head, and zeros after them."""
    for role, width in {"query": qk, "key": qk, "value": v, "output": v}.items():
        projection, factor = target.get_submodule(getattr(source.architecture, role)), 1.0
        if role == "query":
            factor = source.scaling / target.scaling
        for name, heads in (("weight", source.weight_of(role)), ("bias", source.bias_of(role))):
            if heads is None:
                continue
            padded = heads.new_zeros(heads.shape[0], width, *heads.shape[2:], device="cpu")
            padded[:, : heads.shape[1]] = (heads.cpu().double() * factor).to(heads.dtype)
            flat = padded.flatten(0, 1)
            setattr(projection, name, nn.Parameter(flat.T.contiguous() if role == "output" else flat, False))
