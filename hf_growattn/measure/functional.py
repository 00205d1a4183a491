"""The mathematics of growing attention, as pure functions on tensors.

A head has two bottlenecks. Its pattern `W_Q W_K^T` says which tokens attend to which; its message `W_V W_O` says what
they pass on. Both are a product of a *stacked* side, one factor for each query head (`W_Q`, `W_O`), and a *shared*
side, one factor for each key/value head (`W_K`, `W_V`), which a group of query heads share under GQA.

Symbols: `H` query heads in `G` groups of `g = H / G`; `a` features on the stacked side, `b` on the shared side (those
of the attention's input `X`, one more where a projection has a bias: the augmented `X' = [X | 1]`); `k` width of a
head, the old `d_k` or `d_v`; `p` new dims. `T` (a x b) is the gradient of a head's pattern or message `Z`: the loss
changes by `<T, Z>`, with `T = s sum_n X_n^T G_n X_n` for patterns (`s` the softmax scale, `G = dL/dS` the gradient of
the logits) and `T = sum (dL/dY)^T A X` for messages (`A` the attention weights, `Y` the output). Steps are measured in
the metric `tr(C_a Z C_b Z^T)` of second moments `C = R^T R`, that of the logits or of the output they move.

`mathematics.md` derives the formulas; its sections are named below.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def augment(hidden_states: Tensor) -> Tensor:
    """Append the constant 1 that carries a bias: (..., d) -> (..., d + 1)."""
    return torch.cat((hidden_states, hidden_states.new_ones(*hidden_states.shape[:-1], 1)), dim=-1)


def moment_sum(inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `sum_t x_t x_t^T` over the tokens that count: (batch, tokens, d) -> (d, d).

    A mask (batch, tokens) is zero for padding; None or a mask of another shape counts all tokens.
    """
    counted = _counted(inputs, mask)
    return counted.T @ counted


def square_sum(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `sum_t ||y_t||^2` over the tokens that count: (batch, tokens, d) -> scalar; masked as `moment_sum`."""
    return _counted(states, mask).square().sum()


def _counted(states: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens (batch tokens, d), zeros for those that do not count: to choose some would wait for the device."""
    if mask is not None and mask.shape == states.shape[:2]:
        states = states.masked_fill(~mask.to(states.device).bool().unsqueeze(-1), 0.0)
    return states.flatten(0, 1)


def join_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weight (heads, width, d), bias (heads, width) or None -> factors (heads, d or d + 1, width), the bias last."""
    factors = weight.transpose(-1, -2)
    return factors if bias is None else torch.cat((factors, bias.unsqueeze(-2)), dim=-2)


def split_bias(factors: Tensor, features: int) -> tuple[Tensor, Tensor | None]:
    """Undo `join_bias`."""
    weight = factors[:, :features].transpose(-1, -2)
    return weight, factors[:, features] if factors.shape[1] > features else None


def ridged(moment: Tensor, fraction: float) -> Tensor:
    """Add `fraction` of the mean eigenvalue to every eigenvalue of second moments, (..., d, d).

    Real inputs have uneven spectra: without a ridge the whitening multiplies noise in directions that hardly occur.
    """
    least = moment.shape[-1] * torch.finfo(moment.dtype).eps  # below it rounding would leave a negative eigenvalue
    size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    added = max(fraction, least) * size + torch.finfo(moment.dtype).tiny
    return moment + added * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)


def square_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return `R` with `R^T R = C`, and `R^-1`, of positive definite second moments, each (..., d, d).

    `R` is upper triangular, by Cholesky: any root whitens, and this one needs no eigenvectors. The first features alone
    have the first rows and columns of both.
    """
    root = torch.linalg.cholesky_ex(moment, upper=True).L  # does not wait for the device, as `cholesky` does
    identity = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device).expand_as(moment)
    return root, torch.linalg.solve_triangular(root, identity, upper=True)


def apply_root(root: Tensor, factors: Tensor) -> Tensor:
    """Return `root @ factors`, (..., n, k); a root of no dimension is a multiple of the identity."""
    return root @ factors if root.dim() else root * factors


