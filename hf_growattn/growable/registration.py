"""Enter grown models into the tables of transformers by the names of their classes.

The tables of transformers hold names of classes, and the module that has them as attributes, which makes ours when it
is asked for one. So no model family is imported here.
"""

import types

from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    model_type_to_module_name,
)

from ..model.compat import register_type
from ..model.configuration import PREFIX


def register_families(library: types.ModuleType) -> None:
    """Teach the Auto classes the names of the grown models of every type.

    Args:
        library: the module that has the classes as attributes.
    """
    for model_type, name in list(CONFIG_MAPPING_NAMES.items()):
        if not model_type.startswith(PREFIX):
            ours = PREFIX + model_type
            register_type(ours, f"GrowAttn{name}", library, model_type_to_module_name(ours))
