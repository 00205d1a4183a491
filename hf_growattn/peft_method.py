"""Growth as a method of peft: `GrowAttnConfig` for `get_peft_model`, and its guided start.

The base stays frozen and as it is. An adapter is the new dims alone: for each layer, the queries, keys, values and
output columns that a growth would append to every head, as an extension of `GrowableAttention`. (`adapters.py` is about
something else: LoRA on projections that grow.) Importing this file teaches peft the method.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.versions import require_version

from .adapters import plain
from .attention import GrowableAttention
from .growth import Grower, settle
from .modeling import GrowableModelMixin, attentions
from .patch import patch_model, unpatch_model
from .plan import GrowthConfig
from .probe import MESSAGES, PATTERNS, set_extension
from .report import GrowthReport

require_version("peft>=0.18", "hf_growattn.GrowAttnConfig needs it; try: pip install -U 'peft>=0.18'")

from peft import PeftConfig, PeftModel, PeftType  # noqa: E402  not before its version is known
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge  # noqa: E402
from peft.utils import register_peft_method  # noqa: E402

_NAME = "growattn"
_PREFIX = f"{_NAME}_"
_DIMS = {"query": "qk_dims", "key": "qk_dims", "value": "v_dims", "output": "v_dims"}
_ZERO_AT_FIRST = (PATTERNS.stacked, MESSAGES.stacked)


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
    """What an adapter adds to every head of the chosen layers. Give `qk_dims`, `v_dims` or both.

    Attributes:
        qk_dims: dims added to the queries and keys of each head (patterns).
        v_dims: dims added to the values of each head, and to what the output projection reads (messages).
        layers: indices of the layers; None means every layer.
        modules_to_save: names of other modules to train and to save whole, such as the head of a classifier.

    Raises:
        ValueError: an attribute is out of its range; the message names the fix.
    """

    qk_dims: int = field(default=0, metadata={"help": "Dims added to the queries and keys of each head."})
    v_dims: int = field(default=0, metadata={"help": "Dims added to the values of each head."})
    layers: list[int] | None = field(default=None, metadata={"help": "Indices of the layers; None means all."})
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Names of other modules to train and to save whole."}
    )

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = GROWATTN
        self.layers = self.layers if self.layers is None else list(self.layers)
        self.target_modules = frozenset()  # peft asks for them; known once there is a model, and not saved
        _ = self.growth  # the same bounds

    @property
    def growth(self) -> GrowthConfig:
        """The growth whose new dims the adapter can hold; the old ones stay frozen."""
        return GrowthConfig(qk_dims=self.qk_dims, v_dims=self.v_dims, layers=self.layers, old_dims_train=False)


class GrowAttnLayer(nn.Module, BaseTunerLayer):
    """An attention module's extension: the new dims of each adapter.

    For each role `growattn_<role>` holds by adapter a weight (heads * dims, hidden_size), where heads are those of the
    role, and `growattn_<role>_bias`, (heads * dims,), for those projections that have a bias.
    """

    adapter_layer_names = tuple(f"{_PREFIX}{part}" for role in _DIMS for part in (role, f"{role}_bias"))

    def __init__(self, attention: GrowableAttention, model: PreTrainedModel):
        super().__init__()
        self._home = (attention, model)  # in a tuple, lest they become submodules of a part of theirs
        self.merged_adapters = []
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ParameterDict())

    def get_base_layer(self) -> nn.Module:
        """The attention module, as peft asks for it."""
        return self._home[0]

    def add(self, adapter_name: str, config: GrowAttnConfig) -> None:
        """Add an adapter that changes nothing yet: random keys and values against queries and outputs of zero."""
        attention, _ = self._home
        features = attention.config.hidden_size
        for role, dims in ((role, getattr(config, dims)) for role, dims in _DIMS.items() if getattr(config, dims)):
            projection, rows = plain(attention.projection_of(role)), attention.heads_of(role) * dims
            like = projection.weight
            dtype = like.dtype if like.is_floating_point() else torch.float32  # quantized weights tell nothing
            weight = torch.zeros(rows, features, dtype=dtype, device=like.device)
            if role not in _ZERO_AT_FIRST:
                nn.init.normal_(weight, std=features**-0.5)
            self._weights(role)[adapter_name] = nn.Parameter(weight)
            if role != "output" and projection.bias is not None:
                self._biases(role)[adapter_name] = nn.Parameter(weight.new_zeros(rows))

    def forward(self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor):
        """Lengthen queries (batch, H, tokens, d_k), keys (batch, G, tokens, d_k) and values (batch, G, tokens, d_v)."""
        for name in self._in_use():
            query = self._lengthen("query", name, hidden_states, query)
            key = self._lengthen("key", name, hidden_states, key)
            value = self._lengthen("value", name, hidden_states, value)
        return query, key, value

    def output(self, added: Tensor) -> Tensor:
        """What the added value dims contribute: (batch, tokens, H, n) -> (batch, tokens, hidden_size)."""
        weights = [self._weights("output")[name] for name in self._in_use() if name in self._weights("output")]
        parts = added.split([len(weight) // added.shape[-2] for weight in weights], dim=-1)
        contributed = [part.flatten(-2).to(weight.dtype) @ weight for part, weight in zip(parts, weights)]
        return sum(contributed).to(added.dtype)

    def _lengthen(self, role: str, name: str, inputs: Tensor, states: Tensor) -> Tensor:
        if name not in self._weights(role):
            return states
        weight, bias = self._weights(role)[name], self._biases(role)[name] if name in self._biases(role) else None
        added = nn.functional.linear(inputs.to(weight.dtype), weight, bias)
        added = added.unflatten(-1, (states.shape[1], -1)).transpose(1, 2)
        return torch.cat((states, added.to(states.dtype)), dim=-1)

    def _in_use(self) -> list[str]:
        """Names of the adapters that the forward adds; what is merged is in the attention's own weights."""
        return [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if self._has(n)]

    def _has(self, adapter_name: str) -> bool:
        return any(adapter_name in self._weights(role) for role in _ZERO_AT_FIRST)

    def _weights(self, role: str) -> nn.ParameterDict:
        return getattr(self, f"{_PREFIX}{role}")

    def _biases(self, role: str) -> nn.ParameterDict:
        return getattr(self, f"{_PREFIX}{role}_bias")

    def _beside_live(self, adapter_name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """An adapter's parameters head by head, each with a view on the last dims of the live ones of its role."""
        attention, _ = self._home
        for role in _DIMS:
            for held, view in ((self._weights(role), attention.weight_of), (self._biases(role), attention.bias_of)):
                if adapter_name in held:
                    own = held[adapter_name].detach().unflatten(0, (attention.heads_of(role), -1))
                    yield own, view(role)[:, -own.shape[1] :]

    def take_over(self, adapter_name: str) -> None:
        """Copy the last dims of the attention's live weights into an adapter."""
        for own, live in self._beside_live(adapter_name):
            own.copy_(live)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Widen the attention by the adapters' dims, and write these.

        Args:
            safe_merge: refuse adapters that are not finite.
            adapter_names: which; None means those that are active.

        Raises:
            ValueError: an adapter is not finite, or the attention's weights cannot be widened.
        """
        attention, model = self._home
        for name in filter(self._has, check_adapters_to_merge(self, adapter_names)):
            if safe_merge and not all(own.isfinite().all() for own, _ in self._beside_live(name)):
                raise ValueError(f"NaN or infinite weights in adapter {name!r}; it would break the model. Train anew.")
            if not self.merged:
                self._widths_before = attention.qk_head_dim, attention.v_head_dim
            heads = attention.heads_of("query")
            dims = [len(self._weights(r)[name]) // heads if name in self._weights(r) else 0 for r in _ZERO_AT_FIRST]
            attention.widen(*dims)
            for own, live in self._beside_live(name):
                live.copy_(own)
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

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> None:
        """Leave the attention with the adapters' dims in its own weights, or without; None takes this layer's place."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        else:
            self.unmerge()


class GrowAttnModel(BaseTuner):
    """peft's side of the method: it patches a stock model and gives each chosen layer its `GrowAttnLayer`."""

    prefix: str = _PREFIX
    tuner_layer_cls = GrowAttnLayer
    _was_stock = False

    def _prepare_adapter_config(self, peft_config, model_config):
        return peft_config

    def _prepare_model(self, peft_config: GrowAttnConfig, model: PreTrainedModel) -> None:
        """Patch the model, and find the attention modules by layer.

        Raises:
            TypeError, ValueError: as `patch_model`, or there is no such layer.
        """
        was_stock = not isinstance(model, GrowableModelMixin)
        patch_model(model)
        names = {m.layer_idx: name for name, m in model.named_modules() if isinstance(m, GrowableAttention)}
        layers = names if peft_config.layers is None else peft_config.layers
        for layer in layers:
            if layer not in names:
                if was_stock:
                    unpatch_model(model)
                raise ValueError(f"There is no layer {layer!r}: this model has the layers 0 to {max(names)}.")
        self._was_stock |= was_stock
        peft_config.target_modules = frozenset(names[layer] for layer in layers)

    @staticmethod
    def _check_target_module_exists(peft_config: GrowAttnConfig, key: str) -> bool:
        return key in peft_config.target_modules

    def _create_and_replace(
        self, peft_config, adapter_name, target, target_name, parent, current_key, parameter_name=None
    ) -> None:
        if target.extension is None:
            set_extension(target, GrowAttnLayer(target, self.model))
        target.extension.add(adapter_name, peft_config)
        # A checkpoint of the base holds no adapters.
        ours = {f"{current_key}.extension.{name}" for name, _ in target.extension.named_parameters()}
        self.model._keys_to_ignore_on_save = ours.union(self.model._keys_to_ignore_on_save or ())

    def _replace_module(self, parent, child_name, new_module, child) -> None:
        if isinstance(child, GrowAttnLayer):
            set_extension(parent, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def unload(self) -> nn.Module:
        """Return the base model as it was before: a stock one, if it was that."""
        model = super().unload()
        return unpatch_model(model) if self._was_stock else model


register_peft_method(name=_NAME, config_cls=GrowAttnConfig, model_cls=GrowAttnModel)


def initialize_growattn_weights(
    peft_model: PeftModel, batches: Iterable, adapter_name: str = "default"
) -> GrowthReport:
    """Start an adapter at the new dims that `Grower` finds for the base on these batches, step and all.

    The base is grown, the new dims are moved into the adapter, and the growth is undone: the base keeps the very same
    parameters, to the bit. Other adapters do not count in. If no step lowers the loss (`report.applied` says so), the
    adapter stays as it was.

    Args:
        peft_model: from `get_peft_model` with a `GrowAttnConfig`.
        batches: as for `Grower.grow`.
        adapter_name: which adapter to write; it may be inactive.

    Returns:
        The report of that growth.

    Raises:
        ValueError: there is no such adapter, or it is merged; otherwise as `Grower.grow`.
    """
    config = peft_model.peft_config.get(adapter_name)
    if not isinstance(config, GrowAttnConfig):
        found = f"is a {type(config).__name__}" if config else f"is not one of {', '.join(peft_model.peft_config)}"
        raise ValueError(f"{adapter_name!r} {found}; pass the name of an adapter that was made with a GrowAttnConfig.")
    model = peft_model.get_base_model()
    layers = [attention.extension for attention in attentions(model) if attention.extension is not None]
    if any(layer.merged for layer in layers):
        raise ValueError("Adapters are merged into the base; call unmerge_adapter() before the guided start.")
    with _growing_base(model):
        report = Grower(model, config.growth).grow(batches)
        if report.applied:
            for layer in layers:
                layer.take_over(adapter_name)
    return report


@contextlib.contextmanager
def _growing_base(model: PreTrainedModel) -> Iterator[None]:
    """Let the base grow without its adapters; on leaving it has the very same parameters and adapters again."""
    before = []
    for attention in attentions(model):
        entries = [entry for role in _DIMS for entry in attention.parameters_along(role)]
        parameters = [(module, name, getattr(module, name)) for module, name, _ in entries]
        flags = [(parameter, parameter.requires_grad) for _, _, parameter in parameters]
        before.append((attention, attention.qk_head_dim, attention.v_head_dim, parameters, flags, attention.extension))
    try:
        for attention, _, _, _, flags, _ in before:
            set_extension(attention, None)
            for parameter, _ in flags:
                parameter.requires_grad_(True)  # growth asks for dims that can train, and these will, in the adapter
        yield
    finally:
        for attention, qk_head_dim, v_head_dim, parameters, flags, extension in before:
            attention.widen(qk_head_dim - attention.qk_head_dim, v_head_dim - attention.v_head_dim)
            for module, name, parameter in parameters:
                setattr(module, name, parameter)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            set_extension(attention, extension)
        model.sync_config()
        settle(model, [])
