"""The command line `growattn`: look at a model, measure it on data, grow it, train it, write it for others.

Commands import what they need themselves, so that help is shown without torch.
"""

import contextlib
import difflib
import importlib.util
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .help import format_command_help, format_help
from .options import (
    TAKEN,
    USAGE_ERROR,
    ExportOptions,
    InspectOptions,
    PushOptions,
    UsageError,
    check_new_folder,
    option_name,
    parse_options,
    read_recipe,
)

FAILED, NOTHING, INTERRUPTED = 1, 3, 130
_EXPECTED = (ValueError, OSError, ImportError)  # errors whose message names the fix


def main(words: list[str]) -> int:
    """Run a command line; returns its exit code."""
    as_json, debug = "--json" in words, "--debug" in words
    words = [word for word in words if word not in ("--json", "--debug")]
    if not words or words[0] in ("-h", "--help"):
        print(format_help())
        return 0
    if words[0] == "--version":
        print(f"growattn {sys.modules['hf_growattn'].__version__}")
        return 0
    if not sys.stderr.isatty():
        for library in ("HUB", "DATASETS"):  # transformers goes by the Hub's
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    name, rest = words[0], words[1:]
    try:
        if name not in RUNNERS:
            near = difflib.get_close_matches(name, RUNNERS, n=1)
            suggestion = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"unknown command {name}.{suggestion}")
        if "-h" in rest or "--help" in rest:
            print(format_command_help(name))
            return 0
        return RUNNERS[name](rest, as_json)
    except UsageError as error:
        command = f"growattn {name}" if name in RUNNERS else "growattn"
        _say(f"Usage error: {error} See {command} --help.")
        return USAGE_ERROR
    except KeyboardInterrupt as interrupt:
        _say(f"Interrupted: {str(interrupt) or 'nothing was written.'}")
        return INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        message = " ".join(str(error).split())
        if not isinstance(error, _EXPECTED):
            message = f"{type(error).__name__}: {message} (add --debug to see where)"
        _say(f"Error: {message}")
        return FAILED


def _say(text: str) -> None:
    """Write for people; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def _print_json(figures: dict) -> None:
    print(json.dumps(figures, indent=1))


def _split_names(words: list[str], *names: str) -> tuple[list[str], list[str]]:
    """The names that a command line begins with, and the options after them."""
    given = words[: len(names)]
    if len(given) < len(names) or any(word.startswith("-") for word in given):
        raise UsageError(f"name {' and '.join(names)} first, then the options.")
    return given, words[len(names) :]


def run_inspect(words: list[str], as_json: bool) -> int:
    """Show how wide a model's heads are, and how much of that they use."""
    (name,), rest = _split_names(words, "MODEL")
    parse_options(InspectOptions, rest)
    from tqdm.auto import tqdm

    from ..interop.checkpoints import load_growable
    from .inspection import FULL, format_costs, format_layers, inspect_model

    model = load_growable(name)
    layers = getattr(model.config, "num_hidden_layers", None)
    with tqdm(total=layers, desc="inspecting", unit="layer", leave=False, disable=None) as bar:
        figures = inspect_model(model, bar.update)
    if as_json:
        _print_json(figures)
        return 0
    print(format_layers(figures))
    print(format_costs(figures["costs"]))
    state = "grown" if figures["grown"] else "stock widths"
    print(
        f"{figures['class']} ({state}): {figures['parameters']:,} parameters, {len(figures['layers'])} layers, hidden "
        f"size {figures['hidden_size']}.\n"
        f"A head is full if its effective rank, the number of directions that it uses, is {FULL:.0%} of its width.\n"
        f"To see whether that holds the model back on your data: growattn measure {name} DATA"
    )
    return 0


def _read_recipe(command: str, words: list[str]) -> Any:
    if importlib.util.find_spec("trl") is None:
        raise ImportError("TRL reads the data: pip install 'hf_growattn[finetune]'.")
    return read_recipe(command, words)


def _format_next(command: str, words: list[str], model: str, *more: str) -> str:
    """The command to call next, with those of the given options that it takes."""
    names = _split_words(words)[0][1:]
    options, dropped = [], False
    for word in _split_words(words)[1]:  # an option, or a value of the one before it
        if word.startswith("-") and not word[1:2].isdigit():
            name = option_name(word)
            ours = any(name in taken for taken in TAKEN.values())
            dropped = name in ("o", "output", "output_dir") or (ours and name not in TAKEN[command])
        if not dropped:
            options.append(word)
    return shlex.join(["growattn", command, model, *names, "-o", "DIR", *options, *more])


