"""Register grown models in the tables of transformers and peft when those are imported.

transformers' tables of models hold names of classes and where to look for them; ours are looked for in `hf_growattn`.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder


class _Afterwards(MetaPathFinder):
    """Calls a function after the import of a module that holds such tables."""

    def __init__(self, calls: dict[str, Callable[[], object]]):
        self.calls = calls

    def find_spec(self, name, path, target=None):
        """Find what the other finders do, and have its loader call us in the end."""
        if name not in self.calls:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                self.calls[name]()

            loader.exec_module = execute_and_register
        return spec


def register_when_imported(register_method: Callable[[], object]) -> None:
    """Register the families, and our method of peft, now or after transformers and peft are imported."""
    calls = {"transformers": register_families, "peft.utils.constants": register_families, "peft": register_method}
    sys.meta_path.insert(0, _Afterwards(calls))
    for name in ("transformers", "peft"):
        if name in sys.modules:
            calls[name]()


def register_families() -> None:
    """Teach the Auto classes the names of the grown models of every type, and peft its default target modules."""
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING,
        CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
        model_type_to_module_name,
    )

    from ..model.configuration import PREFIX, register_type_names

    mappings, library = auto_mappings(), sys.modules["hf_growattn"]
    for model_type, name in list(CONFIG_MAPPING_NAMES.items()):
        if model_type.startswith(PREFIX):
            continue
        ours = PREFIX + model_type
        CONFIG_MAPPING._mapping[ours] = f"GrowAttn{name}"
        register_type_names(model_type)
        for mapping in (CONFIG_MAPPING, *mappings):
            mapping._modules[model_type_to_module_name(ours)] = library
        for mapping in mappings:
            mapping._reverse_config_mapping[f"GrowAttn{name}"] = ours  # of several types the last, as in the stock one


def auto_mappings() -> list:
    """What the Auto classes of models and tokenizers look classes up in."""
    from transformers.models.auto import modeling_auto, tokenization_auto
    from transformers.models.auto.auto_factory import _LazyAutoMapping

    tables = [*vars(modeling_auto).values(), tokenization_auto.TOKENIZER_MAPPING]
    return [table for table in tables if isinstance(table, _LazyAutoMapping)]
