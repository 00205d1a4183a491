"""The command line `growattn`: look at a model, measure it on a text, grow it, train it, write it for others.

Commands import what they need themselves, so that help and completion are there without torch.
"""

import contextlib
import json
import os
import shlex
import sys
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from tqdm.auto import tqdm
from typer.core import TyperCommand, TyperGroup

from ..training.arguments import RaceArguments, untaken
from .options import (
    EVALUATE_HELP,
    EXIT_CODES,
    FINETUNE_HELP,
    GROW_HELP,
    HELP,
    MEASURE_HELP,
    RACE_HELP,
    Base,
    Checkpoint,
    Form,
    Json,
    Model,
    Output,
    Repo,
    new_folder,
)

FAILED, NOTHING, INTERRUPTED = 1, 3, 130  # wrong usage is 2, by typer
_TOLD = (ValueError, OSError, ImportError)  # whose messages say what to do


class _Commands(TyperGroup):
    """Tells errors in one line, and gives every ending its exit code."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            _say(f"Interrupted: {str(interrupt) or 'nothing was written.'}")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if ctx.params.get("debug") or type(error).__module__.startswith(("typer", "click")):
                raise
            told = " ".join(str(error).split())
            if not isinstance(error, _TOLD):
                told = f"{type(error).__name__}: {told} (growattn --debug shows where)"
            _say(f"Error: {told}")
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    cls=_Commands,
    help=HELP,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as Trainer's options may be spelt
    },
)


def _say(text: str) -> None:
    """Tell people; standard output is for results."""
    typer.echo(text, err=True)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"growattn {sys.modules['hf_growattn'].__version__}")
        raise typer.Exit()


@app.callback()
def _every_command(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if not sys.stderr.isatty():
        for library in ("HUB", "DATASETS"):  # transformers goes by the Hub's
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")


def _print_json(figures: dict) -> None:
    typer.echo(json.dumps(figures, indent=1))


def _print_table(table) -> None:
    """Print a table on standard output, as wide as the terminal; whole where there is none."""
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


@app.command(epilog=EXIT_CODES)
def inspect(model: Model, as_json: Json = False) -> None:
    """Show how wide a model's heads are, and how much of that they use.

    The effective rank counts the directions that a head really uses; it is at most the width. A head that uses nearly
    all of it is called full.
    """
    from ..interop.checkpoints import load_growable
    from .inspection import FULL, costs_table, inspected, table_of

    loaded = load_growable(model)
    layers = getattr(loaded.config, "num_hidden_layers", None)
    with tqdm(total=layers, desc="inspecting", unit="layer", leave=False, disable=None) as bar:
        figures = inspected(loaded, bar.update)
    if as_json:
        return _print_json(figures)
    _print_table(table_of(figures))
    if figures["grown"]:
        _print_table(costs_table(figures["costs"]))
    state = "grown" if figures["grown"] else "stock widths"
    typer.echo(
        f"{figures['class']} ({state}): {figures['parameters']:,} parameters, {len(figures['layers'])} layers, hidden "
        f"size {figures['hidden_size']}.\n"
        "Patterns are queries and keys, which tokens attend to which; messages are values, what they pass on. Full: "
        f"{FULL:.0%} of the width is in use.\n"
        f"Whether that holds the model back on a text: growattn measure {model} DATA"
    )


class _Handed(TyperCommand):
    """Takes all words as they are, for the parser of recipes; help alone is its own."""

    def collect_usage_pieces(self, ctx):
        return ["MODEL... [OPTIONS]" if self.name == "evaluate" else "MODEL DATA [OPTIONS]"]


def _handed(name: str, help: str, short_help: str):
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    return app.command(
        name, cls=_Handed, help=help, short_help=short_help, epilog=EXIT_CODES, context_settings=settings
    )


def _read(ctx: typer.Context, writes: bool = False, needs_data: bool = True, resumes: str | None = None):
    """The recipe that a command line tells, and whether to print JSON; a folder with a file that resumes may exist."""
    if find_spec("trl") is None:
        raise ImportError("Data are read by TRL: pip install 'hf_growattn[finetune]', or trl.")
    from ..training.recipe import read

    if names := untaken(ctx.info_name or "", ctx.args):
        raise typer.BadParameter(f"growattn {ctx.info_name} does not take {', '.join(names)}: leave that out.")
    words = ["--help" if word in ("--help_all", "--help-all") else word for word in ctx.args if word != "--json"]
    recipe = read(words, f"growattn {ctx.info_name} [names] [options]; growattn {ctx.info_name} --help explains them")
    if not recipe.name or (needs_data and not (recipe.dataset or recipe.models[1:])):
        raise typer.BadParameter("name MODEL and DATA first, and all options after them; or a recipe, by --config")
    if writes and not recipe.training.output_dir:
        raise typer.BadParameter("name the folder to write: --output DIR")
    output = Path(recipe.training.output_dir)
    if writes and not recipe.training.resume_from_checkpoint and not (resumes and (output / resumes).exists()):
        new_folder(output)
    return recipe, "--json" in ctx.args


def _next(command: str, recipe, ctx: typer.Context, model: str | Path, raced: bool = False) -> str:
    """What to call next, with the same options where that command takes them; a race's are dropped if it is over."""
    options, dropped, left = [], False, {"-o", "--output", "--output_dir", "--json"}
    if raced:
        left |= {f"--{option.name}" for option in fields(RaceArguments)}
    for word in ctx.args[len(recipe.models) :]:  # an option, or a value of the one before it
        if word.startswith("--") or word == "-o":
            dropped = word in left or bool(untaken(command, [word]))
        if not dropped:
            options.append(word)
    return shlex.join(["growattn", command, str(model), *recipe.models[1:], "-o", "DIR", *options])


