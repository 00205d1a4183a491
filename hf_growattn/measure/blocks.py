"""The unit of growth: one kind of bottleneck of one layer, and the metric in which its steps are measured."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention
from ..growable.training_state import count, rank, sharded_modules, sum_over_ranks, total
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


class Rows:
    """A matrix of which each rank keeps some rows if it is `spread`, and all of it otherwise."""

    def __init__(self, matrix: Tensor, spread: bool):
        self.spread = spread
        self._shape = matrix.shape
        if spread:
            first, last = (len(matrix) * number // count() for number in (rank(), rank() + 1))
            self._rows = slice(first, last)
        self._own = matrix[self._rows].clone() if spread else matrix

    @property
    def like(self) -> Tensor:
        """An empty tensor in the matrix's precision and on its device."""
        return self._own.new_empty(0)

    def add(self, matrix: Tensor | None) -> None:
        """Add a matrix to it, that of all ranks where it is spread; they call this together then, with None for zeros.

        The matrix is used up.
        """
        if self.spread:
            matrix = self._own.new_zeros(self._shape) if matrix is None else matrix
            sum_over_ranks(matrix)
        if matrix is not None:
            self._own += matrix[self._rows] if self.spread else matrix

    def whole(self) -> Tensor:
        """All of the matrix; ranks that have some rows call this together, and keep no more than those."""
        if not self.spread:
            return self._own
        matrix = self._own.new_zeros(self._shape)
        matrix[self._rows] = self._own
        sum_over_ranks(matrix)
        return matrix


class Roots:
    """`C^(1/2)` and `C^(-1/2)` of one block's second moments: shared side (b, b), stacked side (a, a) or scalars.

    The ranks of a sharded model keep some rows each, and gather a root together whenever they read it.
    """

    def __init__(self, stacked: list[Rows], shared: list[Rows]):
        self._stacked, self._shared = stacked, shared

    @property
    def like(self) -> Tensor:
        """An empty tensor in the statistics' precision and on their device."""
        return self._shared[0].like

    @property
    def stacked_root(self) -> Tensor:
        """(a, a), or a scalar."""
        return self._stacked[0].whole()

    @property
    def stacked_whitening(self) -> Tensor:
        """(a, a), or a scalar."""
        return self._stacked[1].whole()

    @property
    def shared_root(self) -> Tensor:
        """(b, b)."""
        return self._shared[0].whole()

    @property
    def shared_whitening(self) -> Tensor:
        """(b, b)."""
        return self._shared[1].whole()


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
        return self.attention.heads_of("query")

    @property
    def groups(self) -> int:
        """Key/value heads `G`."""
        return self.attention.heads_of("key")

    @property
    def stacked_shape(self) -> tuple[int, int]:
        """Groups and features of the stacked side, `(G, g a)`."""
        return self.groups, self.heads // self.groups * self.attention.features_of(self.kind.stacked)

    @property
    def shared_shape(self) -> tuple[int, int]:
        """Groups and features of the shared side, `(G, b)`."""
        return self.groups, self.attention.features_of(self.kind.shared)

    def old_factors(self) -> tuple[Tensor, Tensor]:
        """What the old dims compute: stacked (H, a, k), shared (G, b, k), with biases, in the statistics' precision.

        New dims of former growths and adapters that are active count in.
        """
        dtype = self.roots.like.dtype
        stacked, shared = (self.attention.factors_of(role, dtype) for role in self.kind.roles)
        return stacked, shared

    def whitened_factors(self) -> tuple[Tensor, Tensor]:
        """The live factors in the metric of the steps: stacked over groups (G, g a, k), shared (G, b, k)."""
        stacked, shared = self.old_factors()
        whitened = F.apply_root(self.roots.stacked_root, stacked)
        return F.stack_groups(whitened, self.groups), self.roots.shared_root @ shared


