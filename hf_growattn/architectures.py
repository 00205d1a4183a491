"""The model families, one row each: how a family names and arranges its self-attention.

To add a family, add a row to ``ARCHITECTURES`` and a line to the contract test. A row holds data; a callable appears in
it only where the family computes something that no other does.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import nn


@dataclass(frozen=True)
class Architecture:
    """How one family of transformers arranges its self-attention.

    Attributes:
        model_type: the stock `config.model_type`, which is also the name of the family's folder in transformers.
        attention: name of the self-attention class in the family's modeling file.
        query, key, value, output: attribute names of the projections on that class. One name given to `query`, `key`
            and `value` means one fused projection whose outputs are laid out `[queries | keys | values]`.
        rotate: name of the function of the modeling file that rotates `(query, key, cos, sin)`; None without rotation.
        attention_dropout: attribute that holds the dropout of the attention weights, a number or an `nn.Dropout`.
        output_dropout: attribute that holds the dropout applied after the output projection, if there is one.
        eager: given an attention module, returns the function that its "eager" implementation runs; None means the
            modeling file's `eager_attention_forward`.
    """

    model_type: str
    attention: str
    query: str
    key: str
    value: str
    output: str
    rotate: str | None
    attention_dropout: str
    output_dropout: str | None = None
    eager: Callable[[nn.Module], Callable] | None = None

    @property
    def modeling_file(self) -> ModuleType:
        """The family's own modeling module inside transformers."""
        return importlib.import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")

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


ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture(
            model_type="llama",
            attention="LlamaAttention",
            query="q_proj",
            key="k_proj",
            value="v_proj",
            output="o_proj",
            rotate="apply_rotary_pos_emb",
            attention_dropout="attention_dropout",
        ),
        Architecture(
            model_type="gpt2",
            attention="GPT2Attention",
            query="c_attn",
            key="c_attn",
            value="c_attn",
            output="c_proj",
            rotate=None,
            attention_dropout="attn_dropout",
            output_dropout="resid_dropout",
            eager=_gpt2_eager,
        ),
    )
}


def architecture_of(model_type: str) -> Architecture:
    """Return the row for a stock `config.model_type`.

    Raises:
        ValueError: the type has no row; the message names the type and the known ones.
    """
    try:
        return ARCHITECTURES[model_type]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(
            f"hf_growattn does not know the model type {model_type!r}. Known types: {known}. "
            "For a model that wraps one of these, patch the inner language model instead."
        ) from None
