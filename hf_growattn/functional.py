"""The mathematics of growing attention, as pure functions on tensors.

Symbols: `H` query heads in `G` groups of `g = H / G`, one key head a group (GQA); `d` features of the attention's input
`X`, one more where a projection has a bias (the augmented `X' = [X | 1]`); `a` features on the query side, `b` on the
key side; `d_k` width of a head's queries and keys; `p` new dims. A pattern is `W_Q W_K^T` (a x b), the logits are
`S = s X W_Q W_K^T X^T` with `s` the softmax scale, and `G = dL/dS`. Everything is first order in the new pattern `Z`,
in the metric `||dS||^2 ~ tr(C_q Z C_k Z^T)` of the second moments `C_q`, `C_k` of the attention's input.

Sources: draft 000 (growing by low-rank regression) and draft 001 (first-order steps in the logits), mended: the moments
are pooled over sequences, the regression whitens before it truncates, and the step descends.
"""

import torch
from torch import Tensor


def augment(hidden_states: Tensor) -> Tensor:
    """Append the constant 1 that carries a bias: (..., d) -> (..., d + 1). Draft 000, remark 1.2."""
    return torch.cat((hidden_states, hidden_states.new_ones(*hidden_states.shape[:-1], 1)), dim=-1)


def moment_sum(inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `sum_t x_t x_t^T` over the tokens that count: (batch, tokens, d) -> (d, d).

    Args:
        inputs: (batch, tokens, d), in the precision to sum in; augmented, its last diagonal entry counts the tokens.
        mask: (batch, tokens), zero for padding; None or another shape (a mask that tells no padding) counts all.

    Source: draft 000 section 2, pooled over sequences in place of the one `X^T X`.
    """
    counted = inputs.flatten(0, 1)
    if mask is not None and mask.shape == inputs.shape[:2]:
        counted = inputs[mask.to(inputs.device).bool()]
    return counted.T @ counted


def join_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return factors with the bias as last row. Draft 000, remark 1.2.

    Args:
        weight: (heads, width, d).
        bias: (heads, width), or None.

    Returns:
        (heads, d + 1, width), or (heads, d, width) without a bias.
    """
    factors = weight.transpose(-1, -2)
    return factors if bias is None else torch.cat((factors, bias.unsqueeze(-2)), dim=-2)


def split_bias(factors: Tensor, features: int) -> tuple[Tensor, Tensor | None]:
    """Undo `join_bias`: (heads, d or d + 1, width) -> weight (heads, width, d), bias (heads, width) or None."""
    weight = factors[:, :features].transpose(-1, -2)
    return weight, factors[:, features] if factors.shape[1] > features else None


def ridged(moment: Tensor, fraction: float) -> Tensor:
    """Add `fraction` of the mean eigenvalue to every eigenvalue of a second moment, (d, d).

    Real inputs have uneven spectra: without a ridge the whitening multiplies noise in directions that hardly occur.
    """
    return moment + fraction * moment.diagonal().mean() * torch.eye(len(moment)).to(moment)


def square_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return `C^(1/2)` and `C^(-1/2)` of a positive definite second moment, each (d, d) and symmetric."""
    eigenvalues, vectors = torch.linalg.eigh(moment)
    root = eigenvalues.clamp_min(torch.finfo(moment.dtype).tiny).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def stack_groups(per_head: Tensor, groups: int) -> Tensor:
    """Stack the query heads of each group along the query side: (H, a, n) -> (G, g a, n).

    The heads of a group share one key head, so they share the key side of a direction.
    """
    return per_head.reshape(groups, -1, per_head.shape[-1])


def unstack_groups(stacked: Tensor, heads: int) -> Tensor:
    """Undo `stack_groups`: (G, g a, n) -> (H, a, n)."""
    return stacked.reshape(heads, -1, stacked.shape[-1])


def whiten(cross: Tensor, query_whitening: Tensor, key_whitening: Tensor, groups: int) -> Tensor:
    """Return `M = C_q^(-1/2) T C_k^(-1/2)`, stacked over each group: (H, a, b) -> (G, g a, b).

    Args:
        cross: `T = s sum_n X_n^T G_n X_n` of every head, (H, a, b); the loss changes by `<T, Z>` for a new pattern `Z`.
        query_whitening: `C_q^(-1/2)`, (a, a).
        key_whitening: `C_k^(-1/2)`, (b, b).
        groups: number of key heads `G`.

    Source: draft 000 section 2, with the whitening that its truncation needs.
    """
    return stack_groups(query_whitening @ cross @ key_whitening, groups)


def column_basis(factors: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, (..., n, k) -> (..., n, k); missing directions are zero columns.

    Zero or dependent columns must not claim a direction that the factors do not have, as a plain QR would let them.
    """
    basis, values, _ = torch.linalg.svd(factors, full_matrices=False)
    threshold = values[..., :1] * max(factors.shape[-2:]) * torch.finfo(factors.dtype).eps
    return basis * (values > threshold).unsqueeze(-2)


def project_out(matrix: Tensor, basis: Tensor) -> Tensor:
    """Return `(I - B B^T) A`: (..., n, m) and (..., n, k) -> (..., n, m)."""
    return matrix - basis @ (basis.transpose(-1, -2) @ matrix)


def bottleneck(whitened: Tensor, query_basis: Tensor, key_basis: Tensor) -> Tensor:
    """Return what the old dims cannot do: `(I - P_Q) M (I - P_K)`, (G, g a, b).

    `P_Q` and `P_K` project on the whitened columns of `W_Q` (stacked over a group) and of `W_K`. Small changes of those
    reach exactly `{P_Q M' + M'' P_K}`, so this is the part of the gradient that only new dims can follow.

    Args:
        whitened: `M`, (G, g a, b).
        query_basis: `column_basis(C_q^(1/2) W_Q)`, (G, g a, d_k).
        key_basis: `column_basis(C_k^(1/2) W_K)`, (G, b, d_k).

    Source: the tangent space of draft 001 eq. 1.1, in the whitened metric.
    """
    right = project_out(whitened.transpose(-1, -2), key_basis).transpose(-1, -2)
    return project_out(right, query_basis)


def best_directions(whitened: Tensor, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `dims` best directions `U, sigma, V` of a whitened gradient: (G, g a, p), (G, p), (G, b, p).

    Direction `i` is worth `gamma sigma_i^2` to first order. Source: draft 000 section 2 (Eckart-Young).
    """
    u, sigma, vh = torch.linalg.svd(whitened, full_matrices=False)
    return u[..., :dims], sigma[..., :dims], vh[..., :dims, :].transpose(-1, -2)


def directions_from_products(basis: Tensor, products: Tensor, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best directions of `M` that lie in the span of a few known inputs.

    Args:
        basis: inputs `Z`, (G, b, n), in any position.
        products: `M Z`, (G, g a, n), measured.
        dims: how many directions to return.

    Returns:
        `U, sigma, V` as `best_directions` returns them, for `M` restricted to the span, so `u_i^T M v_i = sigma_i`.
    """
    left, values, right = torch.linalg.svd(basis, full_matrices=False)
    # Nearly dependent inputs are dropped: dividing by their small singular values would multiply rounding errors.
    kept = values > 1e-3 * values[..., :1]
    inverse = torch.where(kept, 1 / values.clamp_min(torch.finfo(values.dtype).tiny), 0)
    orthonormal = left * kept.unsqueeze(-2)
    u, sigma, v = best_directions(products @ (right.transpose(-1, -2) * inverse.unsqueeze(-2)), dims)
    return u, sigma, orthonormal @ v


def first_order_gain(sigma: Tensor) -> Tensor:
    """Return the decrease of the loss per unit of step, `sum_i sigma_i^2`: (..., p) -> (...). Draft 001 eq. 1.2."""
    return sigma.square().sum(-1)


def pattern_factors(
    u: Tensor, sigma: Tensor, v: Tensor, query_whitening: Tensor, key_whitening: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the new columns of `W_Q` (H, a, p) and `W_K` (G, b, p), whose pattern is a step of size 1.

    `W_Q_new W_K_new^T = -C_q^(-1/2) U Sigma V^T C_k^(-1/2)`, each side with the square root of `Sigma`. For a step of
    size `gamma` multiply both by `sqrt(gamma)`.

    Args:
        u, sigma, v: whitened directions, (G, g a, p), (G, p), (G, b, p).
        query_whitening, key_whitening: `C_q^(-1/2)` (a, a) and `C_k^(-1/2)` (b, b).
        heads: number of query heads `H`.

    Source: draft 000 section 2, whitened, and descending.
    """
    magnitude = sigma.sqrt().unsqueeze(-2)
    return query_whitening @ unstack_groups(u * magnitude, heads), -(key_whitening @ (v * magnitude))
