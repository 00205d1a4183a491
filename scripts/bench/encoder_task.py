"""Retrieval by an encoder: to find the answer to a question among other answers."""

import itertools
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from harness import Task
from text_task import english, load_texts, tokenizer_of, train_tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, BertConfig, BertModel

from hf_growattn import patch_model
from hf_growattn.training.methods import weights_of_rank_one

SCALE = 20.0  # of the cosine, as sentence-transformers has it
LEAST = 40  # characters of a paragraph: shorter ones answer anything


@dataclass(frozen=True)
class Retrieval(Task):
    """Questions and answers, by the angle between means of tokens' last hidden states.

    Attributes:
        source: path or Hub id of the encoder.
        path: of pairs: JSON rows, whose last field is the answer to the others, or a text, of which each paragraph is
            the answer to the one before; empty for Python's own documentation.
        pairs: of a batch; each answer is compared with the others.
        tokens: of a text, at most.
        held_out: pairs to measure on; each answer is compared with all others.
        rank: of LoRA on all linear layers, whose weights are the budget.
    """

    growth_batches: int = 6
    source: str = ""
    path: str = ""
    pairs: int = 16
    tokens: int = 32
    held_out: int = 256
    rank: int = 3

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{Path(self.source).name} on {Path(self.path).stem or 'the documentation of Python'}"

    def __post_init__(self):
        tokenizer_of(self.source)  # once, before runs are forked
        read_pairs(self.path)

    def files(self) -> list[str]:
        """The encoder and the pairs."""
        return [self.source, self.path]

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """A patched copy."""
        return patch_model(AutoModel.from_pretrained(self.source, dtype="float32", add_pooling_layer=False))

    def budget(self, model: nn.Module) -> int:
        """Weights that a method may train."""
        return self.rank * weights_of_rank_one(model, {})

    def batch(self, seed: int, step: int) -> dict:
        """Pairs of the file, from the start again after its end."""
        count = len(read_pairs(self.path)) - self.held_out
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1 + seed)) + self.held_out
        return self._tokens(order[torch.arange(step * self.pairs, (step + 1) * self.pairs) % count].tolist())

    def _tokens(self, numbers: list[int]) -> dict:
        """Questions, then their answers."""
        chosen = [read_pairs(self.path)[number] for number in numbers]
        texts = [question for question, _ in chosen] + [answer for _, answer in chosen]
        tokens = tokenizer_of(self.source)(
            texts, padding=True, truncation=True, max_length=self.tokens, return_tensors="pt"
        )
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    def scores(self, model: nn.Module, batch: dict) -> Tensor:
        """Every question against every answer, (pairs, pairs)."""
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        questions, answers = normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).chunk(2)
        return SCALE * questions @ answers.T

    def loss(self, model: nn.Module, batch: dict) -> Tensor:
        """Of choosing the answer to each question among all answers of the batch."""
        found = self.scores(model, batch)
        return cross_entropy(found, torch.arange(len(found)))

    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """The loss, and recall@1: the share of questions whose own answer is the nearest."""
        found = self.scores(model, self._tokens(list(range(self.held_out))))
        own = torch.arange(len(found))
        return {"loss": cross_entropy(found, own).item(), "recall": (found.argmax(1) == own).float().mean().item()}


@lru_cache
def read_pairs(path: str) -> list[tuple[str, str]]:
    """Questions and answers of a file, in an order that is always the same."""
    if Path(path).suffix in (".json", ".jsonl"):
        whole = Path(path).read_text()
        rows = json.loads(whole) if path.endswith(".json") else [json.loads(line) for line in whole.splitlines()]
        asked = ["\n".join(filter(None, [*row.values()][:-1])) for row in rows]
        before, after = shared_start(asked), shared_start([text[::-1] for text in asked])  # of a template
        found = [(text[before : len(text) - after], [*row.values()][-1]) for text, row in zip(asked, rows)]
    else:
        texts = load_texts(path) if path else english()
        paragraphs = [[p.strip() for p in text.split("\n\n")] for text in texts]
        pairs = [pair for one in paragraphs for pair in itertools.pairwise(one)]
        found = [pair for pair in pairs if min(map(len, pair)) >= LEAST]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[number] for number in order.tolist()]


def shared_start(texts: list[str]) -> int:
    """How many characters all texts begin with."""
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts)))


def tiny_bert(folder: Path) -> str:
    """A tiny BERT with random weights and its tokenizer, saved in a folder."""
    tokenizer = train_tokenizer(english(), 2000)
    tokenizer.pad_token = tokenizer.eos_token
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
