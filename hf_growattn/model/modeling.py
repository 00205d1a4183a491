"""Model classes of grown models, made from the stock ones.

`GrowAttn<Stock class>` is the stock class whose attention modules have the new dims that its config names. Classes are
made when they are needed: by name as an attribute of this module, as `auto_map` in config.json asks for them, or by
`mixed_into`.
"""

import copyreg
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedModel

from .compat import copy_conversions, record_outputs, replace_base
from .configuration import WideConfigMixin, auto_map, config_class_by_name, growable_config_class
from .families import add_extra, find_attentions, sync_config
from .hooks import one_width_error
from .new_dims import NewDims, in_order

_Model = PreTrainedModel if TYPE_CHECKING else object  # what this is mixed into


class WideModelMixin(_Model):
    """Mixed into a stock model class: new dims come from the config, and the code goes along when it is saved.

    Attributes:
        mixin: this one, or the one derived from it, that a class was made of.
        stock_class: the class that it was made from.
    """

    mixin: type["WideModelMixin"]
    stock_class: type[PreTrainedModel]

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.mixin.adopt(self)
        dims_of_layers = dict(config.extra_dims)
        attentions = find_attentions(self) if dims_of_layers else []
        for found in attentions:
            growths = dims_of_layers.pop(str(found.layer), {})
            is_by_place = f".{found.layer}." not in f".{found.name}."  # numbered through encoder and decoder
            if growths and is_by_place and config.attention_count not in (None, len(attentions)):
                raise ValueError(
                    f"extra_dims in config.json is of a model with {config.attention_count} attention modules, and "
                    f"this one has {len(attentions)}. Make it with config.extra_dims = {{}}; then "
                    "load_state_dict(teacher.state_dict(), strict=False) brings the new dims of its layers."
                )
            if growths and "extra" not in found.module._modules:  # an inner model was there first
                extra, like = add_extra(found), next(found.module.parameters())
                for name, dims in in_order(growths):
                    extra.growths[name] = new = NewDims(extra.shape, *dims, dtype=like.dtype, device=like.device)
                    for weight in (w for w in new.parameters() if w.dim() > 1 and not w.is_meta):
                        nn.init.normal_(weight, std=getattr(config, "initializer_range", 0.02))
        last = max((found.layer for found in attentions), default=inf)
        if unplaced := [layer for layer in dims_of_layers if int(layer) <= last]:
            raise ValueError(
                f"extra_dims in config.json names layer {', '.join(unplaced)}, whose attention cannot have new dims."
            )
        if dims_of_layers:  # of a model with more layers, such as a teacher
            sync_config(self)

    @classmethod
    @cache
    def mixed_into(cls, stock: type[Any]) -> type[PreTrainedModel]:
        """Return `GrowAttn<Stock class>`, the subclass with this mixin of a stock model class, base model or head."""
        name, config_class = f"GrowAttn{stock.__name__}", growable_config_class(stock.config_class)
        namespace = {"__module__": cls.__module__, "config_class": config_class, "mixin": cls, "stock_class": stock}
        made = type(name, (cls, stock), namespace)
        # Checkpoints of some families hold other tensors than the modules, and what converts them goes by its name.
        copy_conversions(stock.__name__, name)
        return made

    @classmethod
    def adopt(cls, model: PreTrainedModel) -> None:
        """Swap the classes of the models in a tree whose configs are ours; all else is untouched."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and isinstance(module.config, WideConfigMixin):
                if not isinstance(module, WideModelMixin):
                    module.__class__ = cls.mixed_into(type(module))
                record_outputs(module)

    @classmethod
    def made_class(cls) -> type["WideModelMixin"]:
        """The class that `mixed_into` made, of which this one may be derived, by FSDP2 or by a user."""
        return next(base for base in cls.__mro__ if "stock_class" in vars(base))

    @classmethod
    def class_without_mixin(cls) -> type[PreTrainedModel]:
        """The stock class; that of FSDP2 around it for a sharded model."""
        made = cls.made_class()
        return replace_base(cls, made, made.stock_class)

    def __reduce__(self) -> tuple:
        """Let a pickle name the stock class: another process makes ours of it."""
        cls = type(self)
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        if cls is cls.made_class():
            return _make_empty, (cls.mixin, cls.stock_class), state
        return copyreg.__newobj__, (cls,), state  # pyright: ignore[reportAttributeAccessIssue]

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, with the code of the class next to a grown model's config.

        So `trust_remote_code=True` loads it where the library is not. Classes derived from ours have no code that could
        go along.
        """
        sync_config(self)
        # FSDP's class is a wrapper in name only.
        derived = type(self).__name__.removeprefix("FSDP") != self.made_class().__name__
        if self.config.extra_dims and not derived:
            self.config.auto_map = dict(auto_map(self.config.model_type))
        return super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as `PreTrainedModel.from_pretrained` does, but safetensors alone: nothing was ever saved otherwise."""
        kwargs.setdefault("use_safetensors", True)  # pickles may hold code
        return super().from_pretrained(*args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """Prepare it as the stock model does; a grown one is refused here, since its thread would only log why."""
        for found in find_attentions(self):
            if "extra" in found.module._modules and found.module.extra.active():
                raise one_width_error(found.module, "Continuous batching")
        return super().init_continuous_batching(*args, **kwargs)  # pyright: ignore

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Refuse what would leave a part of the model at random: transformers raises `loading_info.error_msgs`.

        That is attention weights of other sizes, even with `ignore_mismatched_sizes`, which is meant for task heads;
        new dims that the config does not name; and weights that the checkpoint lacks. A model of another class than the
        saved one needs the attention of the saved one alone: it may have another head, a pooler, or cross-attention.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        found = {f"{each.name}.": each.module for each in find_attentions(self)}
        problems = [
            f"{key} is {tuple(saved)} in the weights and {tuple(expected)} by config.json"
            for key, saved, expected in sorted(loading_info.mismatched_keys)
            if key.startswith(tuple(found))
        ]
        missing = set(loading_info.missing_keys) - set(self.all_tied_weights_keys)
        saved_as = self.config.architectures if isinstance(self.config.architectures, list) else []
        if type(self).__name__ not in saved_as:
            saved = [place for place, module in found.items() if not missing.issuperset(_weights_of(module, place))]
            missing = {key for key in missing if key.startswith(tuple(saved or found))}
        problems += [f"{key} is missing" for key in sorted(missing)]
        places = {name for name, _ in self.named_modules()}  # a checkpoint may have more layers
        unnamed = [key for key in sorted(loading_info.unexpected_keys) if ".extra.growths." in key]
        problems += [f"{key} is not in config.json" for key in unnamed if key.partition(".extra.")[0] in places]
        if problems:
            more = [f"and {len(problems) - 4} more"] if len(problems) > 4 else []
            loading_info.error_msgs.append(
                f"{'; '.join(problems[:4] + more)}. config.json and the weights are not of the same save: put back "
                "what save_pretrained wrote together, or correct extra_dims in config.json."
            )

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether the code of the class, its initialization too, is other than transformers': that of ours is not."""
        return "stock_class" not in vars(cls) and super().is_custom_code()

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Do nothing for a class of ours, as for its config; a class derived from it is transformers' to care for."""
        if "stock_class" not in vars(cls):
            super().register_for_auto_class(auto_class)