def _ready(recipe):
    """Load what is measured: a Grower of the model, batches of the data on the model's device, and its tokenizer."""
    from ..grow.growth import Grower
    from ..grow.plan import check_budget
    from ..growable.models import attentions
    from ..training.data import check_tokens, drawn
    from ..training.finetuning import load, read_all
    from ..training.sft import make_sft_loss

    try:
        growth_config = recipe.growth_config(default="1%")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    data, config, tokenizer = read_all(recipe)
    batches, ids = drawn(data, tokenizer, recipe.training, recipe.growth.growth_batches)
    check_tokens(ids, config)
    model, device = load(recipe, dtype="auto"), recipe.training.device
    check_budget(growth_config, attentions(model), model.num_parameters())
    _say(f"Measuring on {len(ids)} rows of at most {recipe.training.max_length} tokens, on {device}.")
    grower = Grower(model, growth_config)  # which says so if the weights are quantized
    grower.loss = make_sft_loss(model.to(device), tokenizer, recipe.training)
    return grower, batches, tokenizer


@_handed("measure", MEASURE_HELP, "Measure where the width of its heads holds a model back on your data.")
def measure(ctx: typer.Context) -> None:
    """Measure, and say what that means."""
    from ..report.words import report_text
    from .inspection import measured

    recipe, as_json = _read(ctx)
    grower, drawn, _ = _ready(recipe)
    report = grower.measure(drawn)
    if as_json:
        _print_json(measured(report))
    else:
        typer.echo(report_text(report, _next("race", recipe, ctx, recipe.name)))
    raise typer.Exit(0 if report.found else NOTHING)


@_handed("race", RACE_HELP, "Find out whether growth beats LoRA on your data.")
def race(ctx: typer.Context) -> None:
    """Race, and say how to go on with the winner."""
    recipe, as_json = _read(ctx, writes=True, resumes="race.jsonl")
    from ..training.methods import METHODS
    from ..training.race import race_of

    contest = race_of(recipe, say=_say)
    if as_json:
        _print_json(contest.figures())
    else:
        typer.echo(str(contest))
    options = " ".join(f"--{name} {value}" for name, value in contest.options_of(contest.winner).items())
    _say(f"Train by the winner: {_next('finetune', recipe, ctx, recipe.name, raced=True)} {options}")
    for near in {*contest.finalists} - {contest.winner}:
        _say(
            f"{METHODS[near].capital} is near, and may end lower in a longer training. Train both, and keep what ends "
            f"lower: {_next('finetune', recipe, ctx, recipe.name)} --method auto "
            f"--race {shlex.quote(recipe.training.output_dir)}"
        )
    raise typer.Exit(0 if METHODS[contest.winner].growth else NOTHING)


