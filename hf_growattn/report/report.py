"""What a growth or a trim measured and did: `GrowthReport` and `TrimReport`, which print as tables."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from . import pictures
from .words import format_table, format_width, report_text, wrap_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LayerGrowth:
    """One kind of bottleneck of one layer in a growth.

    Attributes:
        layer: index.
        kind: "patterns" (`qk_head_dim`) or "messages" (`v_head_dim`).
        width: before and after.
        step_size: the step `gamma` that was taken here; 0 after a rollback and where nothing grew.
        gain: first-order decrease of the loss per unit of step, on batches that the directions were not computed from.
        out_of_reach: share of the gradient, 0 to 1, in the metric of the logits or outputs, beyond the old dims; None
            where their weights cannot be read.
    """

    layer: int
    kind: str
    width: tuple[int, int]
    step_size: float
    gain: float
    out_of_reach: float | None

    @property
    def predicted_gain(self) -> float:
        """`gain` at the step that was taken; no measured loss."""
        return self.step_size * self.gain


@dataclass(frozen=True)
class GrowthReport:
    """What a growth measured and did; prints as its losses, its costs, and a table of the layers.

    Attributes:
        loss_before, loss_after: mean loss of the growth batches, in the loss's own unit; equal if nothing was kept.
        layers: one entry for each layer and kind that was measured.
        added_parameters: number of weights added.
        kept: False for what `Grower.measure` tried and took back.
        cache_bytes: of a token's keys and values over all layers, before and after.
        parameters: number of the model's weights before; 0 where that is not known.
        validated_loss: mean loss of the batches of the line search, before and at the steps that were taken, each half
            along directions of the other, and two standard errors of the fall. Step and number of dims were chosen on
            these batches. None where no such loss was measured.
        added_bytes: of the weights added.
        decoding: how many times as long one more token takes, two standard errors of that, and after how many tokens;
            None where it was not measured.
    """

    loss_before: float
    loss_after: float
    layers: list[LayerGrowth]
    added_parameters: int
    kept: bool = True
    cache_bytes: tuple[int, int] = (0, 0)
    parameters: int = 0
    validated_loss: tuple[float, float, float] | None = None
    added_bytes: int = 0
    decoding: tuple[float, float, int] | None = None

    @property
    def applied(self) -> bool:
        """Whether the model has grown."""
        return self.kept and self.found

    @property
    def found(self) -> bool:
        """Whether some step along new directions lowers the loss."""
        return any(layer.step_size > 0 for layer in self.layers)

    @property
    def predicted_gain(self) -> float:
        """The sum of the layers' predicted gains."""
        return sum(layer.predicted_gain for layer in self.layers)

    def figures(self) -> dict[str, float]:
        """What the growth did, as flat numbers for a tracker, as in `accelerator.log(report.figures(), step=step)`."""
        return {f"growth_{name}": getattr(self, name) for name in ("loss_before", "loss_after", "added_parameters")}

    def to_dict(self) -> dict:
        """The report as what `json.dumps` takes."""
        return {"applied": self.applied, **asdict(self)}

    def __repr__(self) -> str:
        return report_text(self)

    def plot(self) -> "Figure":
        """Draw where the model grew, by matplotlib."""
        return pictures.draw_growth([self])


@dataclass(frozen=True)
class LayerTrim:
    """The new dims of one kind of one layer in a trim.

    Attributes:
        layer, kind, width: as in `LayerGrowth`.
        worth: what the mean loss of the batches rises by without these dims, the mean of cutting them before and after
            all others; None without batches, and where the loss allowed to cut them all.
        error: share of what these dims compute that was cut, as a squared size in the metric of the logits or outputs.
        removed_parameters: number of weights removed.
    """

    layer: int
    kind: str
    width: tuple[int, int]
    worth: float | None
    error: float
    removed_parameters: int


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

    def __repr__(self) -> str:
        rows = []
        for layer in self.layers:
            worth = "-" if layer.worth is None else f"{layer.worth:.4f}"
            cut = (f"{layer.error:.1%}", f"{layer.removed_parameters:,}")
            rows.append([str(layer.layer), layer.kind, format_width(layer.width), worth, *cut])
        columns = ("layer", "kind", "width", "worth", "error", "parameters removed")
        return format_table(columns, rows) + wrap_line(self._outcome())

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
