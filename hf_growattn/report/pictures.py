"""Two pictures of a training with growth, by matplotlib: where it grew, and the loss."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from .words import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _GREY = "#1f77b4", "#8a8a8a"
_STYLE = ["default", "seaborn-v0_8-whitegrid", {"svg.fonttype": "none"}]


def draw_growth(reports: Sequence, log_history: Iterable[dict] = ()) -> "Figure":
    """Make a figure of where the model grew, and of the loss; without data it has no axes."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The pictures of a growth need matplotlib: pip install matplotlib.") from error
    history, panels = list(log_history), []
    if any(report.layers for report in reports):
        panels.append(partial(_draw_places, reports=reports))
    if read_losses(history, "loss") or read_losses(history, "eval_loss"):
        panels.append(partial(_draw_losses, history=history))
    with style.context(_STYLE):
        figure = Figure(figsize=(4.4 * max(len(panels), 1), 3.5), layout="constrained")  # inches
        for index, draw in enumerate(panels, 1):
            draw(figure.add_subplot(1, len(panels), index))
        figure.draw_without_rendering()  # ticks take the style of the moment they are made
    return figure


def _draw_places(axes: "Axes", reports: Sequence) -> None:
    """Draw the share of each layer and kind in the first-order gain of all growths, "-" where nothing grew."""
    gains: dict[tuple[int, str], float] = {}
    grown = set()
    for report in reports:
        counts = report.holds or report.kept
        for layer in report.layers:
            place = layer.layer, layer.kind
            gains[place] = gains.get(place, 0.0) + counts * layer.predicted_gain
            if counts and layer.step_size > 0:
                grown.add(place)
    total = sum(gains.values()) or 1.0
    layers = sorted({layer for layer, _ in gains})
    kinds = sorted({kind for _, kind in gains}, reverse=True)
    size = min(9, 170 / len(layers))
    for (layer, kind), gain in gains.items():
        text = f"{gain / total:.0%}" if (layer, kind) in grown else "-"
        axes.text(kinds.index(kind), layers.index(layer), text, ha="center", va="center", fontsize=size)
    table = [[gains.get((layer, kind), 0.0) for kind in kinds] for layer in layers]
    palest = 1.6 * max(gains.values()) or 1.0  # pale enough to read the text in it
    axes.imshow(table, cmap="Blues", vmin=0, vmax=palest, aspect="auto")
    axes.set_xticks(range(len(kinds)), [KINDS[kind] for kind in kinds])
    axes.set_yticks(range(len(layers)), list(map(str, layers)), fontsize=size)
    axes.grid(visible=False)
    axes.set(title="Where it grew: share of the gain", ylabel="layer")


def read_losses(history: Iterable[dict], name: str) -> list[tuple[float, float]]:
    """The finite losses of that name in a log history, each with its step."""
    return [(entry["step"], entry[name]) for entry in history if math.isfinite(entry.get(name, math.nan))]


def _draw_losses(axes: "Axes", history: list[dict]) -> None:
    """Draw the losses of a training by step, and mark the growths."""
    training, held_out = read_losses(history, "loss"), read_losses(history, "eval_loss")
    if training:
        steps, losses = zip(*training)
        middles = [(step + former) / 2 for former, step in pairwise((0, *steps))]  # each is the mean since the last one
        axes.plot(middles, losses, color=_BLUE, linewidth=0.9, alpha=0.6, label="training")
    if held_out:
        axes.plot(*zip(*held_out), ".-", color=_BLUE, linewidth=1.8, label="held out")
    growths = [entry["step"] for entry in history if "growth_added_parameters" in entry]
    for index, step in enumerate(growths):
        axes.axvline(step, color=_GREY, linestyle=":", linewidth=1.2, label="growth" if index == 0 else None)
    axes.set(title="Loss", xlabel="step", ylabel="loss")
    axes.legend()
