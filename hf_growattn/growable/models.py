"""Model classes of living models: saved whole or not at all, and with new dims that follow what is loaded."""

import importlib
import inspect
import re
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..model.configuration import WideConfigMixin
from ..model.modeling import WideModelMixin, class_by_name
from .attention import GrowableAttention, drop_if_empty
from .folders import loading, replacing

_SAVING = inspect.signature(PreTrainedModel.save_pretrained).parameters


class GrowableModelMixin(WideModelMixin):
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
        """Write the new dims of every layer into every config of the model tree."""
        extra_dims = {
            str(attention.layer): {name: [part.qk_dims, part.v_dims] for name, part in attention.extra.parts.items()}
            for attention in attentions(self)
            if attention.extra is not None and len(attention.extra.parts)
        }
        for config in growable_configs(self):
            config.extra_dims = extra_dims

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Take the parts that a state holds along with its weights, so that one from another growth loads."""
        changed = False
        for name, module in self.named_modules():
            if isinstance(module, GrowableAttention):
                changed |= _follow_parts(module, state_dict, f"{prefix}{name}.extra.parts.")
        if changed:
            self.sync_config()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _follow_parts(attention: GrowableAttention, state: dict[str, Any], prefix: str) -> bool:
    """Give an attention module the parts that a state dict holds for it, and no others; their values come with it.

    Returns:
        Whether that changed anything.
    """
    if not any(key.startswith(prefix.removesuffix("extra.parts.")) for key in state):
        return False  # the state of something else, such as adapters alone
    place, wanted = re.escape(prefix), {}
    for key, tensor in state.items():
        match = re.fullmatch(rf"{place}(.+)\.inside\.weight", key)
        if match is not None:
            outside = state.get(f"{prefix}{match[1]}.outside.weight")
            v_dims = 0 if outside is None else outside.shape[1] // attention.shape.num_heads
            rest = tensor.shape[0] - v_dims * attention.shape.num_key_value_heads
            qk_dims = rest // (attention.shape.num_heads + attention.shape.num_key_value_heads)
            wanted[match[1]] = qk_dims, v_dims
    kept = {} if attention.extra is None else dict(attention.extra.parts.items())
    if wanted == {name: (part.qk_dims, part.v_dims) for name, part in kept.items()}:
        return False
    parts = attention.make_extra().parts
    for name in list(parts):
        if name not in wanted or (parts[name].qk_dims, parts[name].v_dims) != wanted[name]:
            del parts[name]
    for name, dims in wanted.items():
        if name not in parts:
            parts[name] = attention.new_part(*dims)
    drop_if_empty(attention)
    return True


def attentions(model: nn.Module) -> list[GrowableAttention]:
    """The growable attention modules of a model, by layer."""
    found = (module for module in model.modules() if isinstance(module, GrowableAttention))
    return sorted(found, key=lambda attention: attention.layer)


def growable_configs(model: nn.Module) -> list[WideConfigMixin]:
    """The distinct growable config objects in a model tree: a task head may hold another one than its base model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, WideConfigMixin)}.values())


def is_grown(model: nn.Module) -> bool:
    """Whether any attention module has new dims that are kept."""
    return any(attention.parts for attention in attentions(model))


def extra_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all kept new dims."""
    return [p for attention in attentions(model) for part in attention.parts for p in part.parameters()]


def cache_bytes(model: nn.Module) -> int:
    """Bytes of a token's keys and values in the cache, over all layers, in the weights' precision."""
    size, cached = next(model.parameters()).element_size(), [a for a in attentions(model) if a.caches]
    return sum(size * a.heads_of(role) * a.width_of(role) for a in cached for role in ("key", "value"))


def __getattr__(name: str) -> type:
    """Make a class when it is asked for by name, as pickle and the Auto classes do."""
    return class_by_name(name, GrowableModelMixin)
