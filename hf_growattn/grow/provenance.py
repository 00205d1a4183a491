"""The checkpoint that a model names as its own, from which other libraries load it again.

TRL loads the reference of DPO, KTO and GRPO from the checkpoint that the config names, and tokenizers too. After a
growth in memory that checkpoint is another model. So the config names a folder of ours instead, and
loading from there raises an error that says what to pass.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..growable.models import growable_configs

_NOWHERE = str(Path(__file__).parent / "grown_in_memory")


class GrownInMemoryConfig(PreTrainedConfig):
    """What the config in that folder is read as: an error."""

    model_type = "growattn_in_memory"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Raise a RuntimeError that names the fix; AutoTokenizer would swallow other kinds."""
        raise RuntimeError(
            "This model grew in memory, and no checkpoint holds what it is now, so there is nothing to load a "
            "reference model or a tokenizer from. Pass them, as in DPOTrainer(model, ref_model=copy.deepcopy(model), "
            "processing_class=tokenizer, ...); or save the model and its tokenizer, load them, and train what you "
            "loaded."
        )


AutoConfig.register(GrownInMemoryConfig.model_type, GrownInMemoryConfig, exist_ok=True)


def leave_checkpoint(model: PreTrainedModel) -> None:
    """Note that no checkpoint holds a model any more; `origin_of` still knows the one it came from."""
    vars(model)["grown_from"] = origin_of(model)
    for config in growable_configs(model):
        config._name_or_path = _NOWHERE


def origin_of(model: PreTrainedModel) -> str:
    """Folder or Hub id of the checkpoint that a model came from, whatever it became since; "" without one."""
    return getattr(model, "grown_from", model.config.name_or_path or "")


@contextlib.contextmanager
def name_kept(model: PreTrainedModel) -> Iterator[None]:
    """Leave the name of its checkpoint to a model that grows inside: for a growth that is part of a longer run."""
    before = [(config, config._name_or_path) for config in growable_configs(model)]
    try:
        yield
    finally:
        for config, name in before:
            config._name_or_path = name
