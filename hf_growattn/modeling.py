"""Model classes of grown models, made from the stock ones, and what makes a model tree growable.

`GrowAttn<Stock class>` is the stock class with growable attention. `patch_model` swaps a living model to it;
`from_pretrained` builds it from a config. Importing this module registers the classes with the Auto classes.
"""

import ctypes
import inspect
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from .architectures import ARCHITECTURES, Architecture, architecture_of
from .attention import GrowableAttention, growable_attention_class
from .configuration import GROWABLE_CONFIGS, PREFIX, GrowableConfigMixin, layer_widths, stock_head_dim

_AUTO_CLASSES = (
    ("AutoModel", "MODEL_MAPPING"),
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
    ("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING"),
)


class GrowableModelMixin:
    """Mixed into a stock model class: attention widths come from the config, and saving is all or nothing."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        adopt(self)
        for attention in attentions(self):
            qk_head_dim, v_head_dim = layer_widths(config, attention.layer_idx)
            widening = attention.widen(qk_head_dim - attention.qk_head_dim, v_head_dim - attention.v_head_dim)
            for module in {resize.module for resize in widening.resizes}:
                self._init_weights(module)

    def save_pretrained(self, save_directory, is_main_process: bool = True, push_to_hub: bool = False, **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, whole or not at all.

        The checkpoint is written beside `save_directory` and then takes its place in one step, so a process that is
        killed leaves the former checkpoint as it was. Other files of the directory stay. Where the directory itself
        cannot be replaced, as the current directory or a mount, the files are, one after the other.
        """
        target = Path(save_directory).resolve()
        if kwargs.get("distributed_checkpoint"):
            return super().save_pretrained(save_directory, is_main_process, push_to_hub=push_to_hub, **kwargs)
        if not is_main_process:
            with tempfile.TemporaryDirectory() as discarded:  # ranks may gather weights together, but one keeps them
                return super().save_pretrained(discarded, is_main_process, **kwargs)
        if target.is_file():
            raise ValueError(f"{target} is a file; save_pretrained needs a directory.")
        known = inspect.signature(PreTrainedModel.save_pretrained).parameters
        hub_kwargs = {key: kwargs.pop(key) for key in list(kwargs) if key not in known}
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            super().save_pretrained(partial, is_main_process, **kwargs)
            _take_place(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if push_to_hub:
            self.push_to_hub(hub_kwargs.pop("repo_id", target.name), token=kwargs.get("token"), **hub_kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Take the widths along with the weights, so that a state from before or after a growth loads (`fit`)."""
        modules = [(name, module) for name, module in self.named_modules() if isinstance(module, GrowableAttention)]
        changed = [attention.fit(state_dict, f"{prefix}{name}.") for name, attention in modules]
        if any(changed):
            self.sync_config()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def sync_config(self) -> None:
        """Write the widths of the live layers into every config of the model tree: of those that grew, if any."""
        grown = [attention for attention in attentions(self) if is_grown(attention)]
        for config in growable_configs(self):
            config.per_layer_config = {
                a.layer_idx: {"qk_head_dim": a.qk_head_dim, "v_head_dim": a.v_head_dim} for a in grown
            } or None

    def push_to_hub(self, repo_id: str, **kwargs):
        """Push as `PreTrainedModel.push_to_hub` does; with the library, also a card of what grew, all in one commit."""
        library = sys.modules.get("hf_growattn.cards")  # this file travels with checkpoints, the cards do not
        return library.push_model(self, repo_id, **kwargs) if library else super().push_to_hub(repo_id, **kwargs)


def attentions(model: nn.Module) -> list[GrowableAttention]:
    """The growable attention modules of a model, by layer."""
    found = (module for module in model.modules() if isinstance(module, GrowableAttention))
    return sorted(found, key=lambda attention: attention.layer_idx)


def growable_configs(model: nn.Module) -> list[GrowableConfigMixin]:
    """The distinct growable config objects in a model tree: a task head may hold another one than its base model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, GrowableConfigMixin)}.values())


