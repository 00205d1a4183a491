"""The command line `growattn`: measure a model on text, race, write a model for others.

The docstrings of the commands are their help. Each imports what it needs itself, so that help is shown at once.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__

FAILED, USAGE_ERROR, NOTHING, INTERRUPTED = 1, 2, 3, 130
_EXPECTED = (ValueError, OSError, ImportError)  # errors whose message names the fix

app = typer.Typer(
    help="Find out whether the attention of a language model is too narrow for your data, and widen it there.",
    epilog="Exit codes: 0 done; 1 failed, the message says why; 2 wrong usage; 3 no growth helps, or LoRA won; 130 "
    "interrupted, nothing is half-written.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Model = Annotated[
    str, typer.Argument(help="A folder or a Hub id of a stock or grown model; it is never changed.", show_default=False)
]
_Data = Annotated[
    list[str],
    typer.Argument(
        help="Text, chats, or prompts with completions: .txt, .jsonl, .csv or .parquet files, a folder, or the Hub id "
        "of a data set. A text file is cut into blocks of --max-length tokens.",
        show_default=False,
    ),
]
_Output = Annotated[str, typer.Option("-o", "--output", help="New folder to write.", show_default=False)]
_Budget = Annotated[float, typer.Option(help="The most weights to add, as a share of the model's or as a number.")]
_GrowthBatches = Annotated[int, typer.Option(min=2, help="How many training batches a growth reads.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
_Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]
_MaxLength = Annotated[
    int | None,
    typer.Option(help="Tokens of a row at most (default: 1024, or what the model reads at once).", show_default=False),
]
_BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a batch.")]
_Subset = Annotated[str | None, typer.Option(help="Subset of a data set of the Hub.", show_default=False)]
_Split = Annotated[str, typer.Option(help="Split to train on; a split called test is held out.")]
_TextField = Annotated[str, typer.Option(help="The column of plain text.")]
_Dtype = Annotated[str, typer.Option(help="Precision of the weights, such as bfloat16, or auto for the saved one.")]
_LoadIn4bit = Annotated[bool, typer.Option("--load-in-4bit", help="Quantize the model by bitsandbytes.")]


@contextlib.contextmanager
def _reporting(as_json: bool, debug: bool) -> Iterator[Any]:
    """Give a function that prints what a command found and ends it; errors that name their fix become one line."""
    results = sys.stdout

    def report(figures: dict, text: str, code: int = 0) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(figures, indent=1) if as_json else text, file=results, flush=True)
        raise typer.Exit(code)

    try:
        with contextlib.redirect_stdout(sys.stderr):  # where progress and logs belong
            yield report
    except KeyboardInterrupt as interrupt:
        _fail(INTERRUPTED, f"Interrupted: {str(interrupt) or 'nothing was written.'}")
    except _EXPECTED as error:
        if debug:
            raise
        _fail(FAILED, f"Error: {' '.join(str(error).split())}")


def _fail(code: int, message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    raise typer.Exit(code)


def _check_new_folder(folder: str) -> None:
    path = Path(folder)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        _fail(USAGE_ERROR, f"Usage error: {path} exists and is not empty; name a new folder.")


def _as_budget(number: float) -> int | float:
    """A share of the weights, or their number."""
    return int(number) if number >= 1 and number % 1 == 0 else number


def _check_trl() -> None:
    if find_spec("trl") is None:
        raise ImportError("TRL reads the data: pip install 'trl>=1.14' datasets.")


@app.callback(invoke_without_command=True)
def show_version(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Show the version if it is asked for."""
    if version:
        print(f"growattn {__version__}")
        raise typer.Exit()


