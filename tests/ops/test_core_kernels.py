"""The kernels of the spectral core against float64, outputs and all gradients; and the form that uses them."""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import chasm
from chasm import ops
from chasm.ops.operators import exact_product
from helpers import pairwise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

# On a GPU as they are; without one in Triton's interpreter, which wants its variable set before triton is first
# imported, hence a process of its own.
kernel_test = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs inside test_kernels_in_the_interpreter")
gpu_test = pytest.mark.skipif(not CUDA, reason="needs a GPU")
pytestmark = pytest.mark.usefixtures("poisoned")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= tolerance, float(error)


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
    column = normal(3, n).to(HALF).double().requires_grad_()
    x, g = (normal(2, 3, H, W, seed=s).to(HALF) for s in (1, 2))
    i = torch.arange(n)
    T = column[:, (i[:, None] - i) % n]
    y = T @ x.double() if along_h else x.double() @ T.mT
    (expected,) = torch.autograd.grad(y, column, g.double())
    whole, nothing = circulant.circulant_pass(*make_circulants(column.detach(), HALF), x, along_h)
    assert_close(whole, y.detach(), TOLERANCE[HALF])
    assert nothing is None
    mean = column[:, 0].mean()
    whole, apart = circulant.circulant_pass(*make_circulants(column.detach(), HALF, mean_apart=True), x, along_h)
    assert_close(whole, y.detach(), TOLERANCE[HALF])
    assert_close(apart, (y - mean * x).detach(), TOLERANCE[HALF])
    assert_close(circulant.column_gradient(g, x, along_h), expected, 1e-5)  # sums are float32


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
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (33, 40, 65), (96, 96, 96), (1, 1, 1), (7, 33, 130)])
def test_small_products(m, k, n, mended_interpreter):
    from chasm.ops.kernels import basis as small

    P, Q = normal(2, m, k), normal(2, n, k, seed=1).mT
    assert_close(small.product(P, Q), P @ Q, 1e-14)
    single = small.product(P.float(), Q)
    assert single.dtype == torch.float32
    assert_close(single, P.float().double() @ Q, 1e-7)


def as_pair(x):
    upper = x.half()
    return torch.stack([upper, ((x - upper) * 2048).half()])


def of_pair(pair):
    return pair[0].double() + pair[1].double() / 2048


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
@pytest.mark.parametrize("C", [2, 7, 33] if INTERPRETED else [2, 7, 33, 96, 384])
@pytest.mark.parametrize("norm", [0.1, 100.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "large", "of_gradient"),
    [(torch.float32, 2e-7, 1, 2e-6), (torch.float32, 2e-7, 1000, 1e-5), (torch.float64, 1e-10, 1, 1e-9)],
)
def test_basis_and_its_gradient(C, norm, dtype, tolerance, large, of_gradient, basis_by_kernels, mended_interpreter):
    theta, U, exact, V, g = basis_and_a_gradient(C, norm, dtype, large)
    assert_close(U, V, tolerance)
    assert_close(*(torch.autograd.grad(a, b, g.to(a))[0] for a, b in ((U, theta), (V, exact))), of_gradient)
    assert basis_by_kernels == (set() if dtype == torch.float64 else {"skew", "halves", "skew_part"})


@gpu_test
def test_gradient_of_a_large_basis(mended_interpreter):
    theta, U, exact, V, g = basis_and_a_gradient(1024, 100.0, torch.float32, 1)
    assert_close(*(torch.autograd.grad(a, b, g.to(a))[0] for a, b in ((U, theta), (V, exact))), 2e-6)


@kernel_test
@pytest.mark.parametrize(("C", "norm"), [(6, 1.0), (7, 100.0), (33, 50.0)])
@pytest.mark.parametrize("sizes", [(1e-12, 1e12), (1e-36, 1e30)])
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


def mixer(form: str, dtype: torch.dtype, shape: tuple[int, ...], spread: float = 0.3, **options: Any) -> chasm.CHASM:
    options = {"local": False, "step_scale": 1, **options}  # parameters are set by hand here
    torch.manual_seed(0)  # layers start at random
    module = chasm.CHASM(shape[1], size=shape[2:], form=form, **options).to(DEVICE, dtype)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(spread * normal(*p.shape, seed=i).to(p))
    return module


