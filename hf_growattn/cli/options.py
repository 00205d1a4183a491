"""Words of help, and the arguments and options that commands share, each with its check; without torch, as `cli`."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..training.options import (
    SFT_DOCS,
    TAKEN,
    DataArguments,
    EvaluationArguments,
    GrowthOptions,
    RaceOptions,
    listed,
)

HELP = """
Find out whether a language model's attention is too narrow for your data, and widen it there.

Four steps, none of which changes the model that you name:

- `growattn inspect gpt2`: how wide are the heads, and how much of their width do they use?
- `growattn measure gpt2 my_text.txt`: where does the width hold the model back on this text?
- `growattn race gpt2 my_text.txt -o race`: does growing beat LoRA here? A tie goes to LoRA.
- `growattn finetune gpt2 my_text.txt -o grown --method auto`: race, then train by what may end lowest.

MODEL is a folder that save_pretrained wrote, or a Hub id. The model may be stock or grown.

DATA is a .txt, .jsonl, .csv or .parquet file, a folder of them, or the Hub id of a dataset. It holds text, chats, or
prompts with completions. `measure`, `race`, `grow`, `finetune` and `evaluate` read it with the same options.
"""
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed, the message says why; 2 wrong usage; 3 nothing grew, or growth did not win; "
    "130 interrupted, nothing is half-written."
)
_OF_DATA = f"""
**TRL reads the data**, so its options work here: `--dataset_config`, `--dataset_train_split`,
`--dataset_test_split`, `--dataset_text_field`, `--dataset_streaming`, `--max_length`, `--packing`,
`--chat_template_path`, `--completion_only_loss`, `--assistant_only_loss`, `--per_device_train_batch_size`, `--seed`.
A text file is cut into blocks of `--max_length` tokens. `--config recipe.yaml` reads options from a recipe, which may
also mix several `datasets`.
`--help_all` lists every option with its type and default. {SFT_DOCS}

{listed(DataArguments)}
- `--json`: print JSON, and nothing else, on standard output
"""
MEASURE_HELP = f"""
Measure where the width of its heads holds a model back on your data. Nothing is changed or written.

A growth is tried on the loss that `finetune` would train, and taken back. The table shows for each layer its
starvation, which is the share of the gradient that the present width cannot follow, and its validated gain, which is
how far wider heads should lower the loss on unseen data. This does not tell whether growing beats LoRA: `growattn race`
does. The exit code is 3 if nothing would grow.

{listed(GrowthOptions, only=TAKEN["measure"])}
{_OF_DATA}
"""
GROW_HELP = f"""
Widen a model's heads where that lowers the loss on your data, and save the wider model in a new folder, `-o DIR`.

The folder holds the model, its tokenizer, figures for the model card, and report.html, which says what grew and why.
Then train the wider model, as you would any other. If no growth helps on unseen data, nothing is written, and the exit
code is 3.

{listed(GrowthOptions, only=TAKEN["grow"])}
{_OF_DATA}
"""
FINETUNE_HELP = f"""
Train a model on your data with TRL's SFTTrainer.

By default all weights train, and the attention grows once, half-way, by 2% of the weights. `--method` trains something
else. `--method auto` races first, in `DIR-race`, and trains by the winner. If another one is near, it trains, too, the
model that ends lower is kept, and the other one is left in `DIR-METHOD`. A tenth of the data is held out, unless they
have a test split.

{listed(GrowthOptions)}
{_OF_DATA}
Every option of SFTConfig and of TRL's ModelConfig works, such as `--num_train_epochs 2`, `--learning_rate 1e-4`,
`--use_peft --lora_r 8`, `--report_to wandb` and `--resume_from_checkpoint True`. Adapters are merged at the end.

`--load_in_4bit` and `--load_in_8bit` train by `--method growth`, `lora` or `auto` beside quantized weights, and save
what was trained merged into the dense ones; the loss of that is told as well.

On several devices: `torchrun --nproc_per_node 2 -m hf_growattn finetune ...`, or
`accelerate launch -m hf_growattn finetune ...`
"""
RACE_HELP = f"""
Find out what to train on your data: LoRA on all linear layers, growth, or one third growth beside LoRA.

Each of them trains for a short while. All train as many weights, on the same rows in the same order, and each takes the
best of two learning rates, and of larger ones if the larger of these is better. They are compared row by row on
held-out data. What is clearly behind does not go on. Two that cannot be told apart train half as long again, if much
depends on it. A growth that leads has to do so again with the rows in another order, unless it is far ahead. Growth
wins if its lead is more than twice its standard error, lasts, and is over 0.01 nats a token even when the error is
taken off. Less is a tie, and a tie goes to LoRA: it is merged at the end and costs nothing at inference, while wider
heads make the KV cache larger.

Every training is kept in `-o DIR` as soon as it ends, so after an interruption the same command goes on. At the end
the folder holds `race.json` and the winner's `model`, and you are told how to train by the winner. If another method
is near, it may end lower in a longer training: you are told how to train both, and keep what ends lower. The exit
code is 0 if growth wins, and 3 if it does not.

{listed(RaceOptions, GrowthOptions, only=TAKEN["race"])}
{_OF_DATA}
"""
EVALUATE_HELP = f"""
Evaluate models side by side: perplexity of data, and tasks of the lm-evaluation-harness.

A task is a name that the harness knows (`lm-eval ls tasks`; its data come from the Hub), a .yaml file of the harness's
own format, or a .jsonl file, where every line is one of

    {{"context": "The sky is", "continuation": "blue"}}
    {{"query": "Question: What is blue?\\nAnswer:", "choices": ["the sky", "grass"], "gold": 0}}

A space is put between the two parts. A continuation is right if it is the likeliest text (acc), and has a perplexity.
A choice is right if it is the likeliest one (acc), or the likeliest for its length (acc_norm). Files need no network. A
.yaml file may name Python functions that run here, so use only files that you trust.

Figures and differences from the base have standard errors. In chats and completions only those tokens count that
`finetune` would train. If the data have a test split, it is the one that is used. `--per_device_eval_batch_size` rows
are read at once. `--trust_remote_code` runs the code that a model or a metric brings.

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
