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

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .pictures import BLUE, draw_line_search, draw_losses, has_line_search, loss_curves, svg

_NAMES = {"patterns": "queries and keys", "messages": "values"}
_LISTED = 8  # layers to name in a sentence
_LIBRARIES = ("torch", "transformers", "accelerate", "peft")


def save_report(
    reports: Sequence,
    path: str | Path,
    history: Iterable = (),
    steps: Sequence[int] | None = None,
    command: str | None = None,
) -> None:
    """Write the growths of a training as one self-contained HTML file, whole or not at all.

    Args:
        reports: what `Grower.grow` returned each time, or `GrowthCallback.reports`.
        path: the file; its folder is made if it is not there.
        history: of the losses: `trainer.state.log_history`, or (step, loss) of the training.
        steps: the optimizer step of each growth; a log history that the reports were logged to knows it by itself.
        command: what was run; by default the command line of this process, without its secrets. "" leaves it out.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no reports, or not as many steps.
    """
    reports, history = list(reports), list(history)
    if not reports:
        raise ValueError("There is no growth to show: pass what Grower.grow returned, or GrowthCallback.reports.")
    if steps is not None and len(steps) != len(reports):
        raise ValueError(f"There are {len(reports)} reports and {len(steps)} steps: give the step of each growth.")
    steps = [_step_in(history, report) for report in reports] if steps is None else steps
    curves = loss_curves(history)
    marks = {entry["step"] for entry in history if isinstance(entry, dict) and "growth_added_parameters" in entry}
    marks = sorted(marks.union(step for step in steps if step is not None))
    losses = functools.partial(draw_losses, runs=[("", curves, BLUE)], growths=marks)
    page = _template().render(
        growths=[_growth(report, step, f"growth-{index}") for index, (report, step) in enumerate(zip(reports, steps))],
        losses=Markup(svg(losses, "losses")) if any(curves.values()) else None,
        command=_command_line() if command is None else command,
        versions=_versions(),
        time=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    _write_whole(Path(path), page)


def fragment(report) -> str:
    """What a notebook shows of a growth: the sentence and the maps, without pictures."""
    return _template().render(report=report, sentence=sentence(report), layers=layers_of(report))


def sentence(report) -> str:
    """What grew, and why."""
    grown = [layer for layer in report.layers if layer.width[1] > layer.width[0]]
    if not grown:
        return report.outcome()
    where = [
        f"{_NAMES[kind]} in {_layers(report, [layer.layer for layer in grown if layer.kind == kind])}"
        for kind in dict.fromkeys(layer.kind for layer in grown)
    ]
    top = max(grown, key=lambda layer: layer.predicted_gain)
    what, taken = " and ".join(where), sum(sum(layer.taken) for layer in grown)
    grew = "grew" if report.kept else "would grow"
    return (
        f"{what[0].upper()}{what[1:]} {grew}: {taken} directions there lower the loss on batches that they were not "
        f"chosen from. Layer {top.layer}'s {_NAMES[top.kind]} ({top.width[0]} to {top.width[1]} wide) promised most; "
        f"{top.starvation:.0%} of the gradient was beyond their former width."
    )


def layers_of(report) -> dict[int, dict]:
    """The entries of a report by layer, then by kind."""
    layers: dict[int, dict] = {}
    for layer in report.layers:
        layers.setdefault(layer.layer, {})[layer.kind] = layer
    return layers


def _growth(report, step: int | None, name: str) -> dict:
    """All that the page shows of one growth."""
    search = functools.partial(draw_line_search, report=report)
    return {
        "report": report,
        "step": step,
        "sentence": sentence(report),
        "layers": layers_of(report),
        "search": Markup(svg(search, name)) if has_line_search(report) else None,
    }


def _layers(report, grown: list[int]) -> str:
    if len(grown) > _LISTED:
        return f"{len(grown)} of {len(layers_of(report))} layers"
    *most, last = map(str, grown)
    return f"layers {', '.join(most)} and {last}" if most else f"layer {last}"


def _step_in(history: list, report) -> int | None:
    """The step at which this very report was logged."""
    figures = report.figures().items()
    return next((entry["step"] for entry in history if isinstance(entry, dict) and figures <= entry.items()), None)


def _command_line() -> str:
    """The command line of this process, with what looks like a secret masked."""
    words, former = [], ""
    by_name = Path(sys.argv[0]).name == "growattn"  # people do not say which Python runs it
    for word in ["growattn", *sys.argv[1:]] if by_name else sys.orig_argv:
        name, equals, _ = word.partition("=")
        secret = re.compile(r"-.*(token|key|secret|password)", re.IGNORECASE)
        if secret.fullmatch(former):
            word = "***"
        elif equals and secret.fullmatch(name):
            word = f"{name}=***"
        words.append(re.sub(r"hf_\w{10,}", "***", word))
        former = name if not equals else ""
    return shlex.join([Path(words[0]).name, *words[1:]])


def _versions() -> dict[str, str]:
    versions = {"hf_growattn": sys.modules[__package__].__version__, "Python": platform.python_version()}
    found = [library for library in _LIBRARIES if importlib.util.find_spec(library)]
    return versions | {library: metadata.version(library) for library in found}


@functools.cache
def _template():
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def _write_whole(path: Path, text: str) -> None:
    """Write beside, then rename: a reader, a full disk or a killed process never leaves half a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
