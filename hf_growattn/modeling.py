"""Model classes of grown models, made from the stock ones, and what makes a model tree growable.

`GrowAttn<Stock class>` is the stock class with growable attention. `patch_model` swaps a living model to it;
`from_pretrained` builds it from a config. Classes are made when they are needed, by `growable_model_class`, by name as
an attribute of this module, or by the Auto classes.
"""

import inspect
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from pickle import UnpicklingError

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, output_capturing

from .architectures import ARCHITECTURES, Architecture, architecture_of
from .attention import GrowableAttention, growable_attention_class
from .configuration import (
    PREFIX,
    WHEN_FIRST_MADE,
    GrowableConfigMixin,
    config_class_by_name,
    growable_config_class,
    layer_widths,
    stock_head_dim,
)
from .folders import check_index, check_numbers, check_sums, note_sums, replacing

_AUTO_CLASSES = (
    ("AutoModel", "MODEL_MAPPING"),
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
    ("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING"),
)

_CODE_FOLDER = "growattn"  # of a checkpoint: this file and those it imports, which load it where this library is not
_SHIPPED_FAMILIES = frozenset(ARCHITECTURES)  # rows that a program adds later are not in the files


class GrowableModelMixin:
    """Mixed into a stock model class: attention widths come from the config, and saving is all or nothing."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        adopt(self)
        for attention in attentions(self):
            for projection in attention.begin_at(*layer_widths(config, attention.layer_idx)):
                if not projection.weight.is_meta:  # what is loaded is drawn by nobody
                    self._init_weights(projection)

    def save_pretrained(self, save_directory, is_main_process: bool = True, push_to_hub: bool = False, **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, whole or not at all.

        The checkpoint is written beside `save_directory` and then takes its place in one step, so a process that is
        killed leaves the former checkpoint as it was. Other files of the directory stay. Where the directory itself
        cannot be replaced, as the current directory or a mount, the files are, one after the other.

        The code of the classes goes along, so that `trust_remote_code=True` loads it where this library is not.

        Raises:
            ValueError: `save_directory` is a file.
            OSError: it cannot be written, as on a full disk; what was there is as it was.
        """
        target = Path(save_directory).resolve()
        if kwargs.get("distributed_checkpoint"):
            super().save_pretrained(save_directory, is_main_process, push_to_hub=push_to_hub, **kwargs)
            return _add_code(self, target) if is_main_process else None
        if not is_main_process:
            with tempfile.TemporaryDirectory() as discarded:  # ranks may gather weights together, but one keeps them
                return super().save_pretrained(discarded, is_main_process, **kwargs)
        known = inspect.signature(PreTrainedModel.save_pretrained).parameters
        hub_kwargs = {key: kwargs.pop(key) for key in list(kwargs) if key not in known}
        with replacing(target) as partial:
            super().save_pretrained(partial, is_main_process, **kwargs)
            _add_code(self, partial)
        if push_to_hub:
            self.push_to_hub(hub_kwargs.pop("repo_id", target.name), token=kwargs.get("token"), **hub_kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load as `PreTrainedModel.from_pretrained` does, but safetensors alone, and say of a damaged one what to do.

        Raises:
            OSError: weights are missing, cut short or, in a folder, others than were saved there.
            RuntimeError: the weights are not those that config.json describes.
        """
        folder = Path(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")
        check_sums(_sums_of(folder))
        check_index(folder)
        check_numbers(folder)
        kwargs.setdefault("use_safetensors", True)  # nothing was ever saved otherwise, and pickles may hold code
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except Exception as error:
            absent = isinstance(error, FileNotFoundError) and ".safetensors" in str(error)
            reason = "it names pickled files, which may hold code" if isinstance(error, UnpicklingError) else error
            if absent or reason is not error or type(error).__name__ == "SafetensorError":  # nor may these import that
                raise OSError(
                    f"The checkpoint {pretrained_model_name_or_path} is not whole: {reason}. Copy, download or save it "
                    "again."
                ) from error
            raise

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Refuse what would leave a part of the model at random: transformers raises `loading_info.error_msgs`.

        That is attention weights of other sizes, even with `ignore_mismatched_sizes`, which is meant for task heads,
        and weights that the checkpoint lacks, but for those of a task head that it was not saved with.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        layers = tuple(f"{name}." for name, module in self.named_modules() if isinstance(module, GrowableAttention))
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
                "what save_pretrained wrote together, or mend per_layer_config in config.json."
            )

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Do nothing for a class of ours, as for its config; a class derived from it is transformers' to care for."""
        if cls.__module__ != __name__:
            super().register_for_auto_class(auto_class)

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
    if row.refusal(model.config):
        raise ValueError(f"This model cannot be grown: {row.refusal(model.config)}.")
    stock_attention = {name: m for name, m in model.named_modules() if _is_stock_self_attention(m, row)}
    for name, module in stock_attention.items():
        stock_forward = getattr(row.modeling_file, row.attention).forward
        replaced = "forward" in vars(module) and "_old_forward" not in vars(module)
        if type(module).forward is not stock_forward or replaced:
            raise ValueError(
                f"{name} has a forward of its own ({type(module).__name__}), which patching would replace. Patch the "
                "model before other libraries do, and use the stock attention class."
            )
    for module in stock_attention.values():
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
    model_type = stock.config_class.model_type
    row = architecture_of(model_type)
    growable_attention_class(getattr(row.modeling_file, row.attention), row)  # pickle asks for it next, by its name
    namespace = {"__module__": __name__, "config_class": growable_config_class(model_type)}
    cls = type(f"GrowAttn{stock.__name__}", (GrowableModelMixin, stock), namespace)
    globals()[cls.__name__] = cls  # so that pickle finds it
    # Checkpoints of some families hold other tensors than the modules, and what converts them goes by these names.
    for theirs, ours in ((stock.__name__, cls.__name__), (model_type, PREFIX + model_type)):
        conversions = get_checkpoint_conversion_mapping(theirs)
        if conversions is not None:
            register_checkpoint_conversion_mapping(ours, conversions, overwrite=True)
    return cls


def __getattr__(name: str):
    """Make a model class, or find a config class, when it is asked for by name, as pickle and `auto_map` do."""
    stock = getattr(transformers, name.removeprefix("GrowAttn"), None) if name.startswith("GrowAttn") else None
    stock_config = getattr(stock, "config_class", None)
    if getattr(stock_config, "model_type", None) in ARCHITECTURES:
        return growable_model_class(stock)
    return config_class_by_name(name)


def register(model_type: str) -> None:
    """Teach AutoConfig the grown models of a family that has a row in `ARCHITECTURES`; model classes follow it.

    The library does this on import. Code that travelled with a checkpoint does not: it serves that checkpoint alone.
    """
    config_class = growable_config_class(model_type)
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def _register_models(config_class: type[GrowableConfigMixin]) -> None:
    """Teach the Auto classes the models of a config class; transformers itself builds some through them."""
    for auto_name, stock in _stock_classes(config_class.model_type.removeprefix(PREFIX)).items():
        model_class = growable_model_class(stock)
        getattr(transformers, auto_name).register(model_class.config_class, model_class, exist_ok=True)


WHEN_FIRST_MADE.append(_register_models)


def _stock_classes(model_type: str) -> dict[str, type[PreTrainedModel]]:
    """The stock model class of a family by the name of its Auto class, for those that know the family."""
    config_class = CONFIG_MAPPING[model_type]
    mappings = {auto_name: getattr(transformers, mapping_name) for auto_name, mapping_name in _AUTO_CLASSES}
    return {name: mapping[config_class] for name, mapping in mappings.items() if config_class in mapping}


def auto_map(model_type: str) -> dict[str, str]:
    """Where a checkpoint of a family keeps the classes that the Auto classes may load it by, for its config.json."""
    names = {"AutoConfig": growable_config_class(model_type).__name__}
    for auto_name, stock in _stock_classes(model_type).items():
        names[auto_name] = growable_model_class(stock).__name__
    return {auto_name: f"{_CODE_FOLDER}/{Path(__file__).stem}.{name}" for auto_name, name in names.items()}


def _sums_of(checkpoint: Path) -> Path:
    return checkpoint / _CODE_FOLDER / "checksums.json"


def _add_code(model: PreTrainedModel, folder: Path) -> None:
    """Put checksums of the weights and the code of a model's class into its checkpoint, and its place into config.json.

    Nothing for adapters saved alone, which have no config; no code of classes and families that are not in our files.
    """
    ours = next(cls for cls in type(model).__mro__ if cls.__module__ == __name__)
    model_type = model.config.model_type.removeprefix(PREFIX)
    derived = type(model).__name__.removeprefix("FSDP") != ours.__name__  # FSDP's own class is a wrapper in name only
    if not (folder / CONFIG_NAME).exists():
        return
    (folder / _CODE_FOLDER).mkdir(exist_ok=True)
    note_sums(_sums_of(folder))
    if derived or model_type not in _SHIPPED_FAMILIES:
        return
    custom_object_save(ours, folder / _CODE_FOLDER)
    config = {**json.loads((folder / CONFIG_NAME).read_text()), "auto_map": auto_map(model_type)}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