def _weights_of(attention: nn.Module, place: str) -> set[str]:
    """The names of an attention module's own weights, in the model where it has this place."""
    return {place + name for name, _ in attention.named_parameters() if not name.startswith("extra.")}


def _make_empty(mixin: type[WideModelMixin], stock: type[PreTrainedModel]) -> PreTrainedModel:
    """A model of our class without anything in it, for a pickle to fill."""
    made = mixin.mixed_into(stock)
    return made.__new__(made)


def class_by_name(name: str, mixin: type[WideModelMixin]) -> type:
    """Return a model or config class of ours by its name, as pickle and `auto_map` do; an AttributeError for others."""
    stock = getattr(transformers, name.removeprefix("GrowAttn"), None) if name.startswith("GrowAttn") else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel) and stock.config_class is not None:
        return mixin.mixed_into(stock)
    return config_class_by_name(name)


def __getattr__(name: str) -> type:
    """Make a class for a checkpoint that these files came with, which serve that checkpoint alone."""
    found = class_by_name(name, WideModelMixin)
    if issubclass(found, WideModelMixin):  # task heads build the model inside through AutoModel
        stock_config: Any = found.stock_class.config_class
        inner = WideModelMixin.mixed_into(MODEL_MAPPING[stock_config])
        AutoModel.register(inner.config_class, inner, exist_ok=True)
    return found
