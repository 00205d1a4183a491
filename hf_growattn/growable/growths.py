"""A growth alone, apart from its base: a folder of a few megabytes."""

import functools
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..model.extra import Part
from .attention import GrowableAttention
from .folders import replacing
from .models import GrowableModelMixin, growable_configs, is_grown
from .sharding import whole

WEIGHTS, DESCRIPTION = "growth.safetensors", "growth.json"
GROWTH = "growth"  # the folder next to the adapters of a peft model: the new dims of its base


def growable_part(model: nn.Module) -> GrowableModelMixin:
    """The patched model that a module holds, or is.

    Raises:
        ValueError: it holds none.
    """
    found = next((module for module in model.modules() if isinstance(module, GrowableModelMixin)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} is not growable yet: call patch_model(model) first.")
    return found


def save_growth(model: nn.Module, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Save the new dims of a grown model alone, without its base: `growth.safetensors` and `growth.json`.

    Args:
        model: a patched model, or a peft model of one.
        folder: where to; both files are written, or none.
        state_dict: of `model`, if all ranks of a sharded one have gathered it.

    Raises:
        ValueError: the model is not patched, or it has not grown.
    """
    inner = growable_part(model)
    start = next(name for name, module in model.named_modules() if module is inner)
    state = {name: parameter for name, parameter in inner.named_parameters() if _is_new(name)}
    if state_dict is not None:
        state = {name: state_dict[f"{start}.{name}" if start else name] for name in state}
    state = {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in state.items()}
    if not state:
        raise ValueError("This model has not grown: there are no new dims to save.")
    description = {"model_type": inner.config.model_type, "extra_dims": growable_configs(inner)[0].extra_dims}
    with replacing(Path(folder).resolve()) as partial:
        save_file(state, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def load_growth(model: nn.Module, folder: str | Path) -> None:
    """Give a patched model the new dims that `save_growth` wrote, in place of those that it has.

    Optimizers that train the model take the new parameters.

    Raises:
        ValueError: the model is not patched, or the growth is of another model.
        FileNotFoundError: the folder holds no growth.
    """
    inner = growable_part(model)
    description: dict[str, Any] = json.loads((Path(folder) / DESCRIPTION).read_text())
    state = load_file(Path(folder) / WEIGHTS)
    if description.get("model_type") != inner.config.model_type:
        raise ValueError(
            f"{folder} holds a growth of a {description.get('model_type')}, and this is a {inner.config.model_type}."
        )
    sizes = {}
    for name, attention in inner.named_modules():
        if isinstance(attention, GrowableAttention):
            for part_name, dims in description["extra_dims"].get(str(attention.layer), {}).items():
                part = Part(attention.shape, *dims, device="meta")
                place = f"{name}.extra.parts.{part_name}."
                sizes |= {place + own: parameter.shape for own, parameter in part.named_parameters()}
    if sizes != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError(f"{folder} holds a growth of a model of other sizes: load it onto the base that it grew on.")
    inner.set_parts(description["extra_dims"])
    save_with_adapters(inner)
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if _is_new(name):
                parameter.copy_(state[name])


class SavesGrowth:
    """Mixed into the class of a peft model whose base grew under it: peft itself saves the adapters alone."""

    @classmethod
    @functools.cache
    def mixed_into(cls, stock: type[Any]) -> type[Any]:
        """Return the subclass of a class of peft that has this mixin."""
        made = type(f"GrowAttn{stock.__name__}", (cls, stock), {"__module__": __name__})
        setattr(sys.modules[__name__], made.__name__, made)  # so that pickle finds it
        return made

    def save_pretrained(self, save_directory: str, *args, is_main_process: bool = True, **kwargs) -> None:
        """Save the adapters as peft does, and the growth in the folder `growth` next to them, for `load_growth`."""
        stock: Any = super()
        stock.save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)
        model: Any = self
        if is_main_process and is_grown(model):
            save_growth(model, Path(save_directory) / GROWTH, kwargs.get("state_dict"))


def save_with_adapters(model: nn.Module) -> None:
    """Let the peft model around a patched model, if there is one, save the new dims with its adapters."""
    if not hasattr(model, "peft_config"):
        return
    for thing in gc.get_objects():  # the model does not know what is around it
        kind = type(thing)
        if issubclass(kind, nn.Module) and hasattr(kind, "get_base_model") and not issubclass(kind, SavesGrowth):
            tuner = vars(thing).get("_modules", {}).get("base_model")  # one whose making failed has none
            if tuner is not None and tuner._modules.get("model") is model:
                thing.__class__ = SavesGrowth.mixed_into(kind)


def _is_new(name: str) -> bool:
    return ".extra.parts." in name
