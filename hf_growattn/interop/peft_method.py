"""Growth as a method of peft: `GrowAttnConfig` for `get_peft_model`, and its guided start.

The base stays frozen and as it is. An adapter is the new dims alone: for each layer, the queries, keys, values and
output columns that a growth would append to every head, as an extension of `GrowableAttention`. Importing this file
teaches peft the method.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.versions import require_version

from ..grow.checks import layers_of
from ..grow.growth import Grower
from ..grow.plan import GrowthConfig, check_affordable, parameters_of_a_dim, weights_of
from ..growable.attention import GrowableAttention
from ..growable.models import GrowableModelMixin, attentions
from ..growable.patching import patch_model, unpatch_model
from ..growable.sharding import is_sharded, sharded_modules
from ..measure.extension import Extension, ExtraDims, gather, project, set_extension
from ..measure.kinds import KINDS
from ..report.report import GrowthReport

require_version("peft>=0.18", "hf_growattn.GrowAttnConfig needs it; try: pip install -U 'peft>=0.18'")

from peft import PeftConfig, PeftModel, PeftType  # noqa: E402  not before its version is known
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge  # noqa: E402
from peft.utils import register_peft_method  # noqa: E402

_NAME, PREFIX = "growattn", "growattn_"
DIMS = {role: kind.width for kind in KINDS.values() for role in kind.roles}
_ZERO_AT_FIRST = tuple(kind.stacked for kind in KINDS.values())


def _member_of_peft_type() -> PeftType:
    """Add our member to peft's closed enum of methods, which it looks methods up in by name and by value."""
    value = _NAME.upper()
    member = str.__new__(PeftType, value)
    member._name_ = member._value_ = value
    setattr(PeftType, value, member)
    PeftType._member_names_.append(value)
    PeftType._member_map_[value] = PeftType._value2member_map_[value] = member
    return member


GROWATTN = PeftType.__members__.get(_NAME.upper()) or _member_of_peft_type()


@dataclass
class GrowAttnConfig(PeftConfig):
    """What an adapter adds to the heads of the chosen layers. Give `qk_dims`, `v_dims` or both, or a `budget`.

    Attributes:
        qk_dims: dims added to the queries and keys of each head (patterns).
        v_dims: dims added to the values of each head, and to what the output projection reads (messages).
        budget: weights to add at most, or a share of the base model's such as 0.01. The adapter starts with equal
            dims everywhere; `initialize_growattn_weights` gives them to the layers and kinds that gain most, as
            `GrowthConfig` does. `qk_dims` and `v_dims` then say what each layer has, {layer: dims}, and are saved so.
        layers: indices of the layers; None means every layer.
        modules_to_save: names of other modules to train and to save whole, such as the head of a classifier.

    Raises:
        ValueError: an attribute is outside its range; the message names the fix.
    """

    qk_dims: int | dict[int, int] = 0
    v_dims: int | dict[int, int] = 0
    budget: int | float | None = None
    layers: list[int] | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = GROWATTN
        self.layers = self.layers if self.layers is None else list(self.layers)
        self.target_modules = frozenset()  # peft asks for them; known once there is a model, and not saved
        for name in set(DIMS.values()):
            if isinstance(dims := getattr(self, name), dict):
                setattr(self, name, {int(layer): number for layer, number in dims.items()})  # JSON makes them texts
        _ = self.growth  # the same bounds

    @property
    def spent(self) -> bool:
        """Whether the dims of each layer are known that the budget bought."""
        return isinstance(self.qk_dims, dict) and isinstance(self.v_dims, dict)

    @property
    def growth(self) -> GrowthConfig:
        """The growth whose new dims the adapter can hold; the old ones stay frozen."""
        spent = self.budget is not None and self.spent
        dims = {name: getattr(self, name) for name in DIMS.values() if not spent}
        return GrowthConfig(**dims, budget=self.budget, layers=self.layers, old_dims_train=False)

    def hold(self, dims: Mapping[str, Mapping[int, int]]) -> None:
        """Note what a budget bought, {layer: dims} by the name of the width; layers without any are left out."""
        for width, by_layer in dims.items():
            setattr(self, width, {layer: number for layer, number in by_layer.items() if number})

    def dims_at(self, layer: int) -> dict[str, int]:
        """The dims that each head of a layer gains, by role."""
        dims = {role: getattr(self, width) for role, width in DIMS.items()}
        return {role: n.get(layer, 0) if isinstance(n, dict) else n for role, n in dims.items()}


