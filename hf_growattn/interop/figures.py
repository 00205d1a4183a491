"""What a training writes into `figures.json` until `cards.save_figures` does."""

from .cards import FIGURES, find_base_model, find_path

__all__ = ["FIGURES", "source_of"]


def source_of(base_model: str, dataset: str) -> dict[str, str]:
    """The base model and the data of a training, as Hub ids or whole paths."""
    return {"base_model": find_base_model(base_model), "dataset": find_path(dataset)}
