"""The command line `growattn`: look at a model, measure it on a text, grow it, write it for others."""

import json
import math
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import HfApi, get_token
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import logging as transformers_logging
from typer.core import TyperGroup

from .cards import FIGURES, push_folder
from .checkpoints import (
    card_of,
    figures_of,
    load_grown,
    load_model,
    load_tokenizer,
    write_publication,
    written_whole,
)
from .export import export_model
from .growth import Grower
from .inspection import FULL, inspected, starved_gain, verdict, worth_growing
from .modeling import attentions
from .options import (
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
    new_folder,
)
from .patch import patch_model
from .plan import KINDS, GrowthConfig, parameters_of_a_dim
from .report import GrowthReport
from .texts import load_texts, sampled_batches

FAILED, NOTHING, INTERRUPTED = 1, 3, 130  # wrong usage is 2, by typer
_REPORT = "report.html"
_TOLD = (ValueError, OSError, ImportError)  # whose messages say what to do

HELP = """
Find out whether a language model's attention is too narrow for your text, and widen it there.

Three steps, none of which changes the model that you name:

- `growattn inspect gpt2`: how wide are the heads, and how much of that do they use?
- `growattn measure gpt2 my_text.txt`: does the width hold them back on this text?
- `growattn grow gpt2 my_text.txt -o grown`: a wider model, ready to be trained on

MODEL is a folder that save_pretrained wrote, or a Hub id; stock or grown.

DATA is a .txt file, a folder of them, a .jsonl file whose lines have a "text", or the Hub id of a dataset.
"""
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed, the message says why; 2 wrong usage; 3 nothing was grown, or not starved; "
    "130 interrupted, nothing was written."
)


