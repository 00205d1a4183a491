"""Model classes of living models, saved whole or not at all, and `patch_model`, which gives a model such a class."""

import copy
import inspect
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ..model.compat import auto_mappings, has_own_adapters, registered_class
from ..model.configuration import growable_config_class
from ..model.families import dims_of, find_attentions, find_obstacle, growable_configs, remove_extra, sync_config
from ..model.modeling import WideModelMixin, class_by_name
from ..model.new_dims import ExtraDims, HeadShape
from .attention import attentions
from .folders import loading, replacing
from .growth_files import save_growth_beside
from .growths import Dims, call_of_patch, check_kind, growable_model, set_dims
from .training_state import refuse_sharded

_SAVING = inspect.signature(PreTrainedModel.save_pretrained).parameters


class GrowableModelMixin(WideModelMixin):
    """Mixed into a stock model class: attention that can grow, and saving that is all or nothing."""

    def save_pretrained(self, save_directory, is_main_process: bool = True, push_to_hub: bool = False, **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, whole or not at all.

        The checkpoint is written next to `save_directory`, and its files then move there, the config last. A process
        that is killed while it writes leaves the former checkpoint as it was; amid the moves, loading names the folder
        with the rest. Other files of the directory stay. Save from one process at a time. A push comes after it.

        Raises:
            ValueError: `save_directory` is a file, or a model that is spread over processes shall be pushed.
            OSError: it cannot be written, as on a full disk; what was there is as it was.
        """
        if kwargs.get("distributed_checkpoint"):
            return super().save_pretrained(save_directory, is_main_process, push_to_hub=push_to_hub, **kwargs)
        if push_to_hub:
            refuse_sharded(self, [])  # other processes would not save a second time
        if not self.should_save_on_this_rank(is_main_process):
            with tempfile.TemporaryDirectory() as discarded:  # ranks may gather weights together, but one keeps them
                return super().save_pretrained(discarded, is_main_process, **kwargs)
        target = Path(save_directory).resolve()
        hub_kwargs = {"repo_id": target.name} | {key: kwargs.pop(key) for key in list(kwargs) if key not in _SAVING}
        state = kwargs.get("state_dict")
        with replacing(target) as partial:  # saving empties the state that it is given, and a push saves again
            super().save_pretrained(partial, is_main_process, **kwargs | {"state_dict": state and dict(state)})
        has_adapters = has_own_adapters(self)
        if has_adapters:  # those were its adapters alone
            save_growth_beside(self, target, state)
        if push_to_hub and has_adapters:  # what this calls takes the growth along
            self.push_to_hub(**kwargs, **hub_kwargs)  # pyright: ignore[reportArgumentType]
        elif push_to_hub:
            with tempfile.TemporaryDirectory() as folder:
                super().save_pretrained(folder, push_to_hub=True, **kwargs, **hub_kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load as `PreTrainedModel.from_pretrained` does, but safetensors alone, and say of a damaged one what to do.

        Raises:
            OSError: weights are missing or cut short, or another process saved there meanwhile.
            RuntimeError: the weights are not those that config.json describes.
        """
        with loading(Path(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Take the new dims that a state holds along with its weights, so that one from another growth loads."""
        former, dims = dims_of(self), _dims_in(self, state_dict, prefix)
        if former and not dims:
            warnings.warn(
                "The state dict has all old weights and no new dims, so those of this model were taken off.",
                stacklevel=2,
            )
        set_dims(self, dims)
        places = tuple(f"{prefix}{attention.name}.extra.growths." for attention in attentions(self))
        own = {f"{prefix}{name}" for name, _ in self.named_parameters()}
        left_out = [key for key in state_dict if key.startswith(places) and key not in own]
        if left_out:
            warnings.warn(
                f"{len(left_out)} tensors of new dims, such as {left_out[0]}, were left out: their sizes do not show "
                "in a part of a state dict. Load all of it at once, or the checkpoint by from_pretrained.",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _dims_in(model: nn.Module, state: dict[str, Any], prefix: str) -> Dims:
    """The new dims that a model has with a state dict, by the sizes of its tensors: a part of one adds to its own."""
    places = {attention: f"{prefix}{attention.name}." for attention in attentions(model)}
    entries = (f"{place}{entry}" for attention, place in places.items() for entry in _stock_entries(attention.module))
    is_whole = all(entry in state for entry in entries)  # otherwise of adapters, of one layer, or of one file
    found: Dims = {} if is_whole else dims_of(model)
    for attention, place in places.items():
        start, end, shape = f"{place}extra.growths.", ".in_projection.weight", attention.shape
        for growth in [key[len(start) : -len(end)] for key in state if key.startswith(start) and key.endswith(end)]:
            out_projection = state.get(f"{start}{growth}.out_projection.weight")
            if is_whole or out_projection is not None:
                dims = dims_by_size(shape, state[f"{start}{growth}{end}"], out_projection)
                found.setdefault(str(attention.layer), {})[growth] = dims
    return found


def dims_by_size(shape: HeadShape, in_projection: Tensor, out_projection: Tensor | None) -> list[int]:
    """The dims of queries and keys, and of values, that the weights of new dims are for."""
    v_dims = 0 if out_projection is None else out_projection.shape[1] // shape.num_heads
    rows = in_projection.shape[0] - v_dims * shape.num_key_value_heads
    return [rows // (shape.num_heads + shape.num_key_value_heads), v_dims]


def _stock_entries(attention: nn.Module) -> Iterator[str]:
    """The names of a stock attention module's weights and buffers, within it; adapters may be around them."""
    children: Iterator[tuple[str, Any]] = attention.named_children()
    for name, child in children:
        while hasattr(child, "base_layer"):
            name, child = f"{name}.base_layer", child.base_layer
        if name != "extra":
            yield from (f"{name}.{entry}" for entry in child.state_dict())


def patch_model(model: PreTrainedModel, submodels: Sequence[str] | None = None) -> PreTrainedModel:
    """Make a model's attention growable, in place, for this instance only.

    The classes of the model and its inner models are swapped for growable subclasses, and its config for a copy, which
    is saved under a `model_type` of our own. Attention modules stay as they are, class, forward and hooks, until they
    grow; outputs, parameters and buffers stay as they were.

    Args:
        model: a transformers model: base model, causal LM, classifier or any other head. Pass the whole of it: the
            config of a model around the one that is patched would not know of its new dims.
        submodels: names of inner models whose attention may grow, such as `("language_model", "vision_tower")`. By
            default that is the language model of a model that wraps one, and all of any other.

    Returns:
        The same object. Patching it again changes nothing.

    Raises:
        TypeError: `model` is not a transformers model; the message names the one inside a wrapper.
        ValueError: it has no inner model of such a name, or is patched with others; none of its attention modules
            takes its attention function from transformers' table; or the model runs the code that came with its
            checkpoint. The model is as it was then.
    """
    check_kind(model)
    if not isinstance(model, PreTrainedModel):
        holds_one = any(isinstance(module, PreTrainedModel) for module in model.modules())
        fix = f"Pass the one inside: {call_of_patch(model)}." if holds_one else "It holds none."
        raise TypeError(f"patch_model needs a transformers model, not a {type(model).__name__}. {fix}")
    submodels = [submodels] if isinstance(submodels, str) else submodels
    if isinstance(model, GrowableModelMixin):
        if submodels is not None and [*submodels] != model.config.growable_submodels:
            raise ValueError("This model is patched with other submodels: unpatch_model(model) first.")
        return model
    if any(cls.__name__ == WideModelMixin.__name__ for cls in type(model).__mro__):
        raise ValueError(
            "This model runs the code that its checkpoint carries, which cannot grow. Import hf_growattn first, then "
            "load the model again."
        )
    _check(model, submodels)
    _register(type(model.config))
    _replace_configs(model, submodels)
    GrowableModelMixin.adopt(model)
    sync_config(model)  # an inner model may have grown before
    return model


def _check(model: PreTrainedModel, submodels: Sequence[str] | None) -> None:
    """Raise a ValueError if no attention module can have new dims."""
    if not find_attentions(model, submodels):
        named = (module for module in model.modules() if "attention" in type(module).__name__.lower())
        why = {type(module).__name__: find_obstacle(module) for module in named}
        reasons = "; ".join(f"{name} {obstacle}" for name, obstacle in why.items())
        raise ValueError(f"New dims cannot join {type(model).__name__}: {reasons or 'it has no attention module'}.")


def _register(stock: type) -> None:
    """Enter the grown models of one config class, which transformers itself may not know, into the Auto classes."""
    made = growable_config_class(stock)
    if made.model_type in CONFIG_MAPPING and not registered_class(CONFIG_MAPPING, made.model_type):
        return
    AutoConfig.register(made.model_type, made, exist_ok=True)
    for mapping in auto_mappings():
        found = registered_class(mapping, stock)
        if found is not None:  # model classes, and tokenizers as they are
            is_model = hasattr(found, "config_class")
            mapping.register(made, GrowableModelMixin.mixed_into(found) if is_model else found, exist_ok=True)


def _replace_configs(model: PreTrainedModel, submodels: Sequence[str] | None) -> None:
    """Give the model tree a copy of each of its configs, since other models may hold the same objects.

    Those of the model's own class become growable.
    """
    stock_class, copies = type(model.config), {}  # the memo of all copies, by which what is one object stays one
    for module in model.modules():
        for name, config in list(vars(module).items()):
            if isinstance(config, PreTrainedConfig):
                setattr(module, name, new := copy.deepcopy(config, copies))
                if type(new) is stock_class:
                    new.__class__ = growable_config_class(stock_class)
                    vars(new)["model_type"] = stock_class.model_type
                    new.growable_submodels, new.extra_dims = submodels and [*submodels], {}
                    new.attention_count = None


def patch_inside(model: nn.Module) -> Any:
    """Return the patched model that a module is or holds, or its first one, patched now; a ValueError without one."""
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not inside:
        raise ValueError(f"{type(model).__name__} has no transformers model in it, whose attention could grow")
    if not any(isinstance(module, GrowableModelMixin) for module in inside):
        patch_model(inside[0])
    return growable_model(model)  # which refuses several that are apart


def unpatch_model(model: PreTrainedModel, drop_growth: bool = False) -> PreTrainedModel:
    """Give a patched model its stock classes back, in place.

    Args:
        model: patched or not.
        drop_growth: take new dims off, too; the stock weights are what they were, or what training made of them. An
            optimizer still holds the new dims, and never steps them again, since they get no gradient.

    Returns:
        The same object. A model that is not patched is returned as it is.

    Raises:
        TypeError: it is no model.
        ValueError: a layer has grown, and `drop_growth` is not set; or the patched model is inside of what was passed.
    """
    check_kind(model)
    if not isinstance(model, GrowableModelMixin):
        if any(isinstance(module, GrowableModelMixin) for module in model.modules()):
            raise ValueError(f"The patched model is inside this {type(model).__name__}: unpatch_model(that).")
        return model
    extras = [
        (module, extra) for module in model.modules() if isinstance(extra := module._modules.get("extra"), ExtraDims)
    ]
    if any(len(extra.growths) for _, extra in extras) and not drop_growth:
        raise ValueError(
            "This model has grown, and a stock model has no place for its new dims. Save it as it is with "
            "model.save_pretrained, write a stock checkpoint of it with hf_growattn.export_model, or lose the new dims "
            "with unpatch_model(model, drop_growth=True)."
        )
    for module, _ in extras:
        remove_extra(module)
    configs, own = growable_configs(model), vars(model)
    if "grown_from" in own:  # no checkpoint held the grown model, and this one is its origin's again
        for named in (model, *configs):
            named.name_or_path = own["grown_from"]
        del own["grown_from"]
    for config in configs:
        if config.names_our_code:
            del config.auto_map
        del config.growable_submodels, config.extra_dims, config.attention_count
        del vars(config)["model_type"]  # the class says the same from now on
        config.__class__ = config.stock_class  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        if isinstance(module, GrowableModelMixin):
            module.__class__ = type(module).class_without_mixin()  # pyright: ignore[reportAttributeAccessIssue]
    return model


def __getattr__(name: str) -> type:
    """Make a class when it is asked for by name, as pickle and the Auto classes do."""
    return class_by_name(name, GrowableModelMixin)
