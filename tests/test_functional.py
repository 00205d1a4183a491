"""The mathematics: each function against its definition, and each mended error of the drafts."""

import pytest
import torch

from hf_growattn import functional as F

torch.set_default_dtype(torch.float32)


def spd(n, spread=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return (basis * torch.logspace(-spread, spread, n, dtype=torch.float64)) @ basis.T


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_square_roots_and_ridge():
    moment = F.ridged(spd(6), 0.05)
    root, whitening = F.square_roots(moment)
    torch.testing.assert_close(root @ root, moment)
    torch.testing.assert_close(root @ whitening, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(moment - spd(6), 0.05 * spd(6).trace() / 6 * torch.eye(6, dtype=torch.float64))


def test_moments_are_pooled_over_tokens_that_count():
    inputs, mask = F.augment(normal(2, 5, 3)), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    rows = torch.cat((inputs[0, :3], inputs[1, 1:]))
    torch.testing.assert_close(F.moment_sum(inputs, mask), rows.T @ rows)
    assert F.moment_sum(inputs, mask)[-1, -1] == 7
    everything = inputs.reshape(10, 4)
    torch.testing.assert_close(F.moment_sum(inputs), everything.T @ everything)


def test_bias_is_the_last_row():
    weight, bias, x = normal(2, 3, 5), normal(2, 3, seed=2), normal(7, 5, seed=3)
    factors = F.join_bias(weight, bias)
    torch.testing.assert_close(F.augment(x) @ factors[1], x @ weight[1].T + bias[1])
    again = F.split_bias(factors, 5)
    assert torch.equal(again[0], weight) and torch.equal(again[1], bias)
    assert F.split_bias(F.join_bias(weight, None), 5)[1] is None


def test_groups_stack_along_the_query_side():
    per_head = normal(6, 4, 5)
    stacked = F.stack_groups(per_head, 2)
    assert stacked.shape == (2, 12, 5)
    assert torch.equal(stacked[1, 4:8], per_head[4])
    assert torch.equal(F.unstack_groups(stacked, 6), per_head)


def test_column_basis_claims_no_direction_it_lacks():
    factors = normal(6, 3)
    factors[:, 2] = factors[:, 0] + factors[:, 1]
    basis = F.column_basis(factors)
    torch.testing.assert_close(basis @ basis.T @ factors, factors)
    assert (basis.T @ basis).trace().round() == 2
    assert not F.column_basis(torch.zeros(6, 3)).any()


def test_bottleneck_is_orthogonal_to_everything_small_changes_reach():
    heads, groups, a, b, k = 4, 2, 6, 5, 2
    query_root, query_whitening = F.square_roots(spd(a))
    key_root, key_whitening = F.square_roots(spd(b, seed=4))
    w_q, w_k, cross = normal(heads, a, k), normal(groups, b, k, seed=5), normal(heads, a, b, seed=6)
    query_basis = F.column_basis(F.stack_groups(query_root @ w_q, groups))
    key_basis = F.column_basis(key_root @ w_k)
    residual = F.bottleneck(F.whiten(cross, query_whitening, key_whitening, groups), query_basis, key_basis)
    d_q, d_k = normal(heads, a, k, seed=7), normal(groups, b, k, seed=8)
    repeated = (w_k.repeat_interleave(2, 0), d_k.repeat_interleave(2, 0))
    tangent = d_q @ repeated[0].mT + w_q @ repeated[1].mT
    whitened_tangent = F.stack_groups(query_root @ tangent @ key_root, groups)
    assert abs((residual * whitened_tangent).sum()) < 1e-9 * whitened_tangent.norm() * residual.norm()
    # ... and it is all of the rest: removing it leaves a tangent.
    whole = F.whiten(cross, query_whitening, key_whitening, groups)
    assert F.bottleneck(whole - residual, query_basis, key_basis).norm() < 1e-9 * whole.norm()


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
def test_factors_are_the_step_and_gain_is_first_order(heads, groups):
    a, b, p = 6, 5, 3
    query_root, query_whitening = F.square_roots(spd(a))
    key_root, key_whitening = F.square_roots(spd(b, seed=4))
    cross = normal(heads, a, b, seed=6)
    u, sigma, v = F.best_directions(F.whiten(cross, query_whitening, key_whitening, groups), p)
    new_q, new_k = F.pattern_factors(u, sigma, v, query_whitening, key_whitening, heads)
    assert new_q.shape == (heads, a, p) and new_k.shape == (groups, b, p)
    pattern = new_q @ new_k.repeat_interleave(heads // groups, 0).mT
    gain = F.first_order_gain(sigma).sum()
    torch.testing.assert_close((cross * pattern).sum(), -gain)  # draft 000 section 2: descend, S - gamma G
    # The step has the length of the gain in the metric, so no pattern of this length gains more than sqrt(gain).
    length = (query_root @ pattern @ key_root).norm()
    torch.testing.assert_close(length.square(), gain)


def test_truncating_without_whitening_loses():
    """Draft 000 section 2 truncates X^+ B X^+T: that is best for orthonormal X only."""
    scales = torch.logspace(0, -2, 24, dtype=torch.float64)  # features of uneven size
    root, whitening = F.square_roots(torch.diag(scales.square()))
    wanted = whitening @ normal(24, 24, seed=3) @ whitening  # logits of the same strength in every direction

    def explained(pattern):
        return 1 - ((root @ (wanted - pattern) @ root).norm() / (root @ wanted @ root).norm()) ** 2

    u, s, v = F.best_directions(wanted[None], 4)
    truncated = ((u * s[:, None]) @ v.mT)[0]
    u, s, v = F.best_directions((root @ wanted @ root)[None], 4)
    whitened_first = (whitening @ (u * s[:, None]) @ v.mT @ whitening)[0]
    assert explained(whitened_first) > 4 * explained(truncated)
    # Remark 2.1: the error is the tail of the singular values, the whitened ones.
    tail = torch.linalg.svdvals(root @ wanted @ root)
    torch.testing.assert_close(1 - explained(whitened_first), tail[4:].square().sum() / tail.square().sum())


def test_directions_from_products_are_exact_on_their_span():
    matrix = normal(1, 12, 9)
    inputs = normal(1, 9, 5, seed=2)
    inputs[..., 4] = inputs[..., 0]  # dependent inputs are dropped, not inverted
    u, sigma, v = F.directions_from_products(inputs, matrix @ inputs, 3)
    torch.testing.assert_close((u.mT @ matrix @ v)[0], torch.diag(sigma[0]))
    span = F.column_basis(inputs)
    torch.testing.assert_close(sigma, F.best_directions(matrix @ span @ span.mT, 3)[1])


def test_lemmas_of_draft_001_as_mended():
    m, a, b = normal(4, 6), normal(4, 6, seed=2), normal(6, 3, seed=3)
    singular = torch.linalg.svdvals(m)
    assert m.square().sum() >= singular[0] ** 2 and singular[0] ** 2 != singular[0]
    # ||AB||_F >= sigma_min(B) ||A||_F fails when B has no full row rank: take A in its null space.
    null = torch.linalg.svd(b).U[:, 3:].T
    assert (null @ b).norm() < 1e-9 and torch.linalg.svdvals(b)[-1] * null.norm() > 0.1
    x, z = normal(5, 4), normal(4, 4, seed=5)
    assert (x @ z @ x.T).norm() <= torch.linalg.svdvals(x)[0] ** 2 * z.norm()
    assert a.shape == m.shape
