"""Folders of adapters whose base grew: peft saves the growth along, and peft and transformers load it with them.

Importing this file wraps `save_pretrained` and `load_adapter` of peft's models, and `load_adapter` of transformers'.
What has no growth goes through as it is. A hot swap of new dims is refused; who loads the adapters' weights alone is
warned.
"""

import contextlib
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftModel
from peft.utils import hotswap
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..growable.growth_files import GROWN_TYPE, GROWTH, GROWTH_FILE, load_growth_of_adapter, save_growth_beside
from ..growable.growths import is_grown
from ..growable.models import patch_inside
from ..model.new_dims import ExtraDims

_HUB = ("subfolder", "revision", "token", "cache_dir", "local_files_only")


@contextlib.contextmanager
def _unmerged(model: nn.Module) -> Iterator[None]:
    """Take adapters of new dims that are merged out of the growths of a model for a while."""
    extras = [module for module in model.modules() if isinstance(module, ExtraDims)]
    held: list[Any] = [extra._modules["adapters"] for extra in extras if "adapters" in extra._modules]
    merged = {layer: [*layer.merged_adapters] for layer in held if layer.merged}
    for layer in merged:
        layer.unmerge()
    try:
        yield
    finally:
        for layer, names in merged.items():
            layer.merge(adapter_names=names)


def _saves_growth(stock: Callable) -> Callable:
    """A `save_pretrained` of peft that saves the growth of the base in a folder next to each adapter."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save_pretrained(self: Any, save_directory: Any, *args, **kwargs) -> None:
        stock(self, save_directory, *args, **kwargs)
        bound = signature.bind(self, save_directory, *args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["is_main_process"]:
            with _unmerged(self):  # new dims that are adapters are saved as such
                for name in bound.arguments["selected_adapters"] or self.peft_config:
                    folder = Path(save_directory, "" if name == "default" else name)
                    save_growth_beside(self, folder, kwargs.get("state_dict"))

    return save_pretrained


def _loads_growth(stock: Callable) -> Callable:
    """A `load_adapter` that first gives the base the growth which the adapter was trained with, and patches it."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def load_adapter(self: Any, *args, **kwargs) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        load_config = given.get("load_config")
        options = {**getattr(load_config, "download_kwargs", {}), **(given.get("adapter_kwargs") or {}), **kwargs}
        options = {name: options[name] for name in _HUB if options.get(name)}
        source = given.get("model_id") or given.get("peft_model_id")
        source = source or getattr(load_config, "pretrained_model_name_or_path", None)
        others = getattr(self, "peft_config", {}).keys() - {given.get("adapter_name") or "default"}
        if source is not None and _has_growth(source, options):
            place = str(Path(options.pop("subfolder", ""), GROWTH))
            file: Any = cached_file(source, GROWTH_FILE, subfolder=place, **options)
            base: Any = self.get_base_model() if isinstance(self, PeftModel) else self
            is_trainable = given.get("is_trainable", False)
            load_growth_of_adapter(self, patch_inside(base), Path(file).parent, is_trainable, alone=not others)
        elif source is not None and others and is_grown(self):
            warnings.warn(
                f"The adapter in {source} was trained without the new dims that its base has here, which change what "
                "it computes: load it into a model of its own.",
                stacklevel=2,
            )
        return stock(self, *args, **kwargs)

    return load_adapter


def _has_growth(source: Any, options: dict[str, Any]) -> bool:
    """Whether the adapter in a folder, or by a Hub id, was trained with a growth of its base."""
    folder = Path(source, options.get("subfolder", ""))
    is_here = folder.is_dir()
    file = find_adapter_config_file(str(folder)) if is_here else find_adapter_config_file(str(source), **options)
    return file is not None and str(json.loads(Path(file).read_text()).get("peft_type")).startswith(GROWN_TYPE)


def _warns_of_growth(stock: Callable) -> Callable:
    """A `load_peft_weights` that says so where the weights alone are not what was trained."""

    @functools.wraps(stock)
    def load_peft_weights(model_id: str, *args, **kwargs) -> dict:
        if _has_growth(model_id, {name: kwargs[name] for name in _HUB if kwargs.get(name)}):
            warnings.warn(
                f"The adapters in {model_id} were trained with a growth of their base, which these weights lack. Load "
                "both by PeftModel.from_pretrained(base, folder), or the growth by load_growth.",
                stacklevel=2,
            )
        return stock(model_id, *args, **kwargs)

    return load_peft_weights


class _Swappable(dict):
    """The config classes of adapters that peft can swap, by type: a hot swap would leave out a growth."""

    def __missing__(self, peft_type: str) -> None:
        raise ValueError(
            f"Adapters of type {peft_type!r} cannot be hot-swapped: load this one under another name, "
            'model.load_adapter(folder, "other"), then call model.set_adapter("other").'
        )


swappable = {peft_type: PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] for peft_type in hotswap.CONFIG_KEYS_TO_CHECK}
hotswap.PEFT_TYPE_TO_CONFIG_MAPPING = _Swappable(swappable)  # pyright: ignore[reportPrivateImportUsage]
# Without these entries, as in a process that has not imported this, peft stops at the type.
_configs: dict[Any, Any] = PEFT_TYPE_TO_CONFIG_MAPPING
_configs.update({f"{GROWN_TYPE}{peft_type.value}": config for peft_type, config in list(_configs.items())})
peft.load_peft_weights = peft.utils.load_peft_weights = _warns_of_growth(peft.load_peft_weights)
PeftModel.save_pretrained = _saves_growth(PeftModel.save_pretrained)
PeftModel.load_adapter = _loads_growth(PeftModel.load_adapter)
PeftAdapterMixin.load_adapter = _loads_growth(PeftAdapterMixin.load_adapter)
