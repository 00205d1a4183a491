"""The drafts: each error as a counter-example beside what mends it, and each formula that stands as a property."""

from types import SimpleNamespace

import pytest
import torch
from compared import best_directions, logit_variance, product_norm, residual, whiten
from hypothesis import given
from hypothesis import strategies as st
from test_functional import always, normal, seeds, spd
from torch.testing import assert_close

from hf_growattn.grow.old_dims import tangent_step
from hf_growattn.measure import functional as F

sizes = st.integers(1, 6)


def masked_loss(logits, values, target, visible=None):
    """A loss of softmax attention over keys: logits and visible (..., t, t), values and target (..., t, d)."""
    logits = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
    return (target * (logits.softmax(-1) @ values)).sum()


def logit_gradient(logits, *rest):
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(masked_loss(logits, *rest), logits)[0]


def steepest(cross, roots, dims):
    """The project's step of rank `dims` and size 1 for one head: (a, b)."""
    whitened = whiten(cross[None], roots[1], roots[1], 1)
    new_a, new_b = F.step_factors(*best_directions(whitened, dims), roots[1], roots[1], 1)
    return (new_a @ new_b.mT)[0]


def truncated(matrix, rank):
    u, sigma, v = best_directions(matrix, rank)
    return (u * sigma) @ v.mT


def uneven(tokens, features, seed=1):
    return normal(tokens, features, seed=seed) * torch.logspace(0, -2, features, dtype=torch.float64)


# The thirteen errors.


def test_000_s2_the_target_is_s_minus_gamma_g_for_b_as_written_climbs():
    x, values, target = normal(6, 6), normal(6, 4, seed=2), normal(6, 4, seed=3)
    logits = x @ normal(6, 6, seed=4) @ x.T / 6
    gradient, before = logit_gradient(logits, values, target), masked_loss(logits, values, target)
    inverse = torch.linalg.pinv(x)
    for gamma in (0.01, 0.1, 1.0):
        draft, mended = (inverse @ (logits + sign * gamma * gradient) @ inverse.T for sign in (1, -1))
        assert masked_loss(x @ draft @ x.T, values, target) > before
        assert masked_loss(x @ mended @ x.T, values, target) < before
    step = steepest(x.T @ gradient @ x, F.square_roots(F.moment_sum(x[None])), 6)
    assert_close(x @ step @ x.T, -gradient)


def test_000_s2_whitening_comes_before_truncating_unless_x_is_orthonormal():
    wanted, inputs = normal(60, 60, seed=2), uneven(60, 16)
    for x, orthonormal in ((inputs, False), (torch.linalg.qr(inputs).Q, True)):
        inverse, roots = torch.linalg.pinv(x), F.square_roots(F.moment_sum(x[None]))
        reachable = x @ inverse @ wanted @ inverse.T @ x.T
        draft = x @ truncated(inverse @ wanted @ inverse.T, 4) @ x.T
        mended = -x @ steepest(x.T @ wanted @ x, roots, 4) @ x.T
        explained = [1 - ((reachable - fit).norm() / reachable.norm()) ** 2 for fit in (draft, mended)]
        assert explained[1] > 0.4
        if orthonormal:
            assert_close(mended, draft)
        else:
            assert explained[0] < explained[1] / 2


def test_000_remark_2_1_the_error_is_the_whitened_tail_and_what_x_cannot_reach():
    x, wanted, rank = uneven(30, 8), normal(30, 30, seed=2), 3
    inverse, roots = torch.linalg.pinv(x), F.square_roots(F.moment_sum(x[None]))
    error = (wanted + x @ steepest(x.T @ wanted @ x, roots, rank) @ x.T).square().sum()
    draft = torch.linalg.svdvals(inverse @ wanted @ inverse.T)[rank:].square().sum()
    whitened = torch.linalg.svdvals(whiten((x.T @ wanted @ x)[None], roots[1], roots[1], 1)[0])
    unreachable = (wanted - x @ inverse @ wanted @ inverse.T @ x.T).square().sum()
    assert_close(error, whitened[rank:].square().sum() + unreachable)
    assert (draft / error - 1).abs() > 0.5 and unreachable > 0.5 * error


