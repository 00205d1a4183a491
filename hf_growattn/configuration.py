"""Config classes of grown models: the stock config plus the attention widths, under a `model_type` of our own.

`config.json` of a grown checkpoint holds the stock fields, `"model_type": "growattn_<family>"`, the stock width as
`qk_head_dim` and `v_head_dim`, and `per_layer_config` with the widths of the layers that grew. `head_dim` stays what it
was: the rotary width and the source of the softmax scale.
"""

import sys
from collections.abc import Callable
from functools import cache

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.configuration_utils import strict

from .architectures import ARCHITECTURES

PREFIX = "growattn_"

# Called with a config class when the first config of it is made: its model classes cost an import that few need.
WHEN_FIRST_MADE: list[Callable[[type[PreTrainedConfig]], None]] = []


def stock_head_dim(config: PreTrainedConfig) -> int:
    """Width of one head before any growth."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class GrowableConfigMixin:
    """Mixed into a stock config class.

    Attributes:
        qk_head_dim, v_head_dim: the stock head width. Layers that grew override them in `per_layer_config`; read a
            layer's own with `layer_widths`.
    """

    def __new__(cls, *args, **kwargs):
        """Make a config, by its constructor, by a copy or by pickle; see `WHEN_FIRST_MADE`."""
        _first_made(cls)
        return super().__new__(cls)

    def __post_init__(self, **kwargs):
        per_layer_config = kwargs.pop("per_layer_config", None)
        super().__post_init__(**kwargs)
        set_default_widths(self)
        for name in ("qk_head_dim", "v_head_dim"):
            if getattr(self, name) != stock_head_dim(self):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} and the stock head width {stock_head_dim(self)}; outside of "
                    "per_layer_config they are equal. Mend config.json: growth changes per_layer_config "
                    "alone."
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
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Do nothing: `save_pretrained` of the model says where the code is; transformers would say it otherwise."""

    def to_dict(self):
        """Return the config as a dict, as the stock class does."""
        _tell_peft(self.model_type)
        return super().to_dict()


@cache
def _first_made(config_class: type[PreTrainedConfig]) -> None:
    for call in WHEN_FIRST_MADE:
        call(config_class)


def _tell_peft(model_type: str) -> None:
    """Give a type of ours what peft's tables of default target modules hold for its stock type.

    peft looks the type up right after it has read the config by `to_dict`, so it is told there: however late peft was
    imported, it knows by then.
    """
    constants = sys.modules.get("peft.utils.constants")
    stock = model_type.removeprefix(PREFIX)
    for name, table in vars(constants).items() if constants else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and stock in table:
            table.setdefault(model_type, table[stock])


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
                f"at least the stock head width {stock_head_dim(config)}. Mend per_layer_config in config.json."
            )
    return widths


@cache
def growable_config_class(model_type: str) -> type[PreTrainedConfig]:
    """Return `GrowAttn<Stock config class>` for a stock model type."""
    stock = CONFIG_MAPPING[model_type]
    namespace = {"__module__": __name__, "model_type": PREFIX + model_type}
    # A subclass of a strict class checks its fields only as far as it is strict itself.
    return strict(type(f"GrowAttn{stock.__name__}", (GrowableConfigMixin, stock), namespace))


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
