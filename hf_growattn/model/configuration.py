"""Config classes of grown models: the stock config and the widths of the new dims, under a `model_type` of our own.

`config.json` of a grown checkpoint holds the stock fields, `"model_type": "growattn_<type>"`, and `extra_dims` with the
growths of each layer, such as `{"0": {"growth_1": [2, 4]}}`: two new dims of queries and keys, four of values.
"""

import copyreg
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.configuration_utils import strict  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.auto import modeling_auto, tokenization_auto

from .compat import adapter_target_tables, model_class_names

PREFIX = "growattn_"
CODE_FOLDER = "growattn"  # in a checkpoint: the files of this folder, which load it without the library
MOST_DIMS = 2**16  # of a head, far beyond any hidden size: nothing is allocated by a damaged number
_Config = PreTrainedConfig if TYPE_CHECKING else object  # what this is mixed into


class WideConfigMixin(_Config):
    """Mixed into a stock config class.

    Attributes:
        growable_submodels: names of the inner models whose attention may grow; None for the usual ones.
        extra_dims: by layer, as a text, the growths by name, each with its new dims of queries and keys, and of values.
        attention_count: the number of attention modules of the model that these are of.
        auto_map: where the code that loads it lies, once it was saved with its model.
        stock_class: the stock config class.
        model_type: of a config object the stock type, which code of others asks for; `config.json` says that of ours.
    """

    stock_class: type[PreTrainedConfig]
    growable_submodels: list[str] | None
    extra_dims: dict[str, dict[str, list[int]]]
    attention_count: int | None
    auto_map: dict[str, str]

    def __post_init__(self, **kwargs):
        extra_dims = kwargs.pop("extra_dims", None) or {}
        growable_submodels = kwargs.pop("growable_submodels", None)
        attention_count = kwargs.pop("attention_count", None)
        super().__post_init__(**kwargs)
        self.growable_submodels, self.extra_dims = growable_submodels, extra_dims
        self.attention_count = attention_count
        vars(self)["model_type"] = self.stock_class.model_type
        check_extra_dims(extra_dims)
        names = growable_submodels
        listed = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        if names is not None and not listed:
            raise ValueError(f"growable_submodels in config.json must be a list of names, and is {names!r}.")

    def __reduce__(self) -> tuple:
        """Let pickles name the stock class: ours is made when it is needed, and may not be there yet."""
        if "stock_class" not in vars(type(self)):  # a class derived from ours
            return copyreg.__newobj__, (type(self),), vars(self)  # pyright: ignore[reportAttributeAccessIssue]
        return make_empty_config, (self.stock_class,), vars(self)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read a stock config as one that has not grown: peft asks the class of a patched model for its base's."""
        fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if f"{PREFIX}{fields.get('model_type')}" == cls.model_type:
            fields["model_type"] = cls.model_type
        return fields, kwargs

    def to_dict(self) -> dict[str, Any]:
        """As the stock config does; without new dims it is a stock config, which needs nothing of ours."""
        fields = super().to_dict()
        if not self.extra_dims:
            for name in ("extra_dims", "growable_submodels", "attention_count"):
                fields.pop(name, None)
            fields["model_type"] = self.stock_class.model_type
            names = fields.get("architectures")
            fields["architectures"] = names and [name.removeprefix("GrowAttn") for name in names]
            if self.names_our_code:
                del fields["auto_map"]
        return fields

    @property
    def names_our_code(self) -> bool:
        """Whether `auto_map` is what a save of a grown model says."""
        return getattr(self, "auto_map", None) == auto_map(self.model_type)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Do nothing: `save_pretrained` of the model says where the code is; transformers would say it otherwise."""

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save as the stock config does, with the code that loads a grown model if `auto_map` asks for that."""
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        if self.extra_dims and self.names_our_code:
            folder = Path(save_directory) / CODE_FOLDER
            folder.mkdir(exist_ok=True)
            for file in Path(__file__).parent.glob("*.py"):
                if file.name != "__init__.py":
                    (folder / file.name).write_bytes(file.read_bytes())


def check_extra_dims(extra_dims: Any) -> None:
    """Raise a ValueError if `extra_dims` of a config.json has not the form that a save gives it."""
    good, taken = isinstance(extra_dims, dict), {*dir(nn.ModuleDict())}
    for layer, growths in extra_dims.items() if good else ():
        good = good and str(layer).isdecimal() and isinstance(growths, dict)
        good = good and all(str(name).isidentifier() and name not in taken for name in growths)
        for dims in growths.values() if good else ():
            good = good and isinstance(dims, list) and len(dims) == 2
            good = good and all(type(number) is int and 0 <= number < MOST_DIMS for number in dims) and sum(dims) > 0
    if not good:
        form = '{"0": {"growth_1": [2, 4]}}'
        raise ValueError(f"extra_dims in config.json must have a form such as {form}, and is {extra_dims!r:.200}.")


@cache
def auto_map(stock_type: str) -> dict[str, str]:
    """Where a grown checkpoint of a type keeps the classes that the Auto classes may load it by."""
    names = {}
    for auto_name, auto_class in vars(modeling_auto).items():
        table = model_class_names(auto_class)
        if auto_name.startswith("AutoModel") and stock_type in table:
            name = table[stock_type]
            names[auto_name] = name if isinstance(name, str) else name[0]
    names["AutoConfig"] = CONFIG_MAPPING[stock_type].__name__
    return {auto_name: f"{CODE_FOLDER}/modeling.GrowAttn{name}" for auto_name, name in names.items()}


@cache
def growable_config_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return `GrowAttn<Stock config class>`."""
    name = f"GrowAttn{stock.__name__}"
    namespace = {"__module__": __name__, "model_type": PREFIX + stock.model_type, "stock_class": stock}
    # A subclass of a strict class checks its fields only as far as it is strict itself.
    made = strict(type(name, (WideConfigMixin, stock), namespace))
    register_type_names(stock.model_type)
    return made


def make_empty_config(stock: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a config of our class of a stock class, without any field, as pickles and copies begin."""
    made = growable_config_class(stock)
    return made.__new__(made)


def register_type_names(model_type: str) -> None:
    """Enter a type of ours into the tables where others look up its stock type, or the names of its classes.

    Trainer shifts labels under label smoothing for class names that it finds there, pipelines accept them,
    AutoTokenizer chooses a class by the type, and peft, if it is imported, the modules that adapters go around.
    """
    ours = PREFIX + model_type
    for name, table in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES") and model_type in table:
            stock = table[model_type]
            table[ours] = f"GrowAttn{stock}" if isinstance(stock, str) else tuple(f"GrowAttn{one}" for one in stock)
    if model_type in tokenization_auto.TOKENIZER_MAPPING_NAMES:
        tokenization_auto.TOKENIZER_MAPPING_NAMES[ours] = tokenization_auto.TOKENIZER_MAPPING_NAMES[model_type]
    if model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(ours)
    for table in adapter_target_tables():
        if model_type in table:
            table.setdefault(ours, table[model_type])


def config_class_by_name(name: str) -> type[PreTrainedConfig]:
    """Return a config class of ours by its name; an AttributeError if transformers has no stock class of it."""
    import transformers

    stock = getattr(transformers, name.removeprefix("GrowAttn"), None) if name.startswith("GrowAttn") else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedConfig):
        return growable_config_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__getattr__ = config_class_by_name  # pickle asks the module for its classes