@_handed("grow", GROW_HELP, "Widen a model's heads where that lowers the loss on your data.")
def grow(ctx: typer.Context) -> None:
    """Grow once, and save what grew."""
    from ..growable.folders import replacing
    from ..interop.cards import save_figures
    from ..report.words import report_text
    from ..training.outcome import REPORT, drawable
    from .inspection import measured

    recipe, as_json = _read(ctx, writes=True)
    grower, drawn, tokenizer = _ready(recipe)
    output = Path(recipe.training.output_dir)
    report = grower.grow(drawn)
    if report.applied:
        with replacing(output.resolve()) as folder:
            grower.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            save_figures(folder, [report], model=recipe.name, dataset=recipe.dataset)
            if drawable():
                report.save(folder / REPORT)
    if as_json:
        _print_json(measured(report) | {"output": str(output) if report.applied else None})
    else:
        typer.echo(report_text(report, _next("race", recipe, ctx, recipe.name)))
    if not report.applied:
        raise typer.Exit(NOTHING)
    if not drawable():
        _say(f"There is no {REPORT}, since its pictures need matplotlib: pip install matplotlib.")
    _say(f"Saved in {output}. Load it: import hf_growattn, then AutoModelForCausalLM.from_pretrained({str(output)!r}).")
    _say(f"Train it on: {_next('finetune', recipe, ctx, output)} --max_growths 0")


@_handed("finetune", FINETUNE_HELP, "Train a model on your data: all weights, growth, LoRA, or what a race finds best.")
def finetune(ctx: typer.Context) -> None:
    """Train, and say how to go on where that is interrupted."""
    recipe, as_json = _read(ctx, writes=True)
    from ..training import auto
    from ..training.finetuning import callback_of, main
    from ..training.recipe import last_checkpoint

    try:
        callback_of(recipe)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            figures = auto.main(recipe, _say) if recipe.growth.method == "auto" else main(recipe)
    except KeyboardInterrupt as stopped:
        if stopped.args:  # a race, which says how it goes on
            raise
        last = last_checkpoint(Path(recipe.training.output_dir))
        told = f"{last} is whole; go on with --resume_from_checkpoint True." if last else "no checkpoint was saved yet."
        raise KeyboardInterrupt(told) from None
    if as_json and os.environ.get("RANK", "0") == "0":
        _print_json(figures)


@_handed("evaluate", EVALUATE_HELP, "Show perplexity and harness tasks of models side by side.")
def evaluate(ctx: typer.Context) -> None:
    """Measure all of them, and show one table."""
    recipe, as_json = _read(ctx, needs_data=False)
    if not (recipe.evaluation.text or recipe.evaluation.task):
        raise typer.BadParameter("there is nothing to measure: name a --text or a --task")
    from transformers import logging as transformers_logging

    from .evaluation import evaluated, for_json, table_of

    transformers_logging.set_verbosity_error()
    measured, base = evaluated(recipe), recipe.evaluation.base
    if as_json:
        return _print_json(for_json(measured, base))
    _print_table(table_of(measured, base))


@app.command(epilog=EXIT_CODES)
def export(
    checkpoint: Checkpoint,
    output: Output,
    target: Annotated[
        str | None, typer.Option(help="A stock model type such as llama; by default the best that fits.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a grown model as an ordinary one, with the same outputs, which needs no hf_growattn."""
    from transformers import logging as transformers_logging

    from ..interop.checkpoints import load_grown
    from ..interop.export import export_model

    transformers_logging.set_verbosity_error()  # of a config that is the checkpoint's own, once for each load
    model, tokenizer = load_grown(checkpoint)
    report = export_model(model, output, target, tokenizer)
    if as_json:
        return _print_json(asdict(report) | {"path": str(report.path)})
    typer.echo(str(report))


@app.command(epilog=EXIT_CODES)
def push(
    checkpoint: Checkpoint,
    repo: Repo,
    form: Form = "native",
    base: Base = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", callback=new_folder, help="Write all into this new folder, and push nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Push a grown model to the Hub with its card, all in one commit or not at all."""
    from ..growable.folders import replacing
    from ..interop.checkpoints import publish, write_publication

    if dry_run is None:
        url = publish(checkpoint, repo, form, base, private)
        return _print_json({"repo": repo, "commit": url}) if as_json else typer.echo(f"Pushed: {url}")
    with replacing(dry_run.resolve()) as folder:
        write_publication(checkpoint, folder, repo, form, base)
    files = {str(p.relative_to(dry_run)): p.stat().st_size for p in sorted(dry_run.rglob("*")) if p.is_file()}
    if as_json:
        return _print_json({"repo": repo, "files": files})
    typer.echo(f"{dry_run} is what would be pushed to {repo}:")
    typer.echo("\n".join(f"{size:>12,}  {name}" for name, size in files.items()))
