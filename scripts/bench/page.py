"""The page of a benchmark: its figures as JSON, its tables as Markdown, its picture as PNG, and how they were made."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
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


def write(output: Path, name: str, title: str, text: str, figures: dict, seeds: list[int], draw: Callable) -> None:
    """Print the page and write `<name>.json`, `.md` and `.png` into a folder.

    Args:
        output: the folder.
        name: of the files.
        title: of the page.
        text: what was measured, with the tables, in Markdown.
        figures: everything that was measured, for JSON.
        seeds: what the random numbers came from.
        draw: is given matplotlib's pyplot and returns the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = conditions(seeds)
    machine, versions = made["machine"], made["versions"]
    how = (
        f"`{made['command']}`, {made['date']}, seeds {', '.join(map(str, seeds))}, "
        f"{', '.join(f'{package} {version}' for package, version in versions.items())}; "
        f"{machine['processor']}, {machine['cores']} cores, threads used: {machine['threads']}."
    )
    page = f"# {title}\n\n{how}\n\n{text.strip()}\n\n![{title}]({name}.png)\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps(made | {"figures": figures}, indent=1) + "\n")
    (output / f"{name}.md").write_text(page)
    figure = draw(plt)
    figure.savefig(output / f"{name}.png", dpi=110)
    plt.close(figure)
    print(page)


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
