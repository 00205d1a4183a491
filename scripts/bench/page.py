"""The pages of benchmarks: Markdown, a picture and figures as JSON for each; README.md beside this sums them up."""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers

import hf_growattn

RESULTS = Path(__file__).parent / "results"


def table(head: Iterable[str], rows: Iterable[Iterable]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def spread(values: list[float], digits: int = 3) -> str:
    """Median and range; the value alone where there is one, or all are equal. Whole numbers have no digits."""
    if not values:
        return ""
    if all(float(value).is_integer() for value in values):
        digits = 0
    middle, *ends = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


def finite(value):
    """The same with None for numbers that JSON has not: those of a diverged run."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Page:
    """What a benchmark has to say.

    Attributes:
        title: of the page.
        claim: what the figures show, in a sentence or two, with what speaks against growth.
        summary: the table that the README shows, in Markdown.
        text: what was measured and how, with all other tables, in Markdown.
        draw: is given matplotlib's pyplot and returns the picture.
    """

    title: str
    claim: str
    summary: str
    text: str
    draw: Callable


def publish(name: str, page: Page, figures: dict, seeds: list[int], output: Path, seconds: float) -> None:
    """Write `<name>.md`, `.png` and `.json` into a folder, and the README if that is its folder; print the page.

    Args:
        name: of the benchmark's script; `PAGES` says where its page stands in the README.
        page: what is written.
        figures: what the page was made of, for JSON; a list is written a line for each entry.
        seeds: what the random numbers came from.
        output: the folder.
        seconds: what the runs took.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    output.mkdir(parents=True, exist_ok=True)
    made = {"name": name, **conditions(seeds), "minutes": round(seconds / 60, 1), "figures": figures}
    (output / f"{name}.json").write_text(lines_of(made) + "\n")
    text = markdown(name, page, made)
    (output / f"{name}.md").write_text(text)
    picture = page.draw(plt)
    picture.savefig(output / f"{name}.png", dpi=110)
    plt.close(picture)
    print(text)


def markdown(name: str, page: Page, made: dict) -> str:
    """The text of a page."""
    parts = [f"# {page.title}", page.claim, page.summary, page.text.strip()]
    return "\n\n".join([*parts, _how_made(made), f"![{page.title}]({name}.png)"]) + "\n"


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


def lines_of(value, indent: str = "") -> str:
    """JSON with a line for each figure, and for each entry of a list of runs."""
    inner = indent + " "
    if isinstance(value, dict) and any(isinstance(one, (dict, list)) for one in value.values()):
        lines = [f"{inner}{json.dumps(str(key))}: {lines_of(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + indent + "}"
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        lines = [inner + json.dumps(one, allow_nan=False) for one in value]
        return "[\n" + ",\n".join(lines) + "\n" + indent + "]"
    return json.dumps(value, allow_nan=False)


def _how_made(made: dict) -> str:
    machine, versions = made["machine"], made["versions"]
    return (
        f"`{made['command']}`, {made['minutes']} minutes, {made['date']}, seeds {', '.join(map(str, made['seeds']))}, "
        f"{', '.join(f'{package} {version}' for package, version in versions.items())}; "
        f"{machine['processor']}, {machine['cores']} cores, threads used: {machine['threads']}."
    )


def _command() -> str:
    """The command line, without the folders of this machine."""
    threads = os.environ.get("OMP_NUM_THREADS")
    words = [f"path/to/{Path(word).name}" if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = ["python", f"scripts/bench/{Path(sys.argv[0]).name}", *words]
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + shlex.join(command)


def _processor() -> str:
    """What /proc calls the processor, or what Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that most pages have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="tiny, and with one seed: shows that it runs")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; with `--quick` one seed."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = arguments.seeds[:1]
    return arguments
