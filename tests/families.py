"""One line for each family and variant of the contract test: how to build a tiny stock model of it.

Weights are drawn wide enough for attention to be far from uniform, and biases are not zero.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
)

VOCABULARY = 97

LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
GPT2 = dict(
    vocab_size=VOCABULARY,
    n_embd=64,
    n_head=4,
    n_positions=128,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)

VARIANTS = {
    "llama-2": lambda: LlamaConfig(**LLAMA, num_hidden_layers=2),
    "llama-5-bias": lambda: LlamaConfig(**LLAMA, num_hidden_layers=5, attention_bias=True),
    "gpt2-2": lambda: GPT2Config(**GPT2, n_layer=2),
    "gpt2-5-scaled": lambda: GPT2Config(**GPT2, n_layer=5, scale_attn_by_inverse_layer_idx=True),
    "gpt2-2-upcast": lambda: GPT2Config(**GPT2, n_layer=2, reorder_and_upcast_attn=True),
}
FAMILIES = ["llama-5-bias", "gpt2-2"]
HEADS = {
    "causal-lm": AutoModelForCausalLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
}


def build(variant: str, auto_class=AutoModelForCausalLM, attention: str = "sdpa", dtype=torch.float32):
    """A stock model in evaluation mode, the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = auto_class.from_config(VARIANTS[variant](), attn_implementation=attention)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def tokens(batch: int = 3, length: int = 17, seed: int = 3) -> torch.Tensor:
    """Random input_ids without padding, (batch, length)."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(batch: int = 3, length: int = 17, left: bool = True) -> dict[str, torch.Tensor]:
    """Random input_ids and an attention_mask with row `i` padded by `2 i` tokens."""
    input_ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        mask[row, slice(0, 2 * row) if left else slice(length - 2 * row, length)] = 0
    return {"input_ids": input_ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def lm_batches(count: int = 3, seed: int = 11) -> list[dict]:
    """Causal LM batches with padding on either side, which neither is predicted nor predicts.

    Each token has one successor, so that what is learned from one batch holds on the others.
    """
    batches = []
    for index in range(count):
        batch = padded(left=index % 2 == 0)
        hidden = batch["attention_mask"] == 0
        ids = tokens(seed=seed + index)
        for position in range(1, ids.shape[1]):
            ids[:, position] = 2 + 5 * ids[:, position - 1] % (VOCABULARY - 2)
        batch["input_ids"] = ids.masked_fill(hidden, 0)
        # The first real token would be predicted from padding, where implementations may differ.
        unpredictable = hidden | hidden.roll(1, dims=1)
        batches.append({**batch, "labels": batch["input_ids"].masked_fill(unpredictable, -100)})
    return batches
