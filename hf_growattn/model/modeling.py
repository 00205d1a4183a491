"""Model classes of grown models, made from the stock ones.

`GrowAttn<Stock class>` is the stock class whose attention modules have the new dims that its config names. Classes are
made when they are needed: by name as an attribute of this module, as `auto_map` in config.json asks for them, or by
`mixed_into`.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedModel

from .compat import copy_conversions, record_outputs, renew_old_forward
from .configuration import PREFIX, WideConfigMixin, auto_map, config_class_by_name, growable_config_class
from .extra import in_order
from .seam import (
    WideAttention,
    WideProjection,
    find_projections,
    growable_parts,
    input_sizes,
    number_layers,
    reaches_seam,
    read_shape,
    sync_config,
)

_INNER_NORMS = ("layernorm", "layer_norm")  # children of an attention module that norms its own output
_Model = PreTrainedModel if TYPE_CHECKING else object  # what this is mixed into


class WideModelMixin(_Model):
    """Mixed into a stock model class: new dims come from the config, and the code goes along when it is saved.

    Attributes:
        attention_mixin: what the attention modules are made of.
        mixin: this one, or the one derived from it, that a class was made of.
    """

    attention_mixin = WideAttention
    mixin: type["WideModelMixin"]

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.mixin.adopt(self)
        parts_of_layers = dict(config.extra_dims)
        for attention in [module for module in self.modules() if isinstance(module, WideAttention)]:
            parts = parts_of_layers.pop(str(attention.layer), {})
            if parts and attention.extra is None:  # an inner model was there first
                like = next(attention.parameters())
                for name, (qk_dims, v_dims) in in_order(parts):
                    part = attention.add_part(name, qk_dims, v_dims, dtype=like.dtype, device=like.device)
                    for weight in (w for w in part.parameters() if w.dim() > 1 and not w.is_meta):
                        nn.init.normal_(weight, std=getattr(config, "initializer_range", 0.02))
        if parts_of_layers:
            raise ValueError(
                f"extra_dims in config.json names layer {', '.join(parts_of_layers)}, which the model does not have or "
                "whose attention cannot have new dims. To drop layers, load the whole model first."
            )

    @classmethod
    @cache
    def mixed_into(cls, stock: type[Any]) -> type[PreTrainedModel]:
        """Return `GrowAttn<Stock class>`, the subclass with this mixin of a stock model class, base model or head."""
        model_type = stock.config_class.model_type
        name, config_class = f"GrowAttn{stock.__name__}", growable_config_class(stock.config_class)
        made = type(name, (cls, stock), {"__module__": cls.__module__, "config_class": config_class, "mixin": cls})
        setattr(sys.modules[cls.__module__], name, made)  # so that pickle finds it
        # Checkpoints of some families hold other tensors than the modules, and what converts them goes by these names.
        copy_conversions(stock.__name__, name)
        copy_conversions(model_type, PREFIX + model_type)
        return made

    @classmethod
    def adopt(cls, model: PreTrainedModel) -> None:
        """Swap the classes of a model tree whose configs are ours: models, inner models and attention modules.

        Parameters, buffers and hooks are untouched.
        """
        for attention, number, sibling in find_attentions(model):
            attention.__class__ = cls.attention_mixin.mixed_into(type(attention))
            attention.shape, attention.layer = read_shape(attention), number
            if sibling is not None:
                attention.output_sibling = (sibling,)
                if not isinstance(sibling, WideProjection):
                    sibling.__class__ = WideProjection.mixed_into(type(sibling))
            renew_old_forward(attention, sibling)
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and isinstance(module.config, WideConfigMixin):
                if not isinstance(module, WideModelMixin):
                    module.__class__ = cls.mixed_into(type(module))
                record_outputs(module)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, with the code of the class next to its config.

        So `trust_remote_code=True` loads it where the library is not. Classes derived from ours have no code that could
        go along.
        """
        sync_config(self)
        ours = next(base for base in type(self).__mro__ if "mixin" in vars(base))
        derived = type(self).__name__.removeprefix("FSDP") != ours.__name__  # FSDP's class is a wrapper in name only
        if not derived:
            self.config.auto_map = dict(auto_map(self.config.model_type))
        return super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as `PreTrainedModel.from_pretrained` does, but safetensors alone: nothing was ever saved otherwise."""
        kwargs.setdefault("use_safetensors", True)  # pickles may hold code
        return super().from_pretrained(*args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """Prepare it as the stock model does; a grown one is refused here, since its thread would only log why."""
        for module in self.modules():
            if isinstance(module, WideAttention) and module.extra is not None and module.extra.active_parts():
                raise module.wider_than("Continuous batching")
        return super().init_continuous_batching(*args, **kwargs)  # pyright: ignore

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Refuse what would leave a part of the model at random: transformers raises `loading_info.error_msgs`.

        That is attention weights of other sizes, even with `ignore_mismatched_sizes`, which is meant for task heads;
        new dims that the config does not name; and weights that the checkpoint lacks. A model of another class than the
        saved one needs its attention weights alone: it may have another head, or a pooler.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        layers = tuple(f"{name}." for name, module in self.named_modules() if isinstance(module, WideAttention))
        problems = [
            f"{key} is {tuple(saved)} in the weights and {tuple(expected)} by config.json"
            for key, saved, expected in sorted(loading_info.mismatched_keys)
            if key.startswith(layers)
        ]
        saved_as = self.config.architectures if isinstance(self.config.architectures, list) else []
        needed = "" if type(self).__name__ in saved_as else layers
        missing = set(loading_info.missing_keys) - set(self.all_tied_weights_keys)
        problems += [f"{key} is missing" for key in sorted(missing) if key.startswith(needed)]
        unnamed = [key for key in loading_info.unexpected_keys if ".extra.parts." in key]
        problems += [f"{key} is not in config.json" for key in sorted(unnamed)]
        if problems:
            more = [f"and {len(problems) - 4} more"] if len(problems) > 4 else []
            loading_info.error_msgs.append(
                f"{'; '.join(problems[:4] + more)}. config.json and the weights are not of the same save: put back "
                "what save_pretrained wrote together, or correct extra_dims in config.json."
            )

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether the code of the class, its initialization too, is other than transformers': that of ours is not."""
        return "mixin" not in vars(cls) and super().is_custom_code()

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Do nothing for a class of ours, as for its config; a class derived from it is transformers' to care for."""
        if "mixin" not in vars(cls):
            super().register_for_auto_class(auto_class)


