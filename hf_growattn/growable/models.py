"""Model classes of living models: saved whole or not at all, and with widths that follow what is loaded."""

import importlib
import inspect
import tempfile
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..model.configuration import GrownConfigMixin, layer_widths
from ..model.modeling import GrownModelMixin, class_by_name
from .attention import GrowableAttention
from .folders import loading, replacing

_SAVING = inspect.signature(PreTrainedModel.save_pretrained).parameters


class GrowableModelMixin(GrownModelMixin):
    """Mixed into a stock model class: attention that can grow, and saving that is all or nothing."""

    attention_mixin = GrowableAttention

    def save_pretrained(self, save_directory, is_main_process: bool = True, push_to_hub: bool = False, **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, whole or not at all.

        The checkpoint is written next to `save_directory`, and its files then move there, the config last. A process
        that is killed while it writes leaves the former checkpoint as it was. Other files of the directory stay.
        Several processes may save there at once: the last one wins, and what it leaves is whole.

        The code of the classes goes along, so that `trust_remote_code=True` loads it where this library is not.

        Raises:
            ValueError: `save_directory` is a file.
            OSError: it cannot be written, as on a full disk; what was there is as it was.
        """
        if kwargs.get("distributed_checkpoint"):
            return super().save_pretrained(save_directory, is_main_process, push_to_hub=push_to_hub, **kwargs)
        if not self.should_save_on_this_rank(is_main_process):
            with tempfile.TemporaryDirectory() as discarded:  # ranks may gather weights together, but one keeps them
                return super().save_pretrained(discarded, is_main_process, **kwargs)
        target = Path(save_directory).resolve()
        hub_kwargs = {key: kwargs.pop(key) for key in list(kwargs) if key not in _SAVING}
        with replacing(target) as partial:
            super().save_pretrained(partial, is_main_process, **kwargs)
        if push_to_hub:
            self.push_to_hub(hub_kwargs.pop("repo_id", target.name), token=kwargs.get("token"), **hub_kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load as `PreTrainedModel.from_pretrained` does, but safetensors alone, and say of a damaged one what to do.

        Raises:
            OSError: weights are missing or cut short, or another process saved there meanwhile.
            RuntimeError: the weights are not those that config.json describes.
        """
        with loading(Path(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs):
        """Push as `PreTrainedModel.push_to_hub` does, with a card of what grew, all in one commit."""
        # Cards are written far above this room.
        return importlib.import_module("hf_growattn.interop.cards").push_model(self, repo_id, **kwargs)

    def sync_config(self) -> None:
        """Write the widths of the layers that grew into every config of the model tree."""
        grown = [attention for attention in attentions(self) if is_grown(attention)]
        for config in growable_configs(self):
            config.per_layer_config = {
                a.layer_idx: {"qk_head_dim": a.qk_head_dim, "v_head_dim": a.v_head_dim} for a in grown
            } or None

    def take_widths(self, config: PreTrainedConfig) -> None:
        """Take the widths that the config of a checkpoint names, where its weights are loaded into what is there."""
        for attention in attentions(self):
            qk_head_dim, v_head_dim = layer_widths(config, attention.layer_idx)
            attention.widen(qk_head_dim - attention.qk_head_dim, v_head_dim - attention.v_head_dim)
        self.sync_config()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Take the widths along with the weights, so that a state from before or after a growth loads (`fit`)."""
        modules = [(name, module) for name, module in self.named_modules() if isinstance(module, GrowableAttention)]
        changed = [attention.fit(state_dict, f"{prefix}{name}.") for name, attention in modules]
        if any(changed):
            self.sync_config()
        super()._load_from_state_dict(state_dict, prefix, *args)


def attentions(model: nn.Module) -> list[GrowableAttention]:
    """The growable attention modules of a model, by layer."""
    found = (module for module in model.modules() if isinstance(module, GrowableAttention))
    return sorted(found, key=lambda attention: attention.layer_idx)


def growable_configs(model: nn.Module) -> list[GrownConfigMixin]:
    """The distinct growable config objects in a model tree: a task head may hold another one than its base model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, GrownConfigMixin)}.values())


def is_grown(model: nn.Module) -> bool:
    """Whether any layer in a module is wider than its stock width."""
    return any((a.qk_head_dim, a.v_head_dim) != (a.head_dim,) * 2 for a in attentions(model))


def cache_bytes(model: nn.Module) -> int:
    """Bytes of a token's keys and values in the cache, over all layers, in the weights' precision."""
    size, cached = next(model.parameters()).element_size(), [a for a in attentions(model) if a.caches]
    return sum(size * a.heads_of(role) * a.width_of(role) for a in cached for role in ("key", "value"))


def __getattr__(name: str) -> type:
    """Make a class when it is asked for by name, as pickle and the Auto classes do."""
    return class_by_name(name, GrowableModelMixin)
