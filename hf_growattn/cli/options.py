"""Words of help, and the arguments and options that commands share, each with its check; without torch, as `cli`."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..training.arguments import SFT_DOCS, DataArguments, EvaluationArguments, GrowthArguments, RaceArguments, listed

HELP = """
Find out whether a language model's attention is too narrow for your data, and widen it there.

Four steps, none of which changes the model that you name:

- `growattn inspect gpt2`: how wide are the heads, and how much of that do they use?
- `growattn measure gpt2 my_text.txt`: where does the width hold them back on this text?
- `growattn race gpt2 my_text.txt -o race`: is growing worth more than LoRA here? A tie goes to LoRA.
- `growattn finetune gpt2 my_text.txt -o grown`: train on it, and grow half-way

MODEL is a folder that save_pretrained wrote, or a Hub id; stock or grown.

DATA is a file of text, .jsonl, .csv or .parquet, a folder of such, or the Hub id of a dataset: text, chats, or prompts
with completions. `measure`, `race`, `grow`, `finetune` and `evaluate` read it with the same options.
"""
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed, the message says why; 2 wrong usage; 3 nothing grew, or growth did not win; "
    "130 interrupted, nothing is half-written."
)
_OF_DATA = f"""
**Data and everything else** are read by TRL, with its options: `--dataset_config`, `--dataset_train_split`,
`--dataset_test_split`, `--dataset_text_field`, `--dataset_streaming`, `--max_length`, `--packing`,
`--chat_template_path`, `--completion_only_loss`, `--assistant_only_loss`, `--per_device_train_batch_size`, `--seed`.
A text file is one row, and packed. `--config recipe.yaml` reads options from a recipe, mixtures of `datasets` too.
`--help_all` lists every option with its type and default. {SFT_DOCS}

{listed(DataArguments)}
- `--json`: print JSON, and nothing else, on standard output
"""
MEASURE_HELP = f"""
Measure whether the width of its heads holds a model back on your data. Nothing is changed or written.

For each layer: starvation, the share of the gradient that the present width cannot follow; and what the budget
would buy, with the validated gain, the fall of the loss that unseen data should show. The growth is tried, and taken
back. That says where width is short; whether growing is worth more than LoRA, `growattn race` says. The exit code is 3
if nothing would grow. What is measured is the loss that `finetune` would train.

{listed(GrowthArguments)}
{_OF_DATA}
"""
GROW_HELP = f"""
Widen a model's heads where your data ask for it, and save the wider model in a new folder, `-o DIR`.

The folder has the model, its tokenizer, figures for the model card, and report.html, which says what grew and why.
Growth is a start: train the wider model on, as you would any other. Where nothing holds on unseen data nothing is
written, and the exit code is 3.

{listed(GrowthArguments)}
{_OF_DATA}
"""
FINETUNE_HELP = f"""
Train a model on your data with TRL's SFTTrainer, and grow its attention on the way: once and half-way, by 2% of its
weights, unless you say something else. `--method` trains otherwise: LoRA on all linear layers, growth from the start
beside a frozen base, both, or what a race finds best (auto). A tenth of the data is held out, where they have no split
for that.

{listed(GrowthArguments)}
{_OF_DATA}
Every option of SFTConfig and of TRL's ModelConfig works, such as `--num_train_epochs 2`, `--learning_rate 1e-4`,
`--use_peft --lora_r 8`, `--report_to wandb` and `--resume_from_checkpoint True`. Adapters are merged at the end.

On several devices: `torchrun --nproc_per_node 2 -m hf_growattn finetune ...`, or
`accelerate launch -m hf_growattn finetune ...`
"""
RACE_HELP = f"""
Find out what is worth training on your data: LoRA on all linear layers, growth, or a third of growth beside LoRA.

Each trains as many weights, for a short while, on the same rows in the same order, at the better of two learning rates.
They are compared row by row on held-out data. A tie goes to LoRA, which is merged at the end and costs nothing at
inference; wider heads make the KV cache larger. `-o DIR` gets every training as soon as it ends, so that the same
command goes on after an interruption, and at the end `race.json` and `model`, the winner's. The exit code is 0 if
growth wins, 3 if not.

{listed(RaceArguments)}
{listed(GrowthArguments, only=("budget", "growth_batches"))}
{_OF_DATA}
"""
EVALUATE_HELP = f"""
Evaluate models side by side: perplexity of data, and tasks of the lm-evaluation-harness.

A task is a name that the harness knows (`lm-eval ls tasks`; its data come from the Hub), a .yaml file of the harness's
own format, or a .jsonl file, where every line is one of

    {{"context": "The sky is", "continuation": "blue"}}
    {{"query": "Question: What is blue?\\nAnswer:", "choices": ["the sky", "grass"], "gold": 0}}

A space is put between the two parts. The first asks whether the continuation is the likeliest text (acc) and how likely
it is (perplexity), the second whether the right choice is the likeliest one (acc), also by length (acc_norm). Files
need no network. A .yaml file may name Python functions that run here: use those that you trust.

Figures have their standard errors, and so have differences from the base. Of chats and completions the tokens count
that `finetune` would train; of data with a test split, that one. `--per_device_eval_batch_size` rows are read at once;
`--trust_remote_code` runs the code that a model or a metric brings.

{listed(EvaluationArguments)}
{_OF_DATA}
"""


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
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Form = Annotated[
    Literal["native", "stock"],
    typer.Option(help="native: as it grew. stock: an ordinary model, which needs no hf_growattn."),
]
Base = Annotated[str | None, typer.Option(metavar="ID", help="Hub id of the model that grew, if it is not known.")]
