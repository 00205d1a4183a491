"""Growths as a web page: one file without scripts that opens offline, in light and in dark."""

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment

from ..growable.folders import replacing
from . import pictures, words


def save_report(
    reports: Sequence, path: str | Path, log_history: Iterable[dict] = (), model: str = "", data: str = ""
) -> None:
    """Write the growths of a training as one self-contained HTML file, whole or not at all.

    Args:
        reports: what `Grower.grow` returned each time, or `GrowthCallback.reports`.
        path: the file; its folder is made if it does not exist.
        log_history: `trainer.state.log_history`, or dicts with `step` and `loss` of a loop of one's own.
        model: name of the model that grew.
        data: name of the data that it grew on.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the list of reports is empty.
    """
    if not isinstance(reports, Sequence) or not reports:
        raise ValueError("No growth to show: pass what Grower.grow returned, or GrowthCallback.reports.")
    figure, picture = pictures.draw_growth(reports, log_history), io.BytesIO()
    figure.savefig(picture, format="svg", transparent=True)
    template = Environment(autoescape=True).from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    page = template.render(
        model=model,
        data=data,
        growths=[_texts_of(report) for report in reports],
        command=words.race_command(model, data),
        picture=base64.b64encode(picture.getvalue()).decode() if figure.axes else "",
    )
    path = Path(path).resolve()
    with replacing(path.parent) as partial:
        (partial / path.name).write_text(page, encoding="utf-8")


def _texts_of(report) -> dict[str, Sequence]:
    return {"summary": words.summary_of(report), "columns": words.columns_of(report), "rows": words.rows_of(report)}
