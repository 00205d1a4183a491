"""The arguments and options that commands share, each with its help and its check."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


def budget_of(text: str) -> int | float:
    """A budget as people write it: 1%, 0.01 or 20000."""
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; write 1%, 0.01 or 20000.") from None
    share = text.endswith("%") or value < 1
    inside = 0 < value < 1 if share else value.is_integer()
    if not inside:
        raise typer.BadParameter(
            f"{text!r} is out of range; write a share of the model's weights between 0 and 1, such as 1% or 0.01, or a "
            "whole number of weights, such as 20000."
        )
    return value if share else int(value)


def new_folder(folder: Path | None) -> Path | None:
    """A folder to write, which must hold nothing yet."""
    if folder is None:
        return None
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise typer.BadParameter(f"{folder} is there already, and not empty; name a new folder.")
    return folder


def _repo_id(repo_id: str) -> str:
    """A repository of the Hub, with its owner."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise typer.BadParameter(str(error)) from None
    if "/" not in repo_id:
        raise typer.BadParameter(f"The card tells how to load the model: say whose it is, as in you/{repo_id}.")
    return repo_id


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hub id of the model.", show_default=False)]
Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help="Your text: .txt, .jsonl, a folder of .txt, or a Hub id.", show_default=False),
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A grown model, as `growattn grow` left it.", show_default=False)
]
Repo = Annotated[
    str, typer.Argument(metavar="REPO", callback=_repo_id, help="Where it goes on the Hub: you/your-model.")
]
Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="DIR", callback=new_folder, help="New folder to write.", show_default=False),
]
Budget = Annotated[
    float,
    typer.Option(
        parser=budget_of, metavar="WEIGHTS", help="Weights to add at most: a share (1%, 0.01) or a number (20000)."
    ),
]
Batches = Annotated[int, typer.Option(min=2, help="Batches of the text to measure on; more are surer and slower.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a batch; fewer need less memory.")]
BlockSize = Annotated[int, typer.Option(min=2, help="Tokens in a row.")]
Seed = Annotated[int, typer.Option(help="Which part of the text is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Form = Annotated[
    Literal["native", "stock"],
    typer.Option(help="native: as it grew. stock: an ordinary model, which needs no hf_growattn."),
]
Base = Annotated[str | None, typer.Option(metavar="ID", help="Hub id of the model that grew, if it is not known.")]
