"""The output of an attention module, rebuilt from the patterns and messages of its view."""

import torch
from torch import Tensor

from hf_growattn.measure import functional as F
from hf_growattn.measure.views import AttentionView


@torch.no_grad()
def rebuild_output(
    view: AttentionView, hidden_states: Tensor, causal: bool = True, attention_mask: Tensor | None = None
) -> Tensor:
    """`sum_h softmax(s P_h X^T) M_h` plus the output projection's bias: (batch, tokens, d), as `hidden_states`."""
    features = F.augment(hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float())
    output = torch.zeros_like(features[..., :-1])
    for head in range(view.heads):
        logits = view.scaling * compute_logits(view, head, features, causal)
        if attention_mask is not None:
            logits = logits + attention_mask[:, 0]
        message = view.message(head)
        output += logits.softmax(-1) @ (features[..., : message.shape[0]] @ message.left @ message.right.T)
    bias = view.attention.projection_of("output").bias
    return (output if bias is None else output + bias).to(hidden_states.dtype)


def compute_logits(view: AttentionView, head: int, features: Tensor, causal: bool) -> Tensor:
    """`P_h X^T` before the scale, (batch, tokens, tokens); minus infinity for later keys where `causal`."""
    length = features.shape[1]
    logits = features.new_full((*features.shape[:2], length), -torch.inf)
    if view.attention.rotate is None:
        pattern = view.pattern(head)
        queries = features[..., : pattern.shape[0]] @ pattern.left
        keys = features[..., : pattern.shape[1]] @ pattern.right
        return queries @ keys.mT + (logits.triu(1) if causal else 0)
    for offset in range(0 if causal else 1 - length, length):
        pattern = view.pattern(head, offset, length)
        queries = features[:, max(offset, 0) : length + min(offset, 0), : pattern.shape[0]]
        keys = features[:, max(-offset, 0) : length - max(offset, 0), : pattern.shape[1]]
        logits.diagonal(-offset, dim1=1, dim2=2).copy_((queries @ pattern.left * (keys @ pattern.right)).sum(-1))
    return logits
