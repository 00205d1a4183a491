"""What a growth or a trim measured and did: `GrowthReport` and `TrimReport`, which print as tables."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from . import pages, pictures
from .words import lines_of, printed, report_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LayerGrowth:
    """One kind of bottleneck of one layer in a growth.

    Attributes:
        layer: index.
        kind: "patterns" (`qk_head_dim`) or "messages" (`v_head_dim`).
        width: `qk_head_dim` or `v_head_dim` before and after.
        step_size: the step `gamma` that was taken here; 0 after a rollback and where nothing grew.
        in_sample: first-order decrease of the loss per unit of step, for each direction that was measured, over all
            heads, on the growth batches themselves.
        validated: the same on batches that the direction was not chosen from; may be negative.
        strength: for each direction the share of it that was taken, as much as its gain held; 0 where it was not grown.
        starvation: share of the gradient, 0 to 1, in the metric of the logits or outputs, beyond the old dims.
        existing_slope, existing_validated: first-order decrease of the loss per unit of step by the existing weights,
            where they are moved, on the growth batches and on unseen ones.
        quadratic_ratio: draft 001 section 1.5, at the step that was taken: how much of it is beyond first order. Only
            moving the existing weights makes it more than 0.
        price: weights, and bytes of a token in the KV cache, that one more dim of every head costs.
        left: why nothing grew here, in two words; "" where something did.
    """

    layer: int
    kind: str
    width: tuple[int, int]
    step_size: float
    in_sample: tuple[float, ...]
    validated: tuple[float, ...]
    strength: tuple[float, ...]
    starvation: float
    existing_slope: float = 0.0
    existing_validated: float = 0.0
    quadratic_ratio: float = 0.0
    price: tuple[int, int] = (0, 0)
    left: str = ""

    @property
    def taken(self) -> list[bool]:
        """For each direction whether it was grown."""
        return [self.step_size > 0 and strength > 0 for strength in self.strength]

    @property
    def in_sample_gain(self) -> float:
        """First-order decrease of the loss on the growth batches at the step that was taken, in the loss's unit."""
        new = sum(gain * strength for gain, strength in zip(self.in_sample, self.strength))
        return self.step_size * (new + self.existing_slope)

    @property
    def predicted_gain(self) -> float:
        """First-order decrease of the loss that new batches should show, from the validated gains of the new dims."""
        new = sum(gain * strength for gain, strength in zip(self.validated, self.strength))
        return self.step_size * (new + self.existing_validated)

    @property
    def gain(self) -> float | None:
        """`predicted_gain`, as tables and maps show it: None where nothing grew."""
        return self.predicted_gain if self.step_size > 0 else None

    def cells(self) -> list[str]:
        """The row of the table of `GrowthReport.columns`, for a terminal and for a page."""
        steps = (f"{self.in_sample_gain:.4f}", f"{self.predicted_gain:.4f}", f"{self.step_size:.3g}")
        directions = f"{sum(strength > 0 for strength in self.strength)} of {len(self.strength)}"
        measured = [str(self.layer), self.kind, _width(self.width), f"{self.starvation:.2f}", directions]
        return [*measured, *(steps if self.step_size > 0 else ["-"] * 3)]


