"""The command line `growattn`: measure a model on data, race, write a model for others.

The docstrings of the `run_` functions are the help of their commands. Each imports what it needs itself, so that help
is shown without torch.
"""

import argparse
import contextlib
import json
import os
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


def run_measure(recipe: Any) -> Result:
    """Measure where width holds the model back on your data.

    A growth is tried on the loss of the model, then taken back. Nothing is changed or written. This does not compare
    growth with LoRA: race does.
    """
    from ..report.words import report_text, wrap_line
    from .measuring import prepare_growth

    grower, batches = prepare_growth(recipe)
    report = grower.measure(batches)
    about = wrap_line("Any new weights may lower the loss that far: growattn race shows whether width beats LoRA.")
    text = f"{about}\n{report_text(report, recipe.model_name, recipe.datasets)}"
    return Result(report.to_dict(), text, 0 if report.holds else NOTHING)


def run_race(recipe: Any) -> Result:
    """Race LoRA against wider heads on your text; for other data and losses, use hf_growattn.race in Python.

    LoRA on all linear layers, growth, and a third of growth with LoRA train for a short while: the same number of
    weights on the same batches, each with the best of a few learning rates. Growth or the mix wins if it leads by more
    than 0.01 nats a token and by more than two standard errors; otherwise LoRA does, which costs nothing at inference.
    The output keeps every run as it ends, so the same command continues after an interruption.
    """
    output = recipe.training.output_dir
    if not Path(output, "race.jsonl").exists():
        check_new_folder(output)
    from ..report.comparison import TITLES
    from .measuring import race_recipe, training_code

    result = race_recipe(recipe)
    code = training_code(result, recipe)
    text = f"{result}\nTo train by the winner, {TITLES[result.winner]}:\n\n{code}"
    return Result(result.figures(), text, NOTHING if result.winner == "lora" else 0)


def run_export(options: argparse.Namespace) -> Result:
    """Write a grown model as an ordinary one, which needs no hf_growattn.

    All heads become as wide as the widest, rounded up to a multiple of 8. To push the ordinary model: hf upload
    you/your-model DIR.
    """
    check_new_folder(options.output)
    from transformers import logging

    from ..growable.models import GrowableModelMixin
    from ..interop.checkpoints import load_model, load_tokenizer
    from ..interop.export import export_model

    logging.set_verbosity_error()  # it would repeat what the checkpoint's own config says at each load
    model: Any = load_model(options.folder)
    if not isinstance(model, GrowableModelMixin):
        raise ValueError(
            f"{options.folder} holds a stock {model.config.model_type} model, which did not grow and needs no export."
        )
    has_tokenizer = Path(options.folder, "tokenizer_config.json").exists()
    report = export_model(model, options.output, load_tokenizer(options.folder) if has_tokenizer else None)
    return Result(asdict(report) | {"path": str(report.path)}, str(report))


COMMANDS: dict[str, Callable[[Any], Result]] = {
    "measure": run_measure,
    "race": run_race,
    "export": run_export,
}