def adopt(model: PreTrainedModel) -> None:
    """Swap the classes of a model tree whose configs are growable: models, inner models and self-attention.

    Parameters, buffers and hooks are untouched.

    Raises:
        ValueError: an attention module does not run the stock forward, so swapping it would change the model.
    """
    row = architecture_of(model.config.model_type.removeprefix(PREFIX))
    stock_attention = [m for m in model.modules() if _is_stock_self_attention(m, row)]
    for module in stock_attention:
        stock_forward = getattr(row.modeling_file, row.attention).forward
        replaced = "forward" in vars(module) and "_old_forward" not in vars(module)
        if type(module).forward is not stock_forward or replaced:
            raise ValueError(
                f"The attention of layer {module.layer_idx} has a forward of its own ({type(module).__name__}), which "
                "patching would replace. Patch the model before other libraries do, or use the stock attention class."
            )
    for module in stock_attention:
        module.__class__ = growable_attention_class(type(module), row)
        module.adopt()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(module.config, GrowableConfigMixin):
            if not isinstance(module, GrowableModelMixin):
                module.__class__ = growable_model_class(type(module))
            # Output capture looks a model's recorders up by its class; stock models enter it when they are built.
            output_capturing._CAN_RECORD_REGISTRY.setdefault(str(type(module)), module._can_record_outputs)


def _is_stock_self_attention(module: nn.Module, row: Architecture) -> bool:
    if isinstance(module, GrowableAttention) or getattr(module, "is_cross_attention", False):
        return False
    return isinstance(module, getattr(row.modeling_file, row.attention))


def is_grown(model: nn.Module) -> bool:
    """Whether any layer in a module is wider than its stock width."""
    return any((a.qk_head_dim, a.v_head_dim) != (stock_head_dim(a.config),) * 2 for a in attentions(model))


@cache
def growable_model_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return `GrowAttn<Stock class>`, a subclass of a stock model class, base model or head alike."""
    name = f"GrowAttn{stock.__name__}"
    config_class = GROWABLE_CONFIGS[stock.config_class.model_type]
    cls = type(name, (GrowableModelMixin, stock), {"__module__": __name__, "config_class": config_class})
    globals()[name] = cls  # so that pickle finds it
    return cls


def _register() -> None:
    for model_type in ARCHITECTURES:
        config_class = GROWABLE_CONFIGS[model_type]
        stock_config_class = transformers.CONFIG_MAPPING[model_type]
        for auto_name, mapping_name in _AUTO_CLASSES:
            mapping = getattr(transformers, mapping_name)
            if stock_config_class in mapping:
                model_class = growable_model_class(mapping[stock_config_class])
                getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)


_register()


def _take_place(partial: Path, target: Path) -> None:
    """Put a finished directory in the place of `target`, keeping those files of `target` that it does not replace."""
    if not target.exists():
        os.rename(partial, target)
        return
    replaced = {entry.name for entry in partial.iterdir()}
    others = [entry for entry in target.iterdir() if entry.name not in replaced]
    if os.path.ismount(target) or Path.cwd().is_relative_to(target):
        for entry in sorted(partial.iterdir(), key=lambda entry: not _is_weights(entry.name)):
            os.replace(entry, target / entry.name)
        for entry in filter(lambda entry: _is_weights(entry.name), others):
            entry.unlink()
        return
    for entry in others:
        if _is_weights(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, partial / entry.name, copy_function=_link_or_copy, symlinks=True)
        else:
            _link_or_copy(entry, partial / entry.name)
    shutil.copymode(target, partial)
    _exchange(partial, target)


def _is_weights(name: str) -> bool:
    """Weights of a former save, which must not survive beside new ones: shards and their index."""
    return name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))


def _link_or_copy(source, destination):
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, destination, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories; in one step on Linux, elsewhere in three renames of which none loses anything."""
    if sys.platform == "linux":
        at_fdcwd, rename_exchange = -100, 2
        libc = ctypes.CDLL(None)
        renameat2 = getattr(libc, "renameat2", None)
        if renameat2 and renameat2(at_fdcwd, bytes(one), at_fdcwd, bytes(other), rename_exchange) == 0:
            return
    aside = one.with_name(one.name + ".former")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)
