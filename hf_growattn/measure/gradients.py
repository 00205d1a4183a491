"""What new dims could do about the loss: directions, their gain, and how much of it holds on batches they did not see.

The batches are split in two halves. Each half finds directions of its own, and the other half says what they are worth:
that is the validated gain. The directions to grow along come from both halves together.

What is measured is the ordinary gradient of a probe: a few more dims, in the place where new ones join. Dims whose
query weights are zero change no logit, yet the gradient of those weights is `T Omega` if the matching keys are
`X Omega`. The mirror image, zero keys and fixed queries `X Psi`, gives `T^T Psi` in the same pass. Messages are read
the same way: values `X Omega` against output weights of zero, zero values against output weights `Psi`. No T x T and no
d x d matrix per head is formed, and any attention implementation, mask and precision works.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..growable.attention import GrowableAttention, set_trial
from ..growable.training_state import broadcast_from_rank0, sum_over_ranks, total
from ..model.extra import HeadShape
from . import functional as F
from .blocks import Block
from .passes import Objective, backward

SKETCH_PASSES = (1 / 2, 1.0, 1.0)  # part of the batches that each reads; the first one only finds where to look


class _ZeroProjection(torch.autograd.Function):
    """`inputs @ weight` for a weight of zeros: nothing to compute forward, and the gradient of the weight backward."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], weight.shape[-1])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (inputs,) = ctx.saved_tensors
        return None, inputs.flatten(0, -2).T @ gradient.flatten(0, -2)


