"""The task of `recall.py`, books of names and numbers, and its model, which is pretrained on short ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from hf_growattn import patch_model
from hf_growattn.growable.models import attentions

THETA = 254.0  # with 4 dims, the base at which no other offset up to 160 is close to that of the token before


@dataclass(frozen=True)
class Setting:
    """The task and its training.

    Attributes:
        hidden, head_dim: width of the model, and of the queries and keys of its one head a layer.
        names, numbers: words of either kind.
        few, many: pairs in the books of pretraining, which takes turns, and of fine-tuning.
        pretraining, steps: optimizer steps; what a growth measures is taken off `steps`.
        pairs: pairs in a batch, so that a batch has as many sequences as fit.
        dims: that a growth adds to the queries and keys of each layer.
        growth_batches: batches that a growth measures; random growth measures one.
        asked: numbers of pairs that recall is measured at, on `held_out` books of 16 questions each.
        rates: of learning, for rows that train all weights and for those that train added ones.
    """

    hidden: int = 64
    head_dim: int = 4
    names: int = 2048
    numbers: int = 32
    few: list[int] = field(default_factory=lambda: [2, 4, 8])
    many: int = 32
    pretraining: int = 150
    pretraining_rate: float = 4e-3
    steps: int = 120
    pairs: int = 256
    dims: int = 8
    growth_batches: int = 16
    asked: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    held_out: int = 128
    rates: dict[str, list[float]] = field(default_factory=lambda: {"all": [1e-3, 3e-3], "added": [3e-3, 1e-2]})


def draw(setting: Setting, sequences: int, pairs: int, questions: int, generator: torch.Generator) -> dict:
    """Books of pairs, each name once, and questions with their answers, on which alone the loss is."""
    names = torch.rand(sequences, setting.names, generator=generator).argsort(1)[:, :pairs] + setting.numbers
    book = torch.stack((names, torch.randint(setting.numbers, names.shape, generator=generator)), -1)
    asked = torch.randint(pairs, (sequences, questions, 1), generator=generator).expand(-1, -1, 2)
    asked = book.gather(1, asked)
    answers = asked.masked_fill(torch.tensor([True, False]), -100)
    ids = torch.cat((book, asked), 1).flatten(1)
    return {"input_ids": ids, "labels": answers.flatten(1), "logits_to_keep": 2 * questions}


@torch.no_grad()
def build(setting: Setting, extra: int, seed: int) -> SmolLM3ForCausalLM:
    """Two SmolLM3 layers, the second without rotation, started near an induction circuit, which is slow to form.

    The first layer looks at the token before (its biases do) and passes it on turned; the second compares a token with
    what is so turned, by a random projection as wide as its head. Values are as wide as the model.
    """
    torch.manual_seed(seed)
    config = SmolLM3Config(
        vocab_size=setting.names + setting.numbers,
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=setting.head_dim,
        no_rope_layers=[1, 0],
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=setting.hidden**-0.5,
        use_cache=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    model = patch_model(SmolLM3ForCausalLM(config))
    before, match = layers = attentions(model)
    for layer in layers:
        layer.widen(qk_dims=extra, v_dims=setting.hidden - setting.head_dim)
        nn.init.eye_(layer.projection_of("value").weight)
    model.sync_config()
    turn = torch.linalg.qr(torch.randn(setting.hidden, setting.hidden))[0]
    size = 1.5 * setting.hidden**-0.5  # next to embeddings of this size without the factor
    before.projection_of("output").weight.copy_(size * turn)
    match.projection_of("output").weight.copy_(size * torch.eye(setting.hidden))
    angles = THETA ** -(torch.arange(0, setting.head_dim, 2) / setting.head_dim)
    there = torch.cat((angles**0, angles * 0))
    ahead = torch.cat((angles.cos(), angles.sin()))  # by one position
    for role, bias in (("query", there), ("key", ahead)):
        nn.init.normal_(before.projection_of(role).weight, std=0.02)
        before.projection_of(role).bias[: setting.head_dim] = 10 * bias
    query = torch.randn(setting.head_dim + extra, setting.hidden) * 1.5 * setting.hidden**-0.5
    match.projection_of("query").weight.copy_(query)
    match.projection_of("key").weight.copy_(query @ turn.T)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.1)
    return model.requires_grad_(True)


def train(model: nn.Module, batches: list[Callable[[], dict]], rate: float) -> None:
    """AdamW without decay and one cosine over the batches, a step for each."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        return  # a growth may find nothing that holds
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for batch in batches:
        model(**batch()).loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def pretrained(setting: Setting, wide: bool, seed: int, folder: Path) -> SmolLM3ForCausalLM:
    """The model of a seed, trained on short books by the first who asks."""
    model = build(setting, setting.dims if wide else 0, seed)
    kept = folder / f"{'wide' if wide else 'narrow'}-{seed}.pt"
    if not kept.exists():
        generator = torch.Generator().manual_seed(seed)
        turns = [setting.few[step % len(setting.few)] for step in range(setting.pretraining)]
        batches = [partial(draw, setting, setting.pairs // n, n, n, generator) for n in turns]
        train(model, batches, setting.pretraining_rate)
        torch.save(model.state_dict(), kept)
    model.load_state_dict(torch.load(kept))
    return model.eval()


@torch.no_grad()
def recall(setting: Setting, model: nn.Module, pairs: int, seed: int) -> float:
    """Share of right numbers among the answers of held-out books."""
    batch = draw(setting, setting.held_out, pairs, 16, torch.Generator().manual_seed(10_000 + seed))
    answers = batch["labels"][:, 1:]
    right = model(**batch).logits[:, :-1].argmax(-1) == answers
    return right[answers >= 0].float().mean().item()