class GrowAttnLayer(Extension, BaseTunerLayer):
    """An attention module's extension: the new dims of each adapter.

    For each role `growattn_<role>` holds by adapter a weight (heads * dims, hidden_size), where heads are those of the
    role, and `growattn_<role>_bias`, (heads * dims,), for those projections that have a bias.
    """

    adapter_layer_names = tuple(f"{PREFIX}{part}" for role in DIMS for part in (role, f"{role}_bias"))

    def __init__(self, attention: GrowableAttention, model: GrowableModelMixin):
        super().__init__()
        self._home = (attention, model)  # a tuple keeps them from becoming submodules of their own part
        self.merged_adapters = []
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ParameterDict())

    def get_base_layer(self) -> GrowableAttention:
        """The attention module, as peft asks for it."""
        return self._home[0]

    def add(self, adapter_name: str, dims: dict[str, int]) -> None:
        """Add an adapter with these dims by role; it starts without effect, with one side zero."""
        attention = self.get_base_layer()
        features = attention.config.hidden_size
        for role in filter(dims.get, dims):
            weight = attention.empty_like(role).new_zeros(attention.heads_of(role) * dims[role], features)
            if role not in _ZERO_AT_FIRST:
                nn.init.normal_(weight, std=features**-0.5)
            self._weights(role)[adapter_name] = nn.Parameter(weight)
            if attention.bias_of(role) is not None:
                self._weights(role, "_bias")[adapter_name] = nn.Parameter(weight.new_zeros(len(weight)))

    def added(self, role: str, hidden_states: Tensor) -> Tensor | None:
        """The new dims of all adapters in use, one after the other."""
        parts = [project(hidden_states, *self._factors(role, name)) for name in self._in_use(role)]
        return torch.cat(parts, dim=-1) if parts else None

    def output(self, added: Tensor) -> Tensor:
        """What the new values of all adapters in use contribute."""
        weights = [self._factors("output", name)[0] for name in self._in_use("output")]
        parts = added.split([weight.shape[1] for weight in weights], dim=-1)
        return reduce(torch.add, map(gather, parts, weights))

    def _factors(self, role: str, name: str) -> tuple[Tensor, Tensor | None]:
        """An adapter's weight (heads, n, d) and bias (heads, n) of a role."""
        heads = self.get_base_layer().heads_of(role)
        weight, biases = self._weights(role)[name], self._weights(role, "_bias")
        return weight.unflatten(0, (heads, -1)), biases[name].unflatten(0, (heads, -1)) if name in biases else None

    def _in_use(self, role: str) -> list[str]:
        """Names of the adapters that the forward adds; what is merged is in the attention's own weights."""
        if self.disable_adapters or self.merged:
            return []
        return [name for name in self.active_adapters if name in self._weights(role)]

    def _weights(self, role: str, part: str = "") -> nn.ParameterDict:
        return getattr(self, f"{PREFIX}{role}{part}")

    def new_dims(self, adapter_name: str) -> ExtraDims:
        """An adapter's parameters as extra dims of the attention, by role."""
        new = ExtraDims()
        for role in (role for role in DIMS if adapter_name in self._weights(role)):
            weight, bias = self._factors(role, adapter_name)
            new.weights[role], new.biases[role] = weight.detach(), None if bias is None else bias.detach()
        return new

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Widen the attention by the adapters' dims, and write these.

        Args:
            safe_merge: refuse adapters that are not finite.
            adapter_names: which; None means those that are active.

        Raises:
            ValueError: an adapter is not finite, or the attention's weights cannot be widened.
        """
        attention, model = self._home
        for name in check_adapters_to_merge(self, adapter_names):
            new = self.new_dims(name)
            if not new.weights:
                continue
            if safe_merge and not all(tensor.isfinite().all() for tensor in new.tensors()):
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken.")
            if not self.merged:
                self._widths_before = attention.qk_head_dim, attention.v_head_dim
            new.write_into(attention)
            self.merged_adapters.append(name)
        model.sync_config()

    def unmerge(self) -> None:
        """Cut the merged dims off again; the old ones stay as they are, to the bit."""
        attention, model = self._home
        if self.merged:
            qk_head_dim, v_head_dim = self._widths_before
            attention.widen(qk_head_dim - attention.qk_head_dim, v_head_dim - attention.v_head_dim)
            self.merged_adapters.clear()
            model.sync_config()

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapters on or off; merged ones are unmerged first, as peft's other methods do."""
        if not enabled:
            self.unmerge()
        super().enable_adapters(enabled)

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None):
        """Leave the attention with the adapters' dims in its own weights, or without; None takes this layer's place."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        else:
            self.unmerge()


def adapter_layers(model: nn.Module) -> list[GrowAttnLayer]:
    """Those of a model."""
    return [attention.extension for attention in attentions(model) if attention.extension is not None]


class GrowAttnModel(BaseTuner):
    """peft's side of the method: it patches a stock model and gives each chosen layer its `GrowAttnLayer`."""

    prefix: str = PREFIX
    tuner_layer_cls = GrowAttnLayer
    model: PreTrainedModel
    _was_stock = False

    def _prepare_adapter_config(self, peft_config: GrowAttnConfig, model_config) -> GrowAttnConfig:
        return peft_config

    def _prepare_model(self, peft_config: GrowAttnConfig, model: PreTrainedModel) -> None:
        """Patch the model, find the attention modules that get dims, and spend a budget evenly that is not spent yet.

        Raises:
            TypeError, ValueError: as `patch_model`, tensor parallelism, no such layer, or a budget that buys nothing.
        """
        was_stock = not isinstance(model, GrowableModelMixin)
        if any(map(is_sharded, model.parameters())) and not sharded_modules(model):
            raise ValueError("GrowAttnConfig does not support tensor parallelism: load the model without it.")
        patch_model(model)
        try:
            chosen = layers_of(model, peft_config.layers)
            if peft_config.budget is not None and not peft_config.spent:
                adapters = sum(p.numel() for name, p in model.named_parameters() if PREFIX in name)
                base = model.num_parameters() - adapters  # which knows how many weights are packed in a byte
                peft_config.hold(_evenly(chosen, peft_config.budget, base))
        except ValueError:
            if was_stock:
                unpatch_model(model)
            raise
        self._was_stock |= was_stock
        names = {module: name for name, module in model.named_modules()}
        held = (attention for attention in chosen if any(peft_config.dims_at(attention.layer_idx).values()))
        peft_config.target_modules = frozenset(names[attention] for attention in held)

    @staticmethod
    def _check_target_module_exists(peft_config: GrowAttnConfig, key: str) -> bool:
        return key in peft_config.target_modules

    def _create_and_replace(
        self, peft_config, adapter_name, target, target_name, parent, current_key, parameter_name=None
    ) -> None:
        attention = cast(GrowableAttention, target)
        if attention.extension is None:
            set_extension(attention, GrowAttnLayer(attention, cast(GrowableModelMixin, self.model)))
        layer: Any = attention.extension
        layer.add(adapter_name, cast(GrowAttnConfig, peft_config).dims_at(attention.layer_idx))
        # A checkpoint of the base holds no adapters.
        ours = {f"{current_key}.extension.{name}" for name, _ in layer.named_parameters()}
        self.model._keys_to_ignore_on_save = ours.union(self.model._keys_to_ignore_on_save or ())

    def _replace_module(self, parent, child_name, new_module, child) -> None:
        if isinstance(child, GrowAttnLayer):
            set_extension(parent, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    @torch.no_grad()
    def take_over(self, adapter_name: str, found: dict[GrowableAttention, ExtraDims]) -> None:
        """Copy new dims into an adapter; with a budget it gets them in the place of its former ones."""
        config = cast(GrowAttnConfig, self.peft_config[adapter_name])
        if config.budget is not None:
            self._spend(adapter_name, config, found)
        for attention, new in found.items():
            own = attention.extension.new_dims(adapter_name)
            for role, weight in new.weights.items():
                own.weights[role].copy_(weight)
                if (bias := own.biases[role]) is not None:
                    bias.copy_(cast(Tensor, new.biases[role]))

    def _spend(self, adapter_name: str, config: GrowAttnConfig, found: dict[GrowableAttention, ExtraDims]) -> None:
        """Replace an adapter's parameters by new ones, with the dims of each layer that were found."""
        former = next(p for name, p in self.model.named_parameters() if name.endswith(f".{adapter_name}"))
        for layer, name in product(adapter_layers(self.model), GrowAttnLayer.adapter_layer_names):
            if adapter_name in (held := getattr(layer, name)):
                del held[adapter_name]
        config.hold({k.width: {a.layer_idx: new.dims(k.shared) for a, new in found.items()} for k in KINDS.values()})
        self._prepare_model(config, self.model)
        for name in config.target_modules:
            attention: Any = self.model.get_submodule(name)
            self._create_and_replace(config, adapter_name, attention, "", attention, name)
            attention.extension._active_adapter = self.active_adapters
        for name, parameter in self.model.named_parameters():
            if PREFIX in name and name.endswith(f".{adapter_name}"):
                parameter.data = parameter.data.to(former.dtype)
                parameter.requires_grad_(former.requires_grad)

    def _check_merge_allowed(self) -> None:
        """Raise a ValueError before any layer is merged, if the weights of one cannot be widened."""
        super()._check_merge_allowed()
        dense = self.model.config._name_or_path or "the model"
        elsewhere = f"Put the adapter on that ({dense}) by PeftModel.from_pretrained, and merge there."
        for layer, role in product(adapter_layers(self.model), DIMS):
            if getattr(layer, PREFIX + role):
                layer.get_base_layer().parameters_along(role, elsewhere)

    def unload(self) -> nn.Module:
        """Return the base model as it was before: a stock one, if it was that."""
        model = cast(PreTrainedModel, super().unload())
        return unpatch_model(model) if self._was_stock else model


register_peft_method(name=_NAME, config_cls=GrowAttnConfig, model_cls=GrowAttnModel)


def _evenly(layers: list[GrowableAttention], budget: int | float, base: int) -> Mapping[str, Mapping[int, int]]:
    """The dims by layer of both kinds that a budget buys if it is spread over all of them.

    Raises:
        ValueError: it buys none.
    """
    kinds = product(KINDS.values(), layers)
    costs = {(kind.width, layer.layer_idx): parameters_of_a_dim(layer, kind) for kind, layer in kinds}
    dims: dict[str, Counter[int]] = {width: Counter() for width in DIMS.values()}
    left, cheapest = weights_of(budget, base), min(costs.values())
    check_affordable(left, cheapest, base)
    while left >= cheapest:
        for (width, layer), cost in costs.items():
            if cost <= left:
                dims[width][layer] += 1
                left -= cost
    return dims


def initialize_growattn_weights(
    peft_model: PeftModel, batches: Iterable, adapter_name: str = "default", loss=None
) -> GrowthReport:
    """Start an adapter at the new dims that `Grower` finds for the base on these batches, step and all.

    The search leaves the base as it is, quantized or not, and the result is copied into the adapter. Other
    adapters do not count in. A `budget` is spent here, where it gains most: the adapter gets new parameters, in other
    layers, so make the optimizer afterwards. If no step lowers the loss (`report.applied` says so), the adapter stays
    as it was.

    Args:
        peft_model: from `get_peft_model` with a `GrowAttnConfig`.
        batches: as for `Grower.grow`.
        adapter_name: which adapter to write; it may be inactive.
        loss: what to lower, a function of the base model and a batch, as for `Grower`.

    Returns:
        The report of that growth.

    Raises:
        ValueError: the adapter does not exist or is merged, or the model is sharded; otherwise as `Grower.grow`.
    """
    config = peft_model.peft_config.get(adapter_name)
    if not isinstance(config, GrowAttnConfig):
        problem = f"is a {type(config).__name__}" if config else f"is not one of {', '.join(peft_model.peft_config)}"
        raise ValueError(
            f"{adapter_name!r} {problem}; pass the name of an adapter that was made with a GrowAttnConfig."
        )
    tuner = cast(GrowAttnModel, peft_model.base_model)
    if any(map(is_sharded, peft_model.parameters())):
        raise ValueError(
            "The model is sharded already: call initialize_growattn_weights before fully_shard or Trainer."
        )
    if any(layer.merged for layer in adapter_layers(tuner.model)):
        raise ValueError("Adapters are merged into the base; call unmerge_adapter() before the guided start.")
    found: dict[GrowableAttention, ExtraDims] = {}
    with contextlib.ExitStack() as end:
        for attention in attentions(tuner.model):  # growth sees the base alone
            end.callback(set_extension, attention, attention.extension)
            set_extension(attention, None)
        report = Grower(tuner.model, config.growth, loss=loss, take_over=found.update).grow(batches)
    if found:
        tuner.take_over(adapter_name, found)
    return report