class KindProbe(nn.Module):
    """The fixed and the zero weights that probe one kind of bottleneck of one attention module.

    Args:
        shared_probe: `Omega`, (G, b, r).
        stacked_probe: `Psi`, (H, a, r'); None probes one side only.
        heads, stacked_features: `H` and `a`, the shape of the zero weights of the stacked side.

    Attributes:
        zero_stacked: (H, a, r); after a backward pass its gradient is `T Omega`.
        zero_shared: (G, b, r'); its gradient is `T^T Psi`, summed over the heads of each group.
    """

    def __init__(self, shared_probe: Tensor, stacked_probe: Tensor | None, heads: int, stacked_features: int):
        super().__init__()
        self.shared_probe = shared_probe
        self.stacked_probe = (
            shared_probe.new_zeros(heads, stacked_features, 0) if stacked_probe is None else stacked_probe
        )
        zero = shared_probe.new_zeros(())  # one number in memory stands for all; the gradients have their full size
        self.zero_stacked = nn.Parameter(zero.expand(heads, stacked_features, shared_probe.shape[-1]))
        rank = self.stacked_probe.shape[-1]
        self.dims = shared_probe.shape[-1] + rank
        self.zero_shared = nn.Parameter(zero.expand(*shared_probe.shape[:2], rank), requires_grad=rank > 0)

    def stacked(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[zeros | Psi]`: (batch, tokens, d) -> (batch, H, tokens, r + r')."""
        return torch.cat((_nothing(inputs, self.zero_stacked), _projected(inputs, self.stacked_probe)), dim=-1)

    def shared(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[Omega | zeros]`: (batch, tokens, d) -> (batch, G, tokens, r + r')."""
        return torch.cat((_projected(inputs, self.shared_probe), _nothing(inputs, self.zero_shared)), dim=-1)

    def gather(self, added: Tensor) -> Tensor:
        """Bring attended values back by `[zeros | Psi]`: (batch, tokens, H, r + r') -> (batch, tokens, a)."""
        rank = self.zero_stacked.shape[-1]
        zero, probe = self.zero_stacked.mT, self.stacked_probe.mT
        nothing = _ZeroProjection.apply(added[..., :rank].flatten(-2).detach(), zero.flatten(0, 1))  # (H r, a)
        return nothing + added[..., rank:].flatten(-2) @ probe.flatten(0, 1)


def _projected(inputs: Tensor, factors: Tensor) -> Tensor:
    """(batch, tokens, d) times (heads, d or d + 1, r), whose last row is a bias -> (batch, heads, tokens, r)."""
    weight, bias = F.split_bias(factors, inputs.shape[-1])
    projected = nn.functional.linear(inputs, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return projected.unflatten(-1, weight.shape[:2]).transpose(1, 2)


def _nothing(inputs: Tensor, zeros: Tensor) -> Tensor:
    """The same times zeros, of which the backward pass wants the gradient."""
    biased = F.augment(inputs) if zeros.shape[1] > inputs.shape[-1] else inputs
    projected = _ZeroProjection.apply(biased, zeros.transpose(0, 1).flatten(1))
    return projected.unflatten(-1, zeros.shape[::2]).transpose(1, 2)


class Probe(nn.Module):
    """A part that probes an attention module's patterns, its messages, or both, in the statistics' precision."""

    def __init__(self, shape: HeadShape, patterns: KindProbe | None = None, messages: KindProbe | None = None):
        super().__init__()
        self.shape, self.patterns, self.messages = shape, patterns, messages
        self.qk_dims = patterns.dims if patterns else 0
        self.v_dims = messages.dims if messages else 0

    def inside(self, hidden_states: Tensor, key_value_states: Tensor | None = None) -> tuple[Tensor, ...]:
        """Queries, keys and values that probe: (batch, tokens, d) -> (batch, heads, tokens, dims) each."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            dtype = next(self.parameters()).dtype
            inputs = hidden_states.detach().to(dtype)
            source = inputs if key_value_states is None else key_value_states.detach().to(dtype)
            heads = self.shape.num_heads, self.shape.num_key_value_heads
            query, key = (
                states.new_zeros(len(states), n, states.shape[1], 0) for states, n in zip((inputs, source), heads)
            )
            value = key
            if self.patterns is not None:
                query, key = self.patterns.stacked(inputs), self.patterns.shared(source)
            if self.messages is not None:
                value = self.messages.shared(source)
            return query, key, value

    def outside(self, read: Tensor) -> Tensor:
        """What the probing values add, all of it zero: (batch, tokens, H, n) -> (batch, tokens, d)."""
        assert self.messages is not None  # nothing else adds value dims
        with torch.autocast(read.device.type, enabled=False):
            return self.messages.gather(read.to(self.messages.shared_probe.dtype))


@dataclass
class Gradient:
    """What new dims of one block could do, to first order.

    Attributes:
        block: where.
        u, sigma, v: whitened directions, best first: (G, g a, p), (G, p), (G, b, p).
        in_sample: decrease of the loss per unit of step of each dim, over all heads, on its own batches: (p,).
        validated: the same on batches that the direction was not chosen from: (p,).
        starvation: share of the whitened gradient that the old dims cannot follow, between 0 and 1; None where their
            weights cannot be read.
        halves: `u, sigma, v` as either half of the batches alone gives them, to be judged on the other.
    """

    block: Block
    u: Tensor
    sigma: Tensor
    v: Tensor
    in_sample: Tensor
    validated: Tensor
    starvation: float | None
    halves: tuple[tuple[Tensor, Tensor, Tensor], ...]


class _Measurement:
    """One block under the probe: whitened inputs go in, whitened products with each half's gradient come out."""

    def __init__(self, block: Block):
        self.block = block
        self.stacked_shape, self.shared_shape = block.stacked_shape, block.shared_shape

    def beyond_old_dims(self, stacked: Iterable[Tensor], shared: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What the old dims cannot do of products on either side, each (G, g a, r) and (G, b, r').

        The bases of what they can do are as large as the weights: none is held for the layers that wait. Where old
        weights cannot be read, the products are returned as they are.
        """
        if not self.block.is_known:
            return list(stacked), list(shared)
        bases = map(F.column_basis, self.block.whitened_factors())
        first, second = ([F.project_out(part, basis) for part in side] for side, basis in zip((stacked, shared), bases))
        return first, second

    def probe(self, shared_inputs: Tensor, stacked_inputs: Tensor | None) -> KindProbe:
        """Return a probe for `M shared_inputs` and `M^T stacked_inputs`; with None for the second, the first alone."""
        block, stacked_probe = self.block, None
        if stacked_inputs is not None:
            per_head = F.unstack_groups(stacked_inputs, block.heads)
            stacked_probe = F.apply_root(block.roots.stacked_whitening, per_head)
        features = self.stacked_shape[1] * block.groups // block.heads
        shared_probe = block.roots.shared_whitening @ shared_inputs
        self.installed = KindProbe(shared_probe, stacked_probe, block.heads, features)
        return self.installed

    def read(self, batches: float) -> tuple[Tensor, Tensor]:
        """Return `M shared_inputs` (G, g a, r) and `M^T stacked_inputs` (G, b, r') of the mean loss, and reset."""
        probe, roots = self.installed, self.block.roots
        zeros = probe.zero_stacked, probe.zero_shared
        sums = [zero.new_zeros(zero.shape) if zero.grad is None else zero.grad for zero in zeros]
        probe.zero_stacked.grad = probe.zero_shared.grad = None
        sum_over_ranks(*sums)
        products = F.apply_root(roots.stacked_whitening, sums[0] / batches)
        return F.stack_groups(products, self.block.groups), roots.shared_whitening @ (sums[1] / batches)


def _install(measurements: list[_Measurement], inputs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Set the probes of all blocks, those of one attention module together."""
    by_attention: dict[GrowableAttention, dict[str, KindProbe]] = {}
    for measurement, (shared, stacked) in zip(measurements, inputs):
        block = measurement.block
        by_attention.setdefault(block.attention, {})[block.kind.name] = measurement.probe(shared, stacked)
    for attention, probes in by_attention.items():
        set_trial(attention, Probe(attention.shape, **probes))


@dataclass
class _Products:
    """Products with the residual gradient, for both halves of the batches.

    Attributes:
        inputs: (G, b, c), the columns that half 0 chose, then those of half 1, for each pass in turn.
        products: of half 0 and of half 1, each (G, g a, c).
        owned: columns that half 0 chose without having seen half 1, and the reverse: two boolean masks, (c,).
    """

    inputs: Tensor
    products: tuple[Tensor, ...]
    owned: tuple[Tensor, Tensor]

    def directions(self, weights: tuple[float, float], dims: int) -> tuple[Tensor, Tensor, Tensor]:
        """Best directions of both halves together: left (G, g a, p), values (G, p), right (G, b, p)."""
        products = weights[0] * self.products[0] + weights[1] * self.products[1]
        return F.directions_from_products(self.inputs, products, dims)[:3]

    def validated(self, half: int, dims: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Directions of one half as `directions` gives them, and their values as the other half sees them, (G, p)."""
        columns = self.owned[half]
        left, values, right, weights = F.directions_from_products(
            self.inputs[..., columns], self.products[half][..., columns], dims
        )
        other = self.products[1 - half][..., columns] @ weights
        return left, values, right, (left * other).sum(-2)


def shares(halves: tuple[list[dict], list[dict]]) -> tuple[float, float]:
    """What part of all ranks' batches either half holds."""
    counts = total(*map(len, halves))
    return counts[0] / sum(counts), counts[1] / sum(counts)


def _gradient(block: Block, side: _Products, weights: tuple[float, float], dims: int, starvation: float) -> Gradient:
    """Solve for the directions of both halves together and of each alone, and let the halves judge each other."""
    u, sigma, v = side.directions(weights, dims)
    halves = [side.validated(half, dims) for half in (0, 1)]
    validated = torch.stack([(own * other).sum(0) for _, own, _, other in halves]).mean(0)
    own = tuple((u, sigma, v) for u, sigma, v, _ in halves)
    broadcast_from_rank0(u, sigma, v, validated, *own[0], *own[1])
    known = starvation if block.is_known else None
    return Gradient(block, u, sigma, v, sigma.square().sum(0), validated, known, own)


def starvation_of(residual: Tensor, total: Tensor) -> float:
    """Return the starvation from two inner products of one half's gradient with the other's: noise adds to neither."""
    return (residual / total).clamp(0, 1).sqrt().item() if total > 0 else 0.0


def beyond_old_dims(block: Block, parts: list[Tensor]) -> tuple[tuple[Tensor, Tensor], float]:
    """Return what the old dims cannot do of either half's whole gradient, (G, g a, b) each, and the starvation."""
    if not block.is_known:
        return (parts[0], parts[1]), 1.0
    bases = [F.column_basis(factors) for factors in block.whitened_factors()]
    first, second = (F.bottleneck(part, *bases) for part in parts)
    return (first, second), starvation_of((first * second).sum(), (parts[0] * parts[1]).sum())


def exact_gradients(
    objective: Objective,
    blocks: list[Block],
    halves: tuple[list[dict], list[dict]],
    dims: int,
    tick: Callable[[], object] = lambda: None,
) -> list[Gradient]:
    """Return every block's best directions from its whole gradient, `r = d`, in one pass over the batches.

    They lie beyond what the old dims can follow, unless those will not train. Memory and time grow with `heads *
    hidden_size` per token: for small models, and as the test of the sketch. Call inside `evaluation_mode`.
    """
    weights = shares(halves)
    gradients = []
    for block, parts in zip(blocks, whole_gradients(objective, blocks, halves, tick)):
        residuals, starvation = beyond_old_dims(block, parts)
        everything = torch.ones(parts[0].shape[-1], dtype=torch.bool, device=parts[0].device)
        identity = torch.eye(parts[0].shape[-1]).to(parts[0]).expand(block.groups, -1, -1)
        side = _Products(identity, residuals if block.old_dims_train else tuple(parts), (everything, everything))
        gradients.append(_gradient(block, side, weights, dims, starvation))
    return gradients


def whole_gradients(
    objective: Objective,
    blocks: list[Block],
    halves: tuple[list[dict], ...],
    tick: Callable[[], object] = lambda: None,
) -> list[list[Tensor]]:
    """Return the whitened gradient `M` of every block for each part of the batches, each (G, g a, b)."""
    measurements = [_Measurement(block) for block in blocks]
    inputs = [
        (torch.eye(m.shared_shape[1]).to(m.block.roots.like).expand(m.block.groups, -1, -1), None) for m in measurements
    ]
    _install(measurements, inputs)
    whole: list[list[Tensor]] = [[] for _ in blocks]
    for batches in halves:
        backward(objective, batches, tick)
        (count,) = total(len(batches))
        for measurement, parts in zip(measurements, whole):
            parts.append(measurement.read(count)[0])
    return whole


def sketched_gradients(
    objective: Objective,
    blocks: list[Block],
    halves: tuple[list[dict], list[dict]],
    dims: int,
    oversampling: int,
    seed: int,
    tick: Callable[[], object] = lambda: None,
) -> list[Gradient]:
    """Return every block's best directions from a randomized SVD with power iteration, `r = dims + oversampling`.

    A pass over half of the batches, or all of a few, and two over all of them. They probe both sides, the products
    of one pass being the inputs of the other side in the next; the last one probes only the side that the solution is
    taken from. Where nothing holds on the other half after the first whole one, it is the last. Either half iterates
    half of the columns on its own, and all columns are measured on both halves; so what one half chose, the other can
    judge unseen. The first pass also estimates the norms behind the starvation, from its Gaussian inputs. Directions
    lie beyond what the old dims can follow, unless those will not train. Call inside `evaluation_mode`.

    Source: Halko, Martinsson, Tropp 2011, algorithms 4.3 and 4.4, with both sides iterated at once.
    """
    measurements = [_Measurement(block) for block in blocks]
    own_rank, generator = -(-(dims + oversampling) // 2), torch.Generator().manual_seed(seed)
    inputs = []
    for m in measurements:
        like = m.block.roots.like
        shared, stacked = (
            torch.randn((*shape, 2 * own_rank), generator=generator, dtype=like.dtype).to(like.device)
            for shape in (m.shared_shape, m.stacked_shape)
        )
        (stacked,), _ = m.beyond_old_dims((stacked,), ())
        inputs.append((shared, stacked))
    known: list[list[tuple]] = [[] for _ in blocks]
    starvations = []
    weights = shares(halves)
    for sweep, part in enumerate(SKETCH_PASSES):
        found: list[Gradient] = []  # those of the pass before make room
        ends = sweep == len(SKETCH_PASSES) - 1
        _install(measurements, [(shared, None if ends else stacked) for shared, stacked in inputs])
        raw: list[list[tuple[Tensor, Tensor]]] = [[] for _ in blocks]
        for batches in (half[:: round(1 / part)] if len(half) > 2 else half for half in halves):
            backward(objective, batches, tick)
            (count,) = total(len(batches))
            for measurement, read in zip(measurements, raw):
                read.append(measurement.read(count))
        for index, m in enumerate(measurements):
            trains, whole = blocks[index].old_dims_train, [*zip(*raw[index])]
            residual = m.beyond_old_dims(*whole) if trains or sweep == 0 else whole
            if sweep == 0:
                (first, second), (one, other) = residual[1], whole[0]
                starvations.append(starvation_of((first * second).sum(), (one * other).sum()))
            right, left = residual if trains else whole
            if part == 1:
                known[index].append((inputs[index][0], right))
            if ends:
                continue
            # The next inputs lie where the products do, beyond old dims that train; each half keeps to its own columns.
            inputs[index] = tuple(
                torch.cat([F.column_basis(side[half].chunk(2, -1)[half]) for half in (0, 1)], dim=-1)
                for side in (left, right)
            )
            broadcast_from_rank0(*inputs[index])
        if part == 1:
            found = [_from_products(*each, own_rank, weights, dims) for each in zip(blocks, known, starvations)]
            if not any(F.decreasing(gradient.validated)[0] > 0 for gradient in found):  # growth would take none of them
                break
    return found


def _from_products(
    block: Block,
    known: list[tuple[Tensor, list[Tensor]]],
    starvation: float,
    own_rank: int,
    weights: tuple[float, float],
    dims: int,
) -> Gradient:
    """Put the passes' columns together, side by side, and solve."""
    inputs, products = zip(*known)
    first = torch.arange(2 * own_rank, device=inputs[0].device).repeat(len(known)) < own_rank
    of_halves = tuple(torch.cat([both[half] for both in products], -1) for half in (0, 1))
    return _gradient(block, _Products(torch.cat(inputs, -1), of_halves, (first, ~first)), weights, dims, starvation)
