"""Tasks for pretrained causal LMs: a text, and phone books in words. Their models and texts are files."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from harness import Task, pretrained
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.training.methods import weights_of_rank_one

sys.path.insert(0, str(Path(__file__).parents[1]))
from texts import blocks_of, english, load_texts, train_tokenizer

WORDS, ASKED, FIGURES = 64, 8, 3  # first and second words of names, names asked for in a row, figures of a number
READ = 400  # batches that a small Llama is pretrained on
LONGEST = 2_000_000  # characters that are read of a document


def documents_of(path: str) -> list[str]:
    """The documents of a text file or Hub data set; of JSON all strings of a row; without a path, Python's help."""
    if not path:
        return english()
    if Path(path).suffix in (".json", ".jsonl"):
        from datasets import load_dataset

        rows = load_dataset("json", data_files=path, split="train")
        return ["\n".join(value for value in row.values() if value) for row in rows]
    # The literal <unk> of WikiText would become a special token.
    return [text.replace("<unk>", "unk")[:LONGEST] for text in load_texts(path)]


@lru_cache
def tokenizer_of(model: str):
    """The tokenizer of a path or Hub id."""
    return AutoTokenizer.from_pretrained(model)


@lru_cache
def blocks(model: str, path: str, size: int) -> Tensor:
    """The blocks of a text in the tokens of a model, in an order that is always the same."""
    found = blocks_of(documents_of(path), tokenizer_of(model), size)
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]


@dataclass(frozen=True)
class Pretrained(Task):
    """A pretrained causal LM and what it is fine-tuned on.

    Attributes:
        source: path or Hub id of the model.
        rank: of LoRA on all linear layers, whose weights are the budget; 0 for what `dims` cost.
        dims: of queries, keys and values that a uniform growth of each head adds.
    """

    source: str = ""
    rank: int = 3  # the least that a third of it is a whole rank of
    dims: int = 0

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """A patched copy."""
        return patch_model(AutoModelForCausalLM.from_pretrained(self.source, dtype="float32"))

    def budget(self, model: nn.Module) -> int:
        """Weights that a method may train."""
        if self.rank:
            return self.rank * weights_of_rank_one(model, {})
        parts = [attention.make_new_dims(self.dims, self.dims) for attention in attentions(model)]
        return sum(parameter.numel() for part in parts for parameter in part.parameters())

    def loss(self, model: nn.Module, batch: dict) -> Tensor:
        """Nats a labelled token."""
        return model(**batch, use_cache=False).loss

    def tested(self, seed: int) -> list[dict]:
        """Held-out batches."""
        raise NotImplementedError

    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """The loss of a labelled token, and the share of labelled tokens that are right."""
        lost, tokens, right = 0.0, 0, 0
        for batch in self.tested(seed):
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
            labels = batch["labels"][:, 1:]
            lost += cross_entropy(logits.transpose(1, 2), labels, reduction="sum").item()
            tokens += int((labels != -100).sum())
            right += int((logits.argmax(-1) == labels)[labels != -100].sum())
        return {"loss": lost / tokens, "right": right / tokens}


@dataclass(frozen=True)
class OnText(Pretrained):
    """Blocks of a text; those that methods are measured on are the same for all seeds.

    Attributes:
        path: of the text, or a Hub id; empty for Python's own documentation.
        batch_size, block_size: of a batch.
        held_out: blocks to measure on.
    """

    path: str = ""
    batch_size: int = 2
    block_size: int = 128
    held_out: int = 32

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{Path(self.source).name} on {Path(self.path).stem or 'the documentation of Python'}"

    def __post_init__(self):
        if self.source:
            blocks(self.source, self.path, self.block_size)  # once, before runs are forked

    def files(self) -> list[str]:
        """The model and the text."""
        return [self.source, self.path]

    def batch(self, seed: int, step: int) -> dict:
        """Blocks of the text, from the start again after its end."""
        rest = blocks(self.source, self.path, self.block_size)[self.held_out :]
        order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(1 + seed))
        chosen = rest[order[torch.arange(step * self.batch_size, (step + 1) * self.batch_size) % len(rest)]]
        return {"input_ids": chosen, "labels": chosen}

    def tested(self, seed: int) -> list[dict]:
        """Held-out blocks."""
        aside = blocks(self.source, self.path, self.block_size)[: self.held_out]
        return [{"input_ids": some, "labels": some} for some in aside.split(self.batch_size)]


