"""One line for each family and variant of the contract test: how to build a tiny stock model of it.

Weights are drawn wide enough for attention to be far from uniform, and biases are not zero.
"""

import random
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
)

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config

VOCABULARY = 97
COMMON = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
HEADS_OF_16 = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4)
GROUPED = HEADS_OF_16 | dict(num_key_value_heads=2)
LLAMA = COMMON | GROUPED | dict(hidden_size=48, head_dim=16)
GPT2 = COMMON | dict(n_embd=64, n_head=4, n_positions=128)
GPT2.pop("max_position_embeddings")
EXPERTS = dict(num_experts_per_tok=2, output_router_logits=False)
STRAY = dict(num_key_value_heads=1, head_dim=24)  # fields of other families, which the stock attention ignores
WINDOW = 6  # narrower than the inputs below are long


def _of(model_type: str, *parts: dict, layers: int = 2, **fields):
    """What makes a config of a family from some of the parts above."""
    fields = {key: value for part in (COMMON, *parts) for key, value in part.items()} | fields
    return lambda: AutoConfig.for_model(model_type, num_hidden_layers=layers, **fields)


# A line for each family, and one more for each way that its config can make the attention differ.
VARIANTS = {
    "llama-2": _of("llama", LLAMA),
    "llama-5-bias": _of("llama", LLAMA, layers=5, attention_bias=True),
    "gpt2-2": lambda: GPT2Config(**GPT2, n_layer=2),
    "gpt2-5-scaled": lambda: GPT2Config(**GPT2, **STRAY, n_layer=5, scale_attn_by_inverse_layer_idx=True),
    "mistral": _of("mistral", LLAMA, sliding_window=WINDOW),
    "mixtral": _of("mixtral", LLAMA, EXPERTS, num_local_experts=4, sliding_window=None),
    "qwen2": _of("qwen2", GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _of("qwen3", LLAMA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3-moe": _of("qwen3_moe", LLAMA, EXPERTS, num_experts=4, moe_intermediate_size=32),
    "gemma": _of("gemma", LLAMA),
    "gemma2": _of("gemma2", LLAMA, sliding_window=WINDOW, query_pre_attn_scalar=24, attn_logit_softcapping=3.0),
    "gemma3": _of(
        "gemma3_text",
        LLAMA,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": _of("granite", GROUPED, attention_multiplier=0.4, attention_bias=True),
    "granite-unscaled": _of("granite", GROUPED, attention_multiplier=1.0, attention_bias=True),
    "cohere2": _of(
        "cohere2", GROUPED, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], logit_scale=1.0
    ),
    "starcoder2": _of("starcoder2", GROUPED, sliding_window=WINDOW, residual_dropout=0.1),
    "olmo2": _of("olmo2", GROUPED),
    "smollm3": _of("smollm3", GROUPED, no_rope_layers=[1, 0]),
    "stablelm": _of("stablelm", GROUPED, use_qkv_bias=True),
    "stablelm-norms": _of("stablelm", GROUPED, qk_layernorm=True, use_parallel_residual=True),
    "phi3": _of(
        "phi3", GROUPED, partial_rotary_factor=0.5, sliding_window=WINDOW, original_max_position_embeddings=128
    ),
    "gpt-neox": _of("gpt_neox", HEADS_OF_16, STRAY, rotary_pct=0.5),
    "opt": _of("opt", STRAY, hidden_size=64, word_embed_proj_dim=64, ffn_dim=64, num_attention_heads=4),
}
# transformers offers these nothing but the eager implementation.
EAGER_ONLY = ("gemma2", "gpt_oss")
FAMILIES = ["llama-5-bias", "gpt2-2"]
HEADS = {
    "causal-lm": AutoModelForCausalLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
}


def build(variant: str, auto_class=AutoModelForCausalLM, attention: str | None = None, dtype=torch.float32):
    """A stock model in evaluation mode, the same weights at every call; by default with sdpa where it is offered."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = auto_class.from_config(VARIANTS[variant](), attn_implementation=attention)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def build_encoder_decoder():
    """A tiny stock BART in evaluation mode, one layer on either side."""
    from transformers import BartConfig, BartForConditionalGeneration  # not for every process that draws tokens

    small = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in small.items()}
    config = BartConfig(vocab_size=VOCABULARY, d_model=32, init_std=0.3, max_position_embeddings=64, **sides)
    return BartForConditionalGeneration(config).eval()


def word_tokenizer():
    """A tokenizer of as many words as the models know: "<pad>", "<eos>", then "w2", "w3" and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{index}" for index in range(2, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save_with_text(folder: Path, words: int, variant: str = "llama-2") -> None:
    """Leave a tiny model with its tokenizer in `model`, and in `text.txt` words of which each has one successor."""
    word_tokenizer().save_pretrained(folder / "model")
    build(variant).save_pretrained(folder / "model")
    draw, ids = random.Random(0), []
    for index in range(words):
        ids.append(draw.randrange(2, VOCABULARY) if index % 12 == 0 else 2 + 5 * ids[-1] % 95)
    (folder / "text.txt").write_text(" ".join(f"w{index}" for index in ids))


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


def slow_4bit(monkeypatch) -> None:
    """Without what bitsandbytes does on CPUs with AVX512-BF16: widths in multiples of 64 alone, and no shards."""
    if find_spec("bitsandbytes"):
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False, raising=False)


def add_dims(attention, qk_dims: int = 0, v_dims: int = 0, roles=("query", "key", "value", "output"), std: float = 0.3):
    """Give an attention module new dims, drawn for some roles and zero for the others; `sync_config` is the caller's.

    Without "query" or "key", and without "value" or "output", they change nothing.
    """
    name = f"growth_{len(attention.growths) + 1}"
    part = attention.add_new_dims(name, qk_dims, v_dims)
    with torch.no_grad():
        for role in roles:
            part.weight_of(role).normal_(std=std)
    return part


def wide(model, qk_dims: int = 4, v_dims: int = 0, auto_class=AutoModelForCausalLM, **options):
    """A patched model, built if it is named, with new dims drawn at random in every layer; its config knows them."""
    model = build(model, auto_class) if isinstance(model, str) else model
    for attention in attentions(patch_model(model)):
        if qk_dims or v_dims:
            add_dims(attention, qk_dims, v_dims, **options)
    sync_config(model)
    return model


def fingerprint(model, optimizer=None):
    """Everything that a failed or refused growth must leave as it was."""
    state = [] if optimizer is None else [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    if optimizer is not None:
        state.append(
            {id(p): {k: (id(v), torch.as_tensor(v).clone()) for k, v in s.items()} for p, s in optimizer.state.items()}
        )
    return (
        {
            name: (id(p), p.detach().clone(), p.requires_grad, id(p.grad), None if p.grad is None else p.grad.clone())
            for name, p in model.named_parameters()
        },
        [(name, type(m), m.training, [*m._forward_pre_hooks, *m._forward_hooks]) for name, m in model.named_modules()],
        model.config.to_json_string(),
        [(a.width_of("query"), a.width_of("value")) for a in attentions(model)],
        torch.get_rng_state(),
        state,
    )


def same(one, other) -> bool:
    """Equal, tensor by tensor and type by type; NaN where NaN is."""
    if torch.is_tensor(one):
        is_like = one.shape == other.shape and one.dtype == other.dtype
        return is_like and torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def in_training(variant: str):
    """A patched model in training, and its optimizer with a state."""
    model = patch_model(build(variant)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    return model, optimizer


def train(model, optimizer, batches) -> list[float]:
    """Take a step on each batch, and return the losses."""
    losses = []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
