"""The unit of growth: one kind of bottleneck of one layer, and the metric in which its steps are measured."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention
from ..growable.training_state import all_reduce_sum, own_part, sharded_modules, sum_over_ranks, world_size
from ..model.families import first_linear
from ..model.new_dims import full_tensor
from . import functional as F
from .passes import Objective, check_finite, compute_losses


@dataclass(frozen=True)
class Kind:
    """One of a head's two bottlenecks.

    Attributes:
        name: "qk" or "v".
        stacked, shared: the roles of its two sides; the second one is shared by the query heads of a group.
        width: what a number of its dims is called.
    """

    name: str
    stacked: str
    shared: str
    width: str

    @property
    def roles(self) -> tuple[str, str]:
        """The roles of both sides, the stacked one first."""
        return self.stacked, self.shared


QK = Kind("qk", "query", "key", "qk_dims")
V = Kind("v", "output", "value", "v_dims")
KINDS = {kind.name: kind for kind in (QK, V)}
RIDGE = 0.05  # of the mean eigenvalue of the inputs' moments, added to each: those of real inputs are uneven


def _spread_rows(matrix: Tensor) -> Tensor:
    """A matrix that all ranks have, of which each keeps some rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(matrix.device.type, (world_size(),))
    return distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None)


class Roots(NamedTuple):
    """`R` and `R^-1` of the second moments `C = R^T R`: stacked side (a, a) or scalars, shared side (b, b).

    The ranks of a sharded model keep some rows each, and gather a root together whenever they read it.
    """

    stacked_root: Tensor
    stacked_whitening: Tensor
    shared_root: Tensor
    shared_whitening: Tensor


