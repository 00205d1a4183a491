"""Checkpoints as command lines handle them: load with errors that name the fix."""

from pathlib import Path

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from .cards import task_of

_CAUSAL = "AutoModelForCausalLM"


def load_config(name: str) -> PreTrainedConfig:
    """Load a config from a folder or by a Hub id; a ValueError names the fix for what is missing or damaged."""
    if Path(name).is_file():
        raise ValueError(f"{name} is a file, and no model: name the folder or Hub id of a model, then the data.")
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        raise ValueError(
            f"There is no checkpoint in {name}: name a folder that save_pretrained wrote (config.json). Adapters are "
            "merged into their model first, with merge_and_unload()."
        )
    return _load(AutoConfig, name, "model")


def load_model(name: str, causal: bool = False, **options) -> PreTrainedModel:
    """Load a checkpoint by the Auto class of its task, in evaluation mode; if `causal`, a language model alone."""
    config = load_config(name)
    auto_class, task = task_of((config.architectures or ["LlamaForCausalLM"])[0])
    if causal and auto_class not in (_CAUSAL, "AutoModel"):
        raise ValueError(
            f"{name} is a model for {task}. This command reads plain text, which needs a model that predicts the next "
            "token; grow others in Python, with hf_growattn.Grower and your own batches."
        )
    chosen = getattr(transformers, _CAUSAL if causal else auto_class)
    return _load(chosen, name, "model", **options).eval()


def load_tokenizer(name: str):
    """Load the tokenizer of a checkpoint; a ValueError if it has none that can be loaded."""
    tokenizer = _load(AutoTokenizer, name, "tokenizer")
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
        if "contains custom code" in reason:
            reason = "It comes with code of its own, which is not run here."
        elif not Path(name).exists():
            reason = (
                "It is not a folder here. Check the name and the network; for a private model run `hf auth login`. "
                f"({reason.partition(chr(10))[0]})"
            )
        raise ValueError(f"The {what} of {name} cannot be loaded. {reason}") from error
