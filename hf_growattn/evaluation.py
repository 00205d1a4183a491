"""Evaluation of models side by side: perplexity of texts, and tasks of the lm-evaluation-harness.

Every figure has its standard error, and its difference from the base one of its own: the jackknife's over examples or
blocks of text, where both models saw the same ones. Tokens of different tokenizers do not compare; then nats a word and
a byte are shown as well.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from tqdm.auto import tqdm

from . import harness
from .checkpoints import first_line, load_config, load_model, load_tokenizer
from .texts import load_texts, token_ids

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
        if items is None:
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
            error = math.hypot(self.error, other.error)
        return self.value - other.value, error


@torch.no_grad()
def block_nats(model, ids: list[int], prefix: list[int], block: int, batch_size: int) -> list[tuple[float, int]]:
    """Score a text in overlapping blocks, of which each predicts the tokens that the one before did not hold.

    Args:
        model: a causal LM in evaluation mode.
        ids: the text's tokens.
        prefix: what the tokenizer puts before every text; without one, the first token is not predicted.
        block: tokens in a block, prefix included. It moves by half of it.
        batch_size: blocks in a batch.

    Returns:
        For each block the nats of its new tokens, summed, and their number.
    """
    body = min(block - len(prefix), len(ids))
    last = len(ids) - body
    starts = [*range(0, last, max(body // 2, 1)), last]
    firsts = [0 if prefix else 1, *(former + body - start for former, start in pairwise(starts))]
    scored = []
    with tqdm(total=len(starts), desc="blocks of text", leave=False, disable=None) as bar:
        for index in range(0, len(starts), batch_size):
            chosen = slice(index, index + batch_size)
            rows = torch.tensor([prefix + ids[start : start + body] for start in starts[chosen]], device=model.device)
            logits = model(input_ids=rows, use_cache=False).logits
            for row, row_logits, first in zip(rows, logits, firsts[chosen]):
                targets = row[len(prefix) + first :]
                predictions = row_logits[len(prefix) + first - 1 : -1].float()
                scored.append((F.cross_entropy(predictions, targets, reduction="sum").item(), len(targets)))
            bar.update(len(rows))
    return scored


def text_figures(model, tokenizer, texts: list[str], block: int, batch_size: int) -> dict[str, Figure]:
    """Perplexity of a text, and its nats a token, a word and a byte."""
    ids = token_ids(texts, tokenizer)
    if len(ids) < 2:
        raise ValueError("The text has less than two tokens; there is nothing to predict.")
    own = tokenizer("")["input_ids"][:1]
    prefix = own if own == [tokenizer.bos_token_id] else []
    scored = block_nats(model, ids, prefix, block, batch_size)

    def mean(items: list) -> float:
        return sum(nats for nats, _ in items) / sum(count for _, count in items)

    token = Figure.of(mean(scored), mean, scored, ("text", tuple(prefix), tuple(ids)))
    tokens = sum(count for _, count in scored)
    sizes = {WORD: sum(len(text.split()) for text in texts), BYTE: sum(len(text.encode()) for text in texts)}
    figures = {PERPLEXITY: token.map(math.exp), TOKEN: token}
    for name, size in sizes.items():
        figures[name] = token.map(lambda value, size=size: value * tokens / size)
    return figures


def evaluated(
    models: Sequence[str],
    base: str | None = None,
    texts: Sequence[str] = (),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, dict[tuple[str, str], Figure]]:
    """Measure one model after the other, the base first.

    Args:
        models: folders or Hub ids of causal LMs: stock, grown or exported.
        base: another one, which the others are compared with.
        texts: files, folders or Hub ids, of which the perplexity is measured.
        tasks: names that the harness knows, or files of tasks.
        limit: only so many examples of each task.
        batch_size: rows that a model reads at once.
        device: by default the accelerator, if there is one.
        trust_remote_code: run the code that a model or a metric brings.

    Returns:
        For each model its figures, by what was measured and the measure's name.

    Raises:
        ValueError: a model, text, task or device is not there; all are looked for before anything is measured.
        ImportError: there are tasks, and the harness is not installed.
    """
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The device {device} cannot be used here. {first_line(error)}") from error
    names = list(dict.fromkeys([*([base] if base else []), *models]))
    configs = [load_config(name, trust_remote_code).get_text_config() for name in names]
    lengths = [getattr(config, "max_position_embeddings", None) or LONGEST_BLOCK for config in configs]
    tokenizers = {name: load_tokenizer(name, trust_remote_code) for name in names}
    read = {short: load_texts(text) for text, short in short_names(texts).items()}
    loaded = harness.load_tasks(tasks, trust_remote_code) if tasks else None
    block, measured = min(LONGEST_BLOCK, *lengths), {}
    for name in tqdm(names, desc="models", disable=None):
        model = load_model(name, causal=True, trust_remote_code=trust_remote_code).to(device)
        figures = {("model", PARAMETERS): Figure(model.num_parameters())}
        for text, documents in read.items():
            told = text_figures(model, tokenizers[name], documents, block, batch_size)
            figures |= {(text, measure): figure for measure, figure in told.items()}
        if loaded is not None:
            scored = harness.run(model, tokenizers[name], loaded, batch_size, limit)
            figures |= {key: Figure.of(*figure) for key, figure in scored.items()}
        measured[name] = figures
    return measured


def difference(figure: Figure, base: Figure, name: str) -> tuple[float, float | None] | None:
    """What a figure has more than the base's, and the standard error; None for tokens of different tokenizers."""
    return None if name in (PERPLEXITY, TOKEN) and figure.examples != base.examples else figure.minus(base)


def table_of(measured: dict[str, dict], base: str | None) -> Table:
    """A row for each figure, a column for each model, and one for its difference from the base."""
    table = Table("", "")
    for name in short_names([*measured]).values():
        table.add_column(name, justify="right")
    for name in short_names([*measured]).values():
        if base and name != short_names([*measured])[base]:
            table.add_column(f"{name} - base", justify="right")
    keys = list(dict.fromkeys(key for figures in measured.values() for key in figures))
    seen = {
        text: {figures[text, TOKEN].examples for figures in measured.values()} for text, name in keys if name == TOKEN
    }
    former = None
    for key in keys:
        what, name = key
        if name in (WORD, BYTE) and len(seen[what]) == 1:
            continue  # all models saw the same tokens, which tell as much
        cells = [_cell(figures[key].value, figures[key].error) for figures in measured.values()]
        if base:
            others = [figures for model, figures in measured.items() if model != base]
            beside = [difference(figures[key], measured[base][key], name) for figures in others]
            cells += ["-" if told is None else _cell(*told, sign="+") for told in beside]
        table.add_row(what if what != former else "", name, *cells)
        former = what
    return table


def _cell(value: float, error: float | None, sign: str = "") -> str:
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
    told: dict[str, dict] = {"base": base, "models": {}}
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
