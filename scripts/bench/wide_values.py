"""SmolLM3 with values of another width than its queries and keys, which its config cannot ask for."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.smollm3.modeling_smollm3 import (
    SmolLM3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class WideValueAttention(SmolLM3Attention):
    """SmolLM3's attention without a cache, whose values are `v_head_dim` wide."""

    v_head_dim: int

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings=None, attention_mask=None, cache=None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as SmolLM3 does."""
        shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*shape, -1, self.v_head_dim).transpose(1, 2)
        if self.use_rope:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*shape, -1)), weights


def widen_values(model: PreTrainedModel, width: int) -> None:
    """Give all heads of a stock SmolLM3 values of a width, with weights drawn as those of the stock model."""
    config = model.config
    for attention in [module for module in model.modules() if isinstance(module, SmolLM3Attention)]:
        attention.__class__, attention.v_head_dim = WideValueAttention, width
        biased = attention.v_proj.bias is not None
        attention.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=biased)
        attention.o_proj = nn.Linear(config.num_attention_heads * width, config.hidden_size, bias=biased)
        for projection in (attention.v_proj, attention.o_proj):
            nn.init.normal_(projection.weight, std=config.initializer_range)
            if biased:
                nn.init.zeros_(projection.bias)
