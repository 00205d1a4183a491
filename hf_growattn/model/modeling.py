"""Model classes of grown models, made from the stock ones.

`GrowAttn<Stock class>` is the stock class with attention whose widths come from its config. Classes are made when
they are needed: by name as an attribute of this module, as `auto_map` in config.json asks for them, or by `mixed_into`.
"""

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedModel, conversion_mapping
from transformers.utils import output_capturing

from .architectures import ARCHITECTURES, Architecture
from .attention import GrownAttention
from .configuration import (
    PREFIX,
    GrownConfigMixin,
    auto_map,
    config_class_by_name,
    growable_config_class,
    layer_widths,
)

_SHIPPED_FAMILIES = frozenset(ARCHITECTURES)  # rows that a program adds later are not in the files


_Model = PreTrainedModel if TYPE_CHECKING else object  # what this is mixed into


class GrownModelMixin(_Model):
    """Mixed into a stock model class: attention widths come from the config, and the code goes along when it is saved.

    Attributes:
        attention_mixin: what the self-attention modules are made of.
        mixin: this one, or the one derived from it, that a class was made of.
    """

    attention_mixin = GrownAttention
    mixin: type["GrownModelMixin"]

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.mixin.adopt(self)
        for attention in [module for module in self.modules() if isinstance(module, GrownAttention)]:
            changed = attention.begin_at(*layer_widths(config, attention.layer_idx))
            if changed and not changed[0].weight.is_meta:  # loaded weights need no initialization
                for module in (*changed, attention):  # attention last: some families initialize its output again
                    self._init_weights(module)

    @classmethod
    @cache
    def mixed_into(cls, stock: type[Any]) -> type[PreTrainedModel]:
        """Return `GrowAttn<Stock class>`, the subclass with this mixin of a stock model class, base model or head."""
        model_type = stock.config_class.model_type
        row = ARCHITECTURES[model_type]
        cls.attention_mixin.mixed_into(getattr(row.modeling_file, row.attention), row)  # pickle asks for it by name
        name, config_class = f"GrowAttn{stock.__name__}", growable_config_class(model_type)
        made = type(name, (cls, stock), {"__module__": cls.__module__, "config_class": config_class, "mixin": cls})
        setattr(sys.modules[cls.__module__], name, made)  # so that pickle finds it
        # Checkpoints of some families hold other tensors than the modules, and what converts them goes by these names.
        for theirs, ours in ((stock.__name__, name), (model_type, PREFIX + model_type)):
            conversions = conversion_mapping.get_checkpoint_conversion_mapping(theirs)
            if conversions is not None:
                conversion_mapping.register_checkpoint_conversion_mapping(ours, conversions, overwrite=True)
                # peft finds the linear maps of experts by a copy of this table, made when it first needs that.
                for module in (conversion_mapping, sys.modules.get("peft.utils.transformers_weight_conversion")):
                    table = getattr(module, "_MODEL_TO_CONVERSION_PATTERN", {})
                    table[ours] = table.get(theirs, theirs)
        return made

    @classmethod
    def adopt(cls, model: PreTrainedModel) -> None:
        """Swap the classes of a model tree whose configs are ours: models, inner models and self-attention.

        Parameters, buffers and hooks are untouched.
        """
        row = ARCHITECTURES[model.config.model_type.removeprefix(PREFIX)]
        for module, surroundings in surroundings_of(model, row):
            module.__class__ = cls.attention_mixin.mixed_into(type(module), row)
            module.adopt(surroundings)
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and isinstance(module.config, GrownConfigMixin):
                if not isinstance(module, GrownModelMixin):
                    module.__class__ = cls.mixed_into(type(module))
                # Output capture looks a model's recorders up by its class; stock models enter it when they are built.
                output_capturing._CAN_RECORD_REGISTRY.setdefault(str(type(module)), module._can_record_outputs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, with the code of the class next to its config.

        So `trust_remote_code=True` loads it where the library is not. Classes derived from ours, and of families that
        are not in these files, have none that could go along.
        """
        model_type = self.config.model_type
        ours = next(base for base in type(self).__mro__ if "mixin" in vars(base))
        derived = type(self).__name__.removeprefix("FSDP") != ours.__name__  # FSDP's class is a wrapper in name only
        if not derived and model_type.removeprefix(PREFIX) in _SHIPPED_FAMILIES:
            self.config.auto_map = auto_map(model_type)
        return super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as `PreTrainedModel.from_pretrained` does, but safetensors alone: nothing was ever saved otherwise."""
        kwargs.setdefault("use_safetensors", True)  # pickles may hold code
        return super().from_pretrained(*args, **kwargs)

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Refuse what would leave a part of the model at random: transformers raises `loading_info.error_msgs`.

        That is attention weights of other sizes, even with `ignore_mismatched_sizes`, which is meant for task heads,
        and weights that the checkpoint lacks, but for those of a task head that it was not saved with.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        layers = tuple(f"{name}." for name, module in self.named_modules() if isinstance(module, GrownAttention))
        saved_as = self.config.architectures if isinstance(self.config.architectures, list) else []
        as_saved = self.base_model is self or type(self).__name__ in saved_as
        backbone = "" if as_saved else f"{self.base_model_prefix}."
        problems = [
            f"{key} is {tuple(saved)} in the weights and {tuple(expected)} by config.json"
            for key, saved, expected in sorted(loading_info.mismatched_keys)
            if key.startswith(layers)
        ]
        missing = set(loading_info.missing_keys) - set(self.all_tied_weights_keys)
        problems += [f"{key} is missing" for key in sorted(missing) if key.startswith(backbone)]
        if problems:
            more = [f"and {len(problems) - 4} more"] if len(problems) > 4 else []
            loading_info.error_msgs.append(
                f"{'; '.join(problems[:4] + more)}. config.json and the weights are not of the same save: put back "
                "what save_pretrained wrote together, or correct per_layer_config in config.json."
            )

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Do nothing for a class of ours, as for its config; a class derived from it is transformers' to care for."""
        if "mixin" not in vars(cls):
            super().register_for_auto_class(auto_class)


def stock_attentions(model: nn.Module, row: Architecture) -> dict[str, Any]:
    """The self-attention modules of a model that are still of the stock class, by name."""
    stock = getattr(row.modeling_file, row.attention)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, stock)
        and not isinstance(module, GrownAttention)
        and not getattr(module, "is_cross_attention", False)
    }


