"""The pairs of `races.py`, a race of each, and its long trainings."""

import itertools
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import finetuning
import neighbour_task
import recall_task
import torch
from datasets import Dataset
from finetuning_run import SOURCES, documents_of
from finetuning_run import Setting as Sizes
from tokenizers import Tokenizer, models
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from hf_growattn import patch_model
from hf_growattn.training.contest import LONGER, Contest
from hf_growattn.training.data import Prepared, prepare_rows
from hf_growattn.training.methods import METHODS, Budget
from hf_growattn.training.race import run_race

RANK = 3  # of LoRA: the least that a third of it is a whole rank of
LONG_SEEDS = 3
RACE, LONG = "race", "long"  # the parts of a pair


def phone_books(widths: tuple, names: tuple, pairs: tuple) -> dict[str, recall_task.Setting]:
    """Tasks by name: width of queries and keys, names there are, pairs in a book."""
    return {
        f"phone book, queries {w} wide, {p} of {n} names": recall_task.Setting(head_dim=w, names=n, many=p)
        for w, n, p in itertools.product(widths, names, pairs)
    }


def nearest_neighbours(widths: tuple, points: tuple) -> dict[str, neighbour_task.Setting]:
    """Tasks by name: width of queries and keys, points to compare with; the space has 32 dims."""
    return {
        f"nearest neighbour, queries {w} wide, {p} points": neighbour_task.Setting(
            head_dim=w, points=p, sequences=256 // p
        )
        for w, p in itertools.product(widths, points)
    }


BOOKS = phone_books((4, 6, 8), (64, 2048), (16, 32, 64))
NEIGHBOURS = nearest_neighbours((4, 8, 16, 32), (16, 32))
# nobody looked at these while the first rules of a race were made
HELD_OUT = phone_books((4, 6, 8), (512,), (24, 48)) | nearest_neighbours((6, 12, 20), (24,))
HELD_OUT |= phone_books((4, 6, 8), (256,), (20,)) | nearest_neighbours((10,), (20,))
# nor at these while any were that they raced by first
NEVER_SEEN = phone_books((4, 6, 8), (1024,), (16, 28)) | nearest_neighbours((14, 24), (28,))
NEVER_SEEN |= phone_books((4, 6, 8), (128, 4096), (40,)) | nearest_neighbours((6, 18), (20,))
NEVER_SEEN |= phone_books((4, 6, 8), (1536,), (20,)) | nearest_neighbours((8, 28), (24,))
# nor at these while the present rules were
NEWEST = phone_books((4, 6, 8), (768,), (28,)) | nearest_neighbours((10, 16), (28,))
NEWEST |= phone_books((4, 6, 8), (384, 3072), (20, 44)) | nearest_neighbours((6, 12, 22), (18, 26))
TASKS = BOOKS | NEIGHBOURS | HELD_OUT | NEVER_SEEN | NEWEST


@dataclass(frozen=True)
class Setting:
    """The size of everything.

    Attributes:
        steps, seeds: of the race.
        batch_size, block_size: of a batch of text.
        growth_batches: that a growth looks at.
        rows: of a phone book or of nearest neighbours, in all.
    """

    steps: int = 40
    seeds: int = 2
    batch_size: int = 8
    block_size: int = 64
    growth_batches: int = 8
    rows: int = 2400


QUICK = Setting(steps=2, seeds=1, batch_size=4, block_size=16, growth_batches=2, rows=120)
LARGE = Setting(steps=20, batch_size=4)  # for models of which a step takes seconds


def config_of(setting: Setting, output: Path) -> SFTConfig:
    """How to train."""
    return SFTConfig(
        output_dir=str(output),
        max_length=setting.block_size,
        packing=True,
        packing_strategy="wrapped",
        per_device_train_batch_size=setting.batch_size,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )


def on_text(model: str, text: str, setting: Setting, output: Path):
    """What a race of a model on a text takes."""
    tokenizer, training = AutoTokenizer.from_pretrained(model), config_of(setting, output)
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.bos_token
    pieces = [whole[at : at + 2000] for whole in documents_of(text) for at in range(0, len(whole), 2000)]
    rows = prepare_rows(Dataset.from_dict({"text": pieces[:1000]}), None, tokenizer, training)
    return lambda: patch_model(AutoModelForCausalLM.from_pretrained(model)), tokenizer, rows, training


def book_rows(books: recall_task.Setting, rows: int) -> dict[str, torch.Tensor]:
    """Phone books with their questions, tokens and labels."""
    drawn = recall_task.draw(books, rows, books.many, books.many, torch.Generator().manual_seed(1))
    book = drawn["input_ids"].shape[1] - drawn["labels"].shape[1]  # its pairs are not asked for
    return {"input_ids": drawn["input_ids"], "labels": functional.pad(drawn["labels"], (book, 0), value=-100)}


