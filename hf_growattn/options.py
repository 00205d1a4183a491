"""Words of help, and the arguments and options that commands share, each with its check; without torch, as `cli`."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from .arguments import TRAINER_DOCS, GrowthArguments, ModelArguments, TextArguments, budget_of, listed

HELP = """
Find out whether a language model's attention is too narrow for your text, and widen it there.

Three steps, none of which changes the model that you name:

- `growattn inspect gpt2`: how wide are the heads, and how much of that do they use?
- `growattn measure gpt2 my_text.txt`: does the width hold them back on this text?
- `growattn finetune gpt2 my_text.txt -o grown`: train on it, and grow half-way

MODEL is a folder that save_pretrained wrote, or a Hub id; stock or grown.

DATA is a .txt file, a folder of them, a .jsonl file whose lines have a "text", or the Hub id of a dataset.
"""
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed, the message says why; 2 wrong usage; 3 nothing was grown, or not starved; "
    "130 interrupted, nothing is half-written."
)
FINETUNE_HELP = f"""
Train a model on your text with transformers' Trainer, and grow its attention on the way: once and half-way, by 2% of
its weights, unless you say something else.

{listed(GrowthArguments, TextArguments, ModelArguments)}

Every option of Trainer works too, such as `--max_steps 1000` (400 if nothing is said), `--num_train_epochs 2`,
`--learning_rate 1e-4`, `--bf16`, `--gradient_checkpointing`, `--report_to wandb` and `--resume_from_checkpoint True`:
{TRAINER_DOCS}

MODEL and DATA come first. On several devices: `torchrun --nproc_per_node 2 -m hf_growattn finetune ...`, or
`accelerate launch -m hf_growattn finetune ...`
"""
EVALUATE_HELP = """
Evaluate models side by side: perplexity of texts, and tasks of the lm-evaluation-harness.

A task is a name that the harness knows (`lm-eval ls tasks`; its data come from the Hub), a .yaml file of the harness's
own format, or a .jsonl file, where every line is one of

    {"context": "The sky is", "continuation": "blue"}
    {"query": "Question: What is blue?\\nAnswer:", "choices": ["the sky", "grass"], "gold": 0}

A space is put between the two parts. The first asks whether the continuation is the likeliest text (acc) and how likely
it is (perplexity), the second whether the right choice is the likeliest one (acc), also by length (acc_norm). Files
need no network. A .yaml file may name Python functions that run here: use those that you trust.

Figures have their standard errors, and so have differences from the base.
"""


def _budget(text: str) -> int | float:
    try:
        return budget_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def new_folder(folder: Path | None) -> Path | None:
    """A folder to write, which must hold nothing yet."""
    if folder is None:
        return None
    if folder.is_file():
        raise typer.BadParameter(f"{folder} is a file; name a new folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise typer.BadParameter(f"{folder} is there already, and not empty; name a new folder.")
    above = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    try:  # what os.access says of mounts and of root is no promise
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        told = f"nothing can be written in {above} ({error.strerror}); name another folder."
        raise typer.BadParameter(told) from None
    return folder


def _repo_id(repo_id: str) -> str:
    """A repository of the Hub, with its owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

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
TrainedOutput = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="DIR", help="New folder to write, or one to resume.", show_default=False),
]
Budget = Annotated[
    float,
    typer.Option(
        parser=_budget, metavar="WEIGHTS", help="Weights to add at most: a share (1%, 0.01) or a number (20000)."
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
