"""What a growth did, what it costs and what to do about it, in words and tables that fit 80 columns."""

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

MARGIN = 0.01  # nats a token: what a lead must be to count
SURE = 2.0  # standard errors that a lead must be away from nothing
KINDS = {"patterns": "queries and keys", "messages": "values"}
RACE = "growattn race MODEL DATA -o race"
AT_LIMIT, NOTHING_HELD, SPENT = "at its limit", "nothing held", "budget spent"
NO_GAIN, NO_STEP = "no gain", "no step"
_WHY = {
    AT_LIMIT: "the head is as wide as it may become.",
    NOTHING_HELD: "no direction lowers the loss on the half of the batches that it was not chosen from.",
    SPENT: "what the budget bought elsewhere is worth more.",
    NO_GAIN: "directions were found, but the loss did not fall when they were tried.",
    NO_STEP: "directions were bought, but no step along them lowers the loss.",
}
_TERMS = (
    "Starvation: the share of the loss's gradient that a head of the former width cannot follow.",
    "Gain: the share of the fall of the loss that is due to new dims here, as far as it should hold on new batches.",
)
_COLUMNS, _LABEL, _HEADER = 80, 8, 9  # of a terminal, of what comes before a text, of a table's header
_LISTED = 8  # layers to name in a sentence


@dataclass(frozen=True)
class Compared:
    """A model that was trained another way, on the same rows, beside the one that grew.

    Attributes:
        name: what was done instead.
        loss: at the end, of a held-out token.
        lead: how much lower the grown model ends, in nats a token; below 0 it ends higher.
        error: the standard error of that, over the held-out rows.
        cache_bytes: of a token's keys and values.
    """

    name: str
    loss: float
    lead: float
    error: float
    cache_bytes: int

    def lead_text(self) -> str:
        """The lead with its error."""
        return f"{self.lead:+.4f} ± {self.error:.4f}"


def facts(
    reports: Sequence, compared: Sequence[Compared] = (), race: str = RACE, verdict: str = ""
) -> list[tuple[str, str]]:
    """What a reader should know first, as (label, text): the loss, the cost at inference, and what to do.

    Args:
        reports: the `GrowthReport` of each growth of a training, one at least.
        compared: what was trained beside it, if anything was.
        race: the command that would compare it with LoRA.
        verdict: of such a race, if there was one.
    """
    growths = [report for report in reports if report.found]
    told = [("Loss", " ".join(map(loss, reports)))]
    if not growths:
        return [*told, ("Advice", "Do not grow here: train the model as it is, or by LoRA on all linear layers.")]
    caches, kept = (growths[0].cache_bytes[0], growths[-1].cache_bytes[1]), growths[0].kept
    added = sum(report.added_parameters for report in growths)
    told.append(("Cost", cost(caches, added, growths[0].parameters, kept)))
    return [*told, ("Advice", advised(compared, verdict, caches, kept, race))]


def cost(caches: tuple[int, int], added: int, parameters: int, kept: bool = True) -> str:
    """What wider heads cost at inference.

    Args:
        caches: bytes of a token's keys and values before and after.
        added: weights.
        parameters: the model's weights before.
        kept: False for a growth that was only tried.
    """
    before, after = caches
    larger = f"KV cache: {before:,} -> {after:,} bytes a token ({after / before - 1:+.1%}). " if before else ""
    return f"{larger}{added:,} weights {'added' if kept else 'would be added'} ({added / parameters:+.1%})."


def slower(ratios: Sequence[float | None]) -> str:
    """How much longer a batch takes to go through the model after some growths, where each of them was timed."""
    timed = [ratio for ratio in ratios if ratio is not None]
    if len(timed) < len(ratios):
        return ""
    ratio = math.prod(timed)
    return f" A forward pass took {abs(ratio - 1):.0%} {'longer' if ratio >= 1 else 'less time'}."


