"""Checkpoints as command lines handle them: load with errors that name the fix, write whole, push to the Hub."""

import shutil
import tempfile
from pathlib import Path

import transformers
from huggingface_hub import HfApi, get_token
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..model.configuration import PREFIX
from .cards import CARD, FIGURES, PICTURE, model_card, push_folder, read_figures, task_of
from .export import export_model

_CAUSAL = "AutoModelForCausalLM"


def load_config(name: str, revision: str = "main") -> PreTrainedConfig:
    """Load the config of a checkpoint, stock or grown, from a folder or by its Hub id.

    Raises:
        ValueError: the checkpoint is missing or damaged, or it holds adapters only; the message names the fix.
    """
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        raise ValueError(
            f"There is no checkpoint in {name}: name a folder that save_pretrained wrote (config.json). Adapters are "
            "merged into their model first, with merge_and_unload()."
        )
    return _load(AutoConfig, name, "model", revision=revision)


def load_model(name: str, causal: bool = False, revision: str = "main", **options) -> PreTrainedModel:
    """Load a checkpoint by the Auto class of its task, in evaluation mode; if `causal`, a language model alone.

    Raises:
        ValueError: as for `load_config`, or it has another task.
    """
    config = load_config(name, revision)
    auto_class, task = task_of((config.architectures or ["ForCausalLM"])[0])
    if causal and auto_class not in (_CAUSAL, "AutoModel"):
        raise ValueError(
            f"{name} is a model for {task}. This command reads plain text, which needs a model that predicts the next "
            "token; grow others in Python, with hf_growattn.Grower and your own batches."
        )
    chosen = getattr(transformers, _CAUSAL if causal else auto_class)
    return _load(chosen, name, "model", revision=revision, **options).eval()


def load_tokenizer(name: str, revision: str = "main"):
    """Load the tokenizer of a checkpoint.

    Raises:
        ValueError: it has none that can be loaded.
    """
    tokenizer = _load(AutoTokenizer, name, "tokenizer", revision=revision)
    if not tokenizer("Any text", add_special_tokens=False)["input_ids"]:  # what transformers makes out of no files
        raise ValueError(
            f"{name} has no tokenizer that can be loaded: save the one of its base model there, "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({name!r})."
        )
    return tokenizer


def _load(auto_class: type, name: str, what: str, **options):
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # of transformers, safetensors, or the Hub's client: damage has many names
        reason = f"{type(error).__name__}: {error}".partition("Model type should be one of")[0]  # hundreds follow
        if "trust_remote_code" in reason:
            reason = "It comes with code of its own, which is not run here."
        elif not Path(name).exists():
            reason = (
                "It is not a folder here. Check the name and the network; for a private model run `hf auth login`. "
                f"({reason.partition(chr(10))[0]})"
            )
        raise ValueError(f"The {what} of {name} cannot be loaded. {reason}") from error


def load_grown(checkpoint: Path):
    """Load a grown model of any task from a folder, and its tokenizer, None if it has none.

    Raises:
        ValueError: the checkpoint is missing or damaged, or it did not grow.
    """
    model = load_model(str(checkpoint))
    if not model.config.model_type.startswith(PREFIX):
        raise ValueError(
            f"{checkpoint} holds a stock {model.config.model_type} model, which did not grow: it can be used and "
            "pushed as it is, without this library."
        )
    has_tokenizer = (checkpoint / "tokenizer_config.json").exists()
    return model, load_tokenizer(str(checkpoint)) if has_tokenizer else None


def write_publication(checkpoint: Path, folder: Path, repo_id: str, form: str, base: str | None = None) -> None:
    """Write all that is pushed into an empty folder: the model in one of its forms, tokenizer, card and picture.

    Raises:
        ValueError: the checkpoint is not a grown one, it has no stock form, or its `figures.json` is damaged.
    """
    model, tokenizer = load_grown(checkpoint)
    if form == "stock":
        export_model(model, folder, tokenizer=tokenizer)
    else:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    figures = read_figures(checkpoint) if (checkpoint / FIGURES).is_file() else None
    has_picture = (checkpoint / PICTURE).is_file()
    if has_picture:
        shutil.copy(checkpoint / PICTURE, folder / PICTURE)
    model_card(model, repo_id, form, figures=figures, base_model=base, picture=has_picture).save(folder / CARD)


def publish(checkpoint: Path, repo_id: str, form: str, base: str | None, private: bool) -> str:
    """Push a grown checkpoint with its card to the Hub in one commit, and return where that is.

    Raises:
        ValueError: as for `write_publication`, or the token is missing.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused; nothing was changed there but for an empty repository.
    """
    if get_token() is None:
        raise ValueError("A token is needed to push: run `hf auth login`, or set HF_TOKEN to one that may write.")
    with tempfile.TemporaryDirectory() as folder:
        write_publication(checkpoint, Path(folder), repo_id, form, base)
        HfApi().create_repo(repo_id, private=private or None, exist_ok=True)
        return push_folder(Path(folder), repo_id).commit_url
