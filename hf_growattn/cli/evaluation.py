"""Evaluation of models side by side: perplexity of texts, and tasks of the lm-evaluation-harness.

Every figure has its standard error, and its difference from the base one of its own: the jackknife's over examples or
blocks of text, where both models saw the same ones. Tokens of different tokenizers do not compare; then nats a word and
a byte are shown as well.
"""

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from rich.text import Text
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from ..interop.checkpoints import first_line, load_config, load_model, load_tokenizer
from ..training.data import Data, prepare_rows
from ..training.finetuning import loading_options
from ..training.recipe import Recipe
from . import harness

LONGEST_BLOCK = 1024  # tokens; where all models read more, the logits would fill the memory
JACKKNIFE_GROUPS = 200
PARAMETERS, PERPLEXITY, TOKEN, WORD, BYTE = "parameters", "perplexity", "nats a token", "nats a word", "nats a byte"


@dataclass(frozen=True)
class Figure:
    """A value, and what it would be without each group of examples in turn; figures of equal `examples` are paired."""

    value: float
    without: torch.Tensor | None = None
    examples: Hashable = None

    @classmethod
    def of(cls, value: float, statistic: Callable | None, items: list | None, examples: Hashable) -> "Figure":
        """What the statistic gave for a list of items, and gives for all but each group of them."""
        if items is None or statistic is None:
            return cls(value)
        groups = min(len(items), JACKKNIFE_GROUPS)
        rests = [[item for index, item in enumerate(items) if index % groups != group] for group in range(groups)]
        without = torch.tensor([statistic(rest) for rest in rests], dtype=torch.float64) if groups > 1 else None
        return cls(value, without, examples)

    def map(self, function: Callable) -> "Figure":
        """The figure of a function of the value."""
        without = None
        if self.without is not None:
            without = torch.tensor([function(value) for value in self.without.tolist()], dtype=torch.float64)
        return Figure(function(self.value), without, self.examples)

    @property
    def error(self) -> float | None:
        """The standard error."""
        if self.without is None:
            return None
        return math.sqrt((len(self.without) - 1) * self.without.var(correction=0).item())

    def minus(self, other: "Figure") -> tuple[float, float | None]:
        """The difference and its standard error: from pairs, or where there are none as of two samples, too large."""
        if self.without is None or other.without is None:
            error = None
        elif self.examples == other.examples:
            error = Figure(0.0, self.without - other.without).error
        else:
            error = math.hypot(self.error or 0, other.error or 0)
        return self.value - other.value, error