def text_of(told: Iterable[tuple[str, str]]) -> str:
    """Facts as lines of text, each behind its label."""
    return "\n".join(lines_of(f"{label:<{_LABEL}}{text}", _LABEL) for label, text in told)


def lines_of(text: str, indent: int = 2) -> str:
    """A text as lines of text, of which all but the first are indented."""
    return textwrap.fill(text, _COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def where(report) -> str:
    """What grew where, and which layer gains most."""
    grown = [layer for layer in report.layers if layer.width[1] > layer.width[0]]
    if not grown:
        return ""
    named = []
    for kind in dict.fromkeys(layer.kind for layer in grown):
        *most, last = [str(layer.layer) for layer in grown if layer.kind == kind]
        places = f"layers {', '.join(most)} and {last}" if most else f"layer {last}"
        count, layers = len(most) + 1, len({layer.layer for layer in report.layers})
        if count > _LISTED or (most and count == layers):
            places = "every layer" if count == layers else f"{count} of {layers} layers"
        named.append(f"{KINDS[kind]} in {places}")
    top = max(grown, key=lambda layer: layer.predicted_gain)
    what, grew = " and ".join(named), "grew" if report.kept else "would grow"
    return (
        f"{what[0].upper()}{what[1:]} {grew}. The {KINDS[top.kind]} of layer {top.layer} gain most: "
        f"{top.starvation:.0%} of their gradient is beyond the former width of {top.width[0]}."
    )


def prices(report) -> str:
    """What one more dim costs, by kind; where layers differ, from the least to the most."""
    kinds: dict[str, list[str]] = {}
    for kind in dict.fromkeys(layer.kind for layer in report.layers):
        weights, cache = (sorted(set(each)) for each in zip(*(o.price for o in report.layers if o.kind == kind)))
        price = f"{_span(weights)} weights and {_span(cache)} bytes of KV cache a token"
        kinds.setdefault(price, []).append(KINDS[kind])
    told = (f"{price} in {' or in '.join(names)}" for price, names in kinds.items())
    return f"One more dim of every head of a layer costs {', '.join(told)}." if kinds else ""


def meanings(report) -> list[str]:
    """What the words of the map mean: its columns, and why some layers did not grow."""
    given = {layer.left for layer in report.layers}
    return [*_TERMS, *(f"{why[0].upper()}{why[1:]}: {meaning}" for why, meaning in _WHY.items() if why in given)]


def map_of(report) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of the map, with three cells for each kind."""
    kinds = list(dict.fromkeys(layer.kind for layer in report.layers))
    columns = ["layer", *(name for kind in kinds for name in (KINDS[kind], "starvation", "gain"))]
    rows = []
    for index, of in report.by_layer().items():
        cells = [map_cells(report, of[kind]) if kind in of else ["-"] * 3 for kind in kinds]
        rows.append([str(index), *(cell for each in cells for cell in each)])
    return columns, rows


def map_cells(report, layer) -> list[str]:
    """Width, starvation, and the share of the gain, or why there is none, of one kind of one layer."""
    width = " -> ".join(map(str, dict.fromkeys(layer.width)))
    share = f"{layer.predicted_gain / (report.predicted_gain or 1):.0%}"
    return [width, f"{layer.starvation:.2f}", layer.left or share]


def report_text(report, next_command: str = RACE) -> str:
    """A whole report as text: the facts, then the map of layers and what its words mean."""
    parts = [text_of(facts([report], race=next_command))]
    if report.layers:
        parts += [
            "",
            format_table(*map_of(report)),
            *(lines_of(told, 0) for told in (where(report), prices(report)) if told),
        ]
        parts += map(lines_of, meanings(report))
    return "\n".join(parts)


def settled(lead: float, error: float) -> int:
    """1 for a lead that is sure and large enough to count, -1 for a model that is so far behind, 0 for a tie."""
    return 0 if abs(lead) <= max(SURE * error, MARGIN) else (1 if lead > 0 else -1)


def format_gap(lead: float, error: float) -> str:
    """How far one model ends from another, with its standard error."""
    return f"{abs(lead):.4f} ± {error:.4f} nats a token"


def loss(report) -> str:
    """What happened to the loss of the growth batches."""
    before, after = report.loss_before, report.loss_after
    if not report.found:
        nothing_held = not any(any(layer.strength) for layer in report.layers)
        held = "no direction lowers the loss on batches that it was not chosen from"
        why = held if nothing_held else "no step along the new directions lowers the loss"
        return f"{before:.4f} on the growth batches. Nothing was grown: {why}. The model is as it was."
    when = "before" if report.kept else "if it is grown, before"
    told = f"{before:.4f} -> {after:.4f} on the growth batches, {when} any further training."
    if report.judged_after is not None:
        told += (
            f" {report.judged_before:.4f} -> {report.judged_after:.4f} on batches that the directions were not "
            "computed from; the step was chosen on them."
        )
    return told if report.kept else f"{told} Nothing was changed."


def advised(
    compared: Sequence[Compared], verdict: str, caches: tuple[int, int], kept: bool = True, race: str = RACE
) -> str:
    """What to do about a growth that was found; arguments are as for `facts` and `cost`."""
    if compared:
        return _advice(min(compared, key=lambda other: other.loss), caches[1])
    if verdict:
        return f"The race before this training told: {verdict}"
    grows = f"the KV cache becomes {caches[1] / caches[0] - 1:.0%} larger" if caches[0] else "the model becomes larger"
    return (
        f"Compare before you {'keep this' if kept else 'grow'}: {grows}, and LoRA may end as low without that. "
        f"`{race}` tells; a tie goes to LoRA."
    )


def _advice(other: Compared, cache: int) -> str:
    """What to do, by the lead over the best of what else was trained."""
    gap = format_gap(other.lead, other.error)
    larger = cache / other.cache_bytes - 1 if other.cache_bytes else 0.0  # encoders keep no keys and values
    side = settled(other.lead, other.error)
    if side > 0:
        return (
            f"Keep the grown model, if that is worth a KV cache {larger:.0%} larger: it ends {gap} below {other.name}, "
            "the best of the others. Each had one learning rate here; `growattn race` tries several."
        )
    if side < 0:
        return f"Use {other.name} instead. It ends {gap} below the grown model, whose KV cache is {larger:.0%} larger."
    return f"Use {other.name} instead. It is a tie, {gap} apart, and the grown model's KV cache is {larger:.0%} larger."


def beside(compared: Sequence[Compared], cache: int) -> tuple[list[str], list[list[str]]]:
    """The columns and rows that show a grown model, whose cache is given, beside others: the lowest loss first."""
    grown = compared[0].loss - compared[0].lead
    rows = [(grown, ["growth", f"{grown:.4f}", "", f"{cache:,}"])]
    rows += [(o.loss, [o.name, f"{o.loss:.4f}", o.lead_text(), f"{o.cache_bytes:,}"]) for o in compared]
    columns = ["trained by", "held-out loss", "lead of growth", "KV cache, bytes a token"]
    return columns, [row for _, row in sorted(rows)]


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def format_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as text, no wider than it needs; a header goes over several lines, but is never cut inside a word."""
    rows, heads = list(rows), []
    for index, name in enumerate(columns):
        width = max(map(len, [*name.split(), *(row[index] for row in rows)]))
        heads.append(Column("\n".join(textwrap.wrap(name, max(width, _HEADER))), no_wrap=True))
    table, text = Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)), io.StringIO()
    for row in rows:
        table.add_row(*row)
    Console(file=text, width=1000, force_jupyter=False).print(table)  # which would show it, and write nothing
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines() if line.strip())


printed, gap_text = format_table, format_gap  # until their last callers are gone
