"""Every private name of transformers, torch, peft and accelerate that this package uses, and why.

`NAMES` lists them. A test fails by the name of one that is gone, and another one finds names that are not listed. What
would be changed through such a name is changed by a function of this file.
"""

import sys
import types
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import auto_factory, modeling_auto, tokenization_auto
from transformers.utils import output_capturing

NAMES = {
    # transformers: the Auto classes. Their public `register` needs a class, and importing all classes takes minutes.
    "_LazyAutoMapping": "the class of the tables that Auto classes of models look in: nothing lists the tables",
    "_BaseAutoModelClass._model_mapping": "the table that an Auto class looks in",
    "_LazyAutoMapping._model_mapping": "the names of the model classes in such a table, by model type",
    "_LazyAutoMapping._reverse_config_mapping": "the model type by the name of a config class",
    "_LazyAutoMapping._modules": "where a table imports the classes of a type from",
    "_LazyAutoMapping._extra_content": "the classes that somebody registered, whose types no table of names knows",
    "_LazyConfigMapping._mapping": "the names of the config classes, by model type",
    "_LazyConfigMapping._modules": "where the table of configs imports the class of a type from",
    "_LazyConfigMapping._extra_content": "the config classes that somebody registered",
    # transformers: models.
    "configuration_utils.strict": "checks the fields of a config class; a subclass is not strict by itself",
    "output_capturing._CAN_RECORD_REGISTRY": "what output_hidden_states records, by the class of a model",
    "PreTrainedModel._can_record_outputs": "what a model class enters into that registry",
    "PreTrainedModel._adjust_missing_and_unexpected_keys": "overridden: the last look at a load before it returns",
    "PreTrainedModel._keys_to_ignore_on_save": "class authors list in it what a checkpoint leaves out",
    "PreTrainedModel._hf_peft_config_loaded": "set by add_adapter, which keeps adapters without a model of peft",
    "PreTrainedModel._can_set_experts_implementation": "whether a model has experts whose product can be exchanged",
    "PreTrainedConfig._attn_implementation": "which attention function a model uses: the getter that its forwards use",
    "Trainer._load_from_checkpoint": "wrapped: no event says that a checkpoint is loaded before its optimizer is",
    # torch
    "Module._modules": "children by name, without the search through parameters and buffers of `getattr`",
    "Module._parameters": "the same of parameters",
    "Module._load_from_state_dict": "overridden: module authors change in it what a state dict loads into",
    "Module._compiled_call_impl": "what Module.compile sets, put aside while a growth measures",
    "OptimizedModule._orig_mod": "the model inside torch.compile",
    "FlatParameter._fsdp_flattened": "set by FSDP1 on the parameters that it has flattened",
    "DistributedDataParallel._comm_hooks": "the hooks for communication, which a new reducer must be given",
    "DistributedDataParallel._module_parameters": "the parameters that are reduced",
    "DistributedDataParallel._has_rebuilt_buckets": "whether the reducer has ordered its buckets",
    "DistributedDataParallel._remove_autograd_hooks": "takes the hooks of the former reducer off",
    "DistributedDataParallel._build_params_for_reducer": "the parameters in the form that a reducer takes",
    "DistributedDataParallel._build_debug_param_to_name_mapping": "their names, for its errors",
    "DistributedDataParallel._ddp_init_helper": "makes the reducer",
    "DistributedDataParallel._set_static_graph": "says to it that the graph is static",
    # peft
    "PeftType._member_names_": "the enum of methods is closed, and a method needs a member: its names in their order",
    "PeftType._member_map_": "the members by name",
    "PeftType._value2member_map_": "the members by value",
    "BaseTuner._prepare_model": "overridden, as each method does",
    "BaseTuner._create_and_replace": "overridden, as each method does",
    "BaseTuner._replace_module": "overridden where unloading puts modules back",
    "PeftModel._enable_peft_forward_hooks": "calls that of a method, which serves adapters by row or refuses them",
}

