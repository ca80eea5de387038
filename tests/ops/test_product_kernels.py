"""Products of a matrix with a map, and sums over positions, by kernels: against float64."""

import pytest
import torch

from helpers import assert_close, gpu_test, kernel_test, normal

pytestmark = pytest.mark.usefixtures("poisoned")


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(("C", "H", "W"), [(7, 1, 7), (16, 8, 16), (33, 3, 23), (96, 5, 20), (130, 5, 13)])
def test_products_that_add(C, H, W, large, dtype, mended_interpreter, monkeypatch):
    from chasm.ops.kernels.products import product

    monkeypatch.setattr("chasm.ops.kernels.products.is_large_card", lambda x: large)
    A, a, x = (t.to(dtype) for t in (normal(C, C) / C**0.5, normal(2, C, H, W), normal(2, C, H, W, seed=1)))
    bias = normal(C, seed=2).float()
    expected = torch.einsum("mc,bchw->bmhw", A.double(), a.double())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert_close(product(A, a), expected, tolerance)
    assert_close(product(A.mT.contiguous().mT, a), expected, tolerance)
    assert_close(product(A, a, bias, x), expected + bias.double()[:, None, None] + x.double(), tolerance)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("C", "H", "W"), [(7, 1, 7), (16, 8, 16), (33, 3, 23), (96, 15, 20), (130, 5, 13)])
def test_gram_matrix(C, H, W, dtype, mended_interpreter, monkeypatch):
    check_gram((3, C, H, W), dtype)
    monkeypatch.setattr("chasm.ops.kernels.products.multiprocessors", lambda x: 4)  # several blocks for each
    check_gram((3, C, H, W), dtype)


@gpu_test
@pytest.mark.parametrize("shape", [(8, 96, 256, 256), (4, 96, 218, 170), (8, 384, 32, 32)], ids=str)
def test_gram_matrix_of_many_positions(shape):
    check_gram(shape, torch.float32, 2e-6)  # half a million numbers in float32


def check_gram(shape, dtype, tolerance=1e-6):
    from chasm.ops.kernels.products import gram, gram_and_sum

    G, X = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype)
    expected = torch.einsum("bmhw,bnhw->mn", G.double(), X.double())
    assert_close(gram(G, X), expected, tolerance)
    found, total = gram_and_sum(G, X)
    assert_close(found, expected, tolerance)
    assert_close(total, G.double().sum((0, 2, 3)), tolerance)


@kernel_test
@pytest.mark.parametrize(("C", "H", "W"), [(7, 1, 7), (33, 3, 23), (96, 15, 20)])
def test_product_and_gram_in_one_pass(C, H, W, mended_interpreter, monkeypatch):
    from chasm.ops.kernels.products import product_and_gram

    A, q, e = (normal(*shape, seed=s).bfloat16() for s, shape in enumerate([(C, C), *[(3, C, H, W)] * 2]))
    for programs in (264, 3):  # a block for each, then several
        monkeypatch.setattr("chasm.ops.kernels.products.multiprocessors", lambda x, n=programs: n)
        found, total = product_and_gram(A.mT, q, e)
        assert_close(found, torch.einsum("cm,bchw->bmhw", A.double(), q.double()), 1e-2)
        assert_close(total, torch.einsum("bmhw,bnhw->mn", q.double(), e.double()), 2e-6)
    assert product_and_gram(A.float(), q.float(), e.float()) is None
