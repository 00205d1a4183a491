"""A factored matrix agrees with the matrix it stands for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from hf_growattn.measure.views import FactoredMatrix

# fp64: sums in another order, and nothing else.
EXACT = dict(rtol=1e-10, atol=1e-10)


def factored(a, b, k, seed=0, dtype=torch.float64, rank=None):
    generator = torch.Generator().manual_seed(seed)
    left, right, mix = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((a, k), (b, k), (k, k)))
    if rank is not None:
        mix = mix[:, :rank] @ mix[:rank]
    return FactoredMatrix((left @ mix).to(dtype), right.to(dtype))


SIZES = st.integers(1, 12)


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, st.integers(0, 15), st.integers(0, 15), st.integers(0, 99))
def test_factored_equals_dense(a, b, k, rank, seed):
    matrix = factored(a, b, k, seed, rank=min(rank, k))
    dense, n = matrix.dense(), min(a, b, k)
    assert matrix.shape == dense.shape == (a, b)
    values = matrix.singular_values
    close = dict(rtol=1e-10, atol=1e-10 * (1 + float(dense.norm())))
    assert_close(values, torch.linalg.svdvals(dense)[:n], **close)
    assert (values.diff() <= 0).all()
    u, s, v = matrix.svd()
    assert (u.shape, s.shape, v.shape) == ((a, n), (n,), (b, n))
    assert_close(u * s @ v.T, dense, **close)
    for basis in (u, v):
        assert_close(basis.T @ basis, torch.eye(n, dtype=torch.float64), **EXACT)
    assert 0 <= matrix.effective_rank <= n + 1e-9


def test_effective_rank():
    equal = FactoredMatrix(torch.eye(9, 4), 3 * torch.eye(7, 4))
    assert_close(equal.effective_rank, torch.tensor(4.0))
    values = torch.tensor([3.0, 1.0])
    share = values / 4
    expected = (-(share * share.log()).sum()).exp()
    assert_close(FactoredMatrix(torch.eye(5, 2) * values, torch.eye(6, 2)).effective_rank, expected)
    for zero in (factored(5, 6, 0), FactoredMatrix(torch.zeros(5, 2), torch.randn(6, 2))):
        assert zero.effective_rank == 0
        assert torch.equal(zero.dense(), torch.zeros(5, 6).to(zero.left))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype):
    matrix, working = factored(8, 6, 3, dtype=dtype), torch.float64 if dtype == torch.float64 else torch.float32
    for found in (matrix.singular_values, matrix.effective_rank, matrix.dense(), *matrix.svd()):
        assert found.dtype == working


def test_a_large_matrix_is_never_formed():
    size = 200_000  # the matrix itself would take 160 GB
    matrix = factored(size, size, 4, dtype=torch.float32)
    assert matrix.singular_values.shape == (4,) and 1 < matrix.effective_rank <= 4
    u, _, v = matrix.svd()
    assert u.shape == v.shape == (size, 4)
