"""Pictures of a growth, each drawn into one panel of matplotlib: for a notebook, a PNG, or a page as SVG."""

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELD_OUT = ("growth_held_out_before", "growth_held_out_after", "eval_loss")  # what a log history calls such a loss
BLUE, ORANGE, GREY = "#1f77b4", "#ff9f43", "#8a8a8a"
INK, _GRID = "#24292f", "#e6e6e6"
_COLORS = {"patterns": BLUE, "messages": ORANGE}
_IN_PAGES = {BLUE: "--blue", GREY: "--grey", INK: "--ink", _GRID: "--line", "#ffffff": "--paper"}
_PLOTTED = 6  # spectra in a notebook's picture, of the layers and kinds that gain most
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "legend.edgecolor": "none",
    "legend.fancybox": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "growth",  # the same picture gives the same text
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@contextlib.contextmanager
def _style() -> Iterator[None]:
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError("The pictures of a growth are drawn by matplotlib: pip install matplotlib.") from error
    with style.context(["default", _STYLE]):
        yield


def drawn(panels: Sequence[Callable], columns: int, size: tuple[float, float] = (4.4, 3.5)) -> "Figure":
    """Make a matplotlib figure of panels in rows of so many columns, each of a size in inches.

    Raises:
        ImportError: matplotlib is not installed; the message names the fix.
    """
    with _style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        rows = max(-(-len(panels) // columns), 1)
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flat
        for draw, place in zip(panels, places):
            place.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            draw(place)
        for place in places:
            place.remove()
        figure.draw_without_rendering()  # ticks take the style of the moment they are made
        return figure


def svg(draw: Callable, name: str) -> str:
    """Draw one panel as an SVG element whose colours are variables of the page; `name` goes before every id in it."""
    text = io.StringIO()
    figure = drawn([draw], columns=1, size=(3.9, 2.6))
    with _style():
        figure.savefig(text, format="svg", transparent=True)
    element = text.getvalue()[text.getvalue().index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)
    element = re.sub(
        r'<svg\b(.*?) (?:width|height)="[^"]*"(.*?) (?:width|height)="[^"]*"', r"<svg\1\2", element, count=1
    )
    for color, variable in _IN_PAGES.items():
        element = element.replace(color, f"var({variable})")
    return element


def loss_curves(history: Iterable) -> dict[str, list[list[float]]]:
    """Read the losses of a training as [step, loss]; a growth's step may have two held-out ones.

    Args:
        history: entries of a Trainer's log history, or (step, loss) of the training.
    """
    curves: dict[str, list[list[float]]] = {"training": [], "held_out": []}
    for each in history:
        entry: dict[str, float] = each if isinstance(each, dict) else dict(zip(("step", "loss"), each))
        for name in ("loss", *HELD_OUT):
            curve = curves["training" if name == "loss" else "held_out"]
            if math.isfinite(entry.get(name, math.nan)) and [entry["step"], entry[name]] not in curve[-1:]:
                curve.append([entry["step"], entry[name]])
    return curves


def draw_losses(panel: "Axes", runs: Iterable[tuple[str, dict, str]], growths: Iterable[int]) -> None:
    """Draw the losses of trainings by step, and where they grew: each with its name, `loss_curves` and colour."""
    shown = []
    for name, curves, color in runs:
        if curves["training"]:
            steps, losses = zip(*curves["training"])
            middles = [(step + former) / 2 for former, step in pairwise((0, *steps))]  # a mean since the last one
            panel.plot(middles, losses, color=color, linewidth=0.9, alpha=0.6, label=f"{name}training")
        if curves["held_out"]:
            panel.plot(*zip(*curves["held_out"]), ".-", color=color, linewidth=1.8, label=f"{name}held out")
        shown += [point for curve in curves.values() for point in curve]
    mark_growths(panel, growths)
    last = max(step for step, _ in shown)
    late = [loss for step, loss in shown if step >= 0.1 * last]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    panel.set_ylim(min(late) - margin, max(late) + margin)  # the first steps would flatten all that follows
    panel.set(xlabel="step", ylabel="nats a token", title="Loss")
    handles, labels = panel.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    panel.legend(unique.values(), unique.keys())


def draw_lead(panel: "Axes", grown: dict, plain: dict, growths: Iterable[int]) -> None:
    """Draw by how much the held-out loss of a grown model is below that of the same training without growth."""
    losses = dict(plain["held_out"])
    lead = [(step, losses[step] - loss) for step, loss in grown["held_out"] if step in losses]
    panel.axhline(0, color=GREY, linewidth=1)
    panel.plot(*zip(*lead), marker=".", color=BLUE, linewidth=1.8)
    mark_growths(panel, growths)
    panel.set(xlabel="step", ylabel="nats a token", title="Lead of the grown model, held out")


def mark_growths(panel: "Axes", growths: Iterable[int]) -> None:
    """Mark the steps of growths."""
    for step in growths:
        panel.axvline(step, color=BLUE, linestyle=":", linewidth=1.2, label="growth")


def draw_line_search(panel: "Axes", report) -> None:
    """Draw the loss at every common step that was tried, of which there must be one."""
    tried = sorted((step, loss) for step, loss in report.line_search.items() if math.isfinite(loss))
    steps, losses = zip(*tried)
    best = min(losses)
    before = report.judged_before  # of the very batches of the search
    if before is not None:
        panel.axhline(before, color=GREY, linestyle="--", linewidth=1, label="before")
    panel.plot(steps, losses, ".-", color=BLUE)
    panel.plot(steps[losses.index(best)], best, "o", color=BLUE, fillstyle="none", markersize=9, label="lowest")
    if before is not None and best < before:  # steps far too long would flatten the valley
        fall = before - best
        panel.set_ylim(best - 0.15 * fall, min(max(*losses, before), before + fall) + 0.1 * fall)
    panel.set(xscale="log", xlabel="step along all directions", ylabel="loss", title="Line search")
    panel.locator_params(axis="x", subs=(1, 2, 5) if steps[-1] < 100 * steps[0] else (1,), numticks=6)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.legend()


def has_line_search(report) -> bool:
    """Whether there is a line search to draw."""
    return any(map(math.isfinite, report.line_search.values()))


def draw_spectrum(panel: "Axes", layer, legend: bool) -> None:
    """Draw what each measured direction of one kind of one layer gains, in sample and validated."""
    color, taken = _COLORS[layer.kind], layer.taken
    for label, chosen in (("validated, taken", True), ("validated, left", False)):
        bars = [(place, gain) for place, gain in enumerate(layer.validated, 1) if taken[place - 1] is chosen]
        if bars:
            panel.bar(*zip(*bars), width=0.7, color=color if chosen else "none", edgecolor=color, label=label)
    panel.plot(range(1, len(layer.in_sample) + 1), layer.in_sample, "_", color=INK, label="in sample")
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.grid(axis="x", visible=False)
    panel.ticklabel_format(axis="y", scilimits=(-2, 3))
    panel.set(xlabel="direction", ylabel="gain per unit of step", title=f"Layer {layer.layer}, {layer.kind}")
    if legend:
        panel.legend()


def draw_map(panel: "Axes", title: str, values: Mapping[tuple[int, str], float | None], most: float, form: str) -> None:
    """Draw a number for each layer and kind as a map with the numbers in it, "-" for None; `most` is darkest."""
    rows, kinds = (list(dict.fromkeys(place)) for place in zip(*values))
    size = min(9, 170 / len(rows))
    for (layer, kind), value in values.items():
        text = "-" if value is None else format(value, form)
        panel.text(kinds.index(kind), rows.index(layer), text, ha="center", va="center", fontsize=size)
    table = [[values.get((layer, kind)) or 0.0 for kind in kinds] for layer in rows]
    panel.imshow(table, cmap="Blues", vmin=0, vmax=1.6 * most, aspect="auto")  # pale enough to write on
    panel.set_xticks(range(len(kinds)), kinds)
    panel.set_yticks(range(len(rows)), list(map(str, rows)), fontsize=size)
    panel.grid(visible=False)
    panel.set(ylabel="layer", title=title)


def draw_gains(panel: "Axes", title: str, gains: Mapping[tuple[int, str], float | None]) -> None:
    """Draw the validated gain of each layer and kind as a map."""
    draw_map(panel, title, gains, max((gain or 0.0 for gain in gains.values()), default=0.0) or 1.0, ".4f")


def plotted(report) -> "Figure":
    """Make a matplotlib figure of all that a report has to show: maps, line search and spectra."""
    panels: list[Callable] = []
    if report.layers:
        starved = {(layer.layer, layer.kind): layer.starvation for layer in report.layers}
        gains = {(layer.layer, layer.kind): layer.gain for layer in report.layers}
        panels.append(partial(draw_map, title="Starvation", values=starved, most=1.0, form=".2f"))
        panels.append(partial(draw_gains, title="Validated gain", gains=gains))
    if has_line_search(report):
        panels.append(partial(draw_line_search, report=report))
    spectra = sorted(report.layers, key=lambda layer: -layer.predicted_gain)[:_PLOTTED]
    panels += [partial(draw_spectrum, layer=layer, legend=layer is spectra[0]) for layer in spectra]
    figure = drawn(panels, columns=3)

    def png() -> bytes:
        data = io.BytesIO()
        figure.savefig(data, format="png")
        return data.getvalue()

    setattr(figure, "_repr_png_", png)  # noqa: B010  notebooks know figures only where pyplot was imported
    return figure


def draw_growth(reports: Sequence, log_history: Iterable = ()) -> "Figure":
    """Make a figure of where the model grew, and of the loss.

    Args:
        reports: the `GrowthReport` of each growth, one at least.
        log_history: of a Trainer; without losses in it the line search of the last growth is drawn.
    """
    history = list(log_history)
    gains: dict[tuple[int, str], float | None] = {}
    for report in reports:
        for layer in report.layers:
            place = layer.layer, layer.kind
            former = gains.get(place)
            gains[place] = layer.gain if former is None else former + (layer.gain or 0.0)
    panels: list[Callable] = []
    if gains:
        panels.append(partial(draw_gains, title="Where it grew: first-order gain", gains=gains))
    curves = loss_curves(history)
    growths = sorted({entry["step"] for entry in history if "growth_added_parameters" in entry})
    if any(curves.values()):
        panels.append(partial(draw_losses, runs=[("", curves, BLUE)], growths=growths))
    elif has_line_search(reports[-1]):
        panels.append(partial(draw_line_search, report=reports[-1]))
    return drawn(panels, columns=2)
