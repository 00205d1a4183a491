"""Every kind of model in one table: how to build a tiny stock one, what is special about it, and batches for its loss.

A line of `MECHANISMS` is a causal LM of `families.py` or `every_type.py`. Encoders, encoder-decoders, image and speech
models, and models around a language model come from tables of their own.
"""

import encoders
import every_type
import families
import modalities
import torch
import wrappers
from conftest import real_batches, real_model

MECHANISMS = {
    "llama-2": "keys and values shared by groups of heads, rotation",
    "llama-5-bias": "biases",
    "gpt2-2": "one fused projection with a transposed weight, learned positions",
    "gpt2-5-scaled": "another softmax scale in each layer",
    "mistral": "sliding windows",
    "qwen2": "biases of queries, keys and values alone, windows in some layers",
    "qwen3": "norms of each head's queries and keys",
    "olmo2": "norms over all heads",
    "gemma2": "capped logits",
    "gemma3": "another rotation in each type of layer",
    "granite": "a softmax scale of its own",
    "smollm3": "layers without rotation",
    "stablelm-norms": "partial rotation, norms with one weight a head",
    "phi3": "one fused projection, partial rotation",
    "gpt-neox": "one fused projection, laid out head by head",
    "opt": "queries scaled before, with biases",
    "gpt_oss": "a sink in each head's softmax",
    "deepseek_v3": "a latent in the cache, values of another width than keys",
    "stories260K": "trained weights",
}
MODELS = [*MECHANISMS, *encoders.ENCODERS, *modalities.MODELS, *wrappers.WRAPPERS]
BY_ATTENTION = [
    (name, attention)
    for name in (*MECHANISMS, *encoders.ENCODERS)
    for attention in ("eager", "sdpa")
    if attention == "eager" or name not in families.EAGER_ONLY
] + [(name, None) for name in (*modalities.MODELS, *wrappers.WRAPPERS)]


def build(name: str, attention: str | None = None):
    """A stock model in evaluation mode, the same weights at every call."""
    if name == "stories260K":
        return real_model(attn_implementation=attention)
    if name in families.VARIANTS:
        return families.build(name, attention=attention)
    if name in MECHANISMS:
        return every_type.build(name, attn_implementation=attention)
    if name in encoders.ENCODERS:
        return encoders.build(name, attention or "sdpa")
    return wrappers.build(name) if name in wrappers.WRAPPERS else modalities.build(name)


def batches(name: str, count: int = 4) -> list[dict]:
    """Batches that the model's own loss takes."""
    if name == "stories260K":
        return [{"input_ids": ids, "labels": ids} for ids in real_batches(count, size=4, tokens=64)]
    if name in MECHANISMS:
        return families.lm_batches(count)
    if name in wrappers.WRAPPERS:
        return [wrappers.batch(name, seed=seed) for seed in range(count)]
    return (encoders if name in encoders.ENCODERS else modalities).batches(name, count)


@torch.no_grad()
def outputs(model, batch: dict) -> torch.Tensor:
    """The logits, or what a model has instead of them."""
    found = model(**batch)
    return found["logits"] if "logits" in found else found[1]
