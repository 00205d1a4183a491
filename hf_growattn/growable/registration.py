"""Register grown models in the tables of transformers and peft when those are imported.

transformers' tables of models hold names of classes and where to look for them; ours are looked for in `hf_growattn`.
"""

import sys
from importlib.abc import MetaPathFinder


class _Afterwards(MetaPathFinder):
    """Runs `register_families` after the import of a module that holds such tables."""

    modules = ("transformers", "peft.utils.constants")

    def find_spec(self, name, path, target=None):
        """Find what the other finders do, and have its loader call us in the end."""
        if name not in self.modules:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                register_families()

            loader.exec_module = execute_and_register
        return spec


def register_when_imported() -> None:
    """Register the families now, if transformers is there already, and after it or peft is imported."""
    sys.meta_path.insert(0, _Afterwards())
    if "transformers" in sys.modules:
        register_families()


def register_families() -> None:
    """Teach the Auto classes the grown models of every family, and peft its default target modules."""
    from ..model.architectures import ARCHITECTURES

    for model_type in ARCHITECTURES:
        register(model_type)


def register(model_type: str) -> None:
    """The same for one family, which transformers itself may not know."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    from ..model.configuration import growable_config_class, register_type_names

    stock, config_class = CONFIG_MAPPING[model_type], growable_config_class(model_type)
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    register_type_names(model_type)
    for mapping in _auto_mappings():
        found = mapping._extra_content.get(stock)
        if model_type in mapping._model_mapping:
            mapping._reverse_config_mapping[config_class.__name__] = config_class.model_type
            mapping._modules[model_type_to_module_name(config_class.model_type)] = sys.modules["hf_growattn"]
        elif hasattr(found, "config_class"):
            from .models import GrowableModelMixin

            mapping.register(config_class, GrowableModelMixin.mixed_into(found), exist_ok=True)
        elif found is not None:  # tokenizers
            mapping.register(config_class, found, exist_ok=True)


def _auto_mappings() -> list:
    """What the Auto classes of models and tokenizers look classes up in."""
    from transformers.models.auto import modeling_auto, tokenization_auto
    from transformers.models.auto.auto_factory import _LazyAutoMapping

    tables = [*vars(modeling_auto).values(), tokenization_auto.TOKENIZER_MAPPING]
    return [table for table in tables if isinstance(table, _LazyAutoMapping)]
