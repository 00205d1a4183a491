"""What new dims could do about the loss: directions, their gain, and how much of it holds on batches they did not see.

The batches are split in two halves. Each half finds directions of its own, and the other half says what they are worth:
that is the validated gain. The directions to grow along come from both halves together.

What is measured is the ordinary gradient of a probe: a few more dims, in the place where new ones join. Dims whose
query weights are zero change no logit, yet the gradient of those weights is `T Omega` if the matching keys are
`X Omega`. The mirror image, zero keys and fixed queries `X Psi`, gives `T^T Psi` in the same pass. Messages are read
the same way: values `X Omega` against output weights of zero, zero values against output weights `Psi`. No T x T and no
d x d matrix per head is formed, and any attention implementation, mask and precision works.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..growable.attention import GrowableAttention, set_trial
from ..growable.training_state import all_reduce_sum, broadcast_from_rank0, sum_over_ranks
from ..model.new_dims import HeadShape
from . import functional as F
from .bottlenecks import Bottleneck
from .passes import ROUNDING, Objective, backward

FIRST_PASSES = (4, 4)  # of a sketch only find where to look: each reads one batch in this number
OVERSAMPLING = 32  # columns beyond the dims, half for either half: with 16 the loss after a growth is .007 higher


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
        stacked_probe: `Psi`, (H, a, r'); with `r = 0` or `r' = 0` one side alone is probed.

    Attributes:
        zero_stacked: (H, a, r); after a backward pass its gradient is `T Omega`.
        zero_shared: (G, b, r'); its gradient is `T^T Psi`, summed over the heads of each group.
    """

    def __init__(self, shared_probe: Tensor, stacked_probe: Tensor):
        super().__init__()
        self.shared_probe, self.stacked_probe = shared_probe, stacked_probe
        zero = shared_probe.new_zeros(())  # one number in memory stands for all; the gradients have their full size
        shared, stacked = shared_probe.shape[-1], stacked_probe.shape[-1]
        self.dims = shared + stacked
        self.zero_stacked = nn.Parameter(zero.expand(*stacked_probe.shape[:2], shared), requires_grad=shared > 0)
        self.zero_shared = nn.Parameter(zero.expand(*shared_probe.shape[:2], stacked), requires_grad=stacked > 0)

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
    """New dims that probe an attention module's queries and keys, its values, or both, in the statistics' precision."""

    recomputes = True  # a probe is wider than most heads

    def __init__(self, shape: HeadShape, qk: KindProbe | None = None, v: KindProbe | None = None):
        super().__init__()
        self.shape, self.qk, self.v = shape, qk, v
        self.qk_dims = qk.dims if qk else 0
        self.v_dims = v.dims if v else 0

    def in_projection(self, hidden_states: Tensor, key_value_states: Tensor | None = None) -> tuple[Tensor, ...]:
        """Queries, keys and values that probe: (batch, tokens, d) -> (batch, heads, tokens, dims) each."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            dtype = next(self.parameters()).dtype
            inputs = hidden_states.detach().to(dtype)
            source = inputs if key_value_states is None else key_value_states.detach().to(dtype)
            query = inputs.new_zeros(len(inputs), self.shape.num_heads, inputs.shape[1], 0)
            key = value = source.new_zeros(len(source), self.shape.num_key_value_heads, source.shape[1], 0)
            if self.qk is not None:
                query, key = self.qk.stacked(inputs), self.qk.shared(source)
            if self.v is not None:
                value = self.v.shared(source)
            return query, key, value

    def out_projection(self, read: Tensor) -> Tensor:
        """What the probing values add, all of it zero: (batch, tokens, H, n) -> (batch, tokens, d)."""
        assert self.v is not None  # nothing else adds value dims
        with torch.autocast(read.device.type, enabled=False):
            return self.v.gather(read.to(self.v.shared_probe.dtype))


@dataclass
class Directions:
    """What new dims of one bottleneck could do, to first order.

    Attributes:
        bottleneck: where.
        u, sigma, v: whitened directions, best first: (G, g a, p), (G, p), (G, b, p). What is as small as `sigma` is on
            the CPU, where nobody waits for a device to read it.
        in_sample: decrease of the loss per unit of step of each dim, over all heads, on its own batches: (p,).
        validated: the same on batches that the direction was not chosen from: (p,).
        out_of_reach: share of the whitened gradient that the old dims cannot follow, between 0 and 1; None where it is
            not known what they can follow, or noise hides it.
        halves: `u, sigma, v` as either half of the batches alone gives them, to be judged on the other.
    """

    bottleneck: Bottleneck
    u: Tensor
    sigma: Tensor
    v: Tensor
    in_sample: Tensor
    validated: Tensor
    out_of_reach: float | None
    halves: tuple[tuple[Tensor, Tensor, Tensor], ...]

    def leave_rounding_out(self, loss: float) -> None:
        """Count no gain of directions that cannot lower this loss by more than its own rounding.

        A step that moves logits by 1, or an output by its own size, would lower the loss by `sigma`. Gradients that
        cancel, as those of queries and keys in rows of one repeated token, leave less than that; the step that the
        promised fall asks for would be huge.
        """
        is_rounding = self.in_sample.sqrt() < ROUNDING * abs(loss)
        self.validated = torch.where(is_rounding, 0.0, self.validated)

    @property
    def share_that_holds(self) -> Tensor:
        """Share of each direction's gain that holds on the half it was not chosen from, between 0 and 1: (p,)."""
        own = torch.stack([sigma.square().sum(0) for _, sigma, _ in self.halves]).mean(0)
        held = F.decreasing(self.validated)  # one gain alone is mostly noise
        return (held / own.clamp_min(torch.finfo(own.dtype).tiny)).clamp(0, 1)

    @property
    def worth(self) -> Tensor:
        """Decrease of the loss on unseen batches per unit of step of each dim, as it would be taken: (p,)."""
        return F.decreasing(self.validated) * self.share_that_holds