@dataclass
class Bottleneck:
    """One kind of bottleneck of one layer: the unit that is measured, allocated and grown.

    Attributes:
        precision: what the attention computes in: that of its weights, or of the autocast around the model.
        old_dims_train: whether training will move the old dims, so that new ones need not do what those can.
    """

    attention: GrowableAttention
    kind: Kind
    roots: Roots
    precision: torch.dtype
    old_dims_train: bool = True
    _old_whitenings: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)  # by side

    @property
    def is_known(self) -> bool:
        """Whether the weights of the old dims can be read."""
        return self.attention.is_known(*self.kind.roles)

    @property
    def span_is_known(self) -> bool:
        """Whether it is known what the old dims can follow; otherwise all of the gradient is taken for new ones.

        Where queries and keys rotate, a change of old dims turns with the distance between two tokens, which that of
        new ones does not.
        """
        return self.is_known and not (self.kind is QK and self.attention.rotate is not None)

    @property
    def heads(self) -> int:
        """Query heads `H`."""
        return self.attention.shape.num_heads

    @property
    def groups(self) -> int:
        """Key/value heads `G`."""
        return self.attention.shape.num_key_value_heads

    @property
    def stacked_shape(self) -> tuple[int, int]:
        """Groups and features of the stacked side, `(G, g a)`."""
        return self.groups, self.heads // self.groups * self.attention.features_of(self.kind.stacked)

    @property
    def shared_shape(self) -> tuple[int, int]:
        """Groups and features of the shared side, `(G, b)`."""
        return self.groups, self.attention.features_of(self.kind.shared)

    @property
    def like(self) -> Tensor:
        """An empty tensor in the statistics' precision and on their device."""
        return own_part(self.roots.shared_root).new_empty(0)

    def whitened(self, stacked: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Factors (H, a, k), (G, b, k) in the metric of the steps, stacked over groups: (G, g a, k), (G, b, k)."""
        return self._whitened_side(0, stacked), self._whitened_side(1, shared)

    def _whitened_side(self, side: int, factors: Tensor) -> Tensor:
        if side:
            return full_tensor(self.roots.shared_root) @ factors
        return F.stack_groups(F.apply_root(full_tensor(self.roots.stacked_root), factors), self.groups)

    def unwhitened(self, stacked: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `whitened`."""
        stacked = F.apply_root(full_tensor(self.roots.stacked_whitening), F.unstack_groups(stacked, self.heads))
        return stacked, full_tensor(self.roots.shared_whitening) @ shared

    def whitened_gradients(self, stacked: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in the factors, (H, a, k), (G, b, k), as those in the `whitened` ones: (G, g a, k), (G, b, k)."""
        whitening = full_tensor(self.roots.stacked_whitening)
        stacked = F.apply_root(whitening.mT if whitening.dim() else whitening, stacked)
        return F.stack_groups(stacked, self.groups), full_tensor(self.roots.shared_whitening).mT @ shared

    def beyond_old_dims(self, side: int, products: Sequence[Tensor]) -> list[Tensor]:
        """What the old dims cannot do of products on the stacked (0) or shared side (1), (G, n, r); all, if unknown."""
        if not self.span_is_known:
            return list(products)
        # As large as the weights: never those of all layers at once.
        factors = self._whitened_side(side, self.attention.factors_of(self.kind.roles[side], self.like.dtype))
        if side not in self._old_whitenings:
            self._old_whitenings[side] = F.column_whitening(factors)
        return [F.project_out(product, factors, self._old_whitenings[side]) for product in products]


def compute_moments(
    objective: Objective,
    attentions: list[GrowableAttention],
    kinds: list[Kind],
    batches: list,
) -> tuple[list[Bottleneck], list[float]]:
    """Pool the second moments of every attention's input over all tokens that are not padding, in one forward pass.

    Queries, keys and values see the same tokens, so they share the moment, each with a constant feature where its
    projection has a bias. For messages it stands in for the moment of the attended tokens `A X`, which differs from
    head to head; their stacked side is measured in units of the rms norm of the attention's output, so that a step is
    in nats for logits and a share of the norm for outputs. Call inside `evaluation_mode`.

    Cross-attention has two moments, that of the queries' input and that of what keys and values read.

    Padding is read from the two-dimensional "attention_mask" that the model is called with, or a decoder's
    "encoder_attention_mask".

    Returns:
        One bottleneck for each layer and kind, in this order, of those layers that the loss runs, and the loss of each
        of this rank's batches.
    """
    model = objective.model
    sums = _MomentSums(attentions, spread=bool(sharded_modules(model)))
    with sums.reading(model):
        losses = compute_losses(objective, batches, sums.begin_batch)
    check_finite(losses)
    sums.sum_over_ranks()
    bottlenecks = []
    for attention in attentions:
        roots_of = sums.pop_roots(attention)
        if roots_of is not None:
            precision = sums.precisions[attention]
            bottlenecks += [Bottleneck(attention, kind, roots_of(kind), precision) for kind in kinds]
    return bottlenecks, losses


class _MomentSums:
    """Sums over tokens, by attention module: second moments of its inputs, and the squared size of its outputs.

    Attributes:
        inputs: second moments of what queries are made of, and without cross-attention keys and values, too.
        sources: second moments of what cross-attention makes keys and values of.
        outputs: squared sizes of the outputs.
        precisions: the types of the outputs; those of the weights on a rank without batches.
        projected: the modules whose forward ran, but not their hooks.
        mask, source_mask: the padding of the call under way, as the model was given it.
        counts: whether the batch under way counts.
        spread: whether each rank keeps some rows of the moments.
    """

    def __init__(self, attentions: list[GrowableAttention], spread: bool):
        self.spread, self.counts = spread, True
        self.mask: Any = None
        self.source_mask: Any = None
        self.inputs: dict[GrowableAttention, Tensor] = {}
        self.sources: dict[GrowableAttention, Tensor] = {}
        self.outputs: dict[GrowableAttention, Tensor] = {}
        self.precisions: dict[GrowableAttention, torch.dtype] = {}
        self.projected: set[GrowableAttention] = set()
        for attention in attentions:  # a rank without batches brings zeros
            like = attention.empty_like()
            self.inputs[attention], self.precisions[attention] = _zero_moment(attention, spread), like.dtype
            self.outputs[attention] = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))

    @contextlib.contextmanager
    def reading(self, model: PreTrainedModel) -> Iterator[None]:
        """Add up what goes through the attention modules meanwhile."""
        hooks = []
        try:
            for attention in self.inputs:
                hooks.append(attention.module.register_forward_hook(partial(self._add, attention), with_kwargs=True))
                projection = first_linear(attention.module)
                hooks.append(projection.register_forward_pre_hook(partial(self._note_projection, attention)))
            for module in model.modules():  # some heads call a part of their base model
                if isinstance(module, PreTrainedModel):
                    hooks.append(module.register_forward_pre_hook(self._note_masks, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin_batch(self, counts: bool) -> None:
        """Note whether the next batch counts."""
        self.counts = counts

    def _note_projection(self, attention: GrowableAttention, *_) -> None:
        """Note that a forward projects its input; the hook of the module itself takes the note back."""
        self.projected.add(attention)

    def _note_masks(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note the padding of a call: a loss may run the model several times, with other masks each time."""
        arguments = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
        self.source_mask = arguments.get("encoder_attention_mask")
        if not isinstance(arguments.get("attention_mask"), Mapping):  # made of the outer model's, for its layers
            self.mask = arguments.get("attention_mask")

    def _add(self, attention: GrowableAttention, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Add the moments of one call."""
        self.projected.discard(attention)
        (inputs, source), size = attention.arguments.read_inputs(module, args, kwargs), self.outputs[attention]
        self.precisions[attention] = output[0].dtype
        with torch.autocast(size.device.type, enabled=False):
            _add_moment(self.inputs[attention], inputs.detach().to(size.dtype), self.mask, self.counts)
            if source is not None:
                if attention not in self.sources:
                    self.sources[attention] = _zero_moment(attention, self.spread)
                _add_moment(self.sources[attention], source.detach().to(size.dtype), self.source_mask, self.counts)
            size += self.counts * F.square_sum(output[0].detach().to(size.dtype), self.mask)

    def sum_over_ranks(self) -> None:
        """Add up what the ranks have; all of them call this together."""
        crossing = all_reduce_sum(*(attention in self.sources for attention in self.inputs))
        for attention, ranks in zip(self.inputs, crossing):
            if ranks and attention not in self.sources:
                self.sources[attention] = _zero_moment(attention, self.spread)
        if not self.spread:  # otherwise the ranks have added up every call
            moments = [sums[each] for sums in (self.inputs, self.sources) for each in self.inputs if each in sums]
            sum_over_ranks(*moments)
        sum_over_ranks(*self.outputs.values())

    def pop_roots(self, attention: GrowableAttention) -> Callable[[Kind], Roots] | None:
        """The roots of an attention's kinds; None for one that the loss does not run. Its sums are used up.

        In large models all layers' moments and roots do not fit into memory at once.
        """
        moment = full_tensor(self.inputs.pop(attention))
        count = moment[-1, -1]  # the constant feature has counted the tokens
        if not count > 0:
            if attention in self.projected:
                raise ValueError(
                    f"New dims cannot join layer {attention.layer}: what holds its {type(attention.module).__name__} "
                    "calls its forward itself, past the hooks of the module. Leave it out of layers=."
                )
            return None
        size = (self.outputs[attention] / count.to(self.outputs[attention])).sqrt()
        size = torch.where(size > 0, size, 1.0)  # a layer whose output weights are zero has no size of its own
        inputs = sources = _roots_of(moment / count, size.dtype, self.spread)
        if attention in self.sources:
            moment = full_tensor(self.sources.pop(attention))
            sources = _roots_of(moment / moment[-1, -1], size.dtype, self.spread)

        def roots_of(kind: Kind) -> Roots:
            shared = sources(attention.features_of(kind.shared))
            if kind.stacked == "output":
                return Roots(1 / size, size, *shared)
            return Roots(*inputs(attention.features_of(kind.stacked)), *shared)

        return roots_of


def _zero_moment(attention: GrowableAttention, spread: bool) -> Tensor:
    like, features = attention.empty_like(), attention.shape.in_features + 1
    # Their sum is the same in any order then, to the rounding of fp32.
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    zeros = like.new_zeros(features, features, dtype=dtype)
    return _spread_rows(zeros) if spread else zeros


def _add_moment(total: Tensor, states: Tensor, mask: Tensor | None, counts: bool) -> None:
    moment: Any = counts * F.moment_sum(F.augment(states), mask).to(total.dtype)
    if hasattr(total, "full_tensor"):  # all ranks are here, and keep no more than their rows
        sum_over_ranks(moment)
        moment = _spread_rows(moment)
    total += moment


def _roots_of(moment: Tensor, dtype: torch.dtype, spread: bool) -> Callable[[int], list[Tensor]]:
    """A function that gives `R` and `R^-1` of the first features of an input, all or all but the constant."""
    both = [root.to(dtype) for root in F.square_roots(F.ridged(moment, RIDGE))]

    @cache
    def roots(features: int) -> list[Tensor]:
        first = [root[:features, :features] for root in both]
        return [_spread_rows(root) if spread else root for root in first]

    return roots
