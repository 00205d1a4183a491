"""What a growth added, for another copy of the same model: a growth once more, without its search."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..growable.models import GrowableModelMixin, attentions
from ..report.report import GrowthReport
from .frozen import train_grown
from .provenance import leave_checkpoint


@dataclass(frozen=True)
class Added:
    """The new dims of a model that grew, while it has not been trained since.

    Attributes:
        report: of the growth, which moved no old dims.
        widths: of queries and keys, and of values, by layer.
        entries: the values of the new entries, for each layer's parameters that have some.
    """

    report: GrowthReport
    widths: list[tuple[int, int]]
    entries: list[list[Tensor]]

    @classmethod
    def to(cls, model: PreTrainedModel, report: GrowthReport) -> "Added":
        """What a growth added to a model; no model is copied."""
        layers = attentions(model)
        entries = [[p.detach()[new] for p, new in layer.new_entries().items()] for layer in layers]
        return cls(report, [(layer.qk_head_dim, layer.v_head_dim) for layer in layers], entries)

    def give(self, model: PreTrainedModel) -> GrowthReport:
        """Add the same to a patched copy of the model as it was before, in place; returns the report of the growth."""
        resizes = []
        for layer, (qk_head_dim, v_head_dim), entries in zip(attentions(model), self.widths, self.entries):
            resizes += layer.widen(qk_head_dim - layer.qk_head_dim, v_head_dim - layer.v_head_dim).resizes
            with torch.no_grad():
                for (parameter, new), values in zip(layer.new_entries().items(), entries):
                    parameter[new] = values
        cast(GrowableModelMixin, model).sync_config()
        train_grown(model, resizes)
        leave_checkpoint(model)
        return self.report
