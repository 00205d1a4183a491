"""`patch_model` and `unpatch_model`: make one living model growable, and stock again."""

import copy

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from ..model.architectures import ARCHITECTURES, Architecture
from ..model.configuration import PREFIX, GrownConfigMixin, auto_map, growable_config_class, set_default_widths
from ..model.modeling import GrownModelMixin, stock_attentions
from .attention import GrowableAttention
from .models import GrowableModelMixin, attentions, growable_configs, is_grown
from .registration import register

# Families that people ask for, and why they have no row.
_REFUSED = {
    "bloom": "adds ALiBi and the residual stream inside its attention module, which takes no attention function",
    "gpt_oss": "lets every head attend to a learned sink, which the growth's statistics would leave out",
    "deepseek_v2": "keeps keys and values in one latent, whose widths (kv_lora_rank) are already its own",
    "deepseek_v3": "keeps keys and values in one latent, whose widths (kv_lora_rank) are already its own",
    "albert": "computes its residual sum and norm inside the attention module, of which all layers share one",
    "mpnet": "computes attention by hand, with a bias for relative positions, and takes no attention function",
    "deberta-v2": "computes attention by hand, with separate keys and queries for relative positions",
    "gemma3": "wraps a language model: pass that one to patch_model, model.model.language_model",
}


def architecture_of(model_type: str) -> Architecture:
    """Return the row for a stock `config.model_type`.

    Raises:
        ValueError: the type has no row; the message names the type, the known ones and what to do.
    """
    try:
        return ARCHITECTURES[model_type]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        reason = f": it {_REFUSED[model_type]}" if model_type in _REFUSED else ""
        raise ValueError(
            f"hf_growattn does not know the model type {model_type!r}{reason}. Known types: {known}. For a model that "
            "wraps one of these, patch the inner language model instead; for a family of your own, describe it with "
            "register_architecture(Architecture(...))."
        ) from None


def register_architecture(row: Architecture) -> None:
    """Teach the library a model family of your own, by its row; `patch_model` and the Auto classes know it then.

    Do this before `from_pretrained` of its grown checkpoints too. They need this library: a row that is not in its
    files does not travel with a checkpoint.

    Raises:
        ModuleNotFoundError: the modeling module of that name does not exist.
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
            raise ValueError(f"{row.modeling_file.__name__} has no {name}; correct the row of {row.model_type!r}.")
    ARCHITECTURES[row.model_type] = row
    register(row.model_type)


def patch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's attention growable, in place, for this instance only.

    The classes of the model, its inner models and its self-attention modules are swapped for growable subclasses, and
    its config for a copy with a `model_type` of our own. Outputs, parameters, buffers and hooks stay as they were; the
    softmax scale is the one the modules hold, and no growth changes it. A model that was loaded from a GGUF
    into ordinary weights is no longer called quantized, so it can be trained and saved.

    Args:
        model: a transformers model of a known family: base model, causal LM, classifier or any other head.

    Returns:
        The same object. Patching it again changes nothing.

    Raises:
        TypeError: `model` is not a transformers model; pass the one inside a wrapper.
        ValueError: its `config.model_type` is unknown (the message lists the known ones), its family refuses this
            variant or is built otherwise by an older transformers, an attention module runs a forward that is not the
            stock one, or the model runs the code that came with its checkpoint. The model is as it was then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"patch_model needs a transformers model, not {type(model).__name__}. Pass the model inside the wrapper: "
            "accelerator.unwrap_model(model), model.get_base_model() for peft, model._orig_mod for torch.compile."
        )
    if isinstance(model, GrowableModelMixin):
        return model
    if any(cls.__name__ == GrownModelMixin.__name__ for cls in type(model).__mro__):
        raise ValueError(
            "This model runs the code that its checkpoint carries, which cannot grow. Import hf_growattn first, then "
            "load the model again."
        )
    _check(model, architecture_of(model.config.model_type))
    _replace_configs(model, model.config.model_type)
    GrowableModelMixin.adopt(model)
    _forget_gguf(model)
    return model


def _check(model: PreTrainedModel, row: Architecture) -> None:
    """Raise a ValueError if a family refuses this variant, or an attention module does not run the stock forward."""
    if row.refusal(model.config):
        raise ValueError(f"This model cannot be grown: {row.refusal(model.config)}.")
    stock_forward = getattr(row.modeling_file, row.attention).forward
    for name, module in stock_attentions(model, row).items():
        if not hasattr(module, row.query):
            raise ValueError(
                f"{name} ({type(module).__name__}) has no {row.query} in transformers {transformers.__version__}, but "
                "has in newer versions: upgrade transformers to grow this family."
            )
        replaced = "forward" in vars(module) and "_old_forward" not in vars(module)
        if type(module).forward is not stock_forward or replaced:
            raise ValueError(
                f"{name} has a forward of its own ({type(module).__name__}), which patching would replace. Patch the "
                "model before other libraries do, and use the stock attention class."
            )


def _forget_gguf(model: PreTrainedModel) -> None:
    """Call a model ordinary whose weights transformers unpacked from a GGUF; it would go on calling it quantized.

    Neither Trainer nor `save_pretrained` takes a model that is called so. Weights that stayed in blocks are integers.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return
    if all(parameter.is_floating_point() for parameter in model.parameters()):
        quantizer.remove_quantization_config(model)
        for config in growable_configs(model):
            vars(config).pop("_is_quantized", None)


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
        if getattr(config, "auto_map", None) == auto_map(config.model_type):
            del config.auto_map
        config.__class__ = CONFIG_MAPPING[stock_type]  # pyright: ignore[reportAttributeAccessIssue]
    for attention in attentions(model):
        attention.release()
    for module in model.modules():
        if isinstance(module, (GrowableModelMixin, GrowableAttention)):
            module.__class__ = type(module).__bases__[1]
    return model


def _replace_configs(model: PreTrainedModel, model_type: str) -> None:
    """Give the model tree growable copies of its configs: other models may hold the very same config objects."""
    growable, config_class = {}, growable_config_class(model_type)
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "model_type", None) != model_type or isinstance(config, GrownConfigMixin):
            continue
        if id(config) not in growable:
            growable[id(config)] = new = config_class.__new__(config_class)
            vars(new).update(copy.deepcopy(vars(config)))
            vars(new).pop("model_type", None)  # a loaded config notes it, and would hide the class's
            set_default_widths(new)
        module.config = growable[id(config)]