@app.command()
def measure(
    model: _Model,
    data: _Data,
    budget: _Budget = 0.02,
    growth_batches: _GrowthBatches = 16,
    max_length: _MaxLength = None,
    batch_size: _BatchSize = 8,
    subset: _Subset = None,
    split: _Split = "train",
    text_field: _TextField = "text",
    dtype: _Dtype = "auto",
    load_in_4bit: _LoadIn4bit = False,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Measure where width holds the model back on your data.

    A growth is tried out, then taken back. Nothing is changed or written. This does not compare growth with LoRA: race
    does.
    """
    with _reporting(as_json, debug) as report_result:
        _check_trl()
        from ..report.words import report_text
        from .data import TextData
        from .measuring import prepare_growth

        rows = TextData(model, data, max_length, batch_size, subset, split, text_field)
        grower, batches = prepare_growth(rows, _as_budget(budget), growth_batches, dtype, load_in_4bit)
        report = grower.measure(batches)
        report_result(report.to_dict(), report_text(report, model, data), 0 if report.holds else NOTHING)


@app.command()
def race(
    model: _Model,
    data: _Data,
    output: _Output,
    budget: _Budget = 0.02,
    steps: Annotated[int, typer.Option(min=4, help="Steps of a training; a quarter to try a learning rate.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of LoRA and of the better of growth and mix.")] = 2,
    growth_batches: _GrowthBatches = 16,
    max_length: _MaxLength = None,
    batch_size: _BatchSize = 8,
    subset: _Subset = None,
    split: _Split = "train",
    text_field: _TextField = "text",
    dtype: _Dtype = "float32",
    load_in_4bit: _LoadIn4bit = False,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Race LoRA against wider heads on your text; for other data and losses, use hf_growattn.race in Python.

    Three ways to train are compared in short trainings: LoRA on all linear layers, growth, and a mix of 1/3 growth and
    2/3 LoRA. Each trains the same number of weights on the same batches, with the best of a few learning rates. Growth
    or the mix wins if it leads by more than 0.01 nats a token and by more than two standard errors; otherwise LoRA
    does, which costs nothing at inference. Each training is kept in the output folder as it ends, so the same command
    continues after an interruption.
    """
    with _reporting(as_json, debug) as report_result:
        if not Path(output, "race.jsonl").exists():
            _check_new_folder(output)
        _check_trl()
        from ..report.comparison import TITLES
        from .data import TextData
        from .measuring import race_on_text

        rows = TextData(model, data, max_length, batch_size, subset, split, text_field)
        options = {"budget": _as_budget(budget), "growth_batches": growth_batches, "output": output}
        result, code = race_on_text(rows, dtype, load_in_4bit, steps, seeds, **options)
        text = f"{result}\nTo train by the winner, {TITLES[result.winner]}:\n\n{code}"
        report_result(result.figures(), text, NOTHING if result.winner == "lora" else 0)


@app.command()
def export(
    folder: Annotated[str, typer.Argument(help="A grown checkpoint.", show_default=False)],
    output: _Output,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Write a grown model as an ordinary one, which needs no hf_growattn.

    All heads become as wide as the widest, rounded up to a multiple of 8. When transformers
    loads the model, it may warn about original_max_position_embeddings: that is expected and harmless. To push it:
    hf upload you/your-model DIR.
    """
    with _reporting(as_json, debug) as report_result:
        _check_new_folder(output)
        from transformers import logging

        from ..growable.models import GrowableModelMixin
        from ..interop.checkpoints import load_model, load_tokenizer
        from ..interop.export import export_model

        logging.set_verbosity_error()  # it would repeat what the checkpoint's own config says at each load
        model: Any = load_model(folder)
        if not isinstance(model, GrowableModelMixin):
            raise ValueError(
                f"{folder} holds a stock {model.config.model_type} model, which did not grow and needs no export."
            )
        has_tokenizer = Path(folder, "tokenizer_config.json").exists()
        report = export_model(model, output, load_tokenizer(folder) if has_tokenizer else None)
        report_result(asdict(report) | {"path": str(report.path)}, str(report))


def main() -> None:
    """Run the command line of this process, and exit."""
    app(prog_name="growattn")
