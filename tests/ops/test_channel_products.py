"""Products of channel matrices by kernels, as exact as float32: at all sizes of numbers, and not finite ones."""

import pytest
import torch

from chasm.ops.operators import exact_product
from helpers import DEVICE, INTERPRETED, assert_close, kernel_test, normal

pytestmark = pytest.mark.usefixtures("poisoned")


@kernel_test
@pytest.mark.parametrize(("C", "S"), [(1, 3), (7, 65), (16, 1), (40, 65), (63, 129), (90, 67), (96, 130), (128, 64)])
def test_channel_products_in_float32(C, S, mended_interpreter):
    from chasm.ops.kernels import mixing

    A, X = normal(C, C).float(), normal(2, C, S, seed=1).float()
    expected = A.double() @ X.double()
    assert_close(mixing.product(A, X), expected, 5e-7)
    gain, bias, add = normal(C, 7, seed=2).float(), normal(C, seed=3).bfloat16(), normal(2, C, S, seed=4).half()
    bins = torch.arange(S, device=DEVICE) // 3 % 7
    expected = gain.double()[:, bins] * expected + bias.double()[:, None]
    assert_close(mixing.product(A, X, gain, 3, bias=bias), expected, 5e-7)
    out = torch.empty_like(X)
    assert mixing.product(A, X, gain, 3, bias=bias, add=add, out=out) is out
    assert_close(out, expected + add.double(), 5e-7)


@kernel_test
@pytest.mark.parametrize("neighbours", [1, 2, 3, 6, 64, 65, 90, 1000])
@pytest.mark.parametrize("C", [5, 40])
def test_gains_of_few_and_of_many_neighbours(neighbours, C, mended_interpreter):
    from chasm.ops.kernels import mixing

    A, X, gain = normal(C, C).float(), normal(1, C, 300, seed=1).float(), normal(C, 3, seed=2).float()
    bins = torch.arange(300, device=DEVICE) // neighbours % 3
    assert_close(mixing.product(A, X, gain, neighbours), gain.double()[:, bins] * (A.double() @ X.double()), 5e-7)


@kernel_test
@pytest.mark.parametrize("C", [7, 96])
@pytest.mark.parametrize("size", [1e-38, 1e-12, 1.0, 1e12, 1e38])
def test_channel_products_of_all_sizes(C, size, mended_interpreter):
    """Every block of positions is as accurate as if it were alone, and nothing is infinite that need not be."""
    from chasm.ops.kernels import mixing

    block = mixing.BLOCK_S
    sizes = [1, 1e-20, 0, 1e20, 1e-38, 1e-42, 3e37]
    A = (normal(C, C).clamp(-3, 3) * size).float()
    X = torch.cat([normal(1, C, block, seed=i).clamp(-3, 3) * s for i, s in enumerate(sizes)], -1).float()
    Y = mixing.product(A, X)
    expected = A.double() @ X.double()
    infinite = expected.abs() > torch.finfo(torch.float32).max
    assert torch.equal(Y.isinf(), infinite)
    error = (Y.double() - expected).where(~infinite, 0)
    smallest = 2.0**-149 * (C * block) ** 0.5  # where float32 ends
    for e, y in zip(error.split(block, -1), expected.split(block, -1), strict=True):
        assert e.norm() <= 5e-7 * y.norm() + smallest


@kernel_test
@pytest.mark.parametrize(("row", "column"), [(0, 0), (95, 63), (63, 95), (64, 64)])
def test_the_largest_number_may_be_in_any_channel(row, column, mended_interpreter):
    from chasm.ops.kernels import mixing

    A, X = normal(96, 96).float(), normal(1, 96, 65, seed=1).float()
    A[row, column] *= 1e6
    X[:, column] *= 1e6
    assert_close(mixing.product(A, X), A.double() @ X.double(), 5e-7)


@kernel_test
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_channel_products_are_not_finite_only_where_they_cannot_be(number, mended_interpreter):
    from chasm.ops.kernels import mixing

    A, X = normal(90, 90).float(), normal(1, 90, 150, seed=1).float()
    expected = A.double() @ X.double()
    X[0, 80, 3] = X[0, 5, 140] = number
    bad = torch.zeros(90, 150, dtype=torch.bool, device=DEVICE)
    bad[:, [3, 140]] = True
    Y = mixing.product(A, X)[0]
    assert torch.equal(~Y.isfinite(), bad)
    assert_close(Y[~bad], expected[0][~bad], 5e-7)
    A[70, 2] = number
    bad[70] = True
    Y = mixing.product(A, X)[0]
    assert torch.equal(~Y.isfinite(), bad)
    assert_close(Y[~bad], expected[0][~bad], 5e-7)


@kernel_test
def test_many_small_images():
    """A grid has few places for the batch in its second dimension."""
    from chasm.ops.kernels import mixing

    A, X = normal(2, 2).float(), normal(1, 2, 4, seed=1).float()
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *_, **__: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "_product_kernel", Kernel())
        mixing.product(A, X.expand(70_000, 2, 4))
    assert launched == [(70_000,)]


@kernel_test
def test_exact_products_keep_their_dtype(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr("chasm.ops.operators._has_kernel", lambda a, b: True)
    a, b = normal(3, 4).float(), normal(4, 5, seed=1).float()
    torch.set_default_dtype(torch.float64)
    try:
        y = exact_product(a, b)
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype == torch.float32
    assert_close(y, a.double() @ b.double(), 1e-7)
