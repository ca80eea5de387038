"""The kernels of a pass along an axis against float64: circulants, and gains on a spectrum."""

import pytest
import torch

from helpers import HALF, KERNEL_TOLERANCE, assert_close, kernel_test, normal, pairwise

pytestmark = pytest.mark.usefixtures("poisoned")


@kernel_test
@pytest.mark.parametrize(
    ("size", "along_h", "kept", "large"),
    pairwise(
        {
            "size": [(7, 5), (1, 2), (16, 63), (90, 20), (150, 2), (3, 260), (6, 264), (218, 3)],
            "along_h": [True, False],
            "kept": [256, 150, 0],  # a program keeps its matrix, not all do, none does
            "large": [True, False],
        }
    ),
)
def test_circulant_pass_and_its_gradient(size, along_h, kept, large, monkeypatch):
    from chasm.ops.forms.triton import make_circulants
    from chasm.ops.kernels import circulant

    monkeypatch.setattr(circulant, "MAX_KEPT_MATRIX", kept)
    monkeypatch.setattr(circulant, "is_large_card", lambda x: large)
    H, W = size
    n = H if along_h else W
    column = normal(2, n).to(HALF).double().requires_grad_()
    x, g = (normal(2, 2, H, W, seed=s).to(HALF) for s in (1, 2))
    i = torch.arange(n)
    T = column[:, (i[:, None] - i) % n]
    y = T @ x.double() if along_h else x.double() @ T.mT
    (expected,) = torch.autograd.grad(y, column, g.double())
    whole, nothing = circulant.circulant_pass(*make_circulants(column.detach(), HALF), x, along_h)
    assert_close(whole, y.detach(), KERNEL_TOLERANCE[HALF])
    assert nothing is None
    mean = column[:, 0].mean()
    whole, without_mean = circulant.circulant_pass(*make_circulants(column.detach(), HALF, split_mean=True), x, along_h)
    assert_close(whole, y.detach(), KERNEL_TOLERANCE[HALF])
    assert_close(without_mean, (y - mean * x).detach(), KERNEL_TOLERANCE[HALF])
    assert_close(circulant.column_gradient(g, x, along_h), expected, 1e-5)  # sums are float32


@kernel_test
@pytest.mark.parametrize(
    ("shape", "bins", "neighbours"),
    [
        ((2, 3, 42), 7, 2),
        ((5, 2, 6), 3, 1),
        ((1, 9, 24), 3, 4),  # three channels at once
        ((3, 2, 2400), 6, 200),
        ((2, 1, 1), 1, 1),
        *(((2, 2, 3 * (n // 2 + 1) * 2), n // 2 + 1, 2) for n in (7, 63, 90, 218)),  # along W
        *(((2, 2, n * 10), n, 10) for n in (7, 63, 90, 218)),  # along H
    ],
)
def test_gains_and_their_gradient_in_one_pass(shape, bins, neighbours, poisoned):
    from chasm.ops.kernels.spectrum import scale_both

    _, C, S = shape
    place = torch.arange(S) // neighbours % bins
    P, H, gain = normal(*shape).float(), normal(*shape, seed=1).float(), normal(C, bins, seed=2).float()
    each = torch.zeros(C, bins, dtype=torch.float64, device=P.device)
    each.index_add_(1, place.to(P.device), (P.double() * H.double()).sum(0))
    wanted = P * gain[:, place], H * gain[:, place]
    assert_close(scale_both(P, H, gain, neighbours), each, 1e-6)
    assert torch.equal(P, wanted[0])
    assert torch.equal(H, wanted[1])
