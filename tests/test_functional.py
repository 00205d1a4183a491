"""The mathematics: small functions against their definitions, and what mathematics.md derives of them."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from compared import best_directions, column_basis, directions_from_products, residual, whiten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from hf_growattn.grow.old_dims import tangent_step
from hf_growattn.measure import functional as F

always = settings(deadline=None, max_examples=50, derandomize=True, database=None)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 6)


def spd(n, spread=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return (basis * torch.logspace(-spread, spread, n, dtype=torch.float64)) @ basis.T


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_square_roots_and_ridge():
    moment = F.ridged(spd(6), 0.05)
    root, whitening = F.square_roots(moment)
    assert_close(root.mT @ root, moment)
    assert_close(root @ whitening, torch.eye(6, dtype=torch.float64))
    assert_close(moment - spd(6), 0.05 * spd(6).trace() / 6 * torch.eye(6, dtype=torch.float64))


def test_moments_are_pooled_over_tokens_that_count():
    inputs, mask = F.augment(normal(2, 5, 3)), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    rows = torch.cat((inputs[0, :3], inputs[1, 1:]))
    assert_close(F.moment_sum(inputs, mask), rows.T @ rows)
    assert F.moment_sum(inputs, mask)[-1, -1] == 7
    assert_close(F.square_sum(inputs, mask), rows.square().sum())
    assert_close(F.square_sum(inputs, mask[:, :3]), inputs.square().sum())  # the mask of other tokens
    everything = inputs.reshape(10, 4)
    assert_close(F.moment_sum(inputs), everything.T @ everything)


def test_bias_is_the_last_row():
    weight, bias, x = normal(2, 3, 5), normal(2, 3, seed=2), normal(7, 5, seed=3)
    factors = F.join_bias(weight, bias)
    assert_close(F.augment(x) @ factors[1], x @ weight[1].T + bias[1])
    again = F.split_bias(factors, 5)
    assert torch.equal(again[0], weight) and torch.equal(again[1], bias)
    assert F.split_bias(F.join_bias(weight, None), 5)[1] is None


def test_groups_stack_along_the_query_side():
    per_head = normal(6, 4, 5)
    stacked = F.stack_groups(per_head, 2)
    assert stacked.shape == (2, 12, 5)
    assert torch.equal(stacked[1, 4:8], per_head[4])
    assert torch.equal(F.unstack_groups(stacked, 6), per_head)


@pytest.mark.parametrize("dtype, rounding", [(torch.float64, 1e-7), (torch.float32, 1e-3)])
def test_columns_claim_no_direction_that_they_lack(dtype, rounding):
    factors, others = normal(2, 6, 3).to(dtype), normal(2, 6, 4, seed=2).to(dtype)
    factors[1, :, 2] = factors[1, :, 0] + factors[1, :, 1]
    basis = column_basis(factors)
    beyond = F.project_out(others, factors, F.column_whitening(factors))
    assert_close(beyond, others - basis @ (basis.mT @ others), atol=rounding, rtol=0)
    assert_close(F.orthonormal_columns(factors[0]).mT @ F.orthonormal_columns(factors[0]), torch.eye(3, dtype=dtype))
    nothing = torch.zeros(6, 3, dtype=dtype)
    assert torch.equal(F.project_out(others, nothing, F.column_whitening(nothing)), others)
    assert not F.orthonormal_columns(nothing).any()


def test_eigenvectors_of_several_sizes_come_in_one_call_each():
    matrices = [spd(n, seed=n).expand(2, n, n) for n in (3, 5, 3)]
    for matrix, (values, vectors) in zip(matrices, F.eigenvectors(matrices)):
        assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, matrix)
        assert (values.diff() <= 0).all()


def test_directions_from_products_are_exact_on_their_span():
    matrix = normal(1, 12, 9)
    inputs = normal(1, 9, 5, seed=2)
    inputs[..., 4] = inputs[..., 0]  # dependent inputs are dropped, not inverted
    u, sigma, v, weights = directions_from_products(inputs, matrix @ inputs, 3)
    assert_close((u.mT @ matrix @ v)[0], torch.diag(sigma[0]))
    assert_close(inputs @ weights, v)
    span = column_basis(inputs)
    assert_close(sigma, best_directions(matrix @ span @ span.mT, 3)[1])


@always
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_decreasing_is_the_nearest_non_increasing_sequence(values):
    values = torch.tensor(values).double()
    pooled = F.decreasing(values)
    assert (pooled.diff() <= 0).all()
    # Non-increasing sequences are a cone, spanned by the prefixes and minus the whole: nearest means these three.
    left_over = (values - pooled).cumsum(0)
    assert left_over.max() < 1e-9 and abs(left_over[-1]) < 1e-9 and abs((values - pooled) @ pooled) < 1e-9


blocks_of_dims = st.lists(st.tuples(st.lists(st.floats(-2, 5), max_size=3), st.integers(1, 9)), min_size=1, max_size=4)


@always
@given(blocks_of_dims, st.integers(0, 30))
def test_allocate_keeps_to_the_budget_and_buys_only_gains(blocks, budget):
    gains, costs = zip(*blocks)
    taken = F.allocate(gains, costs, budget)
    left = budget - sum(cost * n for cost, n in zip(costs, taken))
    assert left >= 0 and all(gain > 0 for block, n in zip(gains, taken) for gain in block[:n])
    for gain, cost, n in zip(gains, costs, taken):
        assert n == len(gain) or gain[n] <= 0 or cost > left


@always
@given(st.lists(st.lists(st.floats(-2, 5), max_size=3), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 30))
def test_allocate_is_best_where_all_dims_cost_the_same(gains, cost, budget):
    gains = [sorted(block, reverse=True) for block in gains]
    taken = F.allocate(gains, [cost] * len(gains), budget)
    counts = itertools.product(*(range(len(block) + 1) for block in gains))
    totals = [sum(sum(g[:n]) for g, n in zip(gains, count)) for count in counts if cost * sum(count) <= budget]
    assert sum(sum(g[:n]) for g, n in zip(gains, taken)) == pytest.approx(max(totals))


QUANTILES = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 8: 2.30600, 15: 2.13145, 30: 2.04227, 1000: 1.96234}


@pytest.mark.parametrize("freedom", QUANTILES)
def test_student_quantiles_are_those_of_the_tables(freedom):
    assert F.student_quantile(freedom) == pytest.approx(QUANTILES[freedom], rel=3e-6)


@st.composite
def layers(draw):
    """Statistics and factors of a layer; the stacked metric is a moment (patterns) or a scalar (messages)."""
    groups, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    a, b, k, p, seed = draw(sizes), draw(sizes), draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(seeds)
    heads, spread = groups * group, draw(st.floats(0, 1))
    root_a = F.square_roots(spd(a, spread, seed))
    if draw(st.booleans()):
        root_a = torch.tensor(1.7).double(), 1 / torch.tensor(1.7).double()
    root_b = F.square_roots(spd(b, spread, seed + 1))
    cross, w_a = normal(heads, a, b, seed=seed + 2), normal(heads, a, k, seed=seed + 3)
    w_b = normal(groups, b, k, seed=seed + 4)
    whitened = whiten(cross, root_a[1], root_b[1], groups)
    stacked, shared = F.stack_groups(F.apply_root(root_a[0], w_a), groups), root_b[0] @ w_b
    names = "heads groups p seed root_a root_b cross whitened stacked shared"
    return SimpleNamespace(**{name: value for name, value in locals().items() if name in names.split()})


@always
@given(layers())
def test_a_step_is_the_best_of_its_rank_in_the_metric_and_gains_the_squares_of_its_singular_values(layer):
    """By Eckart and Young, so nothing of the same rank and size gains more."""
    u, sigma, v = best_directions(layer.whitened, layer.p)
    new_a, new_b = F.step_factors(u, sigma, v, layer.root_a[1], layer.root_b[1], layer.heads)
    step = new_a @ new_b.repeat_interleave(layer.heads // layer.groups, 0).mT  # (H, a, b)
    moved = F.stack_groups(F.apply_root(layer.root_a[0], step), layer.groups) @ layer.root_b[0].mT
    gain = sigma.square().sum()
    assert_close(moved, -(u * sigma.unsqueeze(-2)) @ v.mT)
    assert_close((layer.cross * step).sum(), -gain)
    assert_close(moved.square().sum(), gain)
    tail = torch.linalg.svdvals(layer.whitened)[..., layer.p :].square().sum()
    assert_close((layer.whitened + moved).square().sum(), tail)


@always
@given(layers())
def test_the_step_of_old_factors_is_the_tangent_part_of_the_gradient(layer):
    m, rest = layer.whitened, residual(layer.whitened, layer.stacked, layer.shared)
    d_a, d_b = tangent_step(m @ layer.shared, m.mT @ layer.stacked, layer.stacked, layer.shared)
    reached = d_a @ layer.shared.mT + layer.stacked @ d_b.mT
    assert_close(reached, rest - m, rtol=1e-6, atol=1e-8)
    p_a, p_b = (side @ torch.linalg.pinv(side) for side in (layer.stacked, layer.shared))
    assert_close(reached, -(p_a @ m + m @ p_b - p_a @ m @ p_b), rtol=1e-6, atol=1e-8)


def test_eigenvalues_that_rounding_leaves_below_zero_give_empty_directions():
    squares, vectors = torch.tensor([[4.0, -1e-12]]), torch.eye(2)[None]
    u, sigma, v, _ = F.directions_from_core(normal(1, 3, 2), normal(1, 4, 2), vectors, squares, vectors, 2)
    assert_close(sigma, torch.tensor([[2.0, 0.0]], dtype=torch.float64))
    assert u[..., 0].any() and not u[..., 1].any() and v.isfinite().all()


@always
@given(seeds, st.integers(1, 2), sizes, sizes, sizes, sizes)
def test_balanced_factors_are_the_best_of_their_rank(seed, groups, n, m, k, rank):
    left, right = normal(groups, n, k, seed=seed), normal(groups, m, k, seed=seed + 1)
    new = F.balanced_factors(left, right, rank)
    assert [side.shape for side in new] == [(groups, n, rank), (groups, m, rank)]
    product = left @ right.mT
    u, sigma, vh = torch.linalg.svd(product, full_matrices=False)
    assert_close(new[0] @ new[1].mT, (u[..., :rank] * sigma[..., None, :rank]) @ vh[..., :rank, :])
    assert rank < min(n, m, k) or (new[0] @ new[1].mT - product).norm() < 1e-9 * product.norm()
    assert_close(new[0].mT @ new[0], new[1].mT @ new[1])
