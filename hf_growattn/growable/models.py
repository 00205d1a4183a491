"""Model classes of living models: saved whole or not at all, and with new dims that follow what is loaded."""

import importlib
import inspect
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..model.configuration import WideConfigMixin
from ..model.extra import Part
from ..model.modeling import WideModelMixin, class_by_name
from .attention import GrowableAttention, drop_if_empty
from .folders import loading, replacing
from .optimizers import add_new_parameters, after_change, optimizers_of, remove_parameters

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
        if getattr(self, "_hf_peft_config_loaded", False) and is_grown(self):  # those were its adapters alone
            growths = importlib.import_module("hf_growattn.growable.growths")
            growths.save_growth(self, target / growths.GROWTH, kwargs.get("state_dict"))
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
        for config in growable_configs(self):
            config.extra_dims = _parts_of(self)

    def set_parts(self, extra_dims: dict[str, dict[str, list[int]]]) -> None:
        """Let every attention module have these new dims and no others, as the config's `extra_dims` names them.

        Parts of the same name and size stay; others begin as zeros. Optimizers that train the model follow, and
        DistributedDataParallel.
        """
        before = extra_parameters(self)
        optimizers = optimizers_of(self) if extra_dims != _parts_of(self) else []
        for attention in attentions(self):
            wanted = extra_dims.get(str(attention.layer), {})
            kept = dict(attention.extra.parts.items()) if attention.extra is not None else {}
            parts = attention.make_extra().parts
            for name, part in kept.items():
                if wanted.get(name) != [part.qk_dims, part.v_dims]:
                    del parts[name]
            for name, dims in wanted.items():
                if name not in parts:
                    parts[name] = attention.new_part(dims[0], dims[1])
            drop_if_empty(attention)
        now = extra_parameters(self)
        if {*map(id, now)} != {*map(id, before)}:
            self.sync_config()
            remove_parameters(optimizers, {*before} - {*now})
            add_new_parameters(optimizers, self, [parameter for parameter in now if parameter.requires_grad])
            after_change(self, self)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Take the parts that a state holds along with its weights, so that one from another growth loads."""
        extra_dims = _parts_in(self, state_dict, prefix)
        if extra_dims is not None:
            self.set_parts(extra_dims)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _parts_of(model: nn.Module) -> dict[str, dict[str, list[int]]]:
    """The kept new dims of a model, as the config's `extra_dims` names them."""
    return {
        str(attention.layer): {name: [part.qk_dims, part.v_dims] for name, part in attention.extra.parts.items()}
        for attention in attentions(model)
        if attention.extra is not None and len(attention.extra.parts)
    }


def _parts_in(model: nn.Module, state: dict[str, Any], prefix: str) -> dict[str, dict[str, list[int]]] | None:
    """The new dims that a state dict holds, by the sizes of its tensors; None if it is not of the whole model."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, attention in model.named_modules():
        if not isinstance(attention, GrowableAttention):
            continue
        place = f"{prefix}{name}."
        if not any(f"{place}{entry}" in state for entry in _stock_entries(attention)):
            return None  # the state of something else, such as adapters alone
        start, end, shape = f"{place}extra.parts.", ".inside.weight", attention.shape
        for part in [key[len(start) : -len(end)] for key in state if key.startswith(start) and key.endswith(end)]:
            outside = state.get(f"{start}{part}.outside.weight")
            v_dims = 0 if outside is None else outside.shape[1] // shape.num_heads
            rows = state[f"{start}{part}{end}"].shape[0] - v_dims * shape.num_key_value_heads
            qk_dims = rows // (shape.num_heads + shape.num_key_value_heads)
            found.setdefault(str(attention.layer), {})[part] = [qk_dims, v_dims]
    return found


def _stock_entries(attention: nn.Module) -> Iterator[str]:
    """The names of a stock attention module's weights and buffers, within it; adapters may be around them."""
    children: Iterator[tuple[str, Any]] = attention.named_children()
    for name, child in children:
        while hasattr(child, "base_layer"):
            name, child = f"{name}.base_layer", child.base_layer
        if name != "extra":
            yield from (f"{name}.{entry}" for entry in child.state_dict())


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


def cache_bytes(model: nn.Module, tried: Mapping[Any, Part] | None = None) -> int:
    """Bytes of a token's keys and values in the cache, over all layers, in the weights' precision.

    They are counted as the attention implementation keeps them. `tried` are parts that are not kept yet.
    """
    numbers = 0
    for attention in (attention for attention in attentions(model) if attention.caches):
        part = (tried or {}).get(attention)
        parts = attention.parts if part is None else [*attention.parts, part]
        numbers += attention.heads_of("key") * sum(attention.cached_widths(parts))
    return next(model.parameters()).element_size() * numbers


def __getattr__(name: str) -> type:
    """Make a class when it is asked for by name, as pickle and the Auto classes do."""
    return class_by_name(name, GrowableModelMixin)
