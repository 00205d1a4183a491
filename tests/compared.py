"""Directions read off the whole gradient, for tests to compare the sketch with: for small models and one process."""

import torch
from torch import Tensor

from hf_growattn.growable.attention import attentions
from hf_growattn.measure import functional as F
from hf_growattn.measure.bottlenecks import QK, Bottleneck, V, compute_moments
from hf_growattn.measure.directions import Directions, read_products, shares, sketched_directions
from hf_growattn.measure.halves import halves_of
from hf_growattn.measure.passes import Objective, evaluation_mode


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
    whitening, core = F.core_of_products(inputs, products, torch.float32)
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
        beyond, out_of_reach = _beyond_old_dims(bottleneck, parts)
        parts = beyond if bottleneck.old_dims_train else parts
        own = [best_directions(part, dims) for part in parts]
        both = weights[0] * parts[0] + weights[1] * parts[1]
        u, sigma, v = best_directions(both, dims)
        validated = (_gain(*own[0], parts[1]) + _gain(*own[1], parts[0])) / 2
        gain = _gain(u, sigma, v, both)
        found.append(Directions(bottleneck, u, sigma, v, gain, validated, out_of_reach, tuple(own)))
    return found


def _beyond_old_dims(bottleneck: Bottleneck, parts: list[Tensor]) -> tuple[list[Tensor], float | None]:
    """What the old dims cannot do of each half's whole gradient, (G, g a, b) each, and its share in that."""
    if not bottleneck.span_is_known:
        return parts, None
    first, second = (residual(part, *bottleneck.whitened(*old_factors(bottleneck))) for part in parts)
    agreed = (parts[0] * parts[1]).sum()
    share = ((first * second).sum() / agreed).clamp(0, 1).sqrt().item() if agreed > 0 else 0.0
    return [first, second], share


def old_factors(bottleneck: Bottleneck) -> tuple[Tensor, Tensor]:
    """What the old dims compute: stacked (H, a, k), shared (G, b, k), with biases, former growths and adapters."""
    stacked, shared = (bottleneck.attention.factors_of(role, bottleneck.like.dtype) for role in bottleneck.kind.roles)
    return stacked, shared


def _gain(u: Tensor, sigma: Tensor, v: Tensor, whitened: Tensor) -> Tensor:
    """First-order decrease of the loss per unit of step of each dim, over all heads, (p,)."""
    return (sigma * (u * (whitened @ v)).sum(-2)).sum(0)


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """`||L R^T||_F` over all groups, without the product: (G, n, k), (G, m, k) -> scalar."""
    return ((left.mT @ left) * (right.mT @ right)).sum().clamp_min(0).sqrt()


def whiten(cross: Tensor, stacked_whitening: Tensor, shared_whitening: Tensor, groups: int) -> Tensor:
    """Return `M = R_a^-T T R_b^-1`, stacked over each group: (H, a, b) -> (G, g a, b).

    Args:
        cross: `T` of every head, (H, a, b).
        stacked_whitening: `R_a^-1`, (a, a), or a scalar.
        shared_whitening: `R_b^-1`, (b, b).
        groups: number of key/value heads `G`.
    """
    transposed = stacked_whitening.mT if stacked_whitening.dim() else stacked_whitening
    return F.stack_groups(F.apply_root(transposed, cross) @ shared_whitening, groups)