def _split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first option, and the others."""
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:first], words[first:]


def run_measure(words: list[str], as_json: bool) -> int:
    """Measure where width holds a model back; nothing is changed or written."""
    recipe = _read_recipe("measure", words)
    from ..report.words import report_text
    from ..training.finetuning import prepare_growth

    grower, batches, _ = prepare_growth(recipe)
    _say(f"Measuring on {len(batches)} batches of {recipe.dataset}.")
    report = grower.measure(batches)
    if as_json:
        _print_json(report.to_dict())
    else:
        print(report_text(report, _format_next("race", words, recipe.model_name)))
    return 0 if report.found else NOTHING


def run_grow(words: list[str], as_json: bool) -> int:
    """Grow once, and save the wider model."""
    recipe = _read_recipe("grow", words)
    output = Path(recipe.training.output_dir)
    check_new_folder(recipe.training.output_dir)
    from ..growable.folders import replacing
    from ..interop.cards import save_figures
    from ..report.pages import save_report
    from ..report.words import report_text
    from ..training.finetuning import prepare_growth

    grower, batches, tokenizer = prepare_growth(recipe)
    _say(f"Measuring on {len(batches)} batches of {recipe.dataset}.")
    report = grower.grow(batches)
    dataset = recipe.dataset
    if report.applied:
        with replacing(output.resolve()) as folder:
            grower.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            save_figures(folder, [report], model=recipe.model_name, dataset=dataset)
            if importlib.util.find_spec("matplotlib"):
                save_report([report], folder / "report.html", model=recipe.model_name, data=dataset)
    if as_json:
        _print_json(report.to_dict() | {"output": str(output) if report.applied else None})
    else:
        print(report_text(report, _format_next("race", words, recipe.model_name)))
    if not report.applied:
        return NOTHING
    _say(f"Saved in {output}. Load it: import hf_growattn, then AutoModelForCausalLM.from_pretrained({str(output)!r}).")
    _say(f"Train it: {_format_next('finetune', words, str(output), '--max_growths', '0')}")
    return 0


def run_race_command(words: list[str], as_json: bool) -> int:
    """Race LoRA, growth and both, and print the commands that go on."""
    recipe = _read_recipe("race", words)
    if not (Path(recipe.training.output_dir) / "race.jsonl").exists():
        check_new_folder(recipe.training.output_dir)
    from ..training.finetuning import race_recipe
    from ..training.methods import METHODS

    race = race_recipe(recipe, _say)
    if as_json:
        _print_json(race.figures())
    else:
        print(race)
    for place, name in (("winner", race.winner), ("runner-up", race.runner_up)):
        if name:
            rate = f"{race.rates[name]:.2g}"
            command = _format_next("finetune", words, recipe.model_name, "--method", name, "--learning_rate", rate)
            _say(f"Train by the {place}, {METHODS[name].title}: {command}")
    return 0 if METHODS[race.winner].growth else NOTHING


def run_finetune(words: list[str], as_json: bool) -> int:
    """Train, growing on the way or by another method."""
    recipe = _read_recipe("finetune", words)
    if not recipe.training.resume_from_checkpoint:
        check_new_folder(recipe.training.output_dir)
    from ..training.finetuning import check_recipe, finetune
    from ..training.recipe import last_checkpoint

    try:
        check_recipe(recipe)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where progress and logs belong
            figures = finetune(recipe)
    except KeyboardInterrupt:
        last = last_checkpoint(Path(recipe.training.output_dir))
        whole = f"{last} is whole; add --resume_from_checkpoint True to continue."
        raise KeyboardInterrupt(whole if last else "no checkpoint was saved yet.") from None
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            _print_json(figures)
        else:
            print(figures["summary"])
    return 0


def run_export(words: list[str], as_json: bool) -> int:
    """Write a grown model as an ordinary one."""
    (checkpoint,), rest = _split_names(words, "FOLDER")
    options = parse_options(ExportOptions, rest)
    check_new_folder(options.output)
    from transformers import logging

    from ..interop.checkpoints import load_grown
    from ..interop.export import export_model

    logging.set_verbosity_error()  # it would repeat what the checkpoint's own config says at each load
    model, tokenizer = load_grown(Path(checkpoint))
    report = export_model(model, options.output, options.target, tokenizer)
    if as_json:
        _print_json(asdict(report) | {"path": str(report.path)})
    else:
        print(report)
    return 0


def run_push(words: list[str], as_json: bool) -> int:
    """Push a grown model with its card to the Hub, all in one commit or not at all."""
    (checkpoint, repo), rest = _split_names(words, "FOLDER", "REPO")
    options = parse_options(PushOptions, rest)
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    from ..growable.folders import replacing
    from ..interop.checkpoints import publish, write_publication

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(str(error)) from error
    if "/" not in repo:
        raise UsageError(f"the card says how to load the model, so name its owner too, as in you/{repo}.")
    if options.dry_run is None:
        url = publish(Path(checkpoint), repo, options.form, options.base, options.private)
        if as_json:
            _print_json({"repo": repo, "commit": url})
        else:
            print(f"Pushed: {url}")
        return 0
    check_new_folder(options.dry_run)
    written = Path(options.dry_run)
    with replacing(written.resolve()) as folder:
        write_publication(Path(checkpoint), folder, repo, options.form, options.base)
    files = {
        str(path.relative_to(written)): path.stat().st_size for path in sorted(written.rglob("*")) if path.is_file()
    }
    if as_json:
        _print_json({"repo": repo, "files": files})
        return 0
    print(f"{written} holds the files that would be pushed to {repo}:")
    for name, size in files.items():
        print(f"{size:>12,}  {name}")
    return 0


RUNNERS: dict[str, Callable[[list[str], bool], int]] = {
    "inspect": run_inspect,
    "measure": run_measure,
    "grow": run_grow,
    "race": run_race_command,
    "finetune": run_finetune,
    "export": run_export,
    "push": run_push,
}
