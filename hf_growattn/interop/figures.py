"""What a training writes into `figures.json` until `cards.save_figures` does."""

from ..report.report import GrowthReport, grown_layers
from .cards import FIGURES, find_base_model, find_path

__all__ = ["FIGURES", "growth_figures", "source_of"]


def source_of(base_model: str, dataset: str) -> dict[str, str]:
    """The base model and the data of a training, as Hub ids or whole paths."""
    return {"base_model": find_base_model(base_model), "dataset": find_path(dataset)}


def growth_figures(report: GrowthReport) -> dict:
    """One growth, from its report alone."""
    added, layers = report.added_parameters, grown_layers(report.figures())
    return {"growth_batches": [report.loss_before, report.loss_after], "added_parameters": added, "layers": layers}