def stack_groups(per_head: Tensor, groups: int) -> Tensor:
    """Stack the query heads of each group along the stacked side: (H, a, n) -> (G, g a, n).

    The heads of a group share one key/value head, so they share the shared side of a direction.
    """
    heads, features, columns = per_head.shape
    return per_head.reshape(groups, heads // groups * features, columns)


def unstack_groups(stacked: Tensor, heads: int) -> Tensor:
    """Undo `stack_groups`: (G, g a, n) -> (H, a, n)."""
    groups, rows, columns = stacked.shape
    return stacked.reshape(heads, groups * rows // heads, columns)


def gram(matrix: Tensor) -> Tensor:
    """Return `A^T A` in fp64, (..., n, k) -> (..., k, k), on the CPU where the device knows no fp64."""
    exact = (matrix.cpu() if matrix.device.type == "mps" else matrix).double()
    return exact.mT @ exact


def column_whitening(matrix: Tensor, noise: float = 1.0) -> Tensor:
    """Return `W` in fp64, (..., k, k), for which the columns of `A W` are orthonormal, `A` (..., n, k).

    Directions of the columns whose square is below the rounding of their type, times `noise`, are left out: dependent
    or zero columns must not claim a direction that they do not have.
    """
    return square_roots(ridged(gram(matrix), noise * torch.finfo(matrix.dtype).eps))[1]


def orthonormal_columns(matrix: Tensor) -> Tensor:
    """Return orthonormal columns with the same span, (..., n, k), short ones for directions that are missing.

    Source: Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", 2015.
    """
    for _ in range(2):
        whitening = column_whitening(matrix)
        matrix = (matrix.to(whitening) @ whitening).to(matrix)
    return matrix


def project_out(matrix: Tensor, factors: Tensor, whitening: Tensor) -> Tensor:
    """Return `(I - P) A`, where `P` projects on the columns of factors `B`: (..., n, m) and (..., n, k) -> (..., n, m).

    `P = B W W^T B^T` with their `column_whitening`; the basis `B W`, as large as the factors, is not formed. Small
    changes of whitened old factors reach exactly `{P_a M' + M'' P_b}`: `(I - P_a) M (I - P_b)` only new dims follow.

    Source: "What new dims can do" in mathematics.md; the idea is the expressivity bottleneck of Verbockhaven et al.,
    "Growing tiny networks", TMLR 2024.
    """
    products = (factors.mT @ matrix).to(whitening)
    return matrix - factors @ (whitening @ (whitening.mT @ products)).to(matrix)


def eigenvectors(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the eigenvalues and eigenvectors of small symmetric matrices, (G, k, k) each, largest first, on the CPU.

    Matrices of one size are solved in one call. A GPU would take them one by one, and each for longer than a CPU does.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}  # by place
    for size in {matrix.shape[-1] for matrix in matrices}:
        places = [place for place, matrix in enumerate(matrices) if matrix.shape[-1] == size]
        values, vectors = torch.linalg.eigh(torch.cat([matrices[place].cpu() for place in places]))
        signs = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True)).sign()  # rounding would choose otherwise
        counts = [len(matrices[place]) for place in places]
        parts = values.flip(-1).split(counts), (vectors * signs).flip(-1).split(counts)
        found.update(zip(places, zip(*parts)))
    return [found[place] for place in range(len(matrices))]