def test_000_s2_the_factors_take_k_singular_values_and_x_plus_is_the_pseudo_inverse():
    matrix = normal(5, 5)
    _, sigma, vh = torch.linalg.svd(matrix)
    with pytest.raises(RuntimeError):  # V_k' Sigma^1/2: (5, 2) by (5, 5)
        vh.T[:, :2] @ sigma.sqrt().diag()
    left, right = F.balanced_factors(matrix[None], torch.eye(5, dtype=torch.float64)[None], 2)
    assert_close((left @ right.mT)[0], truncated(matrix, 2))
    x, wanted = torch.nn.functional.pad(normal(7, 3), (0, 1)), normal(7, 7, seed=2)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(x.T @ x)
    best = torch.linalg.pinv(x) @ wanted @ torch.linalg.pinv(x).T
    assert_close(x.T @ x @ best @ x.T @ x, x.T @ wanted @ x)


def test_000_s1_the_scale_stays_in_the_gradient_and_stays_when_the_head_widens():
    x, values, target, scale = normal(6, 5), normal(6, 2, seed=2), normal(6, 2, seed=3), 4**-0.5
    w_q, w_k = normal(2, 5, 4, seed=4)

    def loss(pattern, s):
        return masked_loss(s * x @ pattern @ x.T, values, target)

    change = normal(5, 5, seed=10)
    pattern, t = w_q @ w_k.T, x.T @ logit_gradient(scale * x @ w_q @ w_k.T @ x.T, values, target) @ x
    measured = (loss(pattern + 1e-6 * change, scale) - loss(pattern - 1e-6 * change, scale)) / 2e-6
    assert_close((scale * t * change).sum(), measured, rtol=1e-6, atol=0)
    assert ((t * change).sum() / measured - 1).abs() > 0.5  # the draft's T, without s
    zeros = torch.zeros(5, 4, dtype=torch.float64)
    wider = torch.cat((w_q, zeros), -1) @ torch.cat((w_k, normal(5, 4, seed=11)), -1).T
    assert_close(loss(wider, scale), loss(pattern, scale), rtol=1e-12, atol=0)
    assert (loss(wider, 8**-0.5) - loss(pattern, scale)).abs() > 1e-2
    assert logit_variance(4, 4, 0.0) == 1 and logit_variance(4, 4, 0.0, recompute_scale=True) == 0.5


def test_000_and_001_moments_are_pooled_and_the_gradient_is_masked():
    tokens, d, scale = 7, 5, 0.5
    x, values, target = normal(4, tokens, d), normal(4, tokens, 3, seed=2), normal(4, tokens, 3, seed=3)
    pattern, mask = normal(d, d, seed=4), torch.arange(tokens) < torch.tensor([[7], [6], [5], [7]])
    x = x * torch.logspace(0, -1, d, dtype=torch.float64)
    target = target * mask[..., None]
    visible = torch.ones(tokens, tokens).tril().bool() & mask[:, None, :]

    def loss(z):
        return masked_loss(scale * x @ (pattern + z) @ x.mT, values, target, visible)

    def pooled(gradient):
        return scale * (x.mT @ gradient @ x).sum(0)

    logits = scale * x @ pattern @ x.mT
    gradient = logit_gradient(logits, values, target, visible)
    assert not gradient[~visible].any() and gradient.sum(-1).abs().max() < 1e-12
    mended, single = pooled(gradient), scale * x[0].T @ gradient[0] @ x[0]
    unmasked = pooled(logit_gradient(logits, values, target))
    change = normal(d, d, seed=5)
    measured = (loss(1e-6 * change) - loss(-1e-6 * change)) / 2e-6
    assert_close((mended * change).sum(), measured, rtol=1e-6, atol=0)
    for wrong in (single, unmasked):
        assert ((wrong * change).sum() / measured - 1).abs() > 0.2
    roots = F.square_roots(F.moment_sum(x, mask) / mask.sum())
    inverse = torch.linalg.pinv(x[0])
    steps = [steepest(mended, roots, 2), -truncated(inverse @ gradient[0] @ inverse.T, 2), steepest(unmasked, roots, 2)]
    losses = [loss(0.01 * step / (roots[0] @ step @ roots[0].mT).norm()) for step in steps]
    assert losses[0] < loss(0) and losses[0] < min(losses[1:])