def results(module: chasm.CHASM, x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        y = module(x)
    y.backward(g.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


VARIANTS = [
    {},
    {"axes": "cw>ch"},
    {"axes": "ch+cw"},
    {"axes": "cw"},
    {"basis": "identity"},
    {"gain": "signed"},
    {"gain": "complex"},
    {"local": True},  # with the residual, whose gradient goes through the core's backward
    {"local": True, "residual": False},
    {"local": True, "basis": "identity"},
]


@kernel_test
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_form_matches_the_oracle(options):
    # on a card in bfloat16, and with enough numbers that their rounding is no accident
    compare((2, 6, 7, 10) if INTERPRETED else (2, 24, 23, 30), options)


@gpu_test
@pytest.mark.parametrize(
    "shape", [(8, 96, 256, 256), (4, 96, 218, 170), (2, 96, 63, 90), (8, 384, 32, 32), (1, 24, 1000, 700)], ids=str
)
def test_form_at_real_sizes(shape):
    compare(shape, {})


@kernel_test
@pytest.mark.parametrize("spread", [0.3, 0.05])
def test_theta_in_bfloat16(spread, mended_interpreter):
    """Its gradient is as good as the others', also while gains hardly differ: the mean gain has no part in it."""
    compare((2, 16, 12, 10), {}, torch.bfloat16, spread)


def compare(shape, options, dtype=HALF, spread=0.3):
    x, g = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype)
    oracle = mixer("reference", torch.float64, shape, spread, **options)
    module = mixer("triton", torch.float32, shape, spread, **options)
    module.load_state_dict(oracle.state_dict())
    oracle.load_state_dict(module.state_dict())  # the same float32 numbers
    names = ["y", "x", *(name for name, _ in module.named_parameters())]
    errors = {}
    for name, found, expected in zip(
        names, results(module, x, g), results(oracle, x.double(), g.double()), strict=True
    ):
        errors[name] = float((found.double() - expected).norm() / expected.norm())
    assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors  # NaN fails


@kernel_test
@pytest.mark.parametrize("shape", [(2, 6, 7, 10), (2, 20, 1, 4), (2, 6, 9), (1, 5, 4, 3, 6)], ids=str)
def test_fft_form_with_the_float32_products(shape, mended_interpreter, monkeypatch):
    from chasm.ops.kernels import products

    grams = []
    for choice in ("_has_product_kernel", "_has_kernels"):
        monkeypatch.setattr(f"chasm.ops.forms.fft.{choice}", lambda X: X.dtype == torch.float32)
    monkeypatch.setattr(products, "gram", lambda *maps, gram=products.gram: grams.append(1) or gram(*maps))
    x, g = normal(*shape).float(), normal(*shape, seed=1).float()
    options = {"ndim": len(shape) - 2}
    oracle = mixer("reference", torch.float64, shape, **options)
    module = mixer("fft", torch.float32, shape, **options)
    oracle.load_state_dict(module.state_dict())
    for found, expected in zip(results(module, x, g), results(oracle, x.double(), g.double()), strict=True):
        assert_close(found, expected, 1e-5)
    assert len(grams) == options["ndim"] + 1  # one for each matrix


@kernel_test
def test_eval_caches_and_gives_the_same():
    module = mixer("triton", torch.float32, (2, 6, 7, 10))
    x = normal(2, 6, 7, 10).to(HALF)
    with torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
        trained = module(x).detach()
        with torch.no_grad():
            kept = module.eval()(x)
            assert_close(kept, trained, 1e-6 if INTERPRETED else 1e-2)  # in training the mean gain is apart
            torch.testing.assert_close(module(x), kept, rtol=0, atol=0)


@kernel_test
def test_checkpointing():
    shape = (2, 6, 7, 10)
    module, x = mixer("triton", torch.float32, shape), normal(*shape).to(HALF)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_(), *module.parameters()]
        with torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
            return list(torch.autograd.grad(run(inputs[0]).square().sum(), inputs))

    again = gradients(lambda x: checkpoint(module, x, use_reentrant=False))
    torch.testing.assert_close(again, gradients(module), rtol=0, atol=0)


@kernel_test
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_folded_models_use_them(options):
    shape = (2, 6, 7, 10)
    oracle = mixer("reference", torch.float64, shape, **options)
    module = mixer("triton", torch.float32, shape, **options)
    oracle.load_state_dict(module.state_dict())
    folded = chasm.fold(module, size=shape[2:])
    x = normal(*shape).to(HALF)
    with torch.no_grad(), torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
        found = folded(x)
        assert {chain.form for chain in folded._chains(x, HALF)} == {"triton"}
    assert_close(found, oracle(x.double()), TOLERANCE[HALF])
    assert not copy.deepcopy(folded)._cache.entries


