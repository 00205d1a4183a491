"""One attention module's side of peft's method: the new dims of each adapter, beside the module's own."""

from functools import reduce
from itertools import chain
from typing import cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ..growable.adapters import obscured, plain
from ..growable.attention import GrowableAttention
from ..growable.models import GrowableModelMixin, attentions
from ..measure.extension import Extension, NewDims, gather, project
from ..measure.kinds import KINDS

PREFIX = "growattn_"
DIMS = {role: kind.width for kind in KINDS.values() for role in kind.roles}
_ZERO_AT_FIRST = tuple(kind.stacked for kind in KINDS.values())


class GrowAttnLayer(Extension, BaseTunerLayer):
    """An attention module's extension: the new dims of each adapter.

    For each role `growattn_<role>` holds by adapter a weight (heads * dims, hidden_size), where heads are those of the
    role, and `growattn_<role>_bias`, (heads * dims,), for those projections that have a bias.
    """

    adapter_layer_names = tuple(f"{PREFIX}{part}" for role in DIMS for part in (role, f"{role}_bias"))

    def __init__(self, attention: GrowableAttention, model: GrowableModelMixin):
        super().__init__()
        self._home = (attention, model)  # in a tuple, lest they become submodules of a part of theirs
        self.merged_adapters = []
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ParameterDict())

    def get_base_layer(self) -> GrowableAttention:
        """The attention module, as peft asks for it."""
        return self._home[0]

    def add(self, adapter_name: str, dims: dict[str, int]) -> None:
        """Add an adapter of so many dims by role, which changes nothing yet: what reads or writes is zero."""
        attention = self.get_base_layer()
        features = attention.config.hidden_size
        for role in filter(dims.get, dims):
            projection, rows = plain(attention.projection_of(role)), attention.heads_of(role) * dims[role]
            like = next(chain(projection.parameters(), projection.buffers()))  # quantized, it need not be the weight
            dtype = like.dtype if obscured(projection) is None else torch.float32
            weight = torch.zeros(rows, features, dtype=dtype, device=like.device)
            if role not in _ZERO_AT_FIRST:
                nn.init.normal_(weight, std=features**-0.5)
            self._weights(role)[adapter_name] = nn.Parameter(weight)
            if has_bias(attention, role):
                self._weights(role, "_bias")[adapter_name] = nn.Parameter(weight.new_zeros(rows))

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

    def new_dims(self, adapter_name: str) -> NewDims:
        """An adapter's parameters as what they are: dims beside the attention's own, of the roles that it has."""
        new = NewDims()
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
                broken = f"The adapter {name} seems to be broken"
                raise ValueError(f"NaNs detected in the merged weights. {broken}: not all of it is finite. Train anew.")
            if not self.merged:
                self._widths_before = attention.qk_head_dim, attention.v_head_dim
            new.keep_in(attention)
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


def layer_of(attention: nn.Module) -> GrowAttnLayer:
    """The adapters of an attention module that has some."""
    return cast(GrowAttnLayer, attention.extension)


def adapter_layers(model: nn.Module) -> list[GrowAttnLayer]:
    """Those of a model."""
    return [layer_of(attention) for attention in attentions(model) if attention.extension is not None]


def has_bias(attention: GrowableAttention, role: str) -> bool:
    """Whether new dims of a role have biases."""
    return role != "output" and plain(attention.projection_of(role)).bias is not None