class _Commands(TyperGroup):
    """Tells errors in one line, and gives every ending its exit code."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("Interrupted: nothing was written.")
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
    context_settings={"help_option_names": ["-h", "--help"]},
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
        transformers_logging.disable_progress_bar()


def _print_json(figures: dict) -> None:
    typer.echo(json.dumps(figures, indent=1, allow_nan=False))


@app.command(epilog=EXIT_CODES)
def inspect(model: Model, as_json: Json = False) -> None:
    """Show how wide a model's heads are, and how much of that they use.

    The effective rank counts the directions that a head really uses; it is at most the width. A head that uses nearly
    all of it is called full.
    """
    loaded = load_model(model)
    layers = loaded.config.num_hidden_layers
    with tqdm(total=layers, desc="inspecting", unit="layer", leave=False, disable=None) as bar:
        figures = inspected(loaded, bar.update)
    if as_json:
        return _print_json(figures)
    table = Table("layer", "kind", "width", "effective rank: mean (range)", "full heads")
    for layer in figures["layers"]:
        for kind in ("patterns", "messages"):
            table.add_row(str(layer["layer"]), kind, *_cells(layer[kind], layer["heads"], figures["stock_width"]))
    _print_table(table)
    state = "grown" if figures["grown"] else "stock widths"
    typer.echo(
        f"{figures['class']} ({state}): {figures['parameters']:,} parameters, {layers} layers, hidden size "
        f"{figures['hidden_size']}.\n"
        "Patterns are queries and keys, which tokens attend to which; messages are values, what they pass on. Full: "
        f"{FULL:.0%} of the width is in use.\n"
        f"Whether that holds the model back on a text: growattn measure {model} DATA"
    )


def _cells(used: dict, heads: int, stock: int) -> list[str]:
    """Width, ranks and full heads of one kind of a layer, for the table."""
    width = f"{stock} -> {used['width']}" if used["width"] > stock else str(stock)
    ranks, full = used["effective_rank"], used["full_heads"]
    if ranks is None:
        return [width, "none: they are normalised", "-"]
    named = "all" if len(full) == heads > 1 else ", ".join(map(str, full)) or "none"
    return [width, f"{sum(ranks) / heads:.1f} ({min(ranks):.1f} to {max(ranks):.1f})", named]


def _print_table(table: Table) -> None:
    """Print a table on standard output, as wide as the terminal."""
    Console(highlight=False).print(table)


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
    loaded, _, drawn = _ready(model, data, budget, batches, batch_size, block_size, seed)
    report = Grower(loaded, GrowthConfig(budget=budget, seed=seed)).measure(drawn)
    if as_json:
        _print_json(_told(report))
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
    loaded, tokenizer, drawn = _ready(model, data, budget, batches, batch_size, block_size, seed)
    before, drawable = loaded.num_parameters(), find_spec("matplotlib") is not None
    report = Grower(loaded, GrowthConfig(budget=budget, seed=seed)).grow(drawn)
    if report.applied:
        with written_whole(output) as folder:
            loaded.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / FIGURES).write_text(json.dumps(figures_of(report, model, data, before), indent=1))
            if drawable:
                report.save(folder / _REPORT)
    if as_json:
        _print_json(_told(report) | {"output": str(output) if report.applied else None})
    else:
        typer.echo(f"{report}\n{verdict(report)}")
    if not report.applied:
        raise typer.Exit(NOTHING)
    if not drawable:
        _say(f"There is no {_REPORT}, since its pictures need matplotlib: pip install matplotlib.")
    _say(f"Saved in {output}. Load it: import hf_growattn, then AutoModelForCausalLM.from_pretrained({str(output)!r}).")


def _ready(model: str, data: str, budget: int | float, batches: int, batch_size: int, block_size: int, seed: int):
    """Load what is measured: the patched model, its tokenizer, and batches of the text on the model's device."""
    texts = load_texts(data)
    tokenizer = load_tokenizer(model)
    loaded = patch_model(load_model(model, causal=True))
    longest = getattr(loaded.config, "max_position_embeddings", None) or math.inf
    if block_size > longest:
        raise typer.BadParameter(f"this model takes {longest} tokens at most", param_hint="--block-size")
    cheapest = min(parameters_of_a_dim(layer, kind) for layer in attentions(loaded) for kind in KINDS.values())
    if (bought := budget if budget >= 1 else int(budget * loaded.num_parameters())) < cheapest:
        raise typer.BadParameter(
            f"{bought:,} weights buy nothing: one more dim of a layer costs {cheapest:,}, "
            f"{cheapest / loaded.num_parameters():.2%} of this model",
            param_hint="--budget",
        )
    drawn = sampled_batches(texts, tokenizer, batches, batch_size, block_size, seed)
    largest = max(int(batch.max()) for batch in drawn)
    if largest >= loaded.get_input_embeddings().num_embeddings:
        raise ValueError(f"The tokenizer in {model} has a token {largest}, which the model lacks: they do not belong.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _say(f"Measuring on {sum(map(len, drawn))} rows of {block_size} tokens, on {device}.")
    return loaded.to(device), tokenizer, [batch.to(device) for batch in drawn]


def _told(report: GrowthReport) -> dict:
    """A report and its verdict for JSON."""
    return {
        "applied": report.applied,
        "starved": worth_growing(report),
        "verdict": verdict(report),
        "starved_gain": starved_gain(report),
        "validated_gain": report.predicted_gain,
        "loss_before": report.loss_before,
        "loss_after": report.loss_after,
        "added_parameters": report.added_parameters,
        "layers": [
            {
                "layer": layer.layer,
                "kind": layer.kind,
                "width": list(layer.width),
                "starvation": layer.starvation,
                "validated_gain": layer.predicted_gain,
                "step_size": layer.step_size,
            }
            for layer in report.layers
        ],
        "seconds": report.seconds,
    }


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
    model, _ = load_grown(checkpoint)
    typer.echo(str(card_of(checkpoint, model, repo, form, base)))


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
    if dry_run is not None:
        with written_whole(dry_run) as folder:
            write_publication(checkpoint, folder, repo, form, base)
        files = {str(p.relative_to(dry_run)): p.stat().st_size for p in sorted(dry_run.rglob("*")) if p.is_file()}
        if as_json:
            return _print_json({"repo": repo, "files": files})
        typer.echo(f"{dry_run} is what would be pushed to {repo}:")
        return typer.echo("\n".join(f"{size:>12,}  {name}" for name, size in files.items()))
    if get_token() is None:
        raise ValueError("There is no token to push with: run `hf auth login`, or set HF_TOKEN to one that may write.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        write_publication(checkpoint, folder, repo, form, base)
        try:
            HfApi().create_repo(repo, private=private or None, exist_ok=True)
            url = push_folder(folder, repo).commit_url
        except Exception as error:  # of the client, of its HTTP library, or of the Hub: the next step is the same
            raise OSError(
                f"The push to {repo} failed. It is one commit: the repository has all of it or nothing. Push again. "
                f"({type(error).__name__}: {error})"
            ) from error
    if as_json:
        return _print_json({"repo": repo, "commit": url})
    typer.echo(f"Pushed: {url}")


if __name__ == "__main__":
    app()