def test_001_s1_1_the_tangent_step_is_steepest_and_minus_t_w_k_is_not():
    d, k = 6, 2
    roots_a, roots_b = F.square_roots(spd(d, 1.0)), F.square_roots(spd(d, 1.0, seed=2))
    t, w_q, w_k = normal(d, d), normal(d, k, seed=3), normal(d, k, seed=4)
    m, a, b = roots_a[1].mT @ t @ roots_b[1], roots_a[0] @ w_q, roots_b[0] @ w_k

    def gain(d_a, d_b):
        """Decrease of the loss by a whitened change of the factors that moves the logits by 1."""
        moved = d_a @ b.T + a @ d_b.mT
        return -(m * moved).sum((-2, -1)) / moved.norm(dim=(-2, -1))

    step = [change[0] for change in tangent_step((m @ b)[None], (m.T @ a)[None], a[None], b[None])]
    best = gain(*step)
    assert gain(roots_a[0] @ (-t @ w_k), roots_b[0] @ (-t.T @ w_q)) < 0.9 * best
    others = gain(normal(1000, d, k, seed=5), normal(1000, d, k, seed=6))
    near = gain(*(part + 0.01 * normal(1000, d, k, seed=7 + i) for i, part in enumerate(step)))
    assert others.max() < best and near.max() < best
    # It is the projection of -M on all that small changes reach.
    units = torch.eye(d * k, dtype=torch.float64).view(-1, d, k)
    reached = torch.cat((units @ b.T, a @ units.mT)).flatten(1).T
    projected = (reached @ torch.linalg.pinv(reached) @ -m.flatten()).view(d, d)
    assert_close(step[0] @ b.T + a @ step[1].T, projected)


def test_001_s1_1_rho_is_a_norm():
    x, t, w_q, w_k, gamma = normal(9, 6), normal(6, 6, seed=2), normal(6, 2, seed=3), normal(6, 2, seed=4), 0.3
    rho = -x @ (w_q @ w_q.T @ t + t @ w_k @ w_k.T) @ x.T
    with pytest.raises(RuntimeError):  # (9, 9) by (6, 2)
        -gamma / rho * (t @ w_k)
    size = product_norm(torch.cat((x @ w_q, x @ t @ w_k), -1)[None], torch.cat((x @ t.T @ w_q, x @ w_k), -1)[None])
    d_q, d_k = -gamma / size * t @ w_k, -gamma / size * t.T @ w_q
    assert_close((x @ (w_q @ d_k.T + d_q @ w_k.T) @ x.T).norm().item(), gamma)


def test_001_s1_3_the_quadratic_term_is_d_q_d_k_and_the_rank_reaches_twice_d_k():
    w_q, w_k, d_q, d_k = normal(4, 8, 2)
    gamma, linear = 0.5, w_q @ d_k.T + d_q @ w_k.T
    moved = (w_q + gamma * d_q) @ (w_k + gamma * d_k).T - w_q @ w_k.T
    assert_close(gamma * (linear + gamma * d_q @ d_k.T), moved)
    assert (gamma * (linear + gamma * d_k @ d_k.T) - moved).norm() > 0.1 * moved.norm()
    assert torch.linalg.matrix_rank(moved) == 4  # 2 d_k, not d_k


