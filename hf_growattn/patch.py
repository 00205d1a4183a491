"""`patch_model` and `unpatch_model`: make one living model growable, and stock again."""

import copy

from transformers import CONFIG_MAPPING, PreTrainedModel

from .architectures import ARCHITECTURES, Architecture, architecture_of
from .attention import GrowableAttention
from .configuration import PREFIX, GrowableConfigMixin, growable_config_class, set_default_widths
from .modeling import GrowableModelMixin, adopt, attentions, auto_map, growable_configs, is_grown, register

for _model_type in ARCHITECTURES:
    register(_model_type)


def register_architecture(row: Architecture) -> None:
    """Teach the library a model family of your own, by its row; `patch_model` and the Auto classes know it then.

    Do this before `from_pretrained` of its grown checkpoints too. They need this library: a row that is not in its
    files does not travel with a checkpoint.

    Raises:
        ModuleNotFoundError: there is no modeling module of that name.
        ValueError: the family has a row already, AutoConfig does not know its type, or the row names what the family
            does not have.
    """
    if row.model_type in ARCHITECTURES:
        raise ValueError(f"{row.model_type!r} has a row already; rows are not replaced.")
    if row.model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"AutoConfig does not know {row.model_type!r}. Call AutoConfig.register with its config first."
        )
    for name in filter(None, (row.attention, row.rotate)):
        if not hasattr(row.modeling_file, name):
            raise ValueError(f"{row.modeling_file.__name__} has no {name}; mend the row of {row.model_type!r}.")
    ARCHITECTURES[row.model_type] = row
    register(row.model_type)


def patch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's attention growable, in place, for this instance only.

    The classes of the model, its inner models and its self-attention modules are swapped for growable subclasses, and
    its config for a copy with a `model_type` of our own. Outputs, parameters, buffers and hooks stay as they were; the
    softmax scale is the one the modules hold, and no growth changes it.

    Args:
        model: a transformers model of a known family: base model, causal LM, classifier or any other head.

    Returns:
        The same object. Patching it again changes nothing.

    Raises:
        TypeError: `model` is not a transformers model; pass the one inside a wrapper.
        ValueError: its `config.model_type` is unknown (the message lists the known ones), its family refuses this
            variant, an attention module runs a forward that is not the stock one, or the model runs the code that came
            with its checkpoint. The model is as it was then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"patch_model needs a transformers model, not {type(model).__name__}. Pass the model inside the wrapper: "
            "accelerator.unwrap_model(model), model.get_base_model() for peft, model._orig_mod for torch.compile."
        )
    if isinstance(model, GrowableModelMixin):
        return model
    if hasattr(model, "sync_config") and model.config.model_type.startswith(PREFIX):
        raise ValueError(
            "This model runs the code that its checkpoint carries, which cannot grow. Import hf_growattn first, then "
            "load the model again."
        )
    architecture_of(model.config.model_type)
    stock_configs = _replace_configs(model, model.config.model_type)
    try:
        adopt(model)
    except BaseException:
        for module, config in stock_configs:
            module.config = config
        raise
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Give a patched model its stock classes back, in place.

    Returns:
        The same object. A model that is not patched is returned as it is.

    Raises:
        ValueError: a layer has grown, and no stock class fits its weights; `export_model` writes others that one does.
    """
    if not isinstance(model, GrowableModelMixin):
        return model
    if is_grown(model):
        raise ValueError(
            "This model has grown, and its weights no longer fit the stock class. Save it as it is with "
            "model.save_pretrained, or write a stock checkpoint of it with hf_growattn.export_model."
        )
    for config in growable_configs(model):
        stock_type = config.model_type.removeprefix(PREFIX)
        config.per_layer_config = None
        del config.qk_head_dim, config.v_head_dim
        if getattr(config, "auto_map", None) == auto_map(stock_type):
            del config.auto_map
        config.__class__ = CONFIG_MAPPING[stock_type]
    for attention in attentions(model):
        attention.release()
    for module in model.modules():
        if isinstance(module, (GrowableModelMixin, GrowableAttention)):
            module.__class__ = type(module).__bases__[1]
    return model


def _replace_configs(model: PreTrainedModel, model_type: str) -> list[tuple]:
    """Give the model tree growable copies of its configs: other models may hold the very same config objects."""
    growable, before, config_class = {}, [], growable_config_class(model_type)
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "model_type", None) != model_type or isinstance(config, GrowableConfigMixin):
            continue
        if id(config) not in growable:
            growable[id(config)] = new = config_class.__new__(config_class)
            vars(new).update(copy.deepcopy(vars(config)))
            vars(new).pop("model_type", None)  # a loaded config notes it, and would hide the class's
            set_default_widths(new)
        before.append((module, config))
        module.config = growable[id(config)]
    return before