# What shards a parameter and leaves a mark on it, with or without a wrapper.
SHARDING_MARKS = {"_fsdp_flattened": "flattened by FSDP1", "ds_id": "partitioned by DeepSpeed ZeRO-3"}


def auto_mappings() -> list[Any]:
    """What the Auto classes of models and tokenizers look classes up in."""
    tables = [*vars(modeling_auto).values(), tokenization_auto.TOKENIZER_MAPPING]
    return [table for table in tables if isinstance(table, auto_factory._LazyAutoMapping)]


def model_class_names(auto_class: Any) -> dict[str, str | tuple[str, ...]]:
    """The names of the model classes that an Auto class chooses from, by model type; empty for other classes."""
    return getattr(getattr(auto_class, "_model_mapping", None), "_model_mapping", {})


def register_type(model_type: str, config_name: str, place: types.ModuleType, module_name: str) -> None:
    """Let the Auto classes look up a model type by names of classes, which `place` has as attributes."""
    CONFIG_MAPPING._mapping[model_type] = config_name
    CONFIG_MAPPING._modules[module_name] = place
    for mapping in auto_mappings():
        mapping._modules[module_name] = place
        mapping._reverse_config_mapping[config_name] = model_type  # of several types the last, as in the stock one


def registered_class(mapping: Any, key: Any) -> Any:
    """The class that somebody registered in a table of the Auto classes; None for one of transformers itself."""
    return mapping._extra_content.get(key)


def copy_conversions(theirs: str, ours: str) -> None:
    """Let checkpoints of a class of ours be converted as those of another one."""
    from transformers import conversion_mapping  # with all that loads checkpoints, which takes seconds

    conversions = conversion_mapping.get_checkpoint_conversion_mapping(theirs)
    if conversions is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(ours, conversions, overwrite=True)


def record_outputs(model: Any) -> None:
    """Let a model whose class was swapped record hidden states; stock models register it when they are built."""
    output_capturing._CAN_RECORD_REGISTRY.setdefault(str(type(model)), model._can_record_outputs)


def leave_out_of_checkpoints(model: Any, names: Iterable[str]) -> None:
    """Let `save_pretrained` of a model leave out these entries of its state, too."""
    model._keys_to_ignore_on_save = {*names, *(model._keys_to_ignore_on_save or ())}


def has_own_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters of its own `add_adapter`, which `save_pretrained` saves without the model."""
    return getattr(model, "_hf_peft_config_loaded", False)


def replace_base(cls: type, old: type, new: type) -> type:
    """The class with another one in the place of a base: `fully_shard` derives a class of its own from a model's."""
    if cls is old:
        return new
    bases = tuple(replace_base(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(old.__name__, new.__name__), bases, namespace)


def rebuild_ddp(ddp: Any) -> None:
    """Let a DistributedDataParallel reduce the parameters that its module has now, with settings and hooks as before.

    Training loops keep the wrapper in a local variable, so the wrapper itself is mended.
    """
    static, hooks = ddp.static_graph, ddp._comm_hooks
    ddp._remove_autograd_hooks()
    del ddp.reducer, ddp.logger
    ddp._module_parameters = [p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore]
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), static)
    ddp._has_rebuilt_buckets, ddp._comm_hooks = False, []
    if static:
        ddp.static_graph = False  # it warns of setting it twice
        ddp._set_static_graph()
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


def add_peft_type(peft_types: Any, name: str) -> Any:
    """Return the member of peft's enum of methods for ours, added at the first call."""
    if name in peft_types.__members__:
        return peft_types.__members__[name]
    member = str.__new__(peft_types, name)
    member._name_ = member._value_ = name
    setattr(peft_types, name, member)
    peft_types._member_names_.append(name)
    peft_types._member_map_[name] = peft_types._value2member_map_[name] = member
    return member


def adapter_target_tables() -> list[dict[str, Any]]:
    """The tables of peft, once it is imported, with the modules that each method adapts by default, by model type."""
    constants = sys.modules.get("peft.utils.constants")
    named = vars(constants).items() if constants else ()
    return [table for name, table in named if name.startswith("TRANSFORMERS_MODELS_TO_")]