def test_001_s1_5_x_enters_the_bound_squared():
    x, change = 3 * torch.eye(4).double(), normal(4, 4)
    moved, spectral = (x @ change @ x.T).norm(), torch.linalg.matrix_norm(x, 2)
    assert moved > 2 * spectral * change.norm()
    assert_close(moved, spectral**2 * change.norm())


def test_001_lemma_1_1_has_sigma_1_squared():
    matrix = torch.diag(torch.tensor([0.5, 0.1])).double()
    largest = torch.linalg.svdvals(matrix)[0]
    assert matrix.square().sum() < largest  # as written
    assert_close(torch.linalg.matrix_norm(matrix, 2) ** 2, largest**2)
    assert largest > 1.9 * largest**2 and matrix.square().sum() >= largest**2


def test_001_lemma_1_2_its_lower_bound_needs_full_row_rank():
    tall, wide = normal(6, 3), normal(3, 6)
    unseen = torch.linalg.svd(tall).U[:, 3:].T  # rows that `tall` maps to zero
    assert (unseen @ tall).norm() < 1e-9 < 0.1 < torch.linalg.svdvals(tall)[-1] * unseen.norm()
    rows = torch.linalg.svd(wide).U[:, -1:].T
    assert_close((rows @ wide).norm(), torch.linalg.svdvals(wide)[-1] * rows.norm())  # reached, never passed


def test_004_softmax_is_over_the_keys_of_each_row():
    q, k, v = normal(3, 5, 4)
    scaled = q @ k.T / 2
    attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    assert_close(scaled.softmax(-1).sum(-1), torch.ones(5).double())
    assert_close(scaled.softmax(-1) @ v, attended)
    assert (scaled.softmax(0).sum(-1) - 1).abs().max() > 0.1  # on each column, as written
    assert (scaled.softmax(0) @ v - attended).norm() > 0.1 * attended.norm()


# The formulas that stand, over random shapes, ranks, spectra, groups and biases.


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
    names = "heads groups a b k p seed root_a root_b cross whitened stacked shared"
    return SimpleNamespace(**{name: value for name, value in locals().items() if name in names.split()})


