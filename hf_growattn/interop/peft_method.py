"""Growth as a method of peft: `GrowAttnConfig` for `get_peft_model`, and its guided start.

The base stays frozen and as it is. An adapter is what a growth keeps, the new dims of each layer, and joins the
attention at the same place: in `attention.extra`. Importing this file teaches peft the method.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils import register_peft_method
from torch import nn
from transformers import PreTrainedModel

from ..grow.growth import Grower
from ..grow.plan import AddedDims, GrowthConfig, check_affordable, layers_of, weights_of
from ..grow.trial import parameters_of_a_dim
from ..growable.attention import GrowableAttention, attentions
from ..growable.growths import is_grown, name_after, sync_config
from ..growable.models import GrowableModelMixin, dims_by_size, patch_model, unpatch_model
from ..growable.training_state import refuse_sharded
from ..measure.bottlenecks import KINDS
from ..model.compat import add_peft_type, leave_out_of_checkpoints
from ..model.configuration import check_extra_dims
from ..model.new_dims import NewDims
from ..report.report import GrowthReport

_NAME, PREFIX = "growattn", "growattn_"


GROWATTN = add_peft_type(PeftType, _NAME.upper())


@dataclass
class GrowAttnConfig(AddedDims, PeftConfig):
    """What an adapter adds to the heads of the chosen layers. Give `qk_dims`, `v_dims` or both, a `budget`, or `dims`.

    Attributes:
        qk_dims, v_dims, budget, kinds, layers: see `AddedDims`. With a budget the adapter starts with equal dims
            everywhere; `initialize_growattn_weights` gives them to the layers and kinds that gain most.
        dims: by layer, as a text, the dims of queries and keys, and of values: what a budget has bought, or a choice.
        modules_to_save: names of other modules to train and to save whole, such as the head of a classifier.

    Raises:
        ValueError: an attribute is outside its range; the message names the fix.
    """

    dims: dict[str, list[int]] | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self):
        PeftConfig.__post_init__(self)
        self.peft_type = GROWATTN
        if not self.dims or self.budget is not None or self.qk_dims or self.v_dims:
            super().__post_init__()
        if self.dims:
            try:
                self.dims = {str(layer): dims for layer, dims in self.dims.items()}
                check_extra_dims({layer: {"dims": dims} for layer, dims in self.dims.items()})
            except (AttributeError, ValueError):
                raise ValueError(f'dims must have a form such as {{"0": [2, 4]}}, and is {self.dims!r:.200}.') from None
        self.target_modules = frozenset()  # peft asks for them; known once there is a model, and not saved

    @property
    def growth(self) -> GrowthConfig:
        """The growth whose new dims the adapter can hold; the old ones stay frozen."""
        if self.dims and self.budget is None:
            raise ValueError("An adapter of chosen dims has no guided start: give qk_dims, v_dims or a budget instead.")
        return GrowthConfig(self.qk_dims, self.v_dims, self.budget, self.kinds, self.layers, old_dims_train=False)

    def dims_at(self, layer: int) -> list[int]:
        """The dims that each head of a layer gains: of queries and keys, and of values."""
        return [self.qk_dims, self.v_dims] if self.dims is None else self.dims.get(str(layer), [0, 0])


class GrowAttnLayer(nn.Module, BaseTunerLayer):
    """The new dims of each adapter in an attention module, by its name: those of `new_dims`.

    `growattn_in_projection` and `growattn_out_projection` hold the same modules: peft finds the name of an adapter in
    the name of a weight right before its end only.
    """

    adapter_layer_names = (f"{PREFIX}in_projection", f"{PREFIX}out_projection")
    other_param_names = ("new_dims",)  # peft deletes an adapter from there, too

    def __init__(self, attention: GrowableAttention, model: GrowableModelMixin):
        super().__init__()
        self._home = (attention, model)  # a tuple keeps them from becoming submodules of their own child
        self.new_dims: dict[str, NewDims] = {}
        self._growths_of_merged: dict[str, str] = {}
        self.merged_adapters = []
        self.growattn_in_projection, self.growattn_out_projection = nn.ModuleDict(), nn.ModuleDict()

    @property
    def attention(self) -> GrowableAttention:
        """The attention that the new dims join."""
        return self._home[0]

    def get_base_layer(self) -> nn.Module:
        """The attention module, as peft asks for it."""
        return self.attention.module

    def add(self, adapter_name: str, new: NewDims) -> None:
        """Hold new dims as an adapter, in place of a former one of this name. Checkpoints of the base leave it out."""
        self.discard(adapter_name)
        self.new_dims[adapter_name] = new
        self.growattn_in_projection[adapter_name] = new.in_projection
        if new.out_projection is not None:
            self.growattn_out_projection[adapter_name] = new.out_projection
        model: Any = self._home[1]
        ours = {name for name, _ in model.named_parameters() if ".extra.adapters." in name}
        leave_out_of_checkpoints(model, ours)

    def discard(self, adapter_name: str) -> None:
        """Hold no such adapter any more."""
        self.new_dims.pop(adapter_name, None)
        for held in (self.growattn_in_projection, self.growattn_out_projection):
            held._modules.pop(adapter_name, None)

    def active(self) -> list[NewDims]:
        """The adapters in use; those that are merged are among the attention's own growths."""
        if self.disable_adapters or self.merged:
            return []
        return [self.new_dims[name] for name in self.active_adapters if name in self.new_dims]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Make copies of adapters growths of the attention, in its precision: no old weight is touched."""
        attention, model = self._home
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.new_dims:
                continue
            adapter = self.new_dims[name]
            new = attention.make_new_dims(adapter.qk_dims, adapter.v_dims).requires_grad_(False)
            new.load_state_dict(adapter.state_dict())
            if safe_merge and not all(weight.isfinite().all() for weight in new.parameters()):
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken.")
            self._growths_of_merged[name] = name_after(attention.growths)
            attention.make_extra().growths[self._growths_of_merged[name]] = new
            self.merged_adapters.append(name)
        sync_config(model)

    def unmerge(self) -> None:
        """Take the merged growths out again."""
        attention, model = self._home
        if self.merged:
            for growth in self._growths_of_merged.values():
                del attention.make_extra().growths[growth]
            self._growths_of_merged.clear()
            self.merged_adapters.clear()
            sync_config(model)

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapters on or off; merged ones are unmerged first, as peft's other methods do."""
        if not enabled:
            self.unmerge()
        super().enable_adapters(enabled)

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None):
        """Leave the attention with the adapters among its own growths, or without; None takes this layer's place."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        else:
            self.unmerge()


def adapter_layers(model: nn.Module) -> list[GrowAttnLayer]:
    """The modules of a model that hold adapters."""
    return [module for module in model.modules() if isinstance(module, GrowAttnLayer)]


class GrowAttnModel(BaseTuner):
    """peft's side of the method: it patches a stock model and gives each chosen layer its `GrowAttnLayer`."""

    prefix: str = PREFIX
    tuner_layer_cls = GrowAttnLayer
    model: PreTrainedModel
    _was_stock = False
    _targets: dict[nn.Module, GrowableAttention]

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args, **kwargs) -> None:
        """As peft does, with a copy of a config with a budget: what it buys for this adapter is noted there."""
        config: Any = self.peft_config[adapter_name]
        self.peft_config[adapter_name] = config if config.budget is None else copy.copy(config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _prepare_model(self, peft_config: GrowAttnConfig, model: PreTrainedModel) -> None:
        """Patch the model, find the attention modules that get dims, and spend a new budget evenly."""
        was_stock = not isinstance(model, GrowableModelMixin)
        refuse_sharded(model, [], but_fsdp2=True)
        patch_model(model)
        try:
            chosen = layers_of(model, map(int, peft_config.dims) if peft_config.dims else peft_config.chosen_layers)
            if peft_config.budget is not None and peft_config.dims is None:
                with _base_alone(model):
                    peft_config.dims = _evenly(chosen, peft_config, model.num_parameters())
        except ValueError:
            if was_stock:
                unpatch_model(model)
            raise
        self._was_stock |= was_stock
        held = [attention for attention in chosen if any(peft_config.dims_at(attention.layer))]
        self._targets = {attention.module: attention for attention in held}
        peft_config.target_modules = frozenset(attention.name for attention in held)

    def _create_and_replace(
        self, peft_config, adapter_name, target, target_name, parent, current_key, parameter_name=None
    ) -> None:
        attention = self._targets[target]
        qk_dims, v_dims = cast(GrowAttnConfig, peft_config).dims_at(attention.layer)
        new = attention.make_new_dims(qk_dims, v_dims)
        with torch.no_grad():  # without effect: the other side of each pair is zero
            for kind in KINDS.values():
                nn.init.normal_(new.weight_of(kind.shared), std=attention.shape.in_features**-0.5)
        self._layer_of(attention).add(adapter_name, new)

    def _layer_of(self, attention: GrowableAttention) -> GrowAttnLayer:
        """The layer of an attention module, which is made at the first call."""
        children: dict[str, Any] = attention.make_extra()._modules
        if "adapters" not in children:
            children["adapters"] = GrowAttnLayer(attention, cast(GrowableModelMixin, self.model))
            children["adapters"].set_adapter(self.active_adapters)
        return children["adapters"]

    def _replace_module(self, parent, child_name, new_module, child) -> None:
        if isinstance(child, GrowAttnLayer):
            del parent._modules[child_name]
            child.attention.drop_if_empty()
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def load_found(self, adapter_name: str, found: dict[GrowableAttention, NewDims]) -> None:
        """Copy new dims into an adapter. With a budget it gets those that were found in the place of its former ones.

        Where an adapter has other sizes, it gets new parameters; they train if the former ones did.
        """
        layers, config = adapter_layers(self.model), cast(GrowAttnConfig, self.peft_config[adapter_name])
        former = next(
            layer.new_dims[adapter_name].in_projection.weight for layer in layers if adapter_name in layer.new_dims
        )
        if config.budget is not None:
            config.dims = {str(attention.layer): [new.qk_dims, new.v_dims] for attention, new in found.items()}
            for layer in layers:
                if layer.attention not in found:
                    layer.discard(adapter_name)
        for attention, new in found.items():
            layer = self._layer_of(attention)
            own = layer.new_dims.get(adapter_name)
            if own is not None and (own.qk_dims, own.v_dims) == (new.qk_dims, new.v_dims):
                own.load_state_dict(new.state_dict())
            else:
                layer.add(adapter_name, new.to(former).requires_grad_(former.requires_grad))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Take the sizes that a state holds of an adapter with a budget, which another start has spent otherwise."""
        for name in (name for name, config in self.peft_config.items() if cast(GrowAttnConfig, config).budget):
            sizes = {}
            for attention in attentions(self.model):
                place = f"{prefix}model.{attention.name}.extra.adapters.{PREFIX}"
                in_projection, out_projection = (
                    state_dict.get(f"{place}{side}_projection.{name}.weight") for side in ("in", "out")
                )
                if in_projection is not None:
                    sizes[attention] = dims_by_size(attention.shape, in_projection, out_projection)
            config = cast(GrowAttnConfig, self.peft_config[name])
            own = {attention: config.dims_at(attention.layer) for attention in sizes}
            if sizes != own:
                self.load_found(name, {attention: attention.make_new_dims(*dims) for attention, dims in sizes.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _enable_peft_forward_hooks(self, *args, adapter_names=None, **kwargs):
        """Refuse adapters by row, which peft would otherwise ignore."""
        if adapter_names is not None:
            raise ValueError("adapter_names are not served by GrowAttn: set_adapter one, and pass its rows alone.")
        return contextlib.nullcontext()

    def add_weighted_adapter(self, *args, **kwargs) -> None:
        """Refuse it: new dims of two adapters have no mean."""
        raise NotImplementedError("GrowAttn adapters have no mean: use several at once, base_model.set_adapter([...]).")

    def unload(self) -> nn.Module:
        """Return the base model as it was before: a stock one, if it was that and has not grown since."""
        model = cast(PreTrainedModel, super().unload())
        return unpatch_model(model) if self._was_stock and not is_grown(model) else model


register_peft_method(name=_NAME, config_cls=GrowAttnConfig, model_cls=GrowAttnModel)

from . import adapter_folders  # noqa: E402, F401  which wraps what saves and loads adapters, ours among them


@contextlib.contextmanager
def _base_alone(model: nn.Module) -> Iterator[None]:
    """Take the adapters out of a model for a while."""
    layers = adapter_layers(model)
    for layer in layers:
        layer.attention.make_extra()._modules["adapters"] = _NoAdapters()
    try:
        yield
    finally:
        for layer in layers:
            layer.attention.make_extra()._modules["adapters"] = layer


class _NoAdapters(nn.Module):
    """Stands for the adapters that are taken out for a while."""

    def active(self) -> list[NewDims]:
        return []


def _evenly(layers: list[GrowableAttention], config: GrowAttnConfig, base: int) -> dict[str, list[int]]:
    """The dims by layer that a budget buys if it is spread over all of them; a ValueError if it buys none."""
    kinds = list(KINDS.values())
    costs = [(layer, kind, parameters_of_a_dim(layer, kind)) for kind in config.chosen_kinds for layer in layers]
    dims = {str(layer.layer): [0, 0] for layer in layers}
    left, cheapest = weights_of(config.budget, base), min(cost for _, _, cost in costs)
    check_affordable(left, cheapest, base)
    while left >= cheapest:
        for layer, kind, cost in costs:
            if cost <= left:
                dims[str(layer.layer)][kinds.index(kind)] += 1
                left -= cost
    return {layer: both for layer, both in dims.items() if any(both)}


def initialize_growattn_weights(
    peft_model: PeftModel, batches: Iterable, adapter_name: str = "default", loss=None
) -> GrowthReport:
    """Start an adapter at the new dims that `Grower` finds for the base on these batches, step and all.

    The base stays as it is, quantized or not, and other adapters do not count in. A `budget` is spent here, where it
    gains most: the adapter gets new parameters, in other layers, so make the optimizer afterwards. If the new dims do
    not hold on batches that they were not computed from (`report.kept` says so), the adapter stays as it was.

    Args:
        peft_model: from `get_peft_model` with a `GrowAttnConfig`.
        batches: as for `Grower.grow`.
        adapter_name: which adapter to write; it may be inactive.
        loss: what to lower, a function of the base model and a batch, as for `Grower`.

    Raises:
        ValueError: the adapter does not exist or is merged, or the model is sharded: call this before `fully_shard` or
            Trainer. Otherwise as `Grower.grow`.
    """
    if not isinstance(peft_model, PeftModel):
        found = type(peft_model).__name__
        raise TypeError(f"A peft model is needed, not a {found}: get_peft_model(model, GrowAttnConfig(budget=0.01)).")
    config = peft_model.peft_config.get(adapter_name)
    if not isinstance(config, GrowAttnConfig):
        problem = f"is a {type(config).__name__}" if config else f"is not one of {', '.join(peft_model.peft_config)}"
        raise ValueError(
            f"{adapter_name!r} {problem}; pass the name of an adapter that was made with a GrowAttnConfig."
        )
    tuner = cast(GrowAttnModel, peft_model.base_model)
    refuse_sharded(peft_model, [])
    if any(layer.merged for layer in adapter_layers(tuner.model)):
        raise ValueError("Adapters are merged into the base; call unmerge_adapter() before the guided start.")
    with _base_alone(tuner.model):
        growth = Grower(tuner.model, config.growth, loss=loss).find(batches)
    if growth.report.holds:
        tuner.load_found(adapter_name, growth.new_dims)
    return replace(growth.drop(), kept=growth.report.holds)
