"""The unit of growth: one kind of bottleneck of one layer, and the metric in which its steps are measured."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention
from ..growable.training_state import all_reduce_sum, own_part, sharded_modules, sum_over_ranks, world_size
from ..model.extra import whole
from . import functional as F
from .passes import Objective, batch_loss, failing_together, in_step


@dataclass(frozen=True)
class Kind:
    """One of a head's two bottlenecks.

    Attributes:
        name: "patterns" or "messages".
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


PATTERNS = Kind("patterns", "query", "key", "qk_dims")
MESSAGES = Kind("messages", "output", "value", "v_dims")
KINDS = {kind.name: kind for kind in (PATTERNS, MESSAGES)}


def _spread_rows(matrix: Tensor) -> Tensor:
    """A matrix that all ranks have, of which each keeps some rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(matrix.device.type, (world_size(),))
    return distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None)


class Roots(NamedTuple):
    """`C^(1/2)` and `C^(-1/2)` of one block's second moments: stacked side (a, a) or scalars, shared side (b, b).

    The ranks of a sharded model keep some rows each, and gather a root together whenever they read it.
    """

    stacked_root: Tensor
    stacked_whitening: Tensor
    shared_root: Tensor
    shared_whitening: Tensor


@dataclass
class Block:
    """One kind of bottleneck of one layer: the unit that is measured, allocated and grown.

    Attributes:
        old_dims_train: whether training will move the old dims, so that new ones need not do what those can.
    """

    attention: GrowableAttention
    kind: Kind
    roots: Roots
    old_dims_train: bool = True

    @property
    def is_known(self) -> bool:
        """Whether the weights of the old dims can be read; otherwise all of the gradient is taken for new ones."""
        return self.attention.is_known(*self.kind.roles)

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

    def old_factors(self) -> tuple[Tensor, Tensor]:
        """What the old dims compute: stacked (H, a, k), shared (G, b, k), with biases, in the statistics' precision.

        New dims of former growths and adapters that are active count in.
        """
        stacked, shared = (self.attention.factors_of(role, self.like.dtype) for role in self.kind.roles)
        return stacked, shared

    def whitened_factors(self) -> tuple[Tensor, Tensor]:
        """`old_factors` in the metric of the steps: (G, g a, k), (G, b, k)."""
        return self.whitened(*self.old_factors())

    def whitened(self, stacked: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Factors (H, a, k), (G, b, k) in the metric of the steps, stacked over groups: (G, g a, k), (G, b, k)."""
        stacked = F.apply_root(whole(self.roots.stacked_root), stacked)
        return F.stack_groups(stacked, self.groups), whole(self.roots.shared_root) @ shared

    def unwhitened(self, stacked: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `whitened`."""
        stacked = F.apply_root(whole(self.roots.stacked_whitening), F.unstack_groups(stacked, self.heads))
        return stacked, whole(self.roots.shared_whitening) @ shared

    def whitened_gradients(self, stacked: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in the factors, (H, a, k), (G, b, k), as those in the `whitened` ones: (G, g a, k), (G, b, k)."""
        stacked = F.apply_root(whole(self.roots.stacked_whitening), stacked)
        return F.stack_groups(stacked, self.groups), whole(self.roots.shared_whitening) @ shared


def measure_moments(
    objective: Objective,
    attentions: list[GrowableAttention],
    kinds: list[Kind],
    batches: list,
    ridge: float,
) -> tuple[list[Block], list[float]]:
    """Pool the second moments of every attention's input over all tokens that are not padding, in one forward pass.

    Queries, keys and values see the same tokens, so they share the moment, each with a constant feature where its
    projection has a bias. For messages it stands in for the moment of the attended tokens `A X`, which differs from
    head to head; their stacked side is measured in units of the rms norm of the attention's output, so that a step is
    in nats for logits and a share of the norm for outputs. Call inside `evaluation_mode`.

    Cross-attention has two moments, that of the queries' input and that of what keys and values read.

    Padding is read from the two-dimensional "attention_mask" that the model is called with, or a decoder's
    "encoder_attention_mask"; `ridge` is the fraction of the mean eigenvalue to add.

    Returns:
        One block for each layer and kind, in this order, of those layers that the loss runs, and the loss of each of
        this rank's batches.
    """
    model = objective.model
    spread, outputs = bool(sharded_modules(model)), {}
    sums: dict[Any, Tensor] = {}
    source_sums: dict[Any, Tensor] = {}  # of what cross-attention reads
    for attention in attentions:  # a rank without batches brings zeros
        sums[attention] = _zero_moment(attention, spread)
        like = attention.empty_like()
        outputs[attention] = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))
    mask: Any = None
    source_mask: Any = None
    counted = True

    def note_masks(module, args, kwargs):  # a loss may run the model several times, with other ones each time
        nonlocal mask, source_mask
        arguments = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
        source_mask = arguments.get("encoder_attention_mask")
        if not isinstance(arguments.get("attention_mask"), Mapping):  # made of the outer model's, for its layers
            mask = arguments.get("attention_mask")

    def add(module, args, kwargs, output):
        given, dtype = module.bind(args, kwargs), outputs[module].dtype
        with torch.autocast(outputs[module].device.type, enabled=False):
            _add_moment(sums[module], given.hidden_states.detach().to(dtype), mask, counted)
            if given.source is not None:
                if module not in source_sums:
                    source_sums[module] = _zero_moment(module, spread)
                _add_moment(source_sums[module], given.source.detach().to(dtype), source_mask, counted)
            outputs[module] += counted * F.square_sum(output[0].detach().to(dtype), mask)

    hooks = [attention.register_forward_hook(add, with_kwargs=True) for attention in attentions]
    for module in model.modules():  # some heads call a part of their base model
        if isinstance(module, PreTrainedModel):
            hooks.append(module.register_forward_pre_hook(note_masks, with_kwargs=True))
    losses = []
    try:
        with torch.no_grad(), failing_together(model):
            for index, batch, counted in in_step(model, batches):
                loss = batch_loss(objective, batch, index).item()
                if counted:
                    losses.append(loss)
                    objective.advance(1)
    finally:
        for hook in hooks:
            hook.remove()
    crossing = all_reduce_sum(*(attention in source_sums for attention in attentions))
    for attention in (attention for attention, ranks in zip(attentions, crossing) if ranks):
        source_sums.setdefault(attention, _zero_moment(attention, spread))
    if not spread:
        sum_over_ranks(*(of[attention] for of in (sums, source_sums) for attention in attentions if attention in of))
    sum_over_ranks(*outputs.values())
    blocks = []
    for attention in attentions:
        of_layer = whole(sums.pop(attention))  # in large models all layers' moments and roots do not fit at once
        count = of_layer[-1, -1]  # the constant feature has counted the tokens
        if not count > 0:
            continue  # the loss does not run this module
        size = (outputs[attention] / count.to(outputs[attention])).sqrt()
        size = torch.where(size > 0, size, 1.0)  # a layer whose output weights are zero has no size of its own
        roots = _roots_of((of_layer / count).to(size), ridge, spread)
        source_roots = roots
        if attention in source_sums:
            of_source = whole(source_sums.pop(attention))
            source_roots = _roots_of((of_source / of_source[-1, -1]).to(size), ridge, spread)
        for kind in kinds:
            shared = source_roots(attention.features_of(kind.shared))
            stacked = [1 / size, size] if kind.stacked == "output" else roots(attention.features_of(kind.stacked))
            blocks.append(Block(attention, kind, Roots(*stacked, *shared)))
    return blocks, losses


def _zero_moment(attention: GrowableAttention, spread: bool) -> Tensor:
    like, features = attention.empty_like(), attention.shape.in_features + 1
    # Their sum is the same in any order then, to the rounding of fp32.
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    zeros = like.new_zeros(features, features, dtype=dtype)
    return _spread_rows(zeros) if spread else zeros


def _add_moment(total: Tensor, states: Tensor, mask: Tensor | None, counted: bool) -> None:
    moment: Any = counted * F.moment_sum(F.augment(states), mask).to(total.dtype)
    if hasattr(total, "full_tensor"):  # all ranks are here, and keep no more than their rows
        sum_over_ranks(moment)
        moment = _spread_rows(moment)
    total += moment


def _roots_of(moment: Tensor, ridge: float, spread: bool) -> Callable[[int], list[Tensor]]:
    """What gives `C^(1/2)` and `C^(-1/2)` of an input with that many features, with or without the constant one."""

    @cache
    def roots(features: int) -> list[Tensor]:
        both = F.square_roots(F.ridged(moment[:features, :features], ridge))
        return [_spread_rows(root) if spread else root for root in both]

    return roots
