"""The model families, one row each: how a family names and arranges its self-attention.

To add a family, add a row to ``ARCHITECTURES`` and a line to the contract test, or hand the row to
`register_architecture`. A row holds data; a callable appears in it only where the family computes something that few
others do. What is left out of a row is as in Llama.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig


def norm_each_head(norm: nn.Module, heads: torch.Tensor) -> torch.Tensor:
    """One norm for every head: (batch, tokens, heads, width), the same."""
    return norm(heads)


def norm_all_heads(norm: nn.Module, heads: torch.Tensor) -> torch.Tensor:
    """One norm over the dims of all heads together."""
    return norm(heads.flatten(-2)).view(heads.shape)


def norm_heads_apart(norm: nn.Module, heads: torch.Tensor) -> torch.Tensor:
    """A norm of its own for each head, in a module that takes (batch, heads, tokens, width)."""
    return norm(heads.transpose(1, 2)).transpose(1, 2)


def _key_value_heads(config: PreTrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _head_dim(config: PreTrainedConfig) -> int:
    own = getattr(config, "head_dim", None)
    return _share_of_hidden_size(config) if own is None else own


def _share_of_hidden_size(config: PreTrainedConfig) -> int:
    return config.hidden_size // config.num_attention_heads


def _one_for_each_head(config: PreTrainedConfig) -> int:
    return config.num_attention_heads


@dataclass(frozen=True)
class Architecture:
    """How one family of transformers arranges its self-attention. A path is dotted, from the attention module.

    Attributes:
        model_type: the stock `config.model_type`.
        attention: name of the self-attention class in the family's modeling file.
        modeling: name of the modeling module; None means transformers' own of that type.
        query, key, value, output: attribute names of the projections on that class. One name given to `query`, `key`
            and `value` means one fused projection.
        output_sibling: name, in the parent module, of the module that holds and applies the output projection, if the
            attention does not.
        fused_groups: given the config, into how many equal groups a fused projection's outputs fall, each laid out
            `[queries | keys | values]` of its heads; of several groups, each holds one head of every role.
        key_value_heads: given the config, the number of key and value heads.
        head_dim: given the config, the width of one head before any growth. A config may hold fields that its family
            ignores, such as `head_dim`: both go by what the stock attention reads.
        query_norm, key_norm: attribute names of what normalises queries and keys; a layer may lack them.
        norm: applies such a module to the heads that were there before any growth.
        rotate: name of the function of the modeling file that rotates `(query, key, cos, sin)`; None without rotation.
        rotates: path of a value that is true where a layer rotates, or a function of the module; None means that all
            layers rotate.
        attention_dropout: attribute that holds the dropout of the attention weights, a number or an `nn.Dropout`; or
            what gives that number for a module.
        output_dropout: the same for the dropout applied after the output projection, if there is one.
        passes: keywords of the attention function, each with the path of its value (None where that is missing).
        scaling: the softmax scale, or what gives it for a module, for a family whose modules do not hold it.
        scales_query: the queries are scaled before they rotate, and the attention function scales by 1.
        aliases: attributes that this library reads, each with the name that the family has for it.
        eager: given an attention module, returns the function that its "eager" implementation runs; None means the
            modeling file's `eager_attention_forward`.
        refusal: given the config, says why a variant cannot be grown; None where it can.
    """

    model_type: str
    attention: str
    modeling: str | None = None
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    output_sibling: str | None = None
    fused_groups: Callable[[PreTrainedConfig], int] = lambda config: 1
    key_value_heads: Callable[[PreTrainedConfig], int] = _key_value_heads
    head_dim: Callable[[PreTrainedConfig], int] = _head_dim
    query_norm: str | None = None
    key_norm: str | None = None
    norm: Callable[[nn.Module, torch.Tensor], torch.Tensor] = norm_each_head
    rotate: str | None = "apply_rotary_pos_emb"
    rotates: str | Callable[[Any], bool] | None = None
    attention_dropout: str | Callable[[nn.Module], float] = "attention_dropout"
    output_dropout: str | Callable[[nn.Module], float] | None = None
    passes: tuple[tuple[str, str], ...] = ()
    scaling: float | Callable[[Any], float] | None = None
    scales_query: bool = False
    aliases: tuple[tuple[str, str], ...] = ()
    eager: Callable[[nn.Module], Callable] | None = None
    refusal: Callable[[PreTrainedConfig], str | None] = lambda config: None

    @property
    def modeling_file(self) -> ModuleType:
        """The family's own modeling module, of transformers unless the row names another."""
        name = self.modeling or f"transformers.models.{self.model_type}.modeling_{self.model_type}"
        return importlib.import_module(name)

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values come out of one projection."""
        return self.query == self.key == self.value


def _gpt2_upcast(attention, query, key, value, attention_mask, **kwargs):
    """Call the method in which GPT-2 keeps its reordered and upcast attention."""
    return attention._upcast_and_reordered_attn(query, key, value, attention_mask)


def _gpt2_eager(attention: nn.Module) -> Callable:
    """GPT-2 alone can be configured to reorder and upcast its eager attention."""
    if attention.reorder_and_upcast_attn:
        return _gpt2_upcast
    return ARCHITECTURES["gpt2"].modeling_file.eager_attention_forward


def _gpt_neo_attend(attention, query, key, value, attention_mask, **kwargs):
    """Call the method in which GPT-Neo keeps its attention, local windows included."""
    attn_output, attn_weights = attention._attn(query, key, value, attention_mask)
    return attn_output.transpose(1, 2), attn_weights


def _falcon_attend(attention, query, key, value, attention_mask, dropout=0.0, alibi=None, **kwargs):
    """Falcon's eager attention, which is no function of its own upstream: other orders of rounding for each position.

    Source: FalconAttention.forward of transformers.
    """
    scores = query @ key.mT
    if alibi is None:
        scores = scores / math.sqrt(attention.head_dim)
    else:
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        scores = (scores + alibi.view(*scores.shape[:2], 1, -1)) * attention.inv_norm_factor
    attn_weights = nn.functional.softmax(scores + attention_mask, dim=-1, dtype=query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, dropout)
    return (attn_weights @ value).transpose(1, 2), attn_weights


def _falcon_dropout(attention: Any) -> float:
    """Falcon drops attention weights under ALiBi, and where it rotates never."""
    return 0.0 if attention.config.rotary else attention.attention_dropout.p


def _falcon_refusal(config: PreTrainedConfig) -> str | None:
    if config.new_decoder_architecture:
        return (
            "Falcon's new decoder architecture interleaves groups of several query heads with their key and value in "
            "one projection, whose heads cannot be viewed one by one"
        )
    return None


def _esm_refusal(config: PreTrainedConfig) -> str | None:
    return "its cross-attention is of the same class as its self-attention" if config.add_cross_attention else None


def _square_root(attention: Any) -> float:
    """The usual softmax scale."""
    return attention.head_dim**-0.5


def _fused(projection: str) -> dict[str, Any]:
    return {"query": projection, "key": projection, "value": projection}


_NORMS: dict[str, Any] = {"query_norm": "q_norm", "key_norm": "k_norm"}
# Of families without grouped heads, whose heads share the hidden size out: they read neither field of the config.
_EVEN_HEADS: dict[str, Any] = {"key_value_heads": _one_for_each_head, "head_dim": _share_of_hidden_size}
_DROPOUTS: dict[str, Any] = {"attention_dropout": "attn_dropout", "output_dropout": "resid_dropout"}
_GPT: dict[str, Any] = {**_EVEN_HEADS, **_DROPOUTS, "rotate": None}
_WINDOW: dict[str, Any] = {"passes": (("sliding_window", "sliding_window"),)}
_BERT: dict[str, Any] = {
    **_EVEN_HEADS,
    **{"query": "query", "key": "key", "value": "value", "output": "dense", "output_sibling": "output", "rotate": None},
    "attention_dropout": "dropout",
    "aliases": (("head_dim", "attention_head_size"),),
}
_ESM: dict[str, Any] = _BERT | {"rotate": "apply_rotary_pos_emb"}
_DISTILBERT: dict[str, Any] = _BERT | {"query": "q_lin", "key": "k_lin", "value": "v_lin"}
_DISTILBERT |= {"output": "out_lin", "output_sibling": None}
_VIT: dict[str, Any] = {"key_value_heads": _one_for_each_head, "rotate": None}
_WINDOW_OF_CONFIG: dict[str, Any] = {"passes": (("sliding_window", "config.sliding_window"),)}

ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture("llama", "LlamaAttention"),
        Architecture("mistral", "MistralAttention", **_WINDOW_OF_CONFIG),
        Architecture("mixtral", "MixtralAttention", **_WINDOW_OF_CONFIG),
        Architecture("qwen2", "Qwen2Attention", **_WINDOW),
        Architecture("qwen3", "Qwen3Attention", **_NORMS, **_WINDOW),
        Architecture("qwen3_moe", "Qwen3MoeAttention", **_NORMS, **_WINDOW),
        Architecture("gemma", "GemmaAttention"),
        Architecture("gemma2", "Gemma2Attention", passes=(*_WINDOW["passes"], ("softcap", "attn_logit_softcapping"))),
        Architecture(
            "gemma3_text", "Gemma3Attention", "transformers.models.gemma3.modeling_gemma3", **_NORMS, **_WINDOW
        ),
        Architecture("granite", "GraniteAttention"),
        Architecture("cohere2", "Cohere2Attention", rotates="sliding_window", **_WINDOW),
        Architecture("starcoder2", "Starcoder2Attention", output_dropout="residual_dropout", **_WINDOW_OF_CONFIG),
        Architecture("olmo2", "Olmo2Attention", **_NORMS, norm=norm_all_heads),
        Architecture("smollm3", "SmolLM3Attention", rotates="use_rope", **_WINDOW),
        Architecture(
            "stablelm",
            "StableLmAttention",
            head_dim=_share_of_hidden_size,
            query_norm="q_layernorm",
            key_norm="k_layernorm",
            norm=norm_heads_apart,
        ),
        Architecture("phi3", "Phi3Attention", **_fused("qkv_proj"), **_WINDOW_OF_CONFIG),
        Architecture("gpt2", "GPT2Attention", **_GPT, **_fused("c_attn"), output="c_proj", eager=_gpt2_eager),
        Architecture(
            "gpt_neo",
            "GPTNeoSelfAttention",
            **_GPT,
            output="out_proj",
            scaling=1.0,
            aliases=(("layer_idx", "layer_id"),),
            eager=lambda attention: _gpt_neo_attend,
        ),
        Architecture(
            "gpt_neox",
            "GPTNeoXAttention",
            **_EVEN_HEADS,
            **_fused("query_key_value"),
            output="dense",
            fused_groups=_one_for_each_head,
            aliases=(("head_dim", "head_size"),),
        ),
        Architecture(
            "opt",
            "OPTAttention",
            **_EVEN_HEADS,
            output="out_proj",
            rotate=None,
            attention_dropout="dropout",
            scales_query=True,
        ),
        Architecture(
            "falcon",
            "FalconAttention",
            **_fused("query_key_value"),
            output="dense",
            fused_groups=lambda config: 1 if config.multi_query else config.num_attention_heads,
            key_value_heads=lambda config: 1 if config.multi_query else config.num_attention_heads,
            head_dim=_share_of_hidden_size,
            rotates="config.rotary",
            attention_dropout=_falcon_dropout,
            aliases=(("scaling", "inv_norm_factor"),),
            eager=lambda attention: _falcon_attend,
            refusal=_falcon_refusal,
        ),
        Architecture("bert", "BertSelfAttention", **_BERT),
        Architecture("roberta", "RobertaSelfAttention", **_BERT),
        Architecture(
            "xlm-roberta",
            "XLMRobertaSelfAttention",
            "transformers.models.xlm_roberta.modeling_xlm_roberta",
            **_BERT,
        ),
        Architecture("electra", "ElectraSelfAttention", **_BERT),
        Architecture(
            "esm",
            "EsmSelfAttention",
            **_ESM,
            rotates=lambda attention: attention.position_embedding_type == "rotary",
            scaling=_square_root,
            scales_query=True,
            refusal=_esm_refusal,
        ),
        Architecture(
            "distilbert",
            "DistilBertSelfAttention",
            **_DISTILBERT,
        ),
        Architecture("eurobert", "EuroBertAttention"),
        Architecture(
            "modernbert",
            "ModernBertAttention",
            **_EVEN_HEADS,
            **_fused("Wqkv"),
            output="Wo",
            output_dropout=lambda attention: getattr(attention.out_drop, "p", 0.0),
            passes=(("sliding_window", "sliding_window"), ("deterministic", "deterministic_flash_attn")),
            scaling=_square_root,
        ),
        Architecture("vit", "ViTAttention", **_VIT),
        Architecture("dinov2", "Dinov2Attention", **_VIT),
    )
}