@dataclass(frozen=True)
class OnTextNarrow(OnText):
    """A text, and a small Llama with heads of some width, pretrained on another text.

    Attributes:
        head_dim: how wide the heads are.
        known: the text of the pretraining.
        source: of the tokenizer.
    """

    head_dim: int = 8
    known: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"Llama, heads {self.head_dim} wide, on {Path(self.path).stem}"

    def files(self) -> list[str]:
        """The tokenizer and the texts."""
        return [self.source, self.path, self.known]

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """The model, the same for all seeds."""
        words = len(tokenizer_of(self.source))
        sizes = dict(hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=8)
        config = LlamaConfig(vocab_size=words, head_dim=self.head_dim, tie_word_embeddings=True, **sizes)
        torch.manual_seed(0)
        reader = OnText(source=self.source, path=self.known, batch_size=16, block_size=self.block_size)
        batches = (reader.batch(0, step) for step in range(READ))
        return patch_model(pretrained(reader, LlamaForCausalLM(config), f"llama-{self.head_dim}", batches, 4e-3))


@dataclass(frozen=True)
class WordBook(Pretrained):
    """Phone books in words: names of two words with a number each, then some names again, whose numbers are asked for.

    A name shares each of its words with others, so both have to be looked up.

    Attributes:
        entries: names in a book.
        tokens: of a batch, about.
        held_out: books to measure on.
    """

    entries: int = 20
    tokens: int = 256
    held_out: int = 8

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{Path(self.source).name} on phone books of {self.entries}"

    def __post_init__(self):
        common_words(tokenizer_of(self.source))  # once, before runs are forked

    def files(self) -> list[str]:
        """The model."""
        return [self.source]

    def batch(self, seed: int, step: int) -> dict:
        """Fresh books."""
        tokenizer = tokenizer_of(self.source)
        size = max(self.tokens // len(word_book(tokenizer, self.entries, torch.Generator())[0]), 1)
        return self._books(tokenizer, size, (1 + seed) * 100_003 + step)

    def tested(self, seed: int) -> list[dict]:
        """Books that no method trains on."""
        tokenizer = tokenizer_of(self.source)
        return [self._books(tokenizer, 1, number) for number in range(self.held_out)]

    def _books(self, tokenizer, size: int, seed: int) -> dict:
        generator = torch.Generator().manual_seed(seed)
        ids, labels = zip(*(word_book(tokenizer, self.entries, generator) for _ in range(size)))
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


@lru_cache
def common_words(tokenizer) -> list[str]:
    """Words that are one token each, the most common ones first."""
    words = []
    for token in range(len(tokenizer)):
        word = tokenizer.decode([token])
        if word[:1] == " " and word[1:].isascii() and word[1:].isalpha() and word.islower() and 5 <= len(word) <= 9:
            words.append(word)
    return words[: 2 * WORDS]


def word_book(tokenizer, entries: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """The tokens and labels of a book and its questions; only the numbers asked for are labels."""
    words = common_words(tokenizer)
    first, second = words[0::2], words[1::2]
    names = torch.randperm(len(first) * len(second), generator=generator)[:entries].tolist()
    numbers = torch.randint(10, (entries, FIGURES), generator=generator).tolist()
    asked = torch.randperm(entries, generator=generator)[:ASKED].tolist()
    ids, labels = [], []
    end = tokenizer.encode("\n", add_special_tokens=False)
    for place, entry in enumerate([*range(entries), *asked]):
        one, other = divmod(names[entry], len(second))
        name = tokenizer.encode(f"{first[one]}{second[other]}:", add_special_tokens=False)
        number = [id for f in numbers[entry] for id in tokenizer.encode(str(f), add_special_tokens=False)]
        ids += name + number + end
        answer = number if place >= entries else [-100] * len(number)
        labels += [-100] * len(name) + answer + [-100] * len(end)
    return ids, labels


def tiny_llama(folder: Path, words: int = 2000) -> str:
    """A tiny Llama with random weights and its tokenizer, saved in a folder, so that nothing is downloaded."""
    tokenizer = train_tokenizer(english(), words)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