def core_of_products(inputs: Tensor, products: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what the best directions of `M` in the span of inputs depend on: their whitening and a matrix, (G, n, n).

    The matrix is `(M Z W)^T M Z W`, whose eigenvectors `directions_from_core` takes, for inputs `Z` (G, b, n), of which
    the products `M Z` (G, g a, n) were measured, and their whitening `W`. Nearly dependent inputs are left out:
    otherwise the rounding of their products, in the precision of the model, would be multiplied.
    """
    of_products = torch.finfo(precision).eps ** 2 / torch.finfo(inputs.dtype).eps  # squares of rounding errors add up
    whitening = column_whitening(inputs, noise=10.0 * max(of_products, 1.0))
    return whitening, whitening.mT @ gram(products) @ whitening


def directions_from_core(
    inputs: Tensor, products: Tensor, whitening: Tensor, squares: Tensor, vectors: Tensor, dims: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best directions of `M` in the span of inputs `Z` (G, b, n), of which `M Z` (G, g a, n) was measured.

    Returns:
        `U, sigma, V` of `M` restricted to the span, (G, g a, p), (G, p) on the CPU, (G, b, p), so `u_i^T M v_i =
        sigma_i`, best first: direction `i` is worth `gamma sigma_i^2` to first order. And `V` in terms of the inputs,
        `V = Z weights`, (G, n, p).

    Source: Eckart and Young 1936; "What new dims can do".
    """
    sigma = squares[..., :dims].clamp_min(0).sqrt()
    inverse = torch.where(sigma > 1e-8 * sigma[..., :1], 1 / sigma, 0)  # below it is rounding
    weights = (whitening @ vectors[..., :dims].to(whitening)).to(products)
    u = products @ weights * inverse.unsqueeze(-2).to(products)
    return u, sigma.to(products.dtype), inputs @ weights, weights


def step_factors(
    u: Tensor, sigma: Tensor, v: Tensor, stacked_whitening: Tensor, shared_whitening: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return new dims of the stacked (H, a, p) and the shared side (G, b, p), whose product is a step of size 1.

    `W_a W_b^T = -R_a^-1 U Sigma V^T R_b^-T`, each side with the square root of `Sigma`, for whitened directions
    `u` (G, g a, p), `sigma` (G, p), `v` (G, b, p) and the whitenings, of which the stacked one may be a scalar.

    Source: "What new dims can do" in mathematics.md.
    """
    magnitude = sigma.to(u).sqrt().unsqueeze(-2)
    return apply_root(stacked_whitening, unstack_groups(u * magnitude, heads)), -(shared_whitening @ (v * magnitude))


def svd_of_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin SVD of `L R^T` without the product: `U`, `S` descending and `V`.

    (..., n, k), (..., m, k) -> (..., n, r), (..., r), (..., m, r) with `r = min(n, m, k)`.
    """
    left_basis, left_core = torch.linalg.qr(left)
    right_basis, right_core = torch.linalg.qr(right)
    u, sigma, vh = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
    return left_basis @ u, sigma, right_basis @ vh.mT


def balanced_factors(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best factors of `L R^T` of a rank, each with the square root of the singular values.

    (G, n, k), (G, m, k) -> (G, n, rank), (G, m, rank), with zero columns where the product has a smaller rank.

    Source: "Joint refactoring" in mathematics.md.
    """
    u, sigma, v = svd_of_product(left, right)
    magnitude = sigma[..., :rank].sqrt().unsqueeze(-2)
    left, right = u[..., :rank] * magnitude, v[..., :rank] * magnitude
    missing = (0, max(rank - left.shape[-1], 0))
    return torch.nn.functional.pad(left, missing), torch.nn.functional.pad(right, missing)


def decreasing(values: Tensor) -> Tensor:
    """Return the non-increasing sequence nearest to `values` in the mean square, (p,): neighbours out of order pool.

    Source: Ayer et al., "An empirical distribution function for sampling with incomplete information", 1955.
    """
    pools: list[list[float]] = []  # [sum, count]
    for value in values.tolist():
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] < pools[-1][0] * pools[-2][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    return values.new_tensor([total / count for total, count in pools for _ in range(int(count))])


def allocate(gains: list[list[float]], costs: list[int], budget: int) -> list[int]:
    """Spend a budget greedily, by gain per cost: return how many dims of each bottleneck to take.

    Each bottleneck gives its dims in order, with a gain each and a cost that is the same for all, and none that gains
    nothing.
    """
    taken = [0] * len(gains)
    while True:
        offers = [
            (gains[i][n] / costs[i], i)
            for i, n in enumerate(taken)
            if n < len(gains[i]) and gains[i][n] > 0 and costs[i] <= budget
        ]
        if not offers:
            return taken
        best = max(offers, key=lambda offer: offer[0])[1]  # of equal ones the first
        budget -= costs[best]
        taken[best] += 1


def student_quantile(freedom: int) -> float:
    """Return the `t` with 95 % of Student's distribution between `-t` and `t`: from 12.7 down to 1.96.

    Found by bisection, since torch has no such function.

    Source: Abramowitz and Stegun, "Handbook of mathematical functions", 26.7.3 and 26.7.4.
    """

    def share_within(angle: float) -> float:
        """The share between `-t` and `t`, for `t = sqrt(freedom) tan(angle)`: a finite sum."""
        is_odd, square = freedom % 2, math.cos(angle) ** 2
        term = total = 0.0 if freedom == 1 else math.cos(angle) if is_odd else 1.0
        for number in range(1 + is_odd, freedom - 2, 2):
            term *= square * number / (number + 1)
            total += term
        return 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total

    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
