"""The page of a benchmark: figures as JSON; tables as Markdown and a picture as PNG out of them; how they were made.

    python scripts/bench/page.py

writes all pages again, and the README, out of the figures that are there.
"""

import importlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers

import hf_growattn

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
INTRODUCTION = """# Evidence

Every section was written by the script that it names, out of the figures beside it; so was this page. Each script has
`--help`, and `--quick`, which shows in a minute or two that it runs and nothing else; `python scripts/bench/page.py`
writes all pages again. Spreads are ranges over the seeds unless said otherwise.
"""
SHORTER_SEARCH = "2026-11-22 22:10 UTC"  # when a growth's search and probe were shortened
EARLIER = "a growth's shorter search and probe, which move the losses after it by up to two hundredths."
# One line for each page, in the order of the README.
PAGES = (
    "nearest_neighbour",
    "finetuning",
    "recall",
    "recall_map",
    "real_model",
    "mix_rates",
    "encoder",
    "races",
    "in_context_regression",
    "growing_up",
    "overhead",
    "probe_cost",
    "training_cost",
    "growth_cost",
    "estimators",
    "allocation",
    "balance",
    "roads",
    "scale",
    "large",
)
VERDICTS = ("reached", "missed", "undecided")
POINTS = 40  # of a curve: more than a picture shows
DIGITS = 9  # of a figure: those of an fp32, so that rounding moves nothing that a page prints
WIDTH = 360  # of a line of JSON, which holds all of most runs

_START = time.monotonic()


