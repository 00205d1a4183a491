"""A family that transformers does not have, as a user might write one: Llama around attention of another make."""

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn
from transformers.models.llama.modeling_llama import eager_attention_forward


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnAttention(nn.Module):
    """All heads in one projection of an unusual name, one after the other."""

    def __init__(self, config: OwnConfig, index: int):
        super().__init__()
        self.config, self.index, self.width = config, index, config.head_dim
        self.scale, self.is_causal, self.num_key_value_groups = 0.3, True, 1
        inner = config.num_attention_heads * config.head_dim
        self.mix = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
        cache = kwargs.get("past_key_values") if cache is None else cache  # its name before transformers 5.24
        shape = (*hidden_states.shape[:2], -1, 3 * self.width)
        query, key, value = self.mix(hidden_states).view(shape).transpose(1, 2).chunk(3, dim=-1)
        query, key = turn(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scale)
        return self.o_proj(out.flatten(-2)), weights


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = OwnAttention(config, index)
        self.post_init()


AutoConfig.register("own", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
