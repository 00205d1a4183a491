"""Growths as a web page: one file without scripts that opens offline, in light and in dark."""

import base64
import functools
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from ..growable.folders import scratch
from . import pictures, words


def save_report(
    reports: Sequence, path: str | Path, log_history: Iterable = (), model: str = "", data: str = ""
) -> None:
    """Write the growths of a training as one self-contained HTML file.

    The file is written whole or not at all.

    Args:
        reports: what `Grower.grow` returned each time, or `GrowthCallback.reports`.
        path: the file; its folder is made if it does not exist.
        log_history: `trainer.state.log_history`, or pairs of step and training loss.
        model: name of the model that grew.
        data: name of the data that it grew on.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the list of reports is empty.
    """
    reports = list(reports)
    if not reports:
        raise ValueError("No growth to show: pass what Grower.grow returned, or GrowthCallback.reports.")
    panels = pictures.growth_panels(reports, log_history)
    page = _template().render(
        model=model,
        data=data,
        growths=[_collect_texts(report) for report in reports],
        columns=words.COLUMNS,
        command=words.race_command(model, data),
        pictures={title: _embed_svg(panel) for title, panel in panels.items()},
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch(path.parent, path.name) as folder:
        written = Path(folder, path.name)
        written.write_text(page, encoding="utf-8")
        os.replace(written, path)


def _collect_texts(report) -> dict:
    """What the page shows of one growth."""
    return {
        "summary": words.summary_of(report),
        "rows": [words.cells_of(each) for each in words.layers_with_shares(report)],
    }


def _embed_svg(panel: pictures.Panel) -> str:
    """One panel as the address of an image that is in the page itself."""
    text = io.BytesIO()
    pictures.draw_panels([panel]).savefig(text, format="svg", transparent=True)
    return "data:image/svg+xml;base64," + base64.b64encode(text.getvalue()).decode()


@functools.cache
def _template() -> Template:
    loader, strict = FileSystemLoader(Path(__file__).parent), StrictUndefined
    pages = Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    return pages.get_template("page.html")
