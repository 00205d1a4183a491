"""A family that transformers does not have, as a user might write one: Llama around attention of another make."""

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn
from transformers.models.llama.modeling_llama import eager_attention_forward


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnAttention(nn.Module):
    """All heads in one projection, one after the other, and the head width under a name of its own."""

    def __init__(self, config: OwnConfig, layer: int):
        super().__init__()
        self.config, self.layer, self.width = config, layer, config.head_dim
        self.scale, self.drop, self.is_causal = 0.3, 0.0, True
        inner = config.num_attention_heads * config.head_dim
        self.mix = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.back = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
        cache = kwargs.get("past_key_values") if cache is None else cache  # its name before transformers 5.24
        shape = (*hidden_states.shape[:2], -1, 3 * self.width)
        query, key, value = self.mix(hidden_states).view(shape).transpose(1, 2).chunk(3, dim=-1)
        query, key = turn(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        out, weights = eager_attention_forward(self, query, key, value, attention_mask, scaling=self.scale)
        return self.back(out.flatten(-2)), weights

    num_key_value_groups = 1


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = OwnAttention(config, index)
        self.post_init()


AutoConfig.register("own", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
