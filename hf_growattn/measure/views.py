"""Attention as patterns and messages: what a head looks for, and what it passes on.

The pattern of a head is `W^P = W_Q W_K^T`, its message `W^M = W_V W_O`, and attention is
`sum_h softmax(s P_h X^T) M_h` with `P_h = X W^P_h`, `M_h = X W^M_h`. Both matrices are `d x d` of rank at most the
head's width, so they are kept as their two factors and never formed.
Symbols: `X` (tokens, d) the attention's input, `X' = [X | 1]` where projections have a bias, `s` the softmax scale.
Only the projections' own weights are seen, quantized ones as the numbers that they compute with: an adapter around one
counts once it is merged.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention, attentions
from ..growable.growths import check_kind
from . import functional as F

ROTARY = ("rotary_emb", "rotary_embeddings")  # what families call the module that gives cos and sin


class FactoredMatrix:
    """The matrix `left @ right.T`, (a, b), which is never formed.

    Everything derived from it costs `O((a + b) k^2)`: `left = Q_l R_l` and `right = Q_r R_r` leave the small core
    `R_l R_r^T`, which has the same singular values.

    Attributes:
        left: (a, k), for any `k`, zero included; in fp64 or fp32, as `right`.
        right: (b, k).
    """

    def __init__(self, left: Tensor, right: Tensor):
        dtype = torch.promote_types(left.dtype, torch.float32)  # decompositions take no half precision
        self.left, self.right = left.to(dtype), right.to(dtype)

    @property
    def shape(self) -> torch.Size:
        """Shape of the product, (a, b)."""
        return torch.Size((self.left.shape[0], self.right.shape[0]))

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the thin SVD `U` (a, n), `S` (n,) descending and `V` (b, n) of it, with `n = min(a, b, k)`."""
        return F.svd_of_product(self.left, self.right)

    @property
    def singular_values(self) -> Tensor:
        """The `min(a, b, k)` singular values that can differ from zero, descending."""
        return self.svd()[1]

    def dense(self) -> Tensor:
        """Form the matrix, (a, b); for tests and small sizes."""
        return self.left @ self.right.T


class AttentionView:
    """Patterns and messages of one layer, read from its weights at each call: they follow training and growth.

    Attributes:
        module: the model's attention module.
        attention: what is known of it.
        layer: number of the layer.
        scaling: the softmax scale `s`, which is not part of the patterns.
        heads: number of query heads `H`: there is a pattern and a message for each.
        groups: number of key/value heads `G`, each shared by `H / G` patterns and messages.
    """

    def __init__(self, attention: GrowableAttention, rotary: Any):
        self.module, self.attention, self._rotary = attention.module, attention, rotary
        self.layer, self.scaling = attention.layer, attention.softmax_scale
        self.heads, self.groups = attention.shape.num_heads, attention.shape.num_key_value_heads

    def pattern(self, head: int, offset: int = 0, length: int | None = None) -> FactoredMatrix:
        """Return the pattern of a query head, `W^P = W_Q R_offset W_K^T`: the logits are `s x'_t W^P x'_u^T`.

        The factors are copies, in fp32 or fp64. Dims that growth added do not rotate, where old ones do by the offset.

        Args:
            head: query head; under GQA it meets the key head of its group.
            offset: position `t` of the query minus position `u` of the key; families without rotation ignore it.
            length: tokens of the whole sequence, for rope types whose frequencies follow it ("dynamic", "longrope");
                None means one that ends at the later of the two positions.

        Returns:
            (d, d); on a side whose projection has a bias, one more, for the constant 1 of the features `X' = [X | 1]`.

        Raises:
            IndexError: the layer has fewer heads; the message gives the number.
            ValueError: the family normalizes queries and keys, so the logits are no bilinear form; or its projections
                are not known.
        """
        attention = self.attention
        if attention.normalizes:
            raise ValueError(
                f"Layer {self.layer} normalizes its queries and keys, so that its logits are no bilinear form and "
                "have no pattern. Its messages can be viewed."
            )
        query, key = self._factors("query", head), self._factors("key", head)
        rotate = attention.rotate
        if rotate is not None:
            if self._rotary is None:
                raise ValueError(f"Layer {self.layer} rotates, and its model has no rotary_emb; pass the whole model.")
            # Some rope types choose frequencies by the largest position of a call, and write them into the module.
            last = abs(offset) if length is None else length - 1
            positions = torch.tensor([[offset], [0], [last]], device=query.device)
            rotary = copy.deepcopy(self._rotary, {id(self._rotary.config): self._rotary.config})
            types = attention.config.layer_types if hasattr(rotary, "layer_types") else None
            kind = {"layer_type": types[self.layer]} if types else {}
            cos, sin = type(rotary).forward(rotary, query, positions, **kind)
            width = cos.shape[-1]  # of the leading dims, which the rotation covers
            old = (factors[..., :width].expand(3, 1, -1, -1) for factors in (query, key))
            rotated = rotate(*old, cos, sin)
            query = torch.cat((rotated[0][0, 0], query[..., width:]), -1)
            key = torch.cat((rotated[1][1, 0], key[..., width:]), -1)
        return FactoredMatrix(query, key)

    def message(self, head: int) -> FactoredMatrix:
        """Return the message of a query head, `W^M = W_V W_O`: the head adds `softmax(..) X' W^M` to the output.

        The factors are copies, in fp32 or fp64. The output's own bias belongs to no head.

        Args:
            head: query head; under GQA it passes on the values of its group.

        Returns:
            (d, d), or (d + 1, d) for the features `X' = [X | 1]` where values have a bias.

        Raises:
            IndexError: the layer has fewer heads; the message gives the number.
            ValueError: the projections of the family are not known.
        """
        return FactoredMatrix(self._factors("value", head), self._factors("output", head))

    def _factors(self, role: str, head: int) -> Tensor:
        """Copy a query head's factors of a role, (d or d + 1, width)."""
        attention, heads = self.attention, self.heads
        if head not in range(heads):
            raise IndexError(f"Layer {self.layer} has {heads} heads, 0 to {heads - 1}; got head {head}.")
        if problem := attention.why_unreadable(role):
            raise ValueError(problem)
        own = head * attention.shape.heads_of(role) // heads
        dtype = torch.promote_types(attention.empty_like(role).dtype, torch.float32)
        return attention.factors_of(role, dtype, adapters=False)[own].clone()


def attention_views(model: PreTrainedModel) -> list[AttentionView]:
    """Return a view on the attention of each layer, in the order of the layers; the model stays as it is.

    Args:
        model: a transformers model, stock, patched or grown, whole.

    Raises:
        ValueError: it has no attention module that passes transformers' table of attention functions.
    """
    check_kind(model)
    rotary = next((module for name, module in model.named_modules() if name.endswith(ROTARY)), None)
    found = attentions(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention that could be viewed: patch_model says why.")
    return [AttentionView(attention, rotary) for attention in found]