def dense(layer, new_a, new_b):
    """The pattern or message of every query head, (H, a, b)."""
    return new_a @ new_b.repeat_interleave(layer.heads // layer.groups, 0).mT


def in_metric(layer, z):
    return F.stack_groups(F.apply_root(layer.root_a[0], z), layer.groups) @ layer.root_b[0].mT


@always
@given(layers())
def test_000_s2_the_step_is_eckart_young_in_the_metric_and_gains_sigma_squared(layer):
    u, sigma, v = best_directions(layer.whitened, layer.p)
    z = dense(layer, *F.step_factors(u, sigma, v, layer.root_a[1], layer.root_b[1], layer.heads))
    moved, gain = in_metric(layer, z), sigma.square().sum()
    assert_close(moved, -(u * sigma.unsqueeze(-2)) @ v.mT)
    assert_close((layer.cross * z).sum(), -gain)
    assert_close(moved.square().sum(), gain)
    tail = torch.linalg.svdvals(layer.whitened)[..., layer.p :].square().sum()
    assert_close((layer.whitened + moved).square().sum(), tail)


@always
@given(layers())
def test_001_s1_1_the_gradient_splits_into_tangent_and_bottleneck(layer):
    rest = residual(layer.whitened, layer.stacked, layer.shared)
    d_a, d_b = normal(*layer.stacked.shape, seed=layer.seed), normal(*layer.shared.shape, seed=layer.seed + 1)
    reached = d_a @ layer.shared.mT + layer.stacked @ d_b.mT
    assert abs((rest * reached).sum()) <= 1e-9 * (1 + rest.norm() * reached.norm())
    gradients = layer.whitened @ layer.shared, layer.whitened.mT @ layer.stacked
    d_a, d_b = tangent_step(*gradients, layer.stacked, layer.shared)
    reached = d_a @ layer.shared.mT + layer.stacked @ d_b.mT
    assert_close(reached, rest - layer.whitened, rtol=1e-6, atol=1e-8)
    p_a, p_b = (side @ torch.linalg.pinv(side) for side in (layer.stacked, layer.shared))
    m = layer.whitened
    assert_close(reached, -(p_a @ m + m @ p_b - p_a @ m @ p_b), rtol=1e-6, atol=1e-8)


@always
@given(seeds, sizes, sizes, st.integers(1, 3), st.integers(1, 3))
def test_000_remark_1_2_a_bias_is_one_more_row_of_every_formula(seed, d, k, heads, p):
    x, g = normal(2, d + 5, d, seed=seed), normal(heads, 2, d + 5, d + 5, seed=seed + 1)
    weight, bias, augmented = normal(2, heads, k, d, seed=seed + 2), normal(2, heads, k, seed=seed + 3), F.augment(x)
    queries, keys = (x[:, None] @ w.mT + b[:, None] for w, b in zip(weight, bias))
    joined = [F.join_bias(w, b) for w, b in zip(weight, bias)]
    assert_close(augmented[:, None] @ joined[0] @ joined[1].mT @ augmented[:, None].mT, queries @ keys.mT)
    cross = (augmented.mT @ g @ augmented).sum(1)  # (heads, d + 1, d + 1)
    roots = F.square_roots(F.ridged(F.moment_sum(augmented), 0.05))
    u, sigma, v = best_directions(whiten(cross, roots[1], roots[1], heads), p)
    sides = [F.split_bias(side, d) for side in F.step_factors(u, sigma, v, roots[1], roots[1], heads)]
    queries, keys = (x[:, None] @ w.mT + b[:, None] for w, b in sides)
    assert_close((g * (queries @ keys.mT).transpose(0, 1)).sum(), -sigma.square().sum())


@always
@given(seeds, st.integers(1, 8), sizes, sizes)
def test_000_s2_the_regression_has_its_gradient_its_normal_equation_and_its_minimiser(seed, tokens, d, rank):
    x = normal(tokens, rank, seed=seed) @ normal(rank, d, seed=seed + 1)  # of any rank
    wanted = normal(tokens, tokens, seed=seed + 2)
    z, inverse = normal(d, d, seed=seed + 3).requires_grad_(), torch.linalg.pinv(x, rtol=1e-10)

    def f(z):
        return (wanted - x @ z @ x.T).square().sum()

    assert_close(torch.autograd.grad(f(z), z)[0], -2 * x.T @ (wanted - x @ z @ x.T) @ x)
    best = inverse @ wanted @ inverse.T
    size = torch.linalg.matrix_norm(x, 2) ** 2
    assert (x.T @ x @ best @ x.T @ x - x.T @ wanted @ x).norm() < 1e-8 * size * wanted.norm()
    assert_close(f(z), f(best) + (x @ (z - best) @ x.T).square().sum())  # so f is convex and least there


@always
@given(seeds, sizes, sizes, sizes, sizes)
def test_001_lemmas_1_1_and_1_2_bound_the_frobenius_norm(seed, m, p, n, o):
    a, b, c = normal(m, p, seed=seed), normal(p, n, seed=seed + 1), normal(n, o, seed=seed + 2)
    values = [torch.linalg.svdvals(matrix) for matrix in (a, b, c)]
    assert_close(a.square().sum(), values[0].square().sum())
    slack = 1 + 1e-12
    assert values[0][0] <= a.norm() * slack
    assert_close(values[0][0] ** 2, torch.linalg.eigvalsh(a @ a.T)[-1])
    product = (a @ b).norm()
    assert product <= min(values[1][0] * a.norm(), values[0][0] * b.norm()) * slack
    assert (a @ b @ c).norm() <= values[0][0] * b.norm() * values[2][0] * slack
    assert p > n or product * slack >= values[1][-1] * a.norm()  # full row rank
    assert m < p or product * slack >= values[0][-1] * b.norm()  # and its mirror


@always
@given(layers(), st.floats(0.01, 2), st.integers(0, 8))
def test_001_s1_5_ds_is_linear_and_quadratic_in_the_step(layer, gamma, extra):
    x_a, x_b = (normal(n + extra, n, seed=layer.seed + n) for n in (layer.a, layer.b))
    w_a, d_a = normal(2, layer.heads, layer.a, layer.k, seed=layer.seed)
    w_b, d_b = normal(2, layer.groups, layer.b, layer.k, seed=layer.seed + 1)
    linear = x_a @ (dense(layer, w_a, d_b) + dense(layer, d_a, w_b)) @ x_b.T
    quadratic = x_a @ dense(layer, d_a, d_b) @ x_b.T
    moved = x_a @ (dense(layer, w_a + gamma * d_a, w_b + gamma * d_b) - dense(layer, w_a, w_b)) @ x_b.T
    assert_close(moved, gamma * linear + gamma**2 * quadratic)
    bound = torch.linalg.matrix_norm(x_a, 2) * torch.linalg.matrix_norm(x_b, 2)
    assert quadratic.norm() <= bound * dense(layer, d_a, d_b).norm() * (1 + 1e-12)


@always
@given(seeds, st.integers(1, 2), sizes, sizes, sizes, sizes)
def test_001_problem_b_factors_are_the_best_of_their_rank_and_balanced(seed, groups, n, m, k, rank):
    left, right = normal(groups, n, k, seed=seed), normal(groups, m, k, seed=seed + 1)
    new = F.balanced_factors(left, right, rank)
    assert [side.shape for side in new] == [(groups, n, rank), (groups, m, rank)]
    product = left @ right.mT
    u, sigma, vh = torch.linalg.svd(product, full_matrices=False)
    assert_close(new[0] @ new[1].mT, (u[..., :rank] * sigma[..., None, :rank]) @ vh[..., :rank, :])
    assert rank < min(n, m, k) or (new[0] @ new[1].mT - product).norm() < 1e-9 * product.norm()
    assert_close(new[0].mT @ new[0], new[1].mT @ new[1])
    assert_close(product_norm(left, right), product.norm())


def test_004_propositions_1_to_4_hold_of_independent_samples():
    x, y = normal(400) + 0.3, normal(300, seed=2) + 0.5
    assert_close(x.var(correction=0), x.square().mean() - x.mean() ** 2)  # 1
    pair = torch.stack((y, y**2 - y))  # dependent
    assert_close(pair.cov(correction=0)[0, 1], pair.prod(0).mean() - pair.mean(1).prod())  # 2
    x, y = torch.meshgrid(x, y, indexing="ij")  # all pairs: independent, exactly
    assert_close((x + y).var(correction=0), x.var(correction=0) + y.var(correction=0))  # 4
    assert (x * y).var(correction=0) > 1.1 * x.var(correction=0) * y.var(correction=0)  # 3 needs zero means
    x, y = x - x.mean(), y - y.mean()
    assert_close((x * y).var(correction=0), x.var(correction=0) * y.var(correction=0))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("new, variance", [(0, 1.0), (8, 0.0), (8, 1.0), (8, 4.0)])
@pytest.mark.parametrize("d_k", [4, 16])
def test_004_proposition_5_var_qk_is_d_k_and_what_each_scale_makes_of_new_dims(d_k, new, variance, recompute):
    q, k = normal(2, 40_000, d_k + new)
    q[:, d_k:] *= variance**0.5
    scale = (d_k + new if recompute else d_k) ** -0.5
    expected = logit_variance(d_k, new, variance, recompute_scale=recompute)
    assert (scale * (q * k).sum(-1)).var().item() == pytest.approx(expected, rel=0.05)
    assert (q[:, :d_k] * k[:, :d_k]).sum(-1).var().item() == pytest.approx(d_k, rel=0.05)
    kept, grown = logit_variance(d_k, new, variance), 1 + new * variance / d_k
    assert kept == pytest.approx(grown) and expected == pytest.approx(grown * d_k * scale**2)