@dataclass(frozen=True)
class GrowthReport:
    """What a growth measured and did; prints as what it gained, what it costs, what to do, and a map of the layers.

    Attributes:
        loss_before, loss_after: mean loss of the growth batches, in the loss's own unit; equal if nothing was kept.
        layers: one entry for each layer and kind that was measured.
        added_parameters: number of weights added.
        line_search: mean loss, of some of the growth batches, at every common step that was tried; by the step of the
            first layer and kind, where kinds differ.
        judged_before, judged_after: mean loss of the batches of the line search, before and at the steps that were
            taken, each half along the directions of the other; None where that was not measured.
        seconds: wall time of each phase.
        kept: False for what `Grower.measure` tried and took back.
        cache_bytes: of a token's keys and values over all layers, before and after; what generation pays for.
        parameters: number of the model's weights before; 0 where that is not known.
        forward_seconds: of one growth batch through the model before and after, each the least of a few; None for what
            was only tried.
        columns: of the table of details.
    """

    columns: ClassVar = (
        "layer",
        "kind",
        "width",
        "starvation",
        "directions",
        "gain in sample",
        "validated gain",
        "step",
    )

    loss_before: float
    loss_after: float
    layers: list[LayerGrowth]
    added_parameters: int
    line_search: dict[float, float]
    seconds: dict[str, float]
    kept: bool = True
    cache_bytes: tuple[int, int] = (0, 0)
    parameters: int = 0
    forward_seconds: tuple[float, float] | None = None
    judged_before: float | None = None
    judged_after: float | None = None

    @property
    def applied(self) -> bool:
        """Whether the model has grown."""
        return self.kept and self.found

    @property
    def found(self) -> bool:
        """Whether there was something worth growing."""
        return any(layer.step_size > 0 for layer in self.layers)

    @property
    def in_sample_gain(self) -> float:
        """First-order decrease of the loss on the growth batches at the steps that were taken."""
        return sum(layer.in_sample_gain for layer in self.layers)

    @property
    def predicted_gain(self) -> float:
        """First-order decrease of the loss that new batches should show at the steps that were taken."""
        return sum(layer.predicted_gain for layer in self.layers)

    @property
    def forward_ratio(self) -> float | None:
        """How long a pass takes after the growth, over what it took before; None for what was not kept."""
        before, after = self.forward_seconds or (0.0, 0.0)
        return after / before if before else None

    def figures(self) -> dict[str, float]:
        """What the growth did, as flat numbers for a tracker, as in `accelerator.log(report.figures(), step=step)`."""
        figures = {
            "growth_loss_before": self.loss_before,
            "growth_loss_after": self.loss_after,
            "growth_predicted_gain": self.predicted_gain,
            "growth_added_parameters": self.added_parameters,
        }
        for layer in (layer for layer in self.layers if layer.step_size > 0):
            name = f"growth_layer_{layer.layer}_{layer.kind}"
            figures |= {f"{name}_width": layer.width[1], f"{name}_gain": layer.predicted_gain}
            figures |= {f"{name}_step_size": layer.step_size, f"{name}_starvation": layer.starvation}
        return figures

    def to_dict(self) -> dict:
        """The report as what `json.dumps` takes."""
        layers = [
            {
                "layer": layer.layer,
                "kind": layer.kind,
                "width": list(layer.width),
                "starvation": layer.starvation,
                "validated_gain": layer.predicted_gain,
                "step_size": layer.step_size,
                "price": dict(zip(("weights", "cache_bytes"), layer.price)),
                "left": layer.left or None,
            }
            for layer in self.layers
        ]
        return {
            "applied": self.applied,
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "judged_loss": [self.judged_before, self.judged_after],
            "added_parameters": self.added_parameters,
            "cache_bytes": list(self.cache_bytes),
            "layers": layers,
            "seconds": self.seconds,
        }

    def by_layer(self) -> dict[int, dict[str, LayerGrowth]]:
        """The entries by layer, then by kind."""
        layers: dict[int, dict[str, LayerGrowth]] = {}
        for layer in self.layers:
            layers.setdefault(layer.layer, {})[layer.kind] = layer
        return layers

    def __str__(self) -> str:
        return report_text(self)

    def details(self) -> str:
        """What `print(report)` leaves out: all figures of every layer, the steps that were tried, and the time."""
        told = (self.promise(), self.timing())
        return printed(self.columns, [layer.cells() for layer in self.layers]) + "\n".join(map(lines_of, told))

    def _repr_html_(self) -> str:
        return pages.fragment(self)

    def save(
        self, path: str | Path, history: Iterable = (), step: int | None = None, command: str | None = None
    ) -> None:
        """Write a page for people, one HTML file that opens offline: `save_report` of this one growth, at a step."""
        pages.save_report([self], path, history, steps=None if step is None else [step], command=command)

    def plot(self) -> "Figure":
        """Draw what was measured, by matplotlib: a notebook shows it, its `savefig` writes it."""
        return pictures.plotted(self)

    def timing(self) -> str:
        """How long each phase took, in a sentence."""
        return f"Time: {', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in self.seconds.items())}."

    def promise(self) -> str:
        """What first order promised, in a sentence."""
        return (
            f"First order promised a fall of {self.in_sample_gain:.4f} on the growth batches, and of "
            f"{self.predicted_gain:.4f} on new ones. Patterns are queries and keys, messages are values."
        )


def grown_layers(figures: dict[str, float]) -> list[dict]:
    """Gather what `GrowthReport.figures` flattened: for each layer and kind its width, gain, step_size, starvation."""
    layers: dict[tuple[int, str], dict] = {}
    for name, value in figures.items():
        if found := re.fullmatch(r"growth_layer_(\d+)_([a-z]+)_(\w+)", name):
            layers.setdefault((int(found[1]), found[2]), {})[found[3]] = value
    return [{"layer": layer, "kind": kind, **of} for (layer, kind), of in layers.items()]


@dataclass(frozen=True)
class LayerTrim:
    """The new dims of one kind of one layer in a trim.

    Attributes:
        layer: index.
        kind: "patterns" (`qk_head_dim`) or "messages" (`v_head_dim`).
        width: `qk_head_dim` or `v_head_dim` before and after.
        worth: what the mean loss of the batches rises by without any of these dims, the mean of cutting them before and
            after those of all other layers and kinds; None without batches, and where the loss allowed to cut them all.
        error: share of what these dims compute that was cut, as a squared size in the metric of the logits or outputs.
        removed_parameters: number of weights removed.
    """

    layer: int
    kind: str
    width: tuple[int, int]
    worth: float | None
    error: float
    removed_parameters: int

    def cells(self) -> list[str]:
        """The row of the table of a `TrimReport`."""
        worth = "-" if self.worth is None else f"{self.worth:.4f}"
        cut = (f"{self.error:.1%}", f"{self.removed_parameters:,}")
        return [str(self.layer), self.kind, _width(self.width), worth, *cut]


@dataclass(frozen=True)
class TrimReport:
    """What a trim measured and cut; prints as a table.

    Attributes:
        loss_before, loss_after: mean loss of the batches, in the loss's own unit; None without batches.
        max_loss_increase: what the loss was allowed to rise by.
        layers: one entry for each layer and kind that had grown.
    """

    loss_before: float | None
    loss_after: float | None
    max_loss_increase: float
    layers: list[LayerTrim]

    @property
    def removed_parameters(self) -> int:
        """Number of weights removed."""
        return sum(layer.removed_parameters for layer in self.layers)

    def __str__(self) -> str:
        columns = ("layer", "kind", "width", "worth", "error", "parameters removed")
        return printed(columns, [layer.cells() for layer in self.layers]) + lines_of(self._outcome())

    def _outcome(self) -> str:
        if not self.layers:
            return "Nothing was cut: no layer has grown."
        outcome = f"{self.removed_parameters:,} parameters removed" if self.removed_parameters else "Nothing was cut"
        if self.loss_before is None:
            return f"{outcome}; without batches only dims that do nothing are."
        return (
            f"{outcome}. Loss {self.loss_before:.4f} -> {self.loss_after:.4f} on the batches, where it was allowed to "
            f"rise by {self.max_loss_increase:g}."
        )


def _width(width: tuple[int, int]) -> str:
    before, after = width
    return f"{before} -> {after}" if after != before else str(before)