def on_task(pair: str, setting: Setting, output: Path, folder: Path):
    """What a race of a narrow model on phone books or nearest neighbours takes."""
    task = TASKS[pair]
    if isinstance(task, recall_task.Setting):
        folder /= f"{task.head_dim}-{task.names}"
        words, size = task.names + task.numbers, max(task.pairs // task.many, 1)
        fresh, drawn = partial(recall_task.pretrained, task, False, 0, folder), book_rows(task, setting.rows)
    else:
        folder /= f"neighbours-{task.head_dim}-{task.points}"
        words, size = task.words, task.sequences
        fresh = partial(neighbour_task.pretrained, task, folder)
        drawn = neighbour_task.draw(task, setting.rows, torch.Generator().manual_seed(1))
    folder.mkdir(parents=True, exist_ok=True)
    bare = Tokenizer(models.WordLevel({str(word): word for word in range(words)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="0", pad_token="0")
    whole = Dataset.from_dict({name: column.tolist() for name, column in drawn.items()})
    whole = whole.train_test_split(128 if setting.rows > 1000 else 20, seed=0, shuffle=False)

    def collate(rows: list[dict]) -> dict:
        return {name: torch.tensor([row[name] for row in rows]) for name in drawn}

    smaller = replace(setting, batch_size=size, block_size=None)
    return fresh, tokenizer, Prepared(whole["train"], whole["test"], collate), config_of(smaller, output)


def measure(pair: str, model: str, text: str, part: str, setting: dict, folder: Path) -> dict:
    """The race of a pair, or the long trainings of all its methods, for `collect`."""
    how = Setting(**setting)
    output = folder / "races" / pair.replace(" ", "-").replace(",", "") / part
    given = on_text(model, text, how, output) if text else on_task(pair, how, output, folder)
    steps, seeds = (how.steps, how.seeds) if part == RACE else (LONGER * how.steps, LONG_SEEDS)
    budget = RANK * Budget.near(given[0](), 1).of_a_rank
    began = time.process_time()  # other work on the machine does not count
    contest = run_race(
        *given,
        full=False,
        budget=budget,
        steps=steps,
        seeds=seeds,
        growth_batches=how.growth_batches,
        halving=part == RACE,
    )
    took = time.process_time() - began
    for run in contest.runs:
        if run.weights > budget:
            raise RuntimeError(
                f"{pair}: {METHODS[run.method].title} trained {run.weights} weights, more than {budget}."
            )
    return summary(contest) | {"processor": took}


def summary(contest: Contest) -> dict:
    """What the page needs of a contest."""
    challenger = contest.challenger("lora")
    lead = contest.lead(challenger, "lora") if challenger else None
    ended = {name: contest.loss(name) for name in METHODS if contest.of(name)}
    return {
        "winner": contest.winner,
        "challenger": challenger,
        "finalists": contest.finalists,
        "lead": {"mean": lead.mean, "error": lead.error} if lead else None,
        "overtime": any(contest.of(name, contest.overtime) for name in METHODS),
        "losses": {"start": contest.start.loss, **ended},
        "cache": {name: contest.of(name)[0].cache / contest.start.cache - 1 for name in ended},
        "forward": {name: median(run.forward for run in contest.of(name)) for name in ended},
        "rates": {name: contest.of(name)[0].rate for name in ended},
    }


def llama(width: int, tokenizer, groups: int = 8) -> LlamaForCausalLM:
    """An untrained Llama with heads of some width, whose keys and values are shared by groups of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"head_dim": width, "num_key_value_heads": groups, "vocab_size": len(tokenizer)}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    positions = {"max_position_embeddings": 256, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **ends, **positions))


MODELS = {
    "Llama, heads 4 wide": partial(llama, 4),
    "Llama, heads 16 wide": partial(llama, 16),
    "GPT-2, heads 8 wide": finetuning.gpt2,
}
# nor did anybody see these race while such rules were made; they race on texts that none of those saw either
MODELS_NEVER_SEEN = {
    "Llama, heads 8 wide, in 2 groups": partial(llama, 8, groups=2),
    "Llama, heads 32 wide": partial(llama, 32),
    "GPT-2, heads 16 wide": partial(finetuning.gpt2, heads=4),
    "Llama, heads 12 wide": partial(llama, 12),
    "GPT-2, heads 4 wide": partial(finetuning.gpt2, heads=16),
}


def trained_here(builds: dict, tokenizer, text: str, folder: Path) -> dict[str, str]:
    """Small models, trained on a text by the first who asks; where they are, by name."""
    places = {}
    for name, build in builds.items():
        SOURCES.update({"pretraining": text, f"{name}'s tokenizer": tokenizer})
        place = folder / name.replace(", ", "-").replace(" ", "-").lower()
        untrained = partial(build, tokenizer=tokenizer)
        places[name] = finetuning.pretrained(name, untrained, "pretraining", place, Sizes())
        tokenizer.save_pretrained(place)
    return places
