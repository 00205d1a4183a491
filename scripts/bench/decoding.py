"""The time of a token after others, of grown models beside a stock one: a part of the page of `overhead.py`."""

import inspect
from collections.abc import Callable
from itertools import product

import page
import torch
from alternating import format_spread, turns
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import cache_bytes, sync_config

WIDTH, LAYERS, HEAD, VOCABULARY = 512, 2, 64, 512
KEPT = 64  # tokens after which the cache is cut back


def prepare(implementation: str, cached: int, new_dims: tuple[int, int], head_dim: int = HEAD) -> tuple:
    """What decodes one more token after some in the cache, and the bytes that the cache keeps of a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // HEAD,
        head_dim=head_dim,
        max_position_embeddings=cached + KEPT,
        attn_implementation=implementation,
    )
    model = patch_model(LlamaForCausalLM(config).eval())
    for attention in attentions(model) if any(new_dims) else ():
        nn.init.normal_(attention.add_new_dims("growth_1", *new_dims).in_projection.weight, std=0.02)
    sync_config(model)
    return decoder(model, torch.randint(VOCABULARY, (1, cached))), cache_bytes(model)


def decoder(model: nn.Module, ids: torch.Tensor) -> Callable:
    """What decodes one more token of each row, after (rows, tokens) that are put into the cache."""
    # The keyword for a cache has another name since transformers 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    given = {name: cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        for part in ids.split(1024, 1):  # eager attention to all at once would fill the memory
            model(input_ids=part, **given)

    @torch.no_grad()
    def decode() -> None:
        model(input_ids=ids[:, :1], **given)
        if cache.get_seq_length() >= ids.shape[1] + KEPT:
            cache.crop(1 - KEPT)

    return decode


def measure(lengths: list[int], seconds: float, least: int) -> list[dict]:
    """The time of a token beside a stock model, for each length and implementation."""
    rows = []
    for cached, implementation in product(lengths, ("sdpa", "eager")):
        stock, bytes_before = prepare(implementation, cached, (0, 0))
        for new_dims, head_dim in (((6, 2), HEAD), ((8, 8), HEAD), ((0, 0), HEAD + 8)):
            ours, bytes_after = prepare(implementation, cached, new_dims, head_dim)
            row = {"cached": cached, "implementation": implementation, "new_dims": new_dims, "head_dim": head_dim}
            rows.append(row | turns(ours, stock, seconds, least) | {"bytes": bytes_after / bytes_before})
    return rows


def table(rows: list[dict]) -> str:
    """A line for each length, implementation and model."""
    lines = []
    for row in rows:
        grown = "+{} queries, keys, +{} values".format(*row["new_dims"])
        model = grown if any(row["new_dims"]) else f"stock, heads {row['head_dim']} wide"
        cells = [format_spread(row[clock]) for clock in ("cpu", "wall")]
        lines.append([f"{row['cached']:,}", row["implementation"], model, *cells, f"{row['bytes']:.3f}"])
    head = ["tokens in the cache", "attention", "model", "CPU time", "by the clock", "bytes of the cache"]
    return (
        f"## Decoding\n\nOne token after others, of a Llama with {LAYERS} layers, d {WIDTH} and heads {HEAD} wide, "
        f"beside that model without growth; ratios, median (quartiles).\n\n{page.table(head, lines)}\n"
    )
