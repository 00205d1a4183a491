"""Nothing of the same rank gains more: not 1,000 neighbours, not long descent, not gromo on the same statistics."""

from types import SimpleNamespace

import pytest
import torch
from compared import best_directions, transposed, whiten
from test_functional import normal, spd
from torch.testing import assert_close

from hf_growattn.measure import functional as F

FORMS = ["one head", "a group of heads", "a bias", "v"]
DIMS = 3


def problem(form, seed=0):
    """A gradient whose whitened singular values are known, in moments that are uneven."""
    heads, groups = (6, 2) if form == "a group of heads" else (1, 1)
    a, b = (7, 7) if form == "a bias" else (7, 6)
    if form == "a bias":
        x = F.augment(normal(40, a - 1, seed=seed) * torch.logspace(0, -1, a - 1).double() + 0.3)
        moment_a = moment_b = F.moment_sum(x[None])
    else:
        moment_a, moment_b = spd(a, 0.7, seed), spd(b, 0.7, seed + 1)
    roots_a, roots_b = F.square_roots(moment_a), F.square_roots(moment_b)
    if form == "v":
        moment_a, roots_a = 2 * torch.eye(a).double(), tuple(torch.tensor([2.0, 0.5]).double().sqrt())
    left = torch.linalg.qr(normal(groups, heads // groups * a, b, seed=seed + 2)).Q
    right = torch.linalg.qr(normal(groups, b, b, seed=seed + 3)).Q
    sigma = torch.logspace(1, 0, b).double() * torch.tensor([[1.0], [0.7]]).double()[:groups]
    cross = (
        F.apply_root(transposed(roots_a[0]), F.unstack_groups(left * sigma.unsqueeze(-2) @ right.mT, heads))
        @ roots_b[0]
    )
    if form == "a bias":  # from a gradient of logits, as it arises
        basis = x @ roots_b[1]
        logits = basis @ (left * sigma.unsqueeze(-2) @ right.mT)[0] @ basis.T
        cross = (x.T @ logits @ x)[None]

    def pattern(new_a, new_b):
        return new_a @ new_b.repeat_interleave(heads // groups, -3).mT

    def size(z):
        """The metric `tr(C_a Z C_b Z^T)`, summed over heads."""
        return ((moment_a @ z @ moment_b) * z).sum((-3, -2, -1))

    def slope(z):
        return (cross * z).sum((-3, -2, -1))

    whitened = whiten(cross, roots_a[1], roots_b[1], groups)
    factors = F.step_factors(*best_directions(whitened, DIMS), roots_a[1], roots_b[1], heads)
    return SimpleNamespace(
        pattern=pattern, size=size, slope=slope, factors=factors, gain=sigma[:, :DIMS].square().sum()
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, 10])
def test_the_step_gains_what_the_known_spectrum_allows(form, seed):
    p = problem(form, seed)
    step = p.pattern(*p.factors)
    assert_close(p.slope(step), -p.gain)
    assert_close(p.size(step), p.gain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, 10])
def test_a_thousand_neighbours_of_the_same_size_and_rank_gain_less(form, seed):
    p = problem(form, seed)
    far = torch.logspace(-3, 0, 1000).double().view(-1, 1, 1, 1)
    near = [f + far * f.std() * normal(1000, *f.shape, seed=seed + 5 + i) for i, f in enumerate(p.factors)]
    others = p.pattern(*near)
    gains = -p.slope(others) * (p.gain / p.size(others)).sqrt()
    assert gains.max() < p.gain < 1.001 * gains.max()  # below, and some of them just below


@pytest.mark.parametrize("form", FORMS)
def test_long_descent_ends_where_the_closed_form_is(form):
    p = problem(form)
    factors = [(0.1 * normal(*f.shape, seed=8 + i)).requires_grad_() for i, f in enumerate(p.factors)]
    descent = torch.optim.LBFGS(
        factors, max_iter=3000, history_size=30, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def objective():
        z = p.pattern(*factors)
        return p.slope(z) + p.size(z) / 2

    def closure():
        descent.zero_grad()
        value = objective()
        value.backward()
        return value

    descent.step(closure)
    step = p.pattern(*p.factors)
    closed = p.slope(step) + p.size(step) / 2
    assert_close(closed, -p.gain / 2)
    assert_close(objective().detach(), closed, rtol=1e-6, atol=0)
    assert objective() > closed * (1 + 1e-12)


# gromo 0.1.0 whitens the side of its incoming weights; the other only where it is told that side's moment.


def gromo_step(moment, cross, dims, **options):
    """Its ascent direction, incoming weights on the first side of `cross`: (a, b)."""
    tools = pytest.importorskip("gromo.utils.tools")
    alpha, omega, _ = tools.compute_optimal_added_parameters(
        moment, cross, numerical_threshold=0, statistical_threshold=0, maximum_added_neurons=dims, **options
    )
    return alpha.T @ omega.T


def layer(case, even=False):
    """One of 100 random layers: moments, gradient, dims, and the project's step (a, b)."""
    a, b, dims = 3 + case % 5, 3 + case // 5 % 5, 1 + case % 3
    spread = 0.2 + case / 100
    moment_a, moment_b = spd(a, 0 if even else spread, 3 * case), spd(b, spread, 3 * case + 1)
    cross = normal(a, b, seed=3 * case + 2)
    roots = F.square_roots(moment_a)[1], F.square_roots(moment_b)[1]
    u, sigma, v = best_directions(whiten(cross[None], *roots, 1), dims)
    new_a, new_b = F.step_factors(u, sigma, v, *roots, 1)
    return moment_a, moment_b, cross, dims, (new_a @ new_b.mT)[0]


def gain_per_size(step, moment_a, moment_b, cross):
    return (-(cross * step).sum() / ((moment_a @ step @ moment_b) * step).sum().sqrt()).item()


def test_no_step_of_gromo_gains_more_at_the_same_size():
    ahead = []
    for case in range(100):
        moment_a, moment_b, cross, dims, step = layer(case)
        ours = gain_per_size(step, moment_a, moment_b, cross)
        for theirs in (-gromo_step(moment_a, cross, dims), -gromo_step(moment_b, cross.T, dims).T):
            theirs = gain_per_size(theirs, moment_a, moment_b, cross)
            assert theirs > 0 and ours >= theirs * (1 - 1e-9), case
            ahead.append(ours / theirs)
    assert sorted(ahead)[20] > 1.01 and sorted(ahead)[100] > 1.1  # far more in most


def test_gromo_agrees_where_one_side_is_white_already():
    for case in range(100):
        moment_a, moment_b, cross, dims, step = layer(case, even=True)
        theirs = -gromo_step(moment_b, cross.T, dims).T
        assert_close(theirs, step, rtol=1e-9, atol=1e-9 * step.abs().max().item())
        ours, gain = (gain_per_size(z, moment_a, moment_b, cross) for z in (step, theirs))
        assert_close(ours, gain, rtol=1e-9, atol=0)


def test_gromo_agrees_once_it_is_told_both_moments():
    for case in range(100):
        moment_a, moment_b, cross, dims, step = layer(case)
        theirs = -gromo_step(moment_a, cross, dims, matrix_covariance_loss_gradient=moment_b)
        assert_close(theirs, step, rtol=1e-9, atol=1e-9 * step.abs().max().item())
