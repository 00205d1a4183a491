"""Growths as a web page: one file that opens offline, without a script, in light and in dark."""

import functools
import importlib.util
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ..growable.folders import scratch
from . import words
from .pictures import BLUE, draw_line_search, draw_losses, has_line_search, loss_curves, svg

_SECRET = re.compile(r"-t|(?i:.*(token|key|secret|passw(or)?d))")  # names of what must not be shown
_CREDENTIALS = re.compile(r"hf_\w{10,}[\w.-]*|(?<=://)[^/\s]+(?=@)|[^\s/:@]+:(?!//)\S+(?=@)")  # wherever they stand
_LIBRARIES = ("torch", "transformers", "accelerate", "peft")


def save_report(
    reports: Sequence,
    path: str | Path,
    log_history: Iterable = (),
    model: str = "",
    data: str = "",
    *,
    steps: Sequence[int | None] | None = None,
    command: str | None = None,
    compared: Sequence[words.Compared] = (),
    verdict: str = "",
) -> None:
    """Write the growths of a training as one self-contained HTML file, whole or not at all.

    Args:
        reports: what `Grower.grow` returned each time, or `GrowthCallback.reports`.
        path: the file; its folder is made if it is not there.
        log_history: of the losses: `trainer.state.log_history`, or (step, loss) of the training.
        model: what was grown, as the page names it.
        data: what it was grown on, as the page names it.
        steps: the optimizer step of each growth; a log history that the reports were logged to knows it by itself.
        command: what was run; by default the command line of this process, without its secrets. "" leaves it out.
        compared: what was trained beside it, to the end.
        verdict: of a race before it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no reports, or not as many steps.
    """
    reports, history = list(reports), list(log_history)
    if not reports:
        raise ValueError("There is no growth to show: pass what Grower.grow returned, or GrowthCallback.reports.")
    if steps is not None and len(steps) != len(reports):
        raise ValueError(f"There are {len(reports)} reports and {len(steps)} steps: give the step of each growth.")
    logged = [entry for entry in history if isinstance(entry, dict)]
    if steps is None:  # that at which each very report was logged
        own = [report.figures().items() for report in reports]
        steps = [next((entry["step"] for entry in logged if figures <= entry.items()), None) for figures in own]
    curves = loss_curves(history)
    marks = {entry["step"] for entry in logged if "growth_added_parameters" in entry}
    marks |= {step for step in steps if step is not None}
    losses = functools.partial(draw_losses, runs=[("", curves, BLUE)], growths=sorted(marks))
    growths = []
    for index, (report, step) in enumerate(zip(reports, steps)):
        search = functools.partial(draw_line_search, report=report)
        picture = Markup(svg(search, f"growth-{index}")) if has_line_search(report) else None
        growths.append({"report": report, "step": step, "search": picture})
    libraries = [library for library in _LIBRARIES if importlib.util.find_spec(library)]
    versions = {"hf_growattn": sys.modules["hf_growattn"].__version__, "Python": platform.python_version()}
    page = _template().render(
        words=words,
        model=model,
        data=data,
        growths=growths,
        facts=words.facts(reports, compared, verdict=verdict),
        beside=words.beside(compared, reports[-1].cache_bytes[1]) if compared else None,
        losses=Markup(svg(losses, "losses")) if any(curves.values()) else None,
        command=_command_line() if command is None else command,
        versions=versions | {library: metadata.version(library) for library in libraries},
        time=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch(path.parent, path.name) as folder:  # a reader or a killed process never meets half a page
        (folder / path.name).write_text(page, encoding="utf-8")
        os.replace(folder / path.name, path)


def fragment(report) -> str:
    """What a notebook shows of a growth: the facts and the map, without pictures."""
    return _template().render(words=words, report=report, facts=words.facts([report]))


def _command_line() -> str:
    """The command line of this process, with what looks like a secret masked."""
    words, former = [], ""
    by_name = Path(sys.argv[0]).name == "growattn"  # people do not say which Python runs it
    for word in ["growattn", *sys.argv[1:]] if by_name else sys.orig_argv:
        name, equals, _ = word.partition("=")
        if former.startswith("-") and _SECRET.fullmatch(former):
            word = "***"
        elif equals and _SECRET.fullmatch(name):
            word = f"{name}=***"
        words.append(_CREDENTIALS.sub("***", word))
        former = name if not equals else ""
    return shlex.join([Path(words[0]).name, *words[1:]])


@functools.cache
def _template() -> Template:
    loader, strict = FileSystemLoader(Path(__file__).parent), StrictUndefined
    pages = Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    return pages.get_template("page.html")
