"""The command line `growattn`: look at a model, measure it on data, train it, write it for others.

The docstrings of the `run_` functions are the help of their commands. Each imports what it needs itself, so that help
is shown without torch.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from .options import UsageError, check_new_folder, read_command

FAILED, USAGE_ERROR, NOTHING, INTERRUPTED = 1, 2, 3, 130
_EXPECTED = (ValueError, OSError, ImportError)  # errors whose message names the fix


class Result(NamedTuple):
    """What a command found out: for --json, for people, and its exit code."""

    figures: dict
    text: str
    code: int = 0


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process; returns its exit code."""
    words = sys.argv[1:] if words is None else words
    as_json, debug = "--json" in words, "--debug" in words
    words = [word for word in words if word not in ("--json", "--debug")]
    try:
        options = read_command(words, {name: str(run.__doc__) for name, run in COMMANDS.items()})
        with contextlib.redirect_stdout(sys.stderr):  # where progress and logs belong
            result = COMMANDS[words[0]](options)
    except UsageError as error:
        return _fail(USAGE_ERROR, f"Usage error: {error} See --help.")
    except KeyboardInterrupt as interrupt:
        return _fail(INTERRUPTED, f"Interrupted: {str(interrupt) or 'nothing was written.'}")
    except Exception as error:
        if debug or not isinstance(error, _EXPECTED):
            raise
        return _fail(FAILED, f"Error: {' '.join(str(error).split())}")
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result.figures, indent=1) if as_json else result.text, flush=True)
    return result.code


def _fail(code: int, message: str) -> int:
    print(message, file=sys.stderr, flush=True)
    return code


def _format_next(command: str, recipe: Any, *more: str) -> str:
    """A command to call next, with those of the given options that it takes, too."""
    dropped = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    dropped.add_argument("-o", "--output", "--output_dir", "--output-dir")
    for option in ("--steps", "--seeds", "--qk_dims", "--v_dims"):
        dropped.add_argument(option, option.replace("_", "-"))
    _, options = dropped.parse_known_args(recipe.words)
    return shlex.join(["growattn", command, recipe.model_name, *recipe.datasets, "-o", "DIR", *options, *more])


def run_inspect(options: argparse.Namespace) -> Result:
    """Show how wide the heads are, and how much of that they use.

    The effective rank counts the directions that a head uses; it is at most the width.
    """
    from ..growable.models import patch_model
    from ..interop.checkpoints import load_model
    from .inspection import format_inspection, inspect_model

    model: Any = patch_model(load_model(options.model))
    figures = inspect_model(model)
    text = format_inspection(figures)
    return Result(figures, f"{text}Does that hold the model back on your data? growattn measure {options.model} DATA")


def run_measure(recipe: Any) -> Result:
    """Measure where width holds the model back on your data.

    A growth is tried on the loss that finetune would train, then taken back. Nothing is changed or written. This does
    not compare growth with LoRA: race does.
    """
    from ..report.words import report_text, wrap_line
    from ..training.finetuning import prepare_growth

    grower, batches = prepare_growth(recipe)
    report = grower.measure(batches)
    race = _format_next("race", recipe)
    about = wrap_line("Any new weights may lower the loss as much: growattn race tells whether width beats LoRA.")
    return Result(report.to_dict(), f"{about}\n{report_text(report, race)}", 0 if report.holds else NOTHING)


def run_race(recipe: Any) -> Result:
    """Find out whether growth beats LoRA on your data.

    LoRA on all linear layers, growth, and a third of growth with LoRA train for a short while: the same number of
    weights on the same rows, each with the best of a few learning rates. Growth wins if it leads by more than 0.01 nats
    a token and by more than two standard errors; otherwise LoRA does, which costs nothing at inference. The output
    keeps every run as it ends, so the same command continues after an interruption.
    """
    output = recipe.training.output_dir
    if not Path(output, "race.jsonl").exists():
        check_new_folder(output)
    from ..training.finetuning import race_recipe
    from ..training.methods import METHODS

    race = race_recipe(recipe)
    method = ["--method", race.winner, "--learning_rate", f"{race.rates[race.winner]:.2g}"]
    text = f"{race}\nTrain by the winner, {METHODS[race.winner].title}: {_format_next('finetune', recipe, *method)}"
    return Result(race.figures(), text, NOTHING if race.winner == "lora" else 0)


def run_finetune(recipe: Any) -> Result:
    """Train with TRL's SFTTrainer, and grow on the way.

    By default all weights train, and attention grows once, half-way. --method trains something else. A tenth of the
    data is held out unless they have a test split. For several devices: torchrun --nproc_per_node 2 -m hf_growattn
    finetune ...
    """
    if not recipe.training.resume_from_checkpoint:
        check_new_folder(recipe.training.output_dir)
    from ..training.finetuning import finetune

    try:
        figures = finetune(recipe)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("--resume_from_checkpoint True continues from the last checkpoint.") from None
    return Result(figures, figures["summary"])


def run_export(options: argparse.Namespace) -> Result:
    """Write a grown model as an ordinary one, which needs no hf_growattn.

    All heads become as wide as the widest, rounded up to a multiple of 8. To push the ordinary model: hf upload
    you/your-model DIR.
    """
    check_new_folder(options.output)
    from transformers import logging

    from ..interop.checkpoints import load_grown
    from ..interop.export import export_model

    logging.set_verbosity_error()  # it would repeat what the checkpoint's own config says at each load
    model, tokenizer = load_grown(Path(options.folder))
    report = export_model(model, options.output, tokenizer)
    return Result(asdict(report) | {"path": str(report.path)}, str(report))


def run_push(options: argparse.Namespace) -> Result:
    """Push a grown model with its card to the Hub, in one commit.

    The card is the README.md in the folder, which finetune writes. You may edit it first. The push replaces
    you/your-model in it with the name of the repository. --dry-run writes the files and the card into a folder instead.
    """
    from huggingface_hub.utils import validate_repo_id

    from ..growable.folders import replacing
    from ..interop.cards import complete_card
    from ..interop.checkpoints import publish, write_publication

    checkpoint, repo, folder = Path(options.folder), options.repo, options.dry_run
    if repo.count("/") != 1:
        raise UsageError(f"{repo} is no name on the Hub: give the owner and the model, as in you/your-model.")
    validate_repo_id(repo)
    if not folder:
        url = publish(checkpoint, repo, options.private)
        return Result({"repo": repo, "commit": url}, f"Pushed: {url}")
    check_new_folder(folder)
    with replacing(Path(folder).resolve()) as partial:
        complete_card(write_publication(checkpoint, partial), partial, repo)
    return Result({"repo": repo, "folder": folder}, f"{folder} holds what would be pushed to {repo}.")


COMMANDS: dict[str, Callable[[Any], Result]] = {
    "inspect": run_inspect,
    "measure": run_measure,
    "race": run_race,
    "finetune": run_finetune,
    "export": run_export,
    "push": run_push,
}
