"""What a growth measured and did: `GrowthReport`, which prints as a table."""

from dataclasses import asdict, dataclass

from .words import report_text


@dataclass(frozen=True)
class LayerGrowth:
    """One kind of bottleneck of one layer in a growth.

    Attributes:
        layer: index.
        name: path of the attention module in the base model, such as "decoder.layers.3.self_attn".
        kind: "qk", queries and keys, or "v", values.
        width: before, and with the new dims that were found.
        step_size: the step `gamma` along the new dims; 0 where they change nothing yet, or none was added.
        gain: first-order decrease of the loss per unit of step, on batches that the directions were not computed from;
            of all directions that were found where none was added.
        out_of_reach: share of the gradient, 0 to 1, in the metric of the logits or outputs, beyond the old dims; None
            where that is not known: for queries and keys that rotate, weights that cannot be read, and too few batches.
    """

    layer: int
    name: str
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
    """What a growth measured and did; prints as the fall of the loss, the costs, and a table of the layers.

    Attributes:
        loss_before: mean loss of the growth batches, in the loss's own unit.
        fall: how far it falls by the new dims, measured on batches that they were not computed from: each half of them
            along directions of the other. 0 where no step lowers the loss.
        error: of the fall, at 95 %.
        holds: whether the fall exceeds its error.
        layers: one entry for each layer and kind that was measured.
        added_parameters: number of weights of the new dims.
        kept: whether the model has the new dims.
        has_room: whether any head may become wider; beyond the size of its input it gains no rank.
        cache_bytes: of a token's keys and values over all layers, without and with the new dims.
        parameters: number of the model's weights before; 0 where that is not known.
        added_bytes: of the weights of the new dims.
    """

    loss_before: float
    fall: float
    error: float
    holds: bool
    layers: list[LayerGrowth]
    added_parameters: int
    kept: bool = False
    has_room: bool = True
    cache_bytes: tuple[int, int] = (0, 0)
    parameters: int = 0
    added_bytes: int = 0

    @property
    def predicted_gain(self) -> float:
        """The sum of the layers' predicted gains."""
        return sum(layer.predicted_gain for layer in self.layers)

    def figures(self) -> dict[str, float]:
        """What the growth did, as flat numbers for a tracker, as in `accelerator.log(report.figures(), step=step)`."""
        logged = {"loss_before": self.loss_before, "fall": self.fall, "error": self.error, "holds": float(self.holds)}
        logged["added_parameters"] = self.added_parameters if self.kept else 0
        return {f"growth_{name}": value for name, value in logged.items()}

    def to_dict(self) -> dict:
        """The report as what `json.dumps` takes."""
        return asdict(self)

    def __repr__(self) -> str:
        return report_text(self)
