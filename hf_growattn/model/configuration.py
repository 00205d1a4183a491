"""Config classes of grown models: the stock config plus the attention widths, under a `model_type` of our own.

`config.json` of a grown checkpoint holds the stock fields, `"model_type": "growattn_<family>"`, the stock width as
`qk_head_dim` and `v_head_dim`, and `per_layer_config` with the widths of the layers that grew. `head_dim` stays what it
was: the rotary width and the source of the softmax scale.
"""

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.configuration_utils import strict  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.auto import modeling_auto, tokenization_auto

from .architectures import ARCHITECTURES

PREFIX = "growattn_"

CODE_FOLDER = "growattn"  # in a checkpoint: the files of this folder, which load it without the library
_AUTO_CLASSES = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForMultipleChoice": modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


def stock_head_dim(config: PreTrainedConfig) -> int:
    """Width of one head before any growth, as the stock attention of the family reads it from a config."""
    return ARCHITECTURES[config.model_type.removeprefix(PREFIX)].head_dim(config)


_Config = PreTrainedConfig if TYPE_CHECKING else object  # what this is mixed into


class GrownConfigMixin(_Config):
    """Mixed into a stock config class.

    Attributes:
        qk_head_dim, v_head_dim: the stock head width. Layers that grew override them in `per_layer_config`; read a
            layer's own with `layer_widths`.
        auto_map: where the code that loads it lies, once it was saved with its model.
    """

    qk_head_dim: int
    v_head_dim: int
    auto_map: dict[str, str]

    def __post_init__(self, **kwargs):
        per_layer_config = kwargs.pop("per_layer_config", None)
        super().__post_init__(**kwargs)
        width = stock_head_dim(self)
        if type(width) is not int or width < 1:
            raise ValueError(f"head_dim is {width!r}; it must be a whole number, at least 1. Correct config.json.")
        set_default_widths(self)
        for name in ("qk_head_dim", "v_head_dim"):
            if getattr(self, name) != width:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} and the stock head width {width}; outside of per_layer_config "
                    "they are equal. Correct config.json: growth changes per_layer_config alone."
                )
        if per_layer_config is not None:
            try:
                self.per_layer_config = per_layer_config
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    'per_layer_config in config.json must hold widths by layer, such as {"0": {"qk_head_dim": 20}}: '
                    f"{error}."
                ) from error
        for layer in range(self.num_hidden_layers):
            layer_widths(self, layer)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read a stock config as one that has not grown: peft asks the class of a patched model for its base's."""
        fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if f"{PREFIX}{fields.get('model_type')}" == cls.model_type:
            fields["model_type"] = cls.model_type
        return fields, kwargs

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Do nothing: `save_pretrained` of the model says where the code is; transformers would say it otherwise."""

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save as the stock config does, with the code that loads it if `auto_map` asks for that."""
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        if getattr(self, "auto_map", None) == auto_map(self.model_type):
            (Path(save_directory) / CODE_FOLDER).mkdir(exist_ok=True)
            for name, code in _code().items():
                (Path(save_directory) / CODE_FOLDER / name).write_bytes(code)


def auto_map(model_type: str) -> dict[str, str]:
    """Where a checkpoint of a type of ours keeps the classes that the Auto classes may load it by."""
    names = {auto_name: table[model_type] for auto_name, table in _AUTO_CLASSES.items() if model_type in table}
    names["AutoConfig"] = f"GrowAttn{CONFIG_MAPPING[model_type.removeprefix(PREFIX)].__name__}"
    return {auto_name: f"{CODE_FOLDER}/modeling.{name}" for auto_name, name in names.items()}


@cache
def _code() -> dict[str, bytes]:
    """The files that travel with a checkpoint, by name: all of this folder."""
    files = (path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")
    return {path.name: path.read_bytes() for path in files}


def set_default_widths(config: PreTrainedConfig) -> None:
    """Note the stock head width where the config has none yet; the global one must be set before any layer's own."""
    for name in ("qk_head_dim", "v_head_dim"):
        if name not in vars(config):
            setattr(config, name, stock_head_dim(config))


def layer_widths(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Return `(qk_head_dim, v_head_dim)` of one layer.

    Raises:
        ValueError: the config holds something else than a whole number at least as large as the stock width.
    """
    layer_config = config.per_layer_config[layer]
    widths = layer_config.qk_head_dim, layer_config.v_head_dim
    for name, width in zip(("qk_head_dim", "v_head_dim"), widths):
        if type(width) is not int or width < stock_head_dim(config):
            raise ValueError(
                f"{name} of layer {layer} is {width!r}; it must be a whole number, "
                f"at least the stock head width {stock_head_dim(config)}. Correct per_layer_config in config.json."
            )
    return widths


@cache
def growable_config_class(model_type: str) -> type[PreTrainedConfig]:
    """Return `GrowAttn<Stock config class>` for a stock model type."""
    stock = CONFIG_MAPPING[model_type]
    namespace = {"__module__": __name__, "model_type": PREFIX + model_type}
    register_type_names(model_type)
    # A subclass of a strict class checks its fields only as far as it is strict itself.
    return strict(type(f"GrowAttn{stock.__name__}", (GrownConfigMixin, stock), namespace))


def register_type_names(model_type: str) -> None:
    """Enter a type of ours into the tables where others look up its stock type, or the names of its classes.

    Trainer shifts labels under label smoothing for class names that it finds there, pipelines accept them,
    AutoTokenizer chooses a class by the type, and peft, once it is imported, the modules that adapters go around.
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
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and model_type in table:
            table.setdefault(ours, table[model_type])


def config_class_by_name(name: str) -> type[PreTrainedConfig]:
    """Return a config class of ours by its name.

    Raises:
        AttributeError: no family has a class of this name.
    """
    for model_type in ARCHITECTURES:
        if name == f"GrowAttn{CONFIG_MAPPING[model_type].__name__}":
            return growable_config_class(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__getattr__ = config_class_by_name  # pickle asks the module for its classes