def table(head: Iterable[str], rows: Iterable[Iterable]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def conditions(seeds: list[int]) -> dict:
    """Date, command, seeds, versions and machine."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": _command(),
        "seeds": seeds,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_growattn": hf_growattn.__version__,
        },
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


@dataclass
class Reach:
    """Something aimed at, and what was measured.

    Attributes:
        aim: in words, with its figure.
        measured: in words, with its figure and spread.
        verdict: one of `VERDICTS`.
    """

    aim: str
    measured: str
    verdict: str

    def __post_init__(self):
        if self.verdict not in VERDICTS:
            raise ValueError(f"the verdict of {self.aim!r} is {self.verdict!r}, none of {VERDICTS}")


@dataclass
class Page:
    """What a benchmark has to say: what `page_of` of its script makes of its figures.

    Attributes:
        title: of the page.
        claim: what the figures show, in a sentence or two, with what speaks against growth.
        summary: the table that the README shows, in Markdown.
        text: what was measured and how, with all other tables, in Markdown.
        draw: is given matplotlib's pyplot and returns the picture.
        reaches: what was aimed at.
    """

    title: str
    claim: str
    summary: str
    text: str
    draw: Callable
    reaches: list[Reach] = field(default_factory=list)


def kept(runs: list[dict], *names: str) -> list[dict]:
    """What a page needs of its runs: these of their figures, where they have them, and curves of at most `POINTS`."""
    needed = [{name: run[name] for name in names if name in run} for run in runs]
    return [run | ({"curve": thinned(run["curve"])} if "curve" in run else {}) for run in needed]


def in_columns(runs: list[dict], *figures: str) -> list[dict]:
    """Runs that differ in nothing but these figures as one, whose figures are lists: far shorter as JSON."""
    groups: dict[str, dict] = {}
    for run in runs:
        alike = {name: value for name, value in run.items() if name not in figures}
        columns = groups.setdefault(json.dumps(alike), alike)
        for name in (name for name in figures if name in run):
            columns.setdefault(name, []).append(run[name])
    return list(groups.values())


def in_rows(groups: list[dict], by: str = "seed") -> list[dict]:
    """What `in_columns` put together, run by run."""
    return [
        {name: value[place] if isinstance(value, list) else value for name, value in group.items()}
        for group in groups
        for place in range(len(group[by]))
    ]


def in_table(runs: list[dict]) -> dict:
    """Runs as the names of their figures and a row for each, for JSON; what is within a figure has its name before."""
    plain = [_plain(run) for run in runs]
    columns = list(dict.fromkeys(name for run in plain for name in run))
    rows = [[run.get(name) for name in columns] for run in plain]
    for row in rows:
        while row[-1] is None:
            row.pop()
    return {"columns": columns, "rows": rows}


def out_of_table(table: dict) -> list[dict]:
    """The runs that `in_table` put together; a figure that is None is left out."""
    runs: list[dict] = []
    for row in table["rows"]:
        run: dict = {}
        for name, value in zip(table["columns"], row):
            if value is not None:
                *within, last = name.split(".")
                place = run
                for part in within:
                    place = place.setdefault(part, {})
                place[last] = value
        runs.append(run)
    return runs


def _plain(run: dict, begin: str = "") -> dict:
    """The same without dicts inside."""
    plain: dict = {}
    for name, value in run.items():
        plain |= _plain(value, f"{begin}{name}.") if isinstance(value, dict) else {begin + name: value}
    return plain


def thinned(curve: list) -> list:
    """At most `POINTS` points of a curve, as far apart as can be, the first and the last among them."""
    last = len(curve) - 1
    return [curve[round(place * last / (POINTS - 1))] for place in range(POINTS)] if last >= POINTS else curve


def publish(name: str, figures: dict, seeds: list[int], output: Path, seconds: float | None = None) -> None:
    """Write figures into a folder as `<name>.json`, the page out of that file, and the README of all pages; print it.

    Args:
        name: of the benchmark's script and files; `PAGES` says where its page stands in the README.
        figures: what the page needs, no more, for JSON; runs are those that are `kept`.
        seeds: what the random numbers came from.
        output: the folder.
        seconds: what the runs took; None for the time since this process began.
    """
    seconds = time.monotonic() - _START if seconds is None else seconds
    made = {"name": name, **conditions(seeds), "minutes": round(seconds / 60, 1), "figures": figures}
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(lines_of(rounded(made)) + "\n")
    print(write(name, output))
    if output == RESULTS:
        README.write_text(readme())


def rounded(value):
    """The same with all floats at `DIGITS` digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def lines_of(value, begin: str = "") -> str:
    """JSON in lines of at most `WIDTH` characters, if no string is longer: a run takes one, or fills a few.

    Args:
        value: for JSON.
        begin: what stands before it on its first line.
    """
    line = begin + json.dumps(value)
    if len(line) < WIDTH or not isinstance(value, (dict, list)):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 1)
    starts = (
        [f"{indent}{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else [indent] * len(value)
    )
    entries = value.values() if isinstance(value, dict) else value
    innermost, lines = "{" not in line[len(begin) + 1 :], []
    for start, entry in zip(starts, entries):
        more = lines_of(entry, start)
        if innermost and lines and len(lines[-1].rpartition("\n")[2]) + len(more) < WIDTH:
            lines[-1] += ", " + more.lstrip()
        else:
            lines.append(more)
    opening, closing = begin + line[len(begin)], indent[1:] + line[-1]
    return "\n".join([opening, ",\n".join(lines), closing])


def read(name: str, folder: Path = RESULTS) -> tuple[Page, dict]:
    """The page that a benchmark's script makes of the figures in a folder, and all that the file says."""
    made = json.loads((folder / f"{name}.json").read_text())
    return importlib.import_module(name).page_of(made["figures"]), made


def markdown(page: Page, made: dict) -> str:
    """The text of a page."""
    picture = f"![{page.title}]({made['name']}.png)"
    parts = [f"# {page.title}", page.claim, page.summary, page.text.strip(), _how(made), picture]
    return "\n\n".join(parts) + "\n"


def write(name: str, folder: Path = RESULTS) -> str:
    """Write a page and its picture, out of its figures; the text is returned."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    page, made = read(name, folder)
    text = markdown(page, made)
    (folder / f"{name}.md").write_text(text)
    picture = page.draw(plt)
    picture.savefig(folder / f"{name}.png", dpi=110)
    plt.close(picture)
    return text


def readme() -> str:
    """The README of all benchmarks, out of their figures."""
    written = {name: read(name) for name in PAGES if (RESULTS / f"{name}.json").exists()}
    reaches = [[r.aim, r.measured, r.verdict] for page, _ in written.values() for r in page.reaches]
    parts = [INTRODUCTION, table(["aim", "measured", "verdict"], reaches)]
    for name, (page, made) in written.items():
        links = f"[All tables](results/{name}.md), [figures](results/{name}.json)."
        picture = f"![{page.title}](results/{name}.png)"
        parts += [f"## {page.title}", page.claim, page.summary, f"{_how(made)} {links}", picture]
    return "\n\n".join(parts) + "\n"


def _how(made: dict) -> str:
    machine, versions = made["machine"], made["versions"]
    earlier = f" It precedes {EARLIER}" if made["date"] < SHORTER_SEARCH else ""
    return (
        f"`{made['command']}`, {made['minutes']} minutes, {made['date']}, seeds {', '.join(map(str, made['seeds']))}, "
        f"{', '.join(f'{package} {version}' for package, version in versions.items())}; "
        f"{machine['processor']}, {machine['cores']} cores, threads used: {machine['threads']}.{earlier}"
    )


def _command() -> str:
    """The command line, without the folders of this machine."""
    threads = os.environ.get("OMP_NUM_THREADS")
    named = [word.rpartition("=") for word in sys.argv[1:]]
    arguments = [f"{n}{e}path/to/{Path(p).name}" if Path(p).is_absolute() else n + e + p for n, e, p in named]
    command = ["python", f"scripts/bench/{Path(sys.argv[0]).name}", *arguments]
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + shlex.join(command)


def _processor() -> str:
    """What /proc calls the processor, or what Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    for each in PAGES:
        write(each)
    README.write_text(readme())