@kernel_test
def test_a_result_may_be_written_in_place():
    shape = (2, 6, 4, 10)
    module, x = mixer("triton", torch.float32, shape, local=False), normal(*shape).to(HALF)
    results = []
    for write in (Tensor.mul_, Tensor.mul):
        z = x.clone().requires_grad_()
        with torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
            y = write(module(z), 2)
        results.append(torch.autograd.grad(y.square().sum(), [z, *module.parameters()]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@kernel_test
def test_folded_models_forget_buffers_of_before():
    """Python gives the id of a tensor that is gone to the next one."""
    shape = (1, 6, 7, 10)
    module = mixer("triton", torch.float32, shape, basis="identity", axes="ch", local=False)
    folded = chasm.fold(module, size=shape[2:])
    x, (step,) = normal(*shape).to(HALF), folded.branches[0]
    for i in range(1, 30):
        step.T = i * torch.eye(7, dtype=torch.float64, device=DEVICE).repeat(6, 1, 1)
        with torch.no_grad():
            assert_close(folded(x), i * x.double(), TOLERANCE[HALF])
    assert len(folded._cache.entries) == 1
    assert not folded.to(torch.float32)._cache.entries


@kernel_test
def test_folded_in_inference_mode_and_used_outside_it():
    with torch.inference_mode():
        folded = chasm.fold(mixer("triton", torch.float32, (2, 6, 7, 10)), size=(7, 10))
        inside = folded(normal(2, 6, 7, 10).to(HALF))
    x = normal(2, 6, 7, 10).to(HALF)
    torch.testing.assert_close(folded(x), inside.clone())


@kernel_test
def test_theta_rests_at_the_start():
    """While all gains are one no basis matters, and the sums cancel to the last bit."""
    module = chasm.CHASM(6, size=(7, 10), form="triton").to(DEVICE)
    with torch.autocast(DEVICE, HALF, enabled=not INTERPRETED):
        y = module(normal(2, 6, 7, 10).to(HALF))
    y.float().square().mean().backward()
    assert not any(theta.grad.any() for theta in module.theta.values())


@kernel_test
def test_a_second_derivative_is_an_error():
    module = mixer("triton", torch.float32, (2, 6, 7, 10))
    x = normal(2, 6, 7, 10).float().requires_grad_()
    if not INTERPRETED:
        module, x = module.to(HALF), x.detach().to(HALF).requires_grad_()
    for power in (2, 1):  # of a linear loss too, whose gradient needs none itself
        (dx,) = torch.autograd.grad(module(x).pow(power).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.square().sum() + module(x).sum(), module.theta["ch"])


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


@kernel_test
def test_maps_are_kept_for_gradients_of_parameters_alone():
    shape = (2, 6, 7, 10)
    oracle, module = mixer("reference", torch.float64, shape), mixer("triton", torch.float32, shape)
    module.requires_grad_(False)
    x, g = normal(*shape).to(HALF).requires_grad_(), normal(*shape, seed=1)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=torch.bfloat16 == HALF):
        y = module(x)
    assert not any(t.ndim == 4 and t.shape == x.shape for t in y.grad_fn.saved_tensors)
    (dx,) = torch.autograd.grad(y, x, g.to(y.dtype))
    exact = x.detach().double().requires_grad_()
    assert_close(dx, torch.autograd.grad(oracle(exact), exact, g)[0], TOLERANCE[HALF])


@kernel_test
@pytest.mark.parametrize("options", [{}, {"local": False, "gain": "complex"}, {"axes": "ch+cw"}], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_runs_the_same_kernels(options, dynamic, monkeypatch):
    """As one graph, forward and backward; with dynamic=True for sizes that are not known."""
    from chasm.ops.kernels import circulant

    passes = []
    original = circulant.circulant_pass
    monkeypatch.setattr(circulant, "circulant_pass", lambda *a: passes.append(type(a[3])) or original(*a))
    torch.compiler.reset()
    module = mixer("triton", torch.float32, (2, 6, 7, 10), **options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 6, 7, 10), (3, 6, 9, 12)):
        x, g = normal(*shape).to(HALF), normal(*shape, seed=1).to(HALF)
        wanted = results(module, x, g)
        module.zero_grad()
        passes.clear()
        found = results(compiled, x, g)
        assert passes.count(Tensor) == 4  # each axis there and back
        module.zero_grad()
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.compiler.reset()


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels are tested directly")
def test_kernels_in_the_interpreter(passed_in_the_interpreter):
    assert passed_in_the_interpreter(__file__) == 193