@contextlib.contextmanager
def probing(bottlenecks: list[Bottleneck], inputs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[KindProbe]]:
    """Probe for `M shared` and `M^T stacked` of whitened inputs `stacked`, `shared` of each bottleneck, for a while."""
    probes = []
    by_attention: dict[GrowableAttention, dict[str, KindProbe]] = {}
    for bottleneck, (stacked, shared) in zip(bottlenecks, inputs):
        stacked_probe, shared_probe = bottleneck.unwhitened(stacked, shared)
        probes.append(KindProbe(shared_probe, stacked_probe))
        by_attention.setdefault(bottleneck.attention, {})[bottleneck.kind.name] = probes[-1]
    try:
        for attention, own in by_attention.items():
            set_trial(attention, Probe(attention.shape, **own))
        yield probes
    finally:
        for attention in by_attention:
            set_trial(attention, None)


def read_products(
    objective: Objective,
    bottlenecks: list[Bottleneck],
    inputs: Iterable[tuple[Tensor, Tensor]],
    parts: Iterable[list],
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return `M shared` (G, g a, r) and `M^T stacked` (G, b, r') of the inputs, for each part of the batches."""
    products: list[list[tuple[Tensor, Tensor]]] = [[] for _ in bottlenecks]
    with probing(bottlenecks, inputs) as probes:
        for batches in parts:
            backward(objective, batches)
            (count,) = all_reduce_sum(len(batches))
            for bottleneck, probe, own in zip(bottlenecks, probes, products):
                zeros = probe.zero_stacked, probe.zero_shared
                sums = [zero.new_zeros(zero.shape) if zero.grad is None else zero.grad for zero in zeros]
                probe.zero_stacked.grad = probe.zero_shared.grad = None
                sum_over_ranks(*sums)
                own.append(bottleneck.whitened_gradients(sums[0] / count, sums[1] / count))
    return products


def shares(halves: tuple[list[dict], list[dict]]) -> tuple[float, float]:
    """What part of all ranks' batches either half holds."""
    counts = all_reduce_sum(*map(len, halves))
    return counts[0] / sum(counts), counts[1] / sum(counts)


def _solve_directions(
    bottlenecks: list[Bottleneck],
    inputs: list[Tensor],
    products: list[list[Tensor]],
    weights: tuple[float, float],
    dims: int,
    shares_out_of_reach: list[Tensor],
) -> list[Directions]:
    """Solve for the directions of both halves together and of each alone, and let the halves judge each other.

    `products` are those of the `inputs`, (G, b, c), with the gradient of half 0 and of half 1, each (G, g a, c). The
    first half of the inputs was chosen by half 0 without having seen half 1, and the other by half 1.
    """

    def problems(columns: Tensor, first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        own = columns.shape[-1] // 2
        yield columns, weights[0] * first + weights[1] * second
        yield columns[..., :own], first[..., :own]
        yield columns[..., own:], second[..., own:]

    cores = []
    for bottleneck, columns, own in zip(bottlenecks, inputs, products):
        cores += [F.core_of_products(*problem, bottleneck.precision) for problem in problems(columns, *own)]
    whitenings = iter([whitening for whitening, _ in cores])
    solutions = iter(F.eigenvectors([core for _, core in cores]))
    found = []
    for bottleneck, columns, own, share_out_of_reach in zip(bottlenecks, inputs, products, shares_out_of_reach):
        solved = []
        for problem in problems(columns, *own):
            solved.append(F.directions_from_core(*problem, next(whitenings), *next(solutions), dims))
        (u, sigma, v, _), *of_halves = solved
        half = columns.shape[-1] // 2
        seen = own[1][..., :half] @ of_halves[0][3], own[0][..., half:] @ of_halves[1][3]  # by the other half
        falls = [(left * other).sum(-2) * values.to(left) for (left, values, _, _), other in zip(of_halves, seen)]
        validated = (falls[0].sum(0) + falls[1].sum(0)).cpu() / 2
        halves = tuple((left, values, right) for left, values, right, _ in of_halves)
        broadcast_from_rank0(u, sigma, v, validated, *halves[0], *halves[1])
        share = share_out_of_reach.item() if bottleneck.span_is_known else 0.0
        found.append(Directions(bottleneck, u, sigma, v, sigma.square().sum(0), validated, share or None, halves))
    return found


def _share_out_of_reach(residual: Tensor, total: Tensor) -> Tensor:
    """The share from two inner products of one half's gradient with the other's; 0 where noise hides it."""
    return torch.where(total > 0, residual / total, 0.0).clamp(0, 1).sqrt()


def passes_over(halves: tuple[list, list]) -> list[tuple[list, list]]:
    """The batches of each pass of a sketch: each of the first ones reads others, or all of a few."""

    def part(half: list, number: int, step: int) -> list:
        return half[number::step] if len(half) > 2 else half

    first = [(part(halves[0], *each), part(halves[1], *each)) for each in enumerate(FIRST_PASSES)]
    return [*first, halves]


def _own_bases(bottleneck: Bottleneck, side: int, products: Sequence[Tensor]) -> Tensor:
    """Orthonormal inputs of a side where its products lie, of which each half has chosen half of the columns.

    Without a gradient, as where the output weights are zero, they are unit vectors: training could not move new dims
    both of whose sides are zero.
    """
    own = [products[half].chunk(2, -1)[half] for half in (0, 1)]
    units = torch.eye(*own[0].shape[-2:]).to(own[0])
    own = [torch.where(part.any(-1, keepdim=True).any(-2, keepdim=True), part, units) for part in own]
    bases = torch.cat([F.orthonormal_columns(part) for part in _left_to_new_dims(bottleneck, side, own)], dim=-1)
    # What dependent columns leave is rounding, which is not beyond the old dims.
    (bases,) = _left_to_new_dims(bottleneck, side, [bases])
    broadcast_from_rank0(bases)
    return bases


def _left_to_new_dims(bottleneck: Bottleneck, side: int, products: Sequence[Tensor]) -> list[Tensor]:
    """What is beyond old dims that train of products on a side, and all of them otherwise."""
    return bottleneck.beyond_old_dims(side, products) if bottleneck.old_dims_train else list(products)


def sketched_directions(
    objective: Objective,
    bottlenecks: list[Bottleneck],
    halves: tuple[list[dict], list[dict]],
    dims: int,
    seed: int,
) -> list[Directions]:
    """Return every bottleneck's best directions from a randomized SVD with power iteration.

    The first pass probes with Gaussian inputs, the second on the other side with what the first has found, and the
    third, over all batches, with what the second has found. Either half iterates half of the columns on its own, and
    all columns are measured on both halves; so what one half chose, the other can judge unseen. The first pass probes
    both sides, which gives the norms behind the share out of reach. Directions lie beyond what the old dims can follow,
    unless those will not train. Call inside `evaluation_mode`.

    Source: Halko, Martinsson, Tropp 2011, algorithms 4.3 and 4.4.
    """
    features = min(bottleneck.shared_shape[1] for bottleneck in bottlenecks)
    # Half as many columns as features find nearly all; more would take more memory than small models train in.
    columns = min(dims + OVERSAMPLING, features // 2)
    own_rank, generator = max(-(-columns // 2), dims), torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, int], like: Tensor) -> Tensor:
        return torch.randn((*shape, 2 * own_rank), generator=generator, dtype=like.dtype).to(like.device)

    def gaussians() -> Iterator[tuple[Tensor, Tensor]]:
        for bottleneck in bottlenecks:
            shared, stacked = (
                draw(shape, bottleneck.like) for shape in (bottleneck.shared_shape, bottleneck.stacked_shape)
            )
            yield bottleneck.beyond_old_dims(0, [stacked])[0], shared

    first, second, every = passes_over(halves)
    # A pass needs the memory: nothing is kept of what went into it, or came out and is done with.
    measured = read_products(objective, bottlenecks, gaussians(), first)
    shares_out_of_reach: list[Tensor] = []
    found: list[Tensor] = []
    for bottleneck in bottlenecks:
        products, mirrored = zip(*measured.pop(0))
        beyond = bottleneck.beyond_old_dims(1, mirrored)
        agreed = (products[0] * products[1]).sum()
        shares_out_of_reach.append(_share_out_of_reach((beyond[0] * beyond[1]).sum(), agreed))
        found.append(_own_bases(bottleneck, 0, products))

    inputs = ((found.pop(0), bottleneck.like.new_empty(*bottleneck.shared_shape, 0)) for bottleneck in bottlenecks)
    measured = read_products(objective, bottlenecks, inputs, second)
    for bottleneck in bottlenecks:
        found.append(_own_bases(bottleneck, 1, [product for _, product in measured.pop(0)]))

    empty = (bottleneck.like.new_empty(*bottleneck.stacked_shape, 0) for bottleneck in bottlenecks)
    measured = read_products(objective, bottlenecks, zip(empty, found), every)
    last: list[list[Tensor]] = []
    for bottleneck in bottlenecks:
        last.append(_left_to_new_dims(bottleneck, 0, [product for product, _ in measured.pop(0)]))
    return _solve_directions(bottlenecks, found, last, shares(halves), dims, shares_out_of_reach)
