"""The command line `growattn`: look at a model, measure it on a text, grow it, train it, write it for others.

Commands import what they need themselves, so that help and completion are there without torch.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from tqdm.auto import tqdm
from typer.core import TyperCommand, TyperGroup

from .options import (
    EVALUATE_HELP,
    EXIT_CODES,
    FINETUNE_HELP,
    HELP,
    Base,
    Batches,
    BatchSize,
    BlockSize,
    Budget,
    Checkpoint,
    Data,
    Form,
    Json,
    Model,
    Output,
    Repo,
    Seed,
    TrainedOutput,
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
        typer.echo(f"growattn {sys.modules[__package__].__version__}")
        raise typer.Exit()


@app.callback()
def _every_command(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers goes by it too


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
    from .checkpoints import load_growable
    from .inspection import FULL, inspected, table_of

    loaded = load_growable(model)
    with tqdm(
        total=getattr(loaded.config, "num_hidden_layers", None),
        desc="inspecting",
        unit="layer",
        leave=False,
        disable=None,
    ) as bar:
        figures = inspected(loaded, bar.update)
    if as_json:
        return _print_json(figures)
    _print_table(table_of(figures))
    state = "grown" if figures["grown"] else "stock widths"
    typer.echo(
        f"{figures['class']} ({state}): {figures['parameters']:,} parameters, {len(figures['layers'])} layers, hidden "
        f"size {figures['hidden_size']}.\n"
        "Patterns are queries and keys, which tokens attend to which; messages are values, what they pass on. Full: "
        f"{FULL:.0%} of the width is in use.\n"
        f"Whether that holds the model back on a text: growattn measure {model} DATA"
    )


@app.command(epilog=EXIT_CODES)
def measure(
    model: Model,
    data: Data,
    budget: Budget = "1%",
    batches: Batches = 32,
    batch_size: BatchSize = 8,
    block_size: BlockSize = 128,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure whether the width of its heads holds a model back on your text. Nothing is changed or written.

    For each layer: starvation, the share of the gradient that the present width cannot follow; and what the budget
    would buy, with the validated gain, the fall of the loss that unseen text should show. The verdict is in words and
    in the exit code: 0 starved, 3 not starved.
    """
    from .inspection import measured, verdict, worth_growing

    grower, drawn, _ = _ready(model, data, budget, batches, batch_size, block_size, seed)
    report = grower.measure(drawn)
    if as_json:
        _print_json(measured(report))
    else:
        typer.echo(f"{report}\n{verdict(report)}")
        if worth_growing(report):
            typer.echo(f"Grow it: growattn grow {model} {data} -o DIR")
    raise typer.Exit(0 if worth_growing(report) else NOTHING)


