"""A growth as text: how far the loss falls, its costs, a table of the layers, and the command of a race."""

import io
import math
import shlex
import textwrap
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

KINDS = {"qk": "queries and keys", "v": "values"}
COLUMNS = {  # of a report's table, each with what it says
    "layer": "the attention module",
    "kind": "queries and keys choose what a head reads, values are what it reads",
    "width": "numbers in each head, before and with the new dims",
    "gradient out of reach": "share that only new dims can follow (- unknown in RoPE)",
    "share of gain": "of the fall that the gradient predicts (- nothing added)",
}
_TERMINAL = 80  # columns
_HEADER = 9  # columns of a table's header at least


def report_text(report, model: str = "MODEL", data: Sequence[str] = ()) -> str:
    """A report of a growth as text, with the command that compares it with LoRA."""
    text = "".join(f"{wrap_line(line)}\n" for line in summary_of(report))
    if report.layers:
        columns = columns_of(report)
        text += "\n" + format_table(columns, rows_of(report))
        text += "".join(f"{name}: {COLUMNS[name]}\n" for name in columns)
    race = shlex.join(["growattn", "race", model, *(data or ["DATA"]), "-o", "race"])
    advice = "LoRA may lower the loss as far. Unless a race has compared them, use hf_growattn.race, or on text:"
    return f"{text}\n{wrap_line(advice)}\n{race}"  # a command to copy is one line


def summary_of(report) -> list[str]:
    """How far the loss falls, and what the growth costs in memory; only the first where nothing holds or is kept."""
    if report.holds:
        lines = [
            f"Loss before: {report.loss_before:.4f}. It falls by {report.fall:.4f} ± {report.error:.4f} (95 % "
            "confidence) on growth batches that the new dims were not computed from."
        ]
    else:
        outcome = "The new dims were kept all the same" if report.kept else "Nothing was grown"
        lines = [f"Loss: {report.loss_before:.4f} on the growth batches. {outcome}: {why_not(report)}."]
        if report.has_room and not report.kept:
            keeping = ", or, as after a race that growth won, keep the new dims by grower.find(batches).keep()"
            lines[0] += f" Pass more batches{keeping if report.added_parameters else ''}."
    if not (report.holds or report.kept):
        return lines
    weights = f"{report.added_parameters:,} weights {'added' if report.kept else 'would be added'}"
    if report.parameters:
        weights += f" ({report.added_parameters / report.parameters:+.1%}, {report.added_bytes / 1e6:.2g} MB to share)"
    before, after = report.cache_bytes
    cache = f"KV cache {before:,} -> {after:,} bytes a token ({after / before - 1:+.1%}), " if before else ""
    lines.append(f"Cost: {cache}{weights}.")  # encoders keep no keys and values
    return lines


def why_not(report) -> str:
    """Why new dims do not hold, as the end of a sentence."""
    if not report.has_room:
        return "the heads are as wide as their input or the config's limits, so there is no room for new dims"
    if all(layer.gain <= 0 for layer in report.layers):
        return "no direction lowers the loss of batches that it was not computed from"
    if all(layer.step_size == 0 for layer in report.layers):
        return "no step along the new directions lowers the loss"
    if not math.isfinite(report.fall):
        return "after the best step the loss of a batch is not finite"
    if report.error == 0:
        return (
            "the same rows are in both halves of the batches, so neither half can judge what the other found: use "
            "fewer batches, or more data"
        )
    does = "lowers" if report.fall > 0 else "raises"
    return (
        f"the best step {does} the loss by {abs(report.fall):.2g} on batches that it was not computed from, and the "
        f"error of that is {report.error:.2g} (95 % confidence)"
    )


def columns_of(report) -> tuple[str, ...]:
    """The names of a report's columns: shares are those of a gain that holds."""
    return tuple(COLUMNS) if report.holds else tuple(COLUMNS)[:-1]


def rows_of(report) -> list[list[str]]:
    """A row under `columns_of` for each layer and kind; "-" where a figure is not known, or new dims do nothing yet."""
    total, rows = report.predicted_gain or 1.0, []
    for layer in report.layers:
        width = layer.width if report.holds or report.kept else layer.width[:1] * 2
        reach = "-" if layer.out_of_reach is None else f"{layer.out_of_reach:.2f}"
        rows.append([layer.name, KINDS[layer.kind], format_width(width), reach])
        if report.holds:
            rows[-1].append(f"{layer.predicted_gain / total:.0%}" if layer.step_size > 0 else "-")
    return rows


def format_width(width: tuple[int, int]) -> str:
    """A width before and after, or one number if both are equal."""
    before, after = width
    return f"{before} -> {after}" if after != before else str(before)


def wrap_line(text: str) -> str:
    """A text as lines for a terminal, indented after the first."""
    return textwrap.fill(text, _TERMINAL, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def format_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as text, no wider than it needs; long headers wrap between words."""
    rows, heads = list(rows), []
    for index, name in enumerate(columns):
        width = max(map(len, [*name.split(), *(row[index] for row in rows)]))
        heads.append(Column("\n".join(textwrap.wrap(name, max(width, _HEADER))), no_wrap=True))
    table, text = Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)), io.StringIO()
    for row in rows:
        table.add_row(*row)
    Console(file=text, width=1000, force_jupyter=False).print(table)  # in a notebook it would display the table
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines() if line.strip())