def blocks_of(row: dict, bos: int | None, block: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a row into overlapping blocks, each with the labels that the one before did not have.

    Args:
        row: its `input_ids` and `labels`.
        bos: what may begin the row, and then begins every block; else the first token is not predicted.
        block: tokens in a block. It moves by half of it.
    """
    prefix = [bos] if row["input_ids"][0] == bos else []
    ids, labels = row["input_ids"][len(prefix) :], row["labels"][len(prefix) :]
    body, done = min(block - len(prefix), len(ids)), 0
    for start in [*range(0, len(ids) - body, max(body // 2, 1)), len(ids) - body]:
        yield prefix + ids[start : start + body], [-100] * (len(prefix) + done - start) + labels[done : start + body]
        done = start + body


@torch.no_grad()
def block_nats(model, rows: Iterable[dict], bos: int | None, block: int, batch_size: int) -> list[tuple[float, int]]:
    """Score rows in overlapping blocks, and return for each block the nats of its labels, summed, and their number."""
    scored = []
    blocks = [cut for row in rows for cut in blocks_of(row, bos, block)]
    for start in tqdm(range(0, len(blocks), batch_size), desc="blocks of text", leave=False, disable=None):
        padded = [
            pad_sequence([torch.tensor(part) for part in parts], batch_first=True, padding_value=filler)
            for parts, filler in zip(zip(*blocks[start : start + batch_size]), (0, -100))
        ]  # on the right, which no token before it sees
        ids, labels = (part.to(model.device) for part in padded)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        nats = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none").sum(1).tolist()
        scored += zip(nats, (labels[:, 1:] != -100).sum(1).tolist())
    return [(total, count) for total, count in scored if count]


def text_figures(
    model, tokenizer, rows: Sequence[dict], sizes: dict[str, int], block: int, batch_size: int
) -> dict[str, Figure]:
    """Perplexity of data, and their nats a token, a word and a byte; `sizes` are the words and bytes there are."""
    scored = block_nats(model, rows, tokenizer.bos_token_id, block, batch_size)
    if not scored:
        raise ValueError("The data have no two tokens in a row; there is nothing to predict.")

    def mean(items: list) -> float:
        return sum(nats for nats, _ in items) / sum(count for _, count in items)

    seen = ("text", *(tuple(row["input_ids"]) for row in rows))
    token, tokens = Figure.of(mean(scored), mean, scored, seen), sum(count for _, count in scored)
    figures = {PERPLEXITY: token.map(math.exp), TOKEN: token}
    for name, size in sizes.items():
        figures[name] = token.map(lambda value, size=size: value * tokens / size)
    return figures


def sizes_of(rows: Iterable[dict], training) -> dict[str, int]:
    """The words and bytes of what is to be predicted in some rows, not yet tokenized."""
    texts = []
    for row in rows:
        parts = row.get(training.dataset_text_field) or row.get("messages") or row.get("conversations")
        if "completion" in row:
            whole = training.completion_only_loss is False
            parts = [part for name in ("prompt",) * whole + ("completion",) for part in _listed(row[name])]
        texts += [part if isinstance(part, str) else part.get("content") or "" for part in _listed(parts)]
    return {WORD: sum(len(text.split()) for text in texts), BYTE: sum(len(text.encode()) for text in texts)}


def _listed(parts) -> list:
    return parts if isinstance(parts, list) else [parts or ""]


def evaluated(recipe: Recipe) -> dict[str, dict[tuple[str, str], Figure]]:
    """Measure the models of a recipe one after the other, the base first.

    Returns:
        For each model its figures, by what was measured and the measure's name.

    Raises:
        ValueError: a model, data, task or device is not there; all are looked for before anything is measured.
        ImportError: there are tasks, and the harness is not installed.
    """
    asked, training = recipe.evaluation, copy.copy(recipe.training)
    trust, batch_size = training.trust_remote_code, training.per_device_eval_batch_size
    device = asked.device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The device {device} cannot be used here. {first_line(error)}") from error
    models, chosen = recipe.models or [recipe.name], recipe.model.model_revision
    if chosen != "main" and (len(models) > 1 or asked.base in models):
        raise ValueError(f"Of which model is {chosen} the revision? Name one MODEL with it, and another as --base.")
    names: list[str] = list(dict.fromkeys([*([asked.base] if asked.base else []), *models]))
    revisions = {name: chosen if name in models else "main" for name in names}
    configs = [load_config(name, trust, revisions[name]).get_text_config() for name in names]
    lengths = [getattr(config, "max_position_embeddings", None) or LONGEST_BLOCK for config in configs]
    tokenizers = {name: load_tokenizer(name, trust, revisions[name]) for name in names}
    read = {}
    for text, short in short_names(asked.text or []).items():
        data = Data(recipe._replace(script=replace(recipe.script, dataset_name=text)))
        read[short] = data.train if data.test is None else data.test
    loaded = harness.load_tasks(asked.task, trust) if asked.task else None
    training.packing, training.max_length = False, None  # blocks below are as long as models read
    sizes = {short: sizes_of(rows, training) for short, rows in read.items()}
    block, measured = min(LONGEST_BLOCK, *lengths), {}
    for name in tqdm(names, desc="models", disable=None):
        tokenized = {s: prepare_rows(r, None, tokenizers[name], training).train for s, r in read.items()}
        model: Any = load_model(name, True, trust, revisions[name], **loading_options(recipe))
        model.to(device)
        figures = {("model", PARAMETERS): Figure(model.num_parameters())}
        for text, rows in tokenized.items():
            told = text_figures(model, tokenizers[name], list(rows), sizes[text], block, batch_size)
            figures |= {(text, measure): figure for measure, figure in told.items()}
        if loaded is not None:
            scored = harness.run(model, tokenizers[name], loaded, batch_size, asked.limit)
            figures |= {key: Figure.of(*figure) for key, figure in scored.items()}
        measured[name] = figures
    return measured


def difference(figure: Figure, base: Figure, name: str) -> tuple[float, float | None] | None:
    """What a figure has more than the base's, and the standard error; None for tokens of different tokenizers."""
    return None if name in (PERPLEXITY, TOKEN) and figure.examples != base.examples else figure.minus(base)


def table_of(measured: dict[str, dict], base: str | None) -> Table:
    """A row for each figure, a column for each model, and one for its difference from the base."""
    table, short = Table("", ""), short_names([*measured])
    differences = [f"{name} - base" for model, name in short.items() if base and model != base]
    for name in (*short.values(), *differences):
        table.add_column(Text(name), justify="right")  # a Text, since [v2] in a str would be a style
    keys = list(dict.fromkeys(key for figures in measured.values() for key in figures))
    seen = {
        text: {figures[text, TOKEN].examples for figures in measured.values()} for text, name in keys if name == TOKEN
    }
    former = None
    for what, name in keys:
        if name in (WORD, BYTE) and len(seen[what]) == 1:
            continue  # all models saw the same tokens, which tell as much
        told = [figures[what][name] for figures in for_json(measured, base)["models"].values()]
        cells = [_cell(entry["value"], entry["standard_error"]) for entry in told]
        cells += [_cell(e["difference"], e["difference_standard_error"], "+") for e in told if "difference" in e]
        table.add_row(Text(what if what != former else ""), Text(name), *cells)
        former = what
    return table


def _cell(value: float | None, error: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:{sign},}"
    form = ".4f" if abs(value) < 1e4 else ".2e"
    return f"{value:{sign}{form}}" + ("" if error is None else f" ± {error:{form}}")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """The last part of each path, where it tells them apart."""
    last = {name: Path(name).name or name for name in names}
    return last if len({*last.values()}) == len(last) else {name: name for name in names}


def for_json(measured: dict[str, dict], base: str | None) -> dict:
    """All figures as one dict: by model, by what was measured, by measure."""
    told: dict = {"base": base, "models": {}}
    for model, figures in measured.items():
        by_what: dict[str, dict] = {}
        for (what, name), figure in figures.items():
            entry = {"value": figure.value, "standard_error": figure.error}
            if base and model != base:
                beside = difference(figure, measured[base][what, name], name)
                entry["difference"], entry["difference_standard_error"] = beside or (None, None)
            by_what.setdefault(what, {})[name] = entry
        told["models"][model] = by_what
    return told
