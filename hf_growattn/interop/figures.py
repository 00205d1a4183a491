"""`figures.json`: what a growth leaves beside a checkpoint, and what whoever passed that on may have made of it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from ..report.report import GrowthReport, grown_layers

FIGURES = "figures.json"


def source_of(base_model: str, dataset: str) -> dict[str, str]:
    """What a training started from, for the model card: Hub ids, or whole paths that cannot be taken for one.

    A folder that was trained or grown itself leads to what that started from.
    """
    if base_model and (Path(base_model) / FIGURES).is_file():
        with contextlib.suppress(ValueError):
            base_model = read_figures(Path(base_model)).get("base_model") or ""
    names = {"base_model": base_model, "dataset": dataset}
    return {key: str(Path(name).resolve()) if name and Path(name).exists() else name for key, name in names.items()}


def growth_figures(report: GrowthReport) -> dict:
    """One growth, of what a report alone knows."""
    added, layers = report.added_parameters, grown_layers(report.figures())
    return {"growth_batches": [report.loss_before, report.loss_after], "added_parameters": added, "layers": layers}


def figures_of(report: GrowthReport, base_model: str, dataset: str, parameters: int) -> dict:
    """What a growth leaves: its source, the parameters before it, and what it did."""
    growths = [growth_figures(report)]
    return {**source_of(base_model, dataset), "before": {"parameters": parameters}, "growths": growths}


def read_figures(folder: Path) -> dict:
    """Read the figures of a checkpoint.

    Raises:
        ValueError: the file does not hold such figures; the message names the fix.
    """
    figures = None
    with contextlib.suppress(RecursionError, ValueError):
        figures = json.loads((folder / FIGURES).read_bytes())
    return check_figures(figures, str(folder / FIGURES))


def check_figures(figures, source: str) -> dict:
    """Return figures of which all that a model card shows is what it can show.

    Raises:
        ValueError: something is not; the message says where in the source, and names the fix.
    """
    for where in _misfits(figures, _FIGURES, ""):
        raise ValueError(
            f"{source} does not hold the figures of a growth{where and f': see {where}'}. Put back what was written "
            "there, or delete it: a model card can do without."
        )
    return figures


def _misfits(value, shape, where: str) -> Iterator[str]:
    """The places where something is not of a shape."""
    if isinstance(shape, dict) and isinstance(value, dict):
        for name, inner in shape.items():
            key = name.removesuffix("?")
            if key == name or value.get(key) is not None:
                yield from _misfits(value.get(key), inner, f"{where}.{key}".lstrip("."))
    elif isinstance(shape, list) and isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _misfits(entry, shape[0], f"{where}[{index}]")
    elif not callable(shape) or not shape(value):
        yield where


def _is_text(value) -> bool:
    return isinstance(value, str)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18  # nor is NaN


def _is_pair(value) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))


# A dict by name, where "?" marks what may be absent or null; a list of one shape; or what tells a single value.
_Shape = dict | list | Callable[[object], bool]
_CURVES: _Shape = {"held_out": [_is_pair]}
_LAYER: _Shape = {"kind": ("patterns", "messages").__contains__}
_LAYER |= dict.fromkeys(("layer", "width", "starvation", "gain", "step_size"), _is_number)
_GROWTH: _Shape = {"step?": _is_number, "held_out?": _is_pair, "growth_batches": _is_pair}
_GROWTH |= {"added_parameters": _is_number, "layers": [_LAYER]}
_FIGURES: _Shape = {"base_model?": _is_text, "dataset?": _is_text, "before?": {"parameters?": _is_number}}
_COMPARED: _Shape = {"name": _is_text} | dict.fromkeys(("loss", "lead", "error", "cache_bytes"), _is_number)
_FIGURES |= {"compared?": [_COMPARED], "with_growth?": _CURVES, "without_growth?": _CURVES, "growths?": [_GROWTH]}
