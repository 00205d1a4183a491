"""Push a grown checkpoint to the Hub, with a model card of what grew, where and why.

    python scripts/push_to_hub.py scripts/output/finetune you/your-model
    python scripts/push_to_hub.py scripts/output/finetune you/your-model --form stock --dry_run to_look_at

The native form keeps the widths as they grew; the stock form is an ordinary architecture that needs no code of ours.
What `scripts/finetune.py` left beside the weights, `figures.json` and `growth.png`, goes into the card. The token is
the one of `hf auth login` or HF_TOKEN.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import transformers
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoTokenizer

from hf_growattn.cards import CARD, FIGURES, PICTURE, model_card, push_folder, task_of
from hf_growattn.configuration import GrowableConfigMixin

FORMS = ("native", "stock")


def load(checkpoint: Path):
    """Load a grown model of any task, and its tokenizer if it has one."""
    if not (checkpoint / "config.json").exists():
        raise SystemExit(f"There is no checkpoint in {checkpoint}: name a folder that save_pretrained wrote.")
    config = AutoConfig.from_pretrained(checkpoint)
    if not isinstance(config, GrowableConfigMixin):
        raise SystemExit(
            f"{checkpoint} holds a stock {config.model_type} model, which did not grow; push it by its own push_to_hub."
        )
    auto_class, _ = task_of((config.architectures or [""])[0])
    model = getattr(transformers, auto_class).from_pretrained(checkpoint)
    tokenizer = None
    if (checkpoint / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return model, tokenizer


def write(checkpoint: Path, folder: Path, repo_id: str, form: str, base: str | None) -> None:
    """Write all that is pushed: the model in one of its forms, tokenizer, card and picture."""
    model, tokenizer = load(checkpoint)
    if form == "stock":
        from hf_growattn.export import export_model

        export_model(model, folder, tokenizer=tokenizer)
    else:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    figures, picture = checkpoint / FIGURES, checkpoint / PICTURE
    if picture.exists():
        shutil.copy(picture, folder / PICTURE)
    told = json.loads(figures.read_text()) if figures.exists() else None
    model_card(model, repo_id, form, figures=told, base_model=base, picture=picture.exists()).save(folder / CARD)


def push(folder: Path, repo_id: str, private: bool) -> None:
    """Push a folder in one commit."""
    try:
        HfApi().create_repo(repo_id, private=private or None, exist_ok=True)
        pushed = push_folder(folder, repo_id)
    except Exception as error:  # of the client, of its HTTP library, or of the Hub: the user's next step is the same
        raise SystemExit(
            f"The push to {repo_id} failed. It is one commit: the repository has all of it or nothing. Push again.\n"
            f"{type(error).__name__}: {error}"
        ) from error
    print(f"Pushed: {pushed.commit_url}")


def main() -> None:
    """Read the command line, write the folder, and push it unless this is a dry run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a grown model")
    parser.add_argument("repo_id", help="where to push: you/your-model")
    parser.add_argument("--form", choices=FORMS, default="native", help="default: native")
    parser.add_argument("--base", help="Hub id of the model that grew; default: as finetune.py noted it")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry_run", type=Path, metavar="FOLDER", help="write all into this folder, and push nothing")
    arguments = parser.parse_args()
    checkpoint, repo_id, dry = arguments.checkpoint, arguments.repo_id, arguments.dry_run
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        parser.error(str(error))
    if "/" not in repo_id:
        parser.error(f"The card tells how to load the model: say whose it is, as in you/{repo_id}.")
    if dry and dry.exists():
        parser.error(f"{dry} is there already; --dry_run writes a new folder.")
    if not dry and get_token() is None:
        raise SystemExit("There is no token to push with: run `hf auth login`, or set HF_TOKEN to one that may write.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = dry or Path(scratch, "model")
        write(checkpoint, folder, repo_id, arguments.form, arguments.base)
        if not dry:
            return push(folder, repo_id, arguments.private)
    print(f"{folder} is what would be pushed to {repo_id}:")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(folder)}")


if __name__ == "__main__":
    main()