@app.command(epilog=EXIT_CODES)
def grow(
    model: Model,
    data: Data,
    output: Output,
    budget: Budget = "1%",
    batches: Batches = 32,
    batch_size: BatchSize = 8,
    block_size: BlockSize = 128,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Widen a model's heads where your text asks for it, and save the wider model in a new folder.

    The folder has the model, its tokenizer, figures for the model card, and report.html, which says what grew and why.
    Growth is a start: train the wider model on, as you would any other. Where nothing holds on unseen text nothing is
    written, and the exit code is 3.
    """
    from .cards import FIGURES
    from .checkpoints import figures_of
    from .folders import replacing
    from .inspection import measured, verdict
    from .outcome import REPORT, drawable

    grower, drawn, tokenizer = _ready(model, data, budget, batches, batch_size, block_size, seed)
    before = grower.model.num_parameters()
    report = grower.grow(drawn)
    if report.applied:
        with replacing(output.resolve()) as folder:
            grower.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / FIGURES).write_text(json.dumps(figures_of(report, model, data, before), indent=1))
            if drawable():
                report.save(folder / REPORT)
    if as_json:
        _print_json(measured(report) | {"output": str(output) if report.applied else None})
    else:
        typer.echo(f"{report}\n{verdict(report)}")
    if not report.applied:
        raise typer.Exit(NOTHING)
    if not drawable():
        _say(f"There is no {REPORT}, since its pictures need matplotlib: pip install matplotlib.")
    _say(f"Saved in {output}. Load it: import hf_growattn, then AutoModelForCausalLM.from_pretrained({str(output)!r}).")
    _say(f"Train it on: growattn finetune {output} {data} -o DIR")


def _ready(model: str, data: str, budget: int | float, batches: int, batch_size: int, block_size: int, seed: int):
    """Load what is measured: a Grower of the model, batches of the text on the model's device, and its tokenizer."""
    import torch

    from .checkpoints import load_growable, load_tokenizer
    from .growth import Grower
    from .modeling import attentions
    from .patch import patch_model
    from .plan import KINDS, GrowthConfig, parameters_of_a_dim
    from .texts import check_length, check_tokens, load_texts, sampled_batches

    texts = load_texts(data)
    loaded = patch_model(load_growable(model, causal=True))
    tokenizer = load_tokenizer(model)
    cheapest = min(parameters_of_a_dim(layer, kind) for layer in attentions(loaded) for kind in KINDS.values())
    if (bought := budget if budget >= 1 else int(budget * loaded.num_parameters())) < cheapest:
        raise typer.BadParameter(
            f"{bought:,} weights buy nothing: one more dim of a layer costs {cheapest:,}, "
            f"{cheapest / loaded.num_parameters():.2%} of this model",
            param_hint="--budget",
        )
    try:
        check_length(block_size, loaded)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--block-size") from None
    drawn = sampled_batches(texts, tokenizer, batches, batch_size, block_size, seed)
    check_tokens(torch.cat(drawn), loaded)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _say(f"Measuring on {sum(map(len, drawn))} rows of {block_size} tokens, on {device}.")
    grower = Grower(loaded.to(device), GrowthConfig(budget=budget, seed=seed))
    return grower, [batch.to(device) for batch in drawn], tokenizer


class _MostlyHandedOn(TyperCommand):
    """Takes what it does not know as options for the Trainer, so arguments come first."""

    def collect_usage_pieces(self, ctx):
        return ["MODEL DATA -o DIR [OPTIONS]"]


@app.command(
    cls=_MostlyHandedOn,
    help=FINETUNE_HELP,
    short_help="Train a model on your text, and grow its attention on the way.",
    epilog=EXIT_CODES,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def finetune(ctx: typer.Context, model: Model, data: Data, output: TrainedOutput, as_json: Json = False) -> None:
    """Hand all options on: they are read as `scripts/finetune.py` reads them."""
    if any(word.startswith("-") for word in (model, data)):
        raise typer.BadParameter("name MODEL and DATA first, and all options after them")
    resumed = any(word.startswith("--resume") for word in ctx.args)
    if not resumed:
        new_folder(output)
    from .finetuning import last_checkpoint, main

    words = ["--model", model, "--dataset", data, "--output_dir", str(output), *ctx.args]
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            figures = main(words, "growattn finetune MODEL DATA -o DIR [options]; growattn finetune --help lists them")
    except KeyboardInterrupt:
        if last := last_checkpoint(output):
            raise KeyboardInterrupt(f"{last} is whole; go on with --resume_from_checkpoint True.") from None
        raise KeyboardInterrupt("no checkpoint was saved yet.") from None
    if as_json and os.environ.get("RANK", "0") == "0":
        _print_json(figures)


@app.command(
    help=EVALUATE_HELP, short_help="Show perplexity and harness tasks of models side by side.", epilog=EXIT_CODES
)
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Folders or Hub ids: stock, grown or exported.", show_default=False),
    ],
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="The model to compare with.")] = None,
    text: Annotated[
        list[str],
        typer.Option(metavar="DATA", help="A text to measure the perplexity of; may be given more than once."),
    ] = [],  # noqa: B006  typer copies it
    task: Annotated[
        list[str], typer.Option(metavar="NAME", help="A task, or a file of one; may be given more than once.")
    ] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many examples of each task.")] = None,
    batch_size: BatchSize = 8,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 and so on; by default the accelerator, if there is one.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model or a metric brings.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure all of them, and show one table."""
    if not (text or task):
        raise typer.BadParameter("there is nothing to measure: name a --text or a --task")
    from transformers import logging as transformers_logging

    from .evaluation import evaluated, for_json, table_of

    transformers_logging.set_verbosity_error()
    measured = evaluated(models, base, text, task, limit, batch_size, device, trust_remote_code)
    if as_json:
        return _print_json(for_json(measured, base))
    _print_table(table_of(measured, base))


@app.command(epilog=EXIT_CODES)
def export(
    checkpoint: Checkpoint,
    output: Output,
    target: Annotated[str, typer.Option(help="A stock model type such as llama; auto takes the best that fits.")] = (
        "auto"
    ),
    as_json: Json = False,
) -> None:
    """Write a grown model as an ordinary one, with the same outputs, which needs no hf_growattn."""
    from transformers import logging as transformers_logging

    from .checkpoints import load_grown
    from .export import export_model

    transformers_logging.set_verbosity_error()  # of a config that is the checkpoint's own, once for each load
    model, tokenizer = load_grown(checkpoint)
    report = export_model(model, output, target, tokenizer)
    if as_json:
        return _print_json(vars(report) | {"path": str(report.path)})
    typer.echo(
        f"A stock {report.model_type} with heads {report.head_dim} wide and {report.parameters:,} parameters, in "
        f"{output}. Its logits differ by {report.difference:.1e} of the largest."
    )
    if report.exact_up_to is not None:
        typer.echo(f"That holds up to {report.exact_up_to:,} tokens.")


@app.command(epilog=EXIT_CODES)
def card(checkpoint: Checkpoint, repo: Repo, form: Form = "native", base: Base = None) -> None:
    """Print the model card of a grown model: where it comes from, what grew and why, how to load it."""
    from .checkpoints import card_of, load_grown

    model, _ = load_grown(checkpoint)
    made = card_of(checkpoint, model, repo, form, base)
    typer.echo(str(made))
    if made.data.base_model is None:
        _say("The model that grew is no repository of the Hub, as far as is known; --base ID names it.")


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
    from .checkpoints import publish, write_publication
    from .folders import replacing

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
