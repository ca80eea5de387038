"""The kernels of orthogonal bases and their gradients against float64."""

import pytest
import torch

from chasm import ops
from helpers import DEVICE, INTERPRETED, assert_close, gpu_test, kernel_test, normal, pairwise

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def basis_by_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kernels also in the interpreter, where nothing is on a GPU; names those that ran."""
    from chasm.ops.kernels import basis as small

    ran: set[str] = set()
    if INTERPRETED:
        monkeypatch.setattr("chasm.ops.basis._has_kernels", lambda theta: theta.dtype != torch.float64)
    for name in ("skew", "halves", "skew_part"):
        original = getattr(small, name)
        monkeypatch.setattr(small, name, lambda *a, f=original, n=name: ran.add(n) or f(*a))
    return ran


def as_pair(x):
    upper = x.half()
    return torch.stack([upper, ((x - upper) * 2048).half()])


def of_pair(pair):
    return pair[0].double() + pair[1].double() / 2048


def basis_and_a_gradient(C, norm, dtype, large):
    """theta, U, theta in float64, U of it by torch; a gradient U (large S + K) of U: its symmetric S has no effect."""
    theta = normal(2, C * (C - 1) // 2)
    spectral = torch.linalg.matrix_norm(ops.skew(theta), 2)
    theta = (theta * norm / spectral[:, None]).to(dtype).requires_grad_()
    exact = theta.detach().double().requires_grad_()
    U, V = ops.orthogonal_basis(theta), torch.linalg.matrix_exp(ops.skew(exact))
    S, K = normal(2, C, C, seed=1), normal(2, C, C, seed=2)
    return theta, U, exact, V, (V.detach() @ (large * (S + S.mT) + K - K.mT)).to(dtype).mT.contiguous().mT


@kernel_test
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (33, 40, 65), (96, 96, 96), (1, 1, 1), (7, 33, 130)])
def test_small_products(m, k, n, mended_interpreter):
    from chasm.ops.kernels import basis as small

    P, Q = normal(2, m, k), normal(2, n, k, seed=1).mT
    assert_close(small.product(P, Q), P @ Q, 1e-14)
    single = small.product(P.float(), Q)
    assert single.dtype == torch.float32
    assert_close(single, P.float().double() @ Q, 1e-7)


@kernel_test
@pytest.mark.parametrize("C", [1, 5, 70])
def test_products_of_pairs(C, mended_interpreter):
    from chasm.ops.kernels import basis as small

    P, Q = normal(2, C, C), normal(2, C, C, seed=1).mT
    p, q = as_pair(P), as_pair(Q.mT).mT
    assert_close(of_pair(p), P, 3e-7)
    assert_close(of_pair(small.product_of_pairs(p, q)), P @ Q, 1e-6)
    assert_close(of_pair(small.product_of_pairs(p, q, factor=0.5, both=True)), (P @ Q + Q @ P) / 2, 1e-6)
    terms = normal(3, 2, C, C, seed=2)
    found = small.product_of_pairs(p, as_pair(terms))
    assert found.shape == (2, 2, 3 * C, C)
    assert_close(of_pair(found), torch.cat([P @ t for t in reversed(terms)], 1), 1e-6)
    wide = as_pair(normal(2, C, 3 * C, seed=3))
    i, j = torch.tril_indices(C, C, -1)
    below = small.product_of_pairs(wide, found, torch.tensor([[3.0, 1.0], [0.0, 1e-3]], device=DEVICE), triangle=True)
    assert below.shape == (2, C * (C - 1) // 2)
    if C > 1:
        scale = torch.tensor([[2.0], [2**-10]], device=DEVICE)  # powers of 2 up to 3, up to 1e-3
        assert_close(below, scale * (of_pair(wide) @ of_pair(found))[:, i, j], 1e-6)


@kernel_test
@pytest.mark.parametrize("C", [1, 7, 70])
def test_skew_part_and_its_size(C, mended_interpreter):
    from chasm.ops.kernels import basis as small

    U, g = normal(2, C, C), normal(2, C, C, seed=1).float() * torch.tensor([1e-12, 1e12], device=DEVICE)[:, None, None]
    K, largest = small.skew_part(U, g)
    expected = (U.mT @ g.double() - g.double().mT @ U) / 2
    for i in range(2 if C > 1 else 0):
        assert_close(K[i], expected[i], 1e-7)
    assert torch.equal(K.triu(1), -K.tril(-1).mT)
    assert torch.equal(largest.amax(1), K.abs().amax((1, 2)))
    found = of_pair(small.product_of_pairs(as_pair(U), K, largest))  # between 1 and 2 before the product
    scale = 2 ** K.abs().amax((1, 2), keepdim=True).log2().floor().double() if C > 1 else 1
    torch.testing.assert_close(found, U @ K.double() / scale, rtol=0, atol=1e-5)


@kernel_test
@pytest.mark.parametrize("C", [2, 33])
def test_what_a_gradient_keeps(C, mended_interpreter):
    from chasm.ops.basis import _NODES, _WEIGHTS, SQUARINGS, _exponentials
    from chasm.ops.kernels import basis as small

    A = ops.skew(normal(2, C * (C - 1) // 2))
    A = A * 200 / torch.linalg.matrix_norm(A, 2)[:, None, None] / 2**SQUARINGS
    V = [torch.linalg.matrix_exp(2**j * A) for j in range(SQUARINGS + 1)]
    kept = torch.stack([A, *V[:-1], A @ A, A @ A @ A, A @ A @ A @ A])
    single, powers, nodes = small.halves(kept, V[-1], _exponentials(A.device))
    assert torch.equal(single, V[-1].float())
    torch.testing.assert_close(of_pair(powers), torch.stack(V[1:]), rtol=0, atol=2**-23)
    weights = torch.tensor([*_WEIGHTS[::-1], *_WEIGHTS], dtype=torch.float64) / 2
    for w, s, found in zip(weights.sqrt(), [-_NODES[1], -_NODES[0], *_NODES], of_pair(nodes).unbind(2), strict=True):
        torch.testing.assert_close(found, w * torch.linalg.matrix_exp((s - 1) * A), rtol=0, atol=1.5e-7)


@kernel_test
@pytest.mark.parametrize(
    ("C", "norm", "numbers"),
    pairwise(
        {
            "C": [2, 7, 33] if INTERPRETED else [2, 7, 33, 96, 384],
            "norm": [0.1, 100.0],
            # dtype, tolerance, size of the symmetric part of the gradient, tolerance of gradients
            "numbers": [
                (torch.float32, 2e-7, 1, 2e-6),
                (torch.float32, 2e-7, 1000, 1e-5),
                (torch.float64, 1e-10, 1, 1e-9),
            ],
        }
    ),
)
def test_basis_and_its_gradient(C, norm, numbers, basis_by_kernels, mended_interpreter):
    dtype, tolerance, large, of_gradient = numbers
    theta, U, exact, V, g = basis_and_a_gradient(C, norm, dtype, large)
    assert_close(U, V, tolerance)
    assert_close(*(torch.autograd.grad(a, b, g.to(a))[0] for a, b in ((U, theta), (V, exact))), of_gradient)
    assert basis_by_kernels == (set() if dtype == torch.float64 else {"skew", "halves", "skew_part"})


@gpu_test
def test_gradient_of_a_large_basis(mended_interpreter):
    theta, U, exact, V, g = basis_and_a_gradient(1024, 100.0, torch.float32, 1)
    assert_close(*(torch.autograd.grad(a, b, g.to(a))[0] for a, b in ((U, theta), (V, exact))), 2e-6)


@kernel_test
@pytest.mark.parametrize(
    ("C", "norm", "sizes"),
    [(6, 1.0, (1e-36, 1e30)), (7, 100.0, (1e-12, 1e12)), (7, 100.0, (1e-36, 1e30)), (33, 50.0, (1e-36, 1e30))],
)
def test_gradients_of_any_size(C, norm, sizes, basis_by_kernels, mended_interpreter):
    theta, U, exact, V, g = basis_and_a_gradient(C, norm, torch.float32, 1)
    g = g * torch.tensor(sizes, device=DEVICE)[:, None, None]
    (found,), (expected,) = torch.autograd.grad(U, theta, g), torch.autograd.grad(V, exact, g.double())
    for i in range(2):
        assert_close(found[i], expected[i], 2e-6)
    assert "halves" in basis_by_kernels


@kernel_test
def test_gradients_of_zero_and_not_finite(basis_by_kernels, mended_interpreter):
    theta, U, exact, V, g = basis_and_a_gradient(7, 30.0, torch.float32, 1)
    (expected,) = torch.autograd.grad(V, exact, g.double())
    for nothing in (0.0, torch.nan, torch.inf):
        g[0] = nothing
        (found,) = torch.autograd.grad(U, theta, g, retain_graph=True)
        assert not found[0].any() if nothing == 0 else not found[0].isfinite().any()
        assert_close(found[1], expected[1], 2e-6)  # the other basis does not see it
    theta = torch.zeros(2, 21, device=DEVICE, requires_grad=True)
    symmetric = (g[1] + g[1].mT).expand(2, 7, 7)
    (found,) = torch.autograd.grad(ops.orthogonal_basis(theta), theta, symmetric)
    assert not found.any()
    assert "halves" in basis_by_kernels


@kernel_test
def test_gradient_that_gathers_in_one_place(basis_by_kernels, mended_interpreter):
    """All of K = 1 - 1^T, of size C though its numbers are 1: exp(A) may turn it into few numbers of that size."""
    C = 40
    x, y = (t / t.norm() for t in (torch.ones(C), torch.ones(C) * torch.tensor([1.0, -1.0]).repeat(C // 2)))
    K = C * (x[:, None] * y - y[:, None] * x).double().to(DEVICE)
    theta, U, exact, V, _ = basis_and_a_gradient(C, 2.0, torch.float32, 1)
    g = (V.detach() @ K).float()
    (found,), (expected,) = torch.autograd.grad(U, theta, g), torch.autograd.grad(V, exact, g.double())
    assert_close(found, expected, 2e-6)


@kernel_test
def test_second_derivative_of_the_basis(basis_by_kernels, mended_interpreter):
    theta = normal(1, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(ops.orthogonal_basis, theta)
    found = []
    for t in (theta.detach().float().requires_grad_(), theta):
        (d,) = torch.autograd.grad(ops.orthogonal_basis(t)[:, 0].pow(3).sum(), t, create_graph=True)
        found += torch.autograd.grad(d.square().sum(), t)
    assert_close(*found, 1e-5)
    assert "skew" in basis_by_kernels