def measure_moments(
    objective: Objective,
    attentions: list[GrowableAttention],
    kinds: list[Kind],
    batches: list,
    ridge: float,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[Block], list[float]]:
    """Pool the second moments of every attention's input over all tokens that are not padding.

    One forward pass over the batches of all ranks. Queries, keys and values see the same tokens, so they share the
    moment, each with a constant feature where its projection has a bias. For messages it stands in for the moment of
    the attended tokens `A X`, which differs from head to head; their stacked side is measured in units of the rms norm
    of the attention's output, so that a step is in nats for logits and a share of the norm for outputs. Call inside
    `evaluation_mode`.

    Cross-attention has two moments, that of the queries' input and that of what keys and values read.

    Padding is read from the two-dimensional "attention_mask" that the model is called with, or a decoder's
    "encoder_attention_mask"; `ridge` is the fraction of the mean eigenvalue to add.

    Returns:
        One block for each layer and kind, in this order, of those layers that the loss runs, and the loss of each of
        this rank's batches.

    Raises:
        ValueError: a batch gives no loss, or none that is finite.
    """
    model = objective.model
    spread, outputs = bool(sharded_modules(model)), {}
    sums: dict[Any, Rows] = {}
    source_sums: dict[Any, Rows] = {}  # of what cross-attention reads
    for attention in attentions:  # a rank without batches brings zeros
        sums[attention] = _zero_rows(attention, spread)
        like = attention.empty_like()
        outputs[attention] = like.new_zeros((), dtype=_statistics_dtype(like))
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

        def moment_of(states: Tensor, mask: Tensor | None) -> Tensor | None:
            return F.moment_sum(F.augment(states.detach().to(dtype)), mask).to(sums[module].like) if counted else None

        with torch.autocast(outputs[module].device.type, enabled=False):
            sums[module].add(moment_of(given.hidden_states, mask))
            if given.source is not None:
                if module not in source_sums:
                    source_sums[module] = _zero_rows(module, spread)
                source_sums[module].add(moment_of(given.source, source_mask))
            if counted:
                outputs[module] += F.square_sum(output[0].detach().to(dtype), mask)

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
                    tick()
    finally:
        for hook in hooks:
            hook.remove()
    crossing = total(*(attention in source_sums for attention in attentions))
    sources = [attention for attention, ranks in zip(attentions, crossing) if ranks]
    source_sums = {attention: source_sums.get(attention) or _zero_rows(attention, spread) for attention in sources}
    if not spread:
        sum_over_ranks(*(moments.whole() for moments in (*sums.values(), *source_sums.values())))
    sum_over_ranks(*outputs.values())
    blocks = []
    for attention in attentions:
        # In large models the moments of all layers and the roots do not fit at once.
        of_layer, like = sums.pop(attention).whole(), outputs[attention]
        count = of_layer[-1, -1]  # the constant feature has counted the tokens
        if not count > 0:
            continue  # the loss does not run this module
        queried = read = _InputRoots((of_layer / count).to(like), ridge, spread)
        if attention in source_sums:
            of_source = source_sums.pop(attention).whole()
            read = _InputRoots((of_source / of_source[-1, -1]).to(like), ridge, spread)
        size = (like / count.to(like)).sqrt()
        for kind in kinds:
            shared = read[kind.shared in attention.shape.biased]
            if kind.stacked == "output":
                stacked = [Rows(1 / size, False), Rows(size, False)]
            else:
                stacked = queried[kind.stacked in attention.shape.biased]
            blocks.append(Block(attention, kind, Roots(stacked, shared)))
    return blocks, losses


def _zero_rows(attention: GrowableAttention, spread: bool) -> Rows:
    like, features = attention.empty_like(), attention.shape.in_features + 1
    # Their sum is the same in any order then, to the rounding of fp32.
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    return Rows(like.new_zeros(features, features, dtype=dtype), spread)


class _InputRoots(dict):
    """`C^(1/2)` and `C^(-1/2)` of a layer's input, with (True) or without (False) the constant feature, as needed."""

    def __init__(self, moment: Tensor, ridge: float, spread: bool):
        super().__init__()
        self.moment, self.ridge, self.spread = moment, ridge, spread

    def __missing__(self, biased: bool) -> list[Rows]:
        moment = self.moment if biased else self.moment[:-1, :-1]
        self[biased] = [Rows(root, self.spread) for root in F.square_roots(F.ridged(moment, self.ridge))]
        return self[biased]


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    """fp64 stays; everything else is measured in fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
