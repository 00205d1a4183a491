"""Evaluate models side by side: perplexity of texts, and tasks of the lm-evaluation-harness.

    python scripts/evaluate.py grown exported --base gpt2 --text held_out.txt
    python scripts/evaluate.py grown --base gpt2 --tasks arc_easy my_task.jsonl --limit 200 --json figures.json

A model is a path or Hub id: stock, grown as `save_pretrained` wrote it, or exported. A text is a text file, a folder of
text files or a Hub id. `growattn evaluate` does the same where the library is installed; its --help shows what a file
of a task looks like.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.pop(0)  # this folder, in which `evaluate` is not the library that the harness imports

from rich.console import Console
from transformers import logging as transformers_logging

from hf_growattn.evaluation import evaluated, for_json, table_of


def main() -> None:
    """Read the command line, measure one model after the other, and show all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="path or Hub id of a causal LM")
    parser.add_argument("--base", metavar="MODEL", help="model to compare with")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="texts to measure the perplexity of")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help="tasks, or files of tasks")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples of each task")
    parser.add_argument("--batch_size", type=int, default=8, help="default: 8")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 and so on; default: the accelerator, if there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures into this file too")
    parser.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="run the code that a model or metric brings",
    )
    options = vars(parser.parse_args())
    file = options.pop("json")
    if not options["text"] and not options["tasks"]:
        parser.error("there is nothing to measure: name a --text or --tasks.")
    if options["batch_size"] < 1 or (options["limit"] is not None and options["limit"] < 1):
        parser.error("--batch_size and --limit are 1 or more.")
    if file and not file.resolve().parent.is_dir():
        parser.error(f"there is no folder {file.parent} to write --json into.")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        measured = evaluated(texts=options.pop("text"), **options)
    except (ValueError, ImportError) as error:
        sys.exit(f"Error: {error}")
    if file:
        file.write_text(json.dumps(for_json(measured, options["base"]), indent=1))
    Console(width=None if sys.stdout.isatty() else 200).print(table_of(measured, options["base"]))


if __name__ == "__main__":
    main()
