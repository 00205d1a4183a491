"""What a growth did, as data and as a table."""

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class LayerGrowth:
    """One layer of a growth.

    Attributes:
        layer: index.
        qk_head_dim, v_head_dim: width before and after.
        slope: first-order decrease of the loss per unit of step, over all heads.
        starvation: share of the gradient, in the metric of the logits, that the old dims cannot follow (0 to 1).
    """

    layer: int
    qk_head_dim: tuple[int, int]
    v_head_dim: tuple[int, int]
    slope: float
    starvation: float


@dataclass(frozen=True)
class GrowthReport:
    """What a growth measured and did; prints as a table.

    Attributes:
        loss_before, loss_after: mean loss of the growth batches, in the loss's own unit; equal if nothing was kept.
        step_size: the common step `gamma` of all layers; 0 if everything was rolled back.
        layers: one entry for each layer that was measured.
        added_parameters: number of weights added.
        line_search: loss at every step tried.
        seconds: wall time of each phase.
    """

    loss_before: float
    loss_after: float
    step_size: float
    layers: list[LayerGrowth]
    added_parameters: int
    line_search: dict[float, float]
    seconds: dict[str, float]

    @property
    def applied(self) -> bool:
        """Whether the growth was kept."""
        return self.step_size > 0

    @property
    def predicted_gain(self) -> float:
        """First-order decrease of the loss at the step that was taken."""
        return self.step_size * sum(layer.slope for layer in self.layers)

    def __str__(self) -> str:
        table = Table("layer", "qk_head_dim", "v_head_dim", "starvation", "predicted gain")
        for layer in self.layers:
            table.add_row(
                str(layer.layer),
                _change(*layer.qk_head_dim),
                _change(*layer.v_head_dim),
                f"{layer.starvation:.2f}",
                f"{self.step_size * layer.slope:.4f}" if self.applied else "-",
            )
        if self.applied:
            outcome = (
                f"Loss {self.loss_before:.4f} -> {self.loss_after:.4f} on the growth batches "
                f"(first order promised {self.predicted_gain:.4f}), step size {self.step_size:.3g}, "
                f"{self.added_parameters:,} parameters added."
            )
        else:
            outcome = (
                f"Rolled back: no step lowers the loss of {self.loss_before:.4f} on the growth batches. "
                "The model is as it was."
            )
        timing = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
        text = io.StringIO()
        Console(file=text, width=100).print(table)
        return f"{text.getvalue()}{outcome}\nTime: {timing}."


def _change(before: int, after: int) -> str:
    return f"{before} -> {after}" if after != before else str(before)
