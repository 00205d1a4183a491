"""Two pictures of a training with growth, by matplotlib: where it grew, and the loss."""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from .words import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]

_BLUE, _ORANGE, _GREY = "#1f77b4", "#d9741a", "#8a8a8a"
_PANEL_SIZE = (4.4, 3.5)  # inches
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "svg.fonttype": "none",
}


def draw_growth(reports: Sequence, log_history: Iterable = ()) -> "Figure":
    """Make a figure of where the model grew, and of the loss; without data it has no axes.

    Args:
        reports: the `GrowthReport` of each growth, at least one.
        log_history: `trainer.state.log_history`, or pairs of step and training loss. Without losses in it, the line
            search of the last growth is drawn.

    Raises:
        ImportError: matplotlib is not installed; the message names the fix.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The pictures of a growth need matplotlib: pip install matplotlib.") from error
    panels = _choose_panels(reports, list(log_history))
    with style.context(["default", _STYLE]):
        width, height = _PANEL_SIZE
        figure = Figure(figsize=(width * max(len(panels), 1), height), layout="constrained")
        for index, draw in enumerate(panels, 1):
            draw(figure.add_subplot(1, len(panels), index))
        figure.draw_without_rendering()  # ticks take the style of the moment they are made

    def to_png() -> bytes:
        data = io.BytesIO()
        figure.savefig(data, format="png")
        return data.getvalue()

    setattr(figure, "_repr_png_", to_png)  # noqa: B010  without pyplot, notebooks do not display figures
    return figure


def _choose_panels(reports: Sequence, history: list) -> list[Callable[["Axes"], None]]:
    """What draws the two pictures; those without data are absent."""
    panels: list[Callable[[Axes], None]] = []
    if any(report.layers for report in reports):
        panels.append(partial(_draw_places, reports=reports))
    training, held_out = read_losses(history)
    if training or held_out:
        growths = {entry["step"] for entry in history if isinstance(entry, dict) and "growth_added_parameters" in entry}
        panels.append(partial(_draw_losses, training=training, held_out=held_out, growths=sorted(growths)))
    elif any(map(math.isfinite, reports[-1].line_search.values())):
        panels.append(partial(_draw_line_search, report=reports[-1]))
    return panels


def _draw_places(axes: "Axes", reports: Sequence) -> None:
    """Draw the share of each layer and kind in the first-order gain of all growths, "-" where nothing grew."""
    gains: dict[tuple[int, str], float] = {}
    grown = set()
    for report in reports:
        for layer in report.layers:
            place = layer.layer, layer.kind
            gains[place] = gains.get(place, 0.0) + layer.predicted_gain
            if layer.step_size > 0:
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


def read_losses(history: Iterable) -> tuple[Points, Points]:
    """The training and the held-out losses of a log history, each with its step; only finite ones."""
    training: Points = []
    held_out: Points = []
    for each in history:
        entry = each if isinstance(each, dict) else {"step": each[0], "loss": each[1]}
        if math.isfinite(entry.get("loss", math.nan)):
            training.append((entry["step"], entry["loss"]))
        if math.isfinite(entry.get("eval_loss", math.nan)):
            held_out.append((entry["step"], entry["eval_loss"]))
    return training, held_out


def _draw_losses(axes: "Axes", training: Points, held_out: Points, growths: list[float]) -> None:
    """Draw the losses of a training by step, and mark the growths."""
    if training:
        steps, losses = zip(*training)
        middles = [(step + former) / 2 for former, step in pairwise((0, *steps))]  # each is the mean since the last one
        axes.plot(middles, losses, color=_BLUE, linewidth=0.9, alpha=0.6, label="training")
    if held_out:
        axes.plot(*zip(*held_out), ".-", color=_BLUE, linewidth=1.8, label="held out")
    for index, step in enumerate(growths):
        axes.axvline(step, color=_GREY, linestyle=":", linewidth=1.2, label="growth" if index == 0 else None)
    axes.set(title="Loss", xlabel="step", ylabel="loss")
    axes.legend()


def _draw_line_search(axes: "Axes", report) -> None:
    """Draw the loss at every common step that was tried, and that of the same batches before and as it grew."""
    tried = sorted((step, loss) for step, loss in report.line_search.items() if math.isfinite(loss))
    axes.plot(*zip(*tried), ".-", color=_BLUE, label="all candidates")
    if report.validated_loss:
        before, after = report.validated_loss
        axes.axhline(before, color=_GREY, linestyle="--", linewidth=1, label="before")
        axes.axhline(after, color=_ORANGE, linewidth=1, label="as grown")
        lowest = min(loss for _, loss in tried)
        if lowest < before:
            axes.set_ylim(lowest - 0.2 * (before - lowest), before + (before - lowest))  # too long steps are cut off
    axes.set(title="Line search", xscale="log", xlabel="step", ylabel="loss")
    axes.legend()
