"""`patch_model` and `unpatch_model`: make one living model growable, and stock again."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..model.configuration import WideConfigMixin, auto_map, growable_config_class
from ..model.modeling import WideModelMixin, find_attentions, renew_old_forward
from ..model.seam import WideAttention, WideProjection, names_taken
from .models import GrowableModelMixin, attentions, growable_configs, is_grown
from .registration import register


def patch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's attention growable, in place, for this instance only.

    The classes of the model, its inner models and its attention modules are swapped for growable subclasses, and its
    config for a copy with a `model_type` of our own. Outputs, parameters, buffers and hooks stay as they were: the
    stock forward runs as it is. A model that was loaded from a GGUF into ordinary weights is no longer called
    quantized, so it can be trained and saved.

    Args:
        model: a transformers model: base model, causal LM, classifier or any other head.

    Returns:
        The same object. Patching it again changes nothing.

    Raises:
        TypeError: `model` is not a transformers model; pass the one inside a wrapper.
        ValueError: none of its attention modules takes its attention function from transformers' table, one runs a
            forward that other code has put there, or the model runs the code that came with its checkpoint. The model
            is as it was then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"patch_model needs a transformers model, not {type(model).__name__}. Pass the model inside the wrapper: "
            "accelerator.unwrap_model(model), model.get_base_model() for peft, model._orig_mod for torch.compile."
        )
    if isinstance(model, GrowableModelMixin):
        return model
    if any(cls.__name__ == WideModelMixin.__name__ for cls in type(model).__mro__):
        raise ValueError(
            "This model runs the code that its checkpoint carries, which cannot grow. Import hf_growattn first, then "
            "load the model again."
        )
    _check(model)
    register(type(model.config))
    _replace_configs(model)
    GrowableModelMixin.adopt(model)
    _forget_gguf(model)
    return model


def _check(model: PreTrainedModel) -> None:
    """Raise a ValueError if no attention module can have new dims, or one does not run its class's forward."""
    found = [module for module, *_ in find_attentions(model)]
    if not found:
        named = {type(module).__name__ for module in model.modules() if "attention" in type(module).__name__.lower()}
        reason = "has no attention module"
        if named:
            reason = (
                f"computes attention in {', '.join(sorted(named))}, of which none takes its attention function from "
                "transformers' table, ALL_ATTENTION_FUNCTIONS, with an output projection of its own after it"
            )
        raise ValueError(f"New dims cannot join {type(model).__name__}: it {reason}.")
    for module in found:
        taken = names_taken(GrowableModelMixin.attention_mixin, module)
        if taken:
            raise ValueError(f"New dims cannot join {type(module).__name__}, which has its own {', '.join(taken)}.")
        if "forward" in vars(module) and "_old_forward" not in vars(module):
            raise ValueError(
                f"A {type(module).__name__} has a forward that other code has put there, which new dims could not "
                "join. Patch the model before other libraries do."
            )


def _replace_configs(model: PreTrainedModel) -> None:
    """Give the model tree growable copies of its configs: other models may hold the very same config objects."""
    growable: dict[int, Any] = {}
    stock_class = type(model.config)
    config_class: Any = growable_config_class(stock_class)
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(config) is not stock_class:
            continue
        if id(config) not in growable:
            growable[id(config)] = new = config_class.__new__(config_class)
            vars(new).update(copy.deepcopy(vars(config)))
            vars(new).pop("model_type", None)  # a loaded config notes it, and would hide the class's
            new.extra_dims = {}
        module.config = growable[id(config)]


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
            config.__dict__.pop("_is_quantized", None)


def unpatch_model(model: PreTrainedModel, drop_growth: bool = False) -> PreTrainedModel:
    """Give a patched model its stock classes back, in place.

    Args:
        model: patched or not.
        drop_growth: take new dims off, too; the stock weights are what they were, or what training made of them.

    Returns:
        The same object. A model that is not patched is returned as it is.

    Raises:
        ValueError: a layer has grown, and `drop_growth` is not set.
    """
    if not isinstance(model, GrowableModelMixin):
        return model
    if is_grown(model) and not drop_growth:
        raise ValueError(
            "This model has grown, and a stock model has no place for its new dims. Save it as it is with "
            "model.save_pretrained, write a stock checkpoint of it with hf_growattn.export_model, or lose the new dims "
            "with unpatch_model(model, drop_growth=True)."
        )
    for config in growable_configs(model):
        _make_stock(config)
    every: list[Any] = list(attentions(model))
    for attention in every:
        attention._modules.pop("extra", None)
        for name in ("shape", "layer", "output_sibling", "call"):
            vars(attention).pop(name, None)
    for module in _ours(model):
        module.__dict__.pop("share", None)
        module.__class__ = type(module).__bases__[1]
        if not isinstance(module, PreTrainedModel):
            renew_old_forward(module)
    return model


def _make_stock(config: WideConfigMixin) -> None:
    if getattr(config, "auto_map", None) == auto_map(config.model_type):
        del config.auto_map
    del config.extra_dims
    config.__class__ = type(config).__bases__[1]  # pyright: ignore[reportAttributeAccessIssue]


def _ours(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules() if isinstance(module, (GrowableModelMixin, WideAttention, WideProjection))
    ]
