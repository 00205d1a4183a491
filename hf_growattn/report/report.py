"""What a growth measured and did: `GrowthReport`, which prints as a table."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from . import pictures
from .words import report_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LayerGrowth:
    """One kind of bottleneck of one layer in a growth.

    Attributes:
        layer: index.
        kind: "qk", queries and keys, or "v", values.
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