def find_attentions(model: nn.Module, parts: Sequence[str] | None = None) -> list[tuple[Any, int, Any]]:
    """The stock attention modules that new dims can join, with their number and the sibling that projects the output.

    The number is that of the layer where their names have one, each another; otherwise their place in the model. The
    sibling is None for modules with an output projection of their own.
    """
    found = []
    for part in growable_parts(model, parts):
        for name, module in part.named_modules():
            if isinstance(module, WideAttention) or not reaches_seam(type(module)):
                continue
            sibling = part.get_submodule(name.rpartition(".")[0])._modules.get("output")
            if not find_obstacle(module, sibling):
                found.append((name, module, None if "output" in find_projections(module) else sibling))
    numbers = number_layers([name for name, *_ in found])
    return [(module, number, sibling) for (_, module, sibling), number in zip(found, numbers)]


def find_obstacle(module: nn.Module, sibling: nn.Module | None = None) -> str:
    """What keeps new dims from joining a module, which it "..."; "" for an attention module that they can join."""
    if not (reaches_seam(type(module)) and hasattr(module, "config")):
        return "takes no attention function from transformers' table ALL_ATTENTION_FUNCTIONS"
    names, inputs = find_projections(module), input_sizes(module)
    query, key = (inputs.get(names.get(role, "")) for role in ("query", "key"))
    if any(name.lower() in _INNER_NORMS for name, _ in module.named_children()):
        return "normalizes its output together with the residual stream"
    if "output" not in names and not hasattr(sibling, "dense"):
        return "has no output projection, nor has a sibling called output"
    if not inputs:
        return "has no linear projection, by which the size of its input would be known"
    if None not in (query, key) and query != key:
        return "reads keys of an input of another size"
    if query is not None and key is None and not inputs.keys() - {*names.values()}:
        return "reads keys of another layer"
    return ""


def class_by_name(name: str, mixin: type[WideModelMixin]) -> type:
    """Return a model or config class of ours by its name, as pickle and `auto_map` do; an AttributeError for others."""
    stock = getattr(transformers, name.removeprefix("GrowAttn"), None) if name.startswith("GrowAttn") else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel) and stock.config_class is not None:
        return mixin.mixed_into(stock)
    return config_class_by_name(name)


def __getattr__(name: str) -> type:
    """Make a class for a checkpoint that these files came with, which serve that checkpoint alone."""
    found = class_by_name(name, WideModelMixin)
    if issubclass(found, PreTrainedModel):  # task heads build the model inside through AutoModel
        inner = WideModelMixin.mixed_into(MODEL_MAPPING[found.__bases__[1].config_class])
        AutoModel.register(inner.config_class, inner, exist_ok=True)
    return found
