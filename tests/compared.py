"""The engine's directions, for tests, and other ways to choose directions: the drafts' own, the plain one, and chance.

All but the sketch look at the whole gradient, so they are for small models and one process; the others do not project
out what the old dims can do.
"""

from functools import partial

import torch
from torch import Tensor

from hf_growattn import Grower, GrowthConfig
from hf_growattn.growable.attention import attentions
from hf_growattn.measure import functional as F
from hf_growattn.measure.bottlenecks import QK, Bottleneck, V, compute_moments
from hf_growattn.measure.directions import Directions, read_products, shares, sketched_directions
from hf_growattn.measure.passes import Objective, evaluation_mode, halves_of

ESTIMATORS = ("pooled-truncated", "per-sequence", "gradient", "random")


def sketched(model, batches, dims):
    """The directions of every layer and kind, as `Grower` measures them."""
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [QK, V], batches)
        return sketched_directions(Objective(model), bottlenecks, halves_of(batches), dims, seed=0)


def best_directions(whitened: Tensor, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `dims` best directions `U, sigma, V` of a whitened gradient: (G, g a, p), (G, p), (G, b, p)."""
    u, sigma, vh = torch.linalg.svd(whitened, full_matrices=False)
    return u[..., :dims], sigma[..., :dims], vh.mT[..., :dims]


def directions_from_products(inputs: Tensor, products: Tensor, dims: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The directions of one matrix, by both steps of the package."""
    whitening, core = F.core_of_products(inputs, products)
    return F.directions_from_core(inputs, products, whitening, *F.eigenvectors([core])[0], dims)


def column_basis(factors: Tensor) -> Tensor:
    """An orthonormal basis of the columns, (..., n, k) -> (..., n, k), with zeros for missing directions."""
    u, sigma, _ = torch.linalg.svd(factors, full_matrices=False)
    return u * (sigma > sigma[..., :1] * max(factors.shape[-2:]) * torch.finfo(factors.dtype).eps).unsqueeze(-2)


def residual(whitened: Tensor, stacked: Tensor, shared: Tensor) -> Tensor:
    """What the old dims cannot do of `M`, by their whitened factors: `(I - P_a) M (I - P_b)`."""
    left, right = column_basis(stacked), column_basis(shared)
    beyond = whitened - left @ (left.mT @ whitened)
    return beyond - beyond @ right @ right.mT


def whole_gradients(
    objective: Objective, bottlenecks: list[Bottleneck], halves: tuple[list[dict], ...]
) -> list[list[Tensor]]:
    """The whitened gradient `M` of every bottleneck for each part of the batches, each (G, g a, b)."""
    inputs = []
    for bottleneck in bottlenecks:
        identity = torch.eye(bottleneck.shared_shape[1]).to(bottleneck.like).expand(bottleneck.groups, -1, -1)
        inputs.append((bottleneck.like.new_zeros(*bottleneck.stacked_shape, 0), identity))
    return [[whole for whole, _ in own] for own in read_products(objective, bottlenecks, inputs, halves)]


def exact_directions(
    objective: Objective, bottlenecks: list[Bottleneck], halves: tuple[list[dict], list[dict]], dims: int
) -> list[Directions]:
    """The best directions of the whole gradient, beyond what the old dims can follow, unless those will not train."""
    found, weights = [], shares(halves)
    for bottleneck, parts in zip(bottlenecks, whole_gradients(objective, bottlenecks, halves)):
        beyond, out_of_reach = beyond_old_dims(bottleneck, parts)
        found.append(
            _judged(bottleneck, beyond if bottleneck.old_dims_train else parts, None, weights, dims, out_of_reach)
        )
    return found


def beyond_old_dims(bottleneck: Bottleneck, parts: list[Tensor]) -> tuple[list[Tensor], float | None]:
    """What the old dims cannot do of each half's whole gradient, (G, g a, b) each, and its share in that."""
    if not bottleneck.span_is_known:
        return parts, None
    first, second = (residual(part, *bottleneck.whitened(*bottleneck.old_factors())) for part in parts)
    agreed = (parts[0] * parts[1]).sum()
    share = ((first * second).sum() / agreed).clamp(0, 1).sqrt().item() if agreed > 0 else 0.0
    return [first, second], share


def _judged(bottleneck, parts, targets, weights, dims, out_of_reach) -> Directions:
    """Directions of both halves and of each, which the other judges; of unwhitened `targets`, where there are some."""
    solve = partial(_whitened_directions, bottleneck) if targets else best_directions
    own = [solve(target, dims) for target in targets or parts]
    both, of_both = (weights[0] * first + weights[1] * second for first, second in (targets or parts, parts))
    u, sigma, v = solve(both, dims)
    validated = (_gain(*own[0], parts[1]) + _gain(*own[1], parts[0])) / 2
    return Directions(bottleneck, u, sigma, v, _gain(u, sigma, v, of_both), validated, out_of_reach, tuple(own))


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """`||L R^T||_F` over all groups, without the product: (G, n, k), (G, m, k) -> scalar."""
    return ((left.mT @ left) * (right.mT @ right)).sum().clamp_min(0).sqrt()


class ComparedGrower(Grower):
    """A `Grower` along directions of one of the `ESTIMATORS`."""

    def __init__(self, model, config: GrowthConfig, optimizer=None, estimator: str = "random"):
        super().__init__(model, config, optimizer)
        self.estimator = estimator

    def find_directions(self, objective: Objective, bottlenecks: list[Bottleneck], halves) -> list[Directions]:
        """Find them, in one pass over the batches."""
        dims = max(self.config.most_dims(bottleneck.attention, bottleneck.kind) for bottleneck in bottlenecks)
        found = objective, bottlenecks, halves, dims, self.config.seed
        return compared_directions(self.estimator, *found)

    def search_steps(self, session, trial):
        """Search them, but for random dims: these wait for training."""
        if self.estimator != "random":
            return super().search_steps(session, trial)
        return [1.0] * len(trial.candidates)


def compared_directions(
    name: str,
    objective: Objective,
    bottlenecks: list[Bottleneck],
    halves: tuple[list[dict], list[dict]],
    dims: int,
    seed: int,
) -> list[Directions]:
    """Return every bottleneck's directions by one of the `ESTIMATORS`.

    Per-sequence, pooled-truncated and gradient differ in what they truncate: the mean over sequences of `X_n^+ G_n
    X_n^+T`, the pooled `C_a^-1 T C_b^-1` (draft 000 section 2), and `T` itself (GradMax, Evci et al. 2022). "random"
    draws the shared side and leaves the function as it is (Net2Net, Chen et al. 2016). Call inside `evaluation_mode`.
    """
    whole = whole_gradients(objective, bottlenecks, halves)
    weights = shares(halves)
    targets: list[list[Tensor]]
    if name == "per-sequence":
        targets = _sequence_targets(objective, bottlenecks, halves)
    else:
        targets = [[_target(name, bottleneck, part) for part in parts] for bottleneck, parts in zip(bottlenecks, whole)]
    generator = torch.Generator().manual_seed(seed)
    found = []
    for bottleneck, parts, target in zip(bottlenecks, whole, targets):
        _, out_of_reach = beyond_old_dims(bottleneck, parts)
        if name == "random":
            found.append(_random(bottleneck, dims, generator, out_of_reach))
            continue
        found.append(_judged(bottleneck, parts, target, weights, dims, out_of_reach))
    return found


def _gain(u: Tensor, sigma: Tensor, v: Tensor, whitened: Tensor) -> Tensor:
    """First-order decrease of the loss per unit of step of each dim, over all heads, (p,)."""
    return (sigma * (u * (whitened @ v)).sum(-2)).sum(0)


def _per_head(bottleneck: Bottleneck, stacked: Tensor, whitening: Tensor) -> Tensor:
    """Apply a matrix of the stacked side to a stacked matrix, (G, g a, n)."""
    return F.stack_groups(F.apply_root(whitening, F.unstack_groups(stacked, bottleneck.heads)), bottleneck.groups)


def _target(name: str, bottleneck: Bottleneck, whitened: Tensor) -> Tensor:
    """What an estimator truncates, (G, g a, b), from the whitened gradient."""
    roots = bottleneck.roots
    if name == "pooled-truncated":
        return _per_head(bottleneck, whitened, roots.stacked_whitening) @ roots.shared_whitening.mT
    return _per_head(bottleneck, whitened, transposed(roots.stacked_root)) @ roots.shared_root


def transposed(root: Tensor) -> Tensor:
    """`R^T` of a root, which may be a scalar."""
    return root.mT if root.dim() else root


def _sequence_targets(objective: Objective, bottlenecks: list[Bottleneck], halves) -> list[list[Tensor]]:
    """Mean over the sequences of each half of the pooled-truncated target with that sequence's moments."""
    attentions = list(dict.fromkeys(bottleneck.attention for bottleneck in bottlenecks))
    kinds = list(dict.fromkeys(bottleneck.kind for bottleneck in bottlenecks))
    targets: list[list[Tensor]] = [[] for _ in bottlenecks]
    for half in halves:
        rows = [{key: value[i : i + 1] for key, value in batch.items()} for batch in half for i in range(_rows(batch))]
        sums: list[Tensor | float] = [0.0] * len(bottlenecks)
        for row in rows:
            own, _ = compute_moments(objective, attentions, kinds, [row])
            for index, (bottleneck, (part,)) in enumerate(zip(own, whole_gradients(objective, own, ([row],)))):
                sums[index] = sums[index] + _target("pooled-truncated", bottleneck, part)
        for target, total in zip(targets, sums):
            target.append(total / len(rows))
    return targets


def _rows(batch: dict) -> int:
    return len(next(value for value in batch.values() if torch.is_tensor(value)))


def _whitened_directions(bottleneck: Bottleneck, target: Tensor, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best directions of an unwhitened target, in whitened coordinates, with unit columns."""
    u, sigma, v = best_directions(target, dims)
    u, v = _per_head(bottleneck, u, bottleneck.roots.stacked_root), bottleneck.roots.shared_root @ v
    sizes = u.norm(dim=-2, keepdim=True), v.norm(dim=-2, keepdim=True)
    tiny = torch.finfo(u.dtype).tiny
    return u / sizes[0].clamp_min(tiny), sigma * (sizes[0] * sizes[1]).squeeze(-2), v / sizes[1].clamp_min(tiny)


def _random(bottleneck: Bottleneck, dims: int, generator: torch.Generator, out_of_reach: float | None) -> Directions:
    like = bottleneck.like
    drawn = torch.randn((*bottleneck.shared_shape, dims), generator=generator, dtype=like.dtype).to(like.device)
    directions = (
        like.new_zeros(*bottleneck.stacked_shape, dims),
        like.new_zeros(bottleneck.groups, dims),
        bottleneck.roots.shared_root @ drawn,
    )
    nothing = like.new_zeros(dims)
    return Directions(bottleneck, *directions, nothing, nothing, out_of_reach, (directions, directions))


def whiten(cross: Tensor, stacked_whitening: Tensor, shared_whitening: Tensor, groups: int) -> Tensor:
    """Return `M = R_a^-T T R_b^-1`, stacked over each group: (H, a, b) -> (G, g a, b).

    Args:
        cross: `T` of every head, (H, a, b).
        stacked_whitening: `R_a^-1`, (a, a), or a scalar.
        shared_whitening: `R_b^-1`, (b, b).
        groups: number of key/value heads `G`.

    Source: draft 000 section 2, with the whitening that its truncation needs.
    """
    return F.stack_groups(F.apply_root(transposed(stacked_whitening), cross) @ shared_whitening, groups)


def logit_variance(head_dim: int, new_dims: int = 0, new_variance: float = 1.0, recompute_scale: bool = False) -> float:
    """Return the variance of a scaled logit `s q.k` whose entries are independent, with zero mean and unit variance.

    `Var(q.k) = d_k`, so `s = d_k^(-1/2)` gives 1 before growth. New dims whose products `q_i k_i` have another variance
    add it; a scale recomputed from the new width shrinks every logit, those of the old dims too, even when the new dims
    are zero. That is why the scale is kept.

    Args:
        head_dim: `d_k` before growth.
        new_dims: dims that are added.
        new_variance: variance of the product of a new query and key entry; 0 for dims that were just added.
        recompute_scale: take `s` from the new width instead of keeping it.

    Source: draft 004, proposition 5.
    """
    return (head_dim + new_dims * new_variance) / (head_dim + new_dims if recompute_scale else head_dim)
