"""The page of a benchmark: its figures as JSON, its tables as Markdown, its picture as PNG, and how they were made."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers

import hf_growattn

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
INTRODUCTION = """# Evidence

Every section was written by the script that it names, out of the figures beside it; so was this page. Each script has
`--help`, and `--quick`, which shows in a minute or two that it runs and nothing else. Spreads are ranges over the seeds
unless said otherwise.
"""
# One line for each page, in the order of the README.
PAGES = (
    "nearest_neighbour",
    "finetuning",
    "recall",
    "instrument",
    "in_context_regression",
    "growing_up",
    "overhead",
    "probe_cost",
    "training_cost",
    "estimators",
    "allocation",
    "balance",
    "scale",
)

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
        verdict: "reached", "missed" or "undecided".
    """

    aim: str
    measured: str
    verdict: str


@dataclass
class Page:
    """What a benchmark has to say.

    Attributes:
        name: of the files; `PAGES` says where the page stands in the README.
        title: of the page.
        claim: what the figures show, in a sentence or two, with what speaks against growth.
        summary: the table that the README shows, in Markdown.
        text: what was measured and how, with all other tables, in Markdown.
        figures: everything that was measured, for JSON.
        seeds: what the random numbers came from.
        seconds: what the runs took; None for the time since this process began.
        reaches: what was aimed at.
    """

    name: str
    title: str
    claim: str
    summary: str
    text: str
    figures: dict
    seeds: list[int]
    seconds: float | None = None
    reaches: list[Reach] = field(default_factory=list)

    def write(self, output: Path, draw: Callable) -> None:
        """Print the page and write `<name>.json`, `.md` and `.png` into a folder, and the README of all pages.

        Args:
            output: the folder.
            draw: is given matplotlib's pyplot and returns the figure.
        """
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        seconds = time.monotonic() - _START if self.seconds is None else self.seconds
        made = conditions(self.seeds) | {"minutes": round(seconds / 60, 1)}
        page = "\n\n".join([f"# {self.title}", self.claim, self.summary, self.text.strip(), _how(made)])
        output.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in asdict(self).items() if key not in ("text", "seeds", "seconds")}
        (output / f"{self.name}.json").write_text(json.dumps(made | kept, indent=1) + "\n")
        (output / f"{self.name}.md").write_text(f"{page}\n\n![{self.title}]({self.name}.png)\n")
        figure = draw(plt)
        figure.savefig(output / f"{self.name}.png", dpi=110)
        plt.close(figure)
        print(page)
        if output == RESULTS:
            README.write_text(readme())


def readme() -> str:
    """The README of all benchmarks, from what they left in the folder of results."""
    written = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in PAGES if _is_there(name)}
    reaches = [[r["aim"], r["measured"], r["verdict"]] for made in written.values() for r in made["reaches"]]
    parts = [INTRODUCTION, table(["aim", "measured", "verdict"], reaches)]
    for name, made in written.items():
        links = f"[All tables](results/{name}.md), [figures](results/{name}.json)."
        picture = f"![{made['title']}](results/{name}.png)"
        parts += [f"## {made['title']}", made["claim"], made["summary"], f"{_how(made)} {links}", picture]
    return "\n\n".join(parts) + "\n"


def _is_there(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def _how(made: dict) -> str:
    machine, versions = made["machine"], made["versions"]
    return (
        f"`{made['command']}`, {made['minutes']} minutes, {made['date']}, seeds {', '.join(map(str, made['seeds']))}, "
        f"{', '.join(f'{package} {version}' for package, version in versions.items())}; "
        f"{machine['processor']}, {machine['cores']} cores, threads used: {machine['threads']}."
    )


def _command() -> str:
    """The command line, without the folders of this machine."""
    threads = os.environ.get("OMP_NUM_THREADS")
    arguments = [f"path/to/{Path(word).name}" if Path(word).is_absolute() else word for word in sys.argv[1:]]
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
    README.write_text(readme())