def surroundings_of(model: nn.Module, row: Architecture) -> list[tuple[Any, dict[str, Any]]]:
    """The stock self-attention modules, each with what it lacks about its place in the model.

    That is the number of its layer, for modules that hold none, and the sibling that holds the output projection.
    """
    found = []
    for number, (name, module) in enumerate(stock_attentions(model, row).items()):
        surroundings: dict[str, Any] = {}
        if getattr(module, "layer_idx", None) is None and "layer_idx" not in dict(row.aliases):
            surroundings["layer_idx"] = number
        if row.output_sibling:
            surroundings["output_sibling"] = (
                getattr(model.get_submodule(name.rpartition(".")[0]), row.output_sibling),
            )
        found.append((module, surroundings))
    return found


def class_by_name(name: str, mixin: type[GrownModelMixin]) -> type:
    """Make a model class, or find a config class, when it is asked for by name, as pickle and `auto_map` do.

    Raises:
        AttributeError: no family has a class of this name.
    """
    stock = getattr(transformers, name.removeprefix("GrowAttn"), None) if name.startswith("GrowAttn") else None
    if getattr(getattr(stock, "config_class", None), "model_type", None) in ARCHITECTURES:
        return mixin.mixed_into(stock)
    return config_class_by_name(name)


def __getattr__(name: str) -> type:
    """Make a class for a checkpoint that these files came with, which serve that checkpoint alone."""
    found = class_by_name(name, GrownModelMixin)
    if issubclass(found, PreTrainedModel):  # task heads build the model inside through AutoModel
        inner = GrownModelMixin.mixed_into(MODEL_MAPPING[found.__bases__[1].config_class])
        AutoModel.register(inner.config_class, inner, exist_ok=True)
    return found
