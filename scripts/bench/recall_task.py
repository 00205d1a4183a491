"""Phone books: names and numbers, then questions. The task of `recall.py`, and its model, pretrained on short books."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from harness import Task, pretrained
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from wide_values import widen_values

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config

THETA = 254.0  # with 4 dims, the base at which no other offset up to 160 is close to that of the token before
QUESTIONS = 16  # of a held-out book


@dataclass(frozen=True)
class PhoneBook(Task):
    """'anna seven bob nine ... bob nine anna seven': pairs of name and number, then names, each before its number.

    Attributes:
        hidden, head_dim: width of the model, and of the queries and keys of its one head a layer.
        names, numbers: words of either kind.
        few, many: pairs in the books of pretraining, which takes turns, and of fine-tuning.
        pretraining: optimizer steps.
        pairs: pairs in a batch, which says how many sequences a batch has.
        dims: that a growth adds to the queries and keys of each layer: what they cost is the budget.
        asked: numbers of pairs that recall is measured at, on `held_out` books.
    """

    steps: int = 120
    growth_batches: int = 16
    warmup: float = 0.0
    hidden: int = 64
    head_dim: int = 4
    names: int = 2048
    numbers: int = 32
    few: tuple[int, ...] = (2, 4, 8)
    many: int = 32
    pretraining: int = 150
    pretraining_rate: float = 4e-3
    pairs: int = 256
    dims: int = 8
    asked: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    held_out: int = 128

    metric = "recall"
    higher_is_better = True

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.many} of {self.names:,} names, queries {self.head_dim} wide"

    def draw(self, sequences: int, pairs: int, questions: int, generator: torch.Generator) -> dict:
        """Books of pairs, each name once, and questions with their answers, on which alone the loss is."""
        names = torch.rand(sequences, self.names, generator=generator).argsort(1)[:, :pairs] + self.numbers
        book = torch.stack((names, torch.randint(self.numbers, names.shape, generator=generator)), -1)
        asked = torch.randint(pairs, (sequences, questions, 1), generator=generator).expand(-1, -1, 2)
        asked = book.gather(1, asked)
        answers = asked.masked_fill(torch.tensor([True, False]), -100)
        ids = torch.cat((book, asked), 1).flatten(1)
        return {"input_ids": ids, "labels": answers.flatten(1), "logits_to_keep": 2 * questions}

    def batch(self, seed: int, step: int) -> dict:
        """Fresh books."""
        generator = torch.Generator().manual_seed((5000 + seed) * 100_003 + step)
        return self.draw(max(self.pairs // self.many, 1), self.many, self.many, generator)

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """The model of a seed, trained on short books."""
        model = build(self, self.dims if wide else 0, seed)
        return pretrained(self, model, f"phone-book-{seed}-{wide}", self.short_books(seed), self.pretraining_rate)

    def short_books(self, seed: int) -> Iterator[dict]:
        """The batches of pretraining."""
        generator = torch.Generator().manual_seed(seed)
        for step in range(self.pretraining):
            pairs = self.few[step % len(self.few)]
            yield self.draw(self.pairs // pairs, pairs, pairs, generator)

    def budget(self, model: nn.Module) -> int:
        """Weights and biases of all new dims of both layers' queries and keys."""
        return 2 * 2 * self.dims * (self.hidden + 1)

    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """Share of right numbers, among books as long as those of fine-tuning and of other lengths."""
        found = {f"of {pairs}": self.recall(model, pairs, seed) for pairs in self.asked}
        return {"recall": self.recall(model, self.many, seed), **found}

    def recall(self, model: nn.Module, pairs: int, seed: int) -> float:
        """Share of right numbers among the answers of held-out books."""
        batch = self.draw(self.held_out, pairs, QUESTIONS, torch.Generator().manual_seed(10_000 + seed))
        answers = batch["labels"][:, 1:]
        right = model(**batch).logits[:, :-1].argmax(-1) == answers
        return right[answers >= 0].float().mean().item()


@torch.no_grad()
def build(task: PhoneBook, extra: int, seed: int) -> SmolLM3ForCausalLM:
    """Two SmolLM3 layers, the second without rotation, started near an induction circuit, which is slow to form.

    The first layer looks at the token before (its biases do) and passes it on turned; the second compares a token with
    what is so turned, by a random projection as wide as its head. Values are as wide as the model. Further queries and
    keys are new dims from the start, since a wider head would rotate at other angles.
    """
    torch.manual_seed(seed)
    config = SmolLM3Config(
        vocab_size=task.names + task.numbers,
        hidden_size=task.hidden,
        intermediate_size=task.hidden,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=task.head_dim,
        no_rope_layers=[1, 0],
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=task.hidden**-0.5,
        use_cache=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    model = SmolLM3ForCausalLM(config)
    widen_values(model, task.hidden)
    before, match = layers = attentions(patch_model(model))
    for layer in layers:
        nn.init.eye_(layer.projection_of("value").weight)
    turn = torch.linalg.qr(torch.randn(task.hidden, task.hidden))[0]
    size = 1.5 * task.hidden**-0.5  # next to embeddings of this size without the factor
    before.projection_of("output").weight.copy_(size * turn)
    match.projection_of("output").weight.copy_(size * torch.eye(task.hidden))
    angles = THETA ** -(torch.arange(0, task.head_dim, 2) / task.head_dim)
    there = torch.cat((angles**0, angles * 0))
    ahead = torch.cat((angles.cos(), angles.sin()))  # by one position
    for role, bias in (("query", there), ("key", ahead)):
        nn.init.normal_(before.projection_of(role).weight, std=0.02)
        before.projection_of(role).bias.copy_(10 * bias)
    query = torch.randn(task.head_dim + extra, task.hidden) * 1.5 * task.hidden**-0.5
    compared = {"query": query, "key": query @ turn.T}
    for role, weight in compared.items():
        match.projection_of(role).weight.copy_(weight[: task.head_dim])
    if extra:
        of_first, of_match = (layer.add_new_dims("wide", qk_dims=extra, v_dims=0) for layer in layers)
        nn.init.normal_(of_first.in_proj.weight, std=0.02)
        for role, weight in compared.items():
            of_match.weight_of(role)[0] = weight[task.head_dim :]
        sync_config(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.1)
    return model.requires_grad_(True)
