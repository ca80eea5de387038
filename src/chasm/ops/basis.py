"""theta -> skew-symmetric A -> orthogonal U = exp(A), in plain matrix products.

Scaling and squaring: exp(A) = p(A / 2^s)^(2^s), where p is the Taylor polynomial of degree 16. On a GPU s is fixed:
nothing depends on the values of A, so there is no host synchronisation, and the call can be captured in a CUDA graph. A
CPU takes as many squarings as the norm of A needs. Many bases are computed in one batched call.

All of it runs in float64: TF32 and autocast never touch float64 products, so a basis is as orthogonal under those
settings as without them. On a CUDA device the gradient of a float32 theta is computed to float32 accuracy.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from chasm.common.cost import counted_as
from chasm.common.precision import float64_device
from chasm.common.tracing import is_transformed
from chasm.ops.kernels import has_triton
from chasm.ops.library import TorchOperator, constant, is_fake, wants_gradient

# The Taylor remainder is below 1e-16 for |A| / 2^s <= 0.78: with 8 squarings for spectral norms up to 200. Beyond that
# accuracy fades gently (1e-8 at 450), so a basis far outside the range of trained ones is still orthogonal in float32.
MAX_NORM, SQUARINGS = 0.78, 8
_TAYLOR = [1 / math.factorial(i) for i in range(17)]
# sin(w)/w, the mean of cos(w s) for |s| < 1, as a mean over two s: to 5e-9 for w up to 1.2, 2 |A|/2^8 at norm 150.
_NODES = [0.33827115, 0.8598559102]
_WEIGHTS = [0.6497086626, 0.3502913324]


def orthogonal_basis(theta: Tensor) -> Tensor:
    """Return U = exp(skew(theta)), the orthogonal basis that theta parametrises.

    Args:
        theta: (..., C(C-1)/2) with any number of leading batch dimensions.

    Returns:
        (..., C, C) in theta's dtype, but at least float32. Differentiable any number of times.

    >>> orthogonal_basis(torch.zeros(3))
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    flat = theta.flatten(0, -2) if theta.ndim > 1 else theta[None]
    C = channels_of(theta.shape[-1])
    with counted_as("matrix exponential", macs=(6 + SQUARINGS) * flat.shape[0] * C**3):
        U = _differentiable(flat) if is_transformed(theta) else _BASIS(flat)[0]
    return U.view(*theta.shape[:-1], C, C)


def skew(theta: Tensor) -> Tensor:
    """Return A (..., C, C) with theta (..., C(C-1)/2) row by row in its strict lower triangle and -A^T above."""
    C = channels_of(theta.shape[-1])
    lower = theta.new_zeros(*theta.shape[:-1], C * C).index_copy(-1, constant(_places, theta, C), theta)
    lower = lower.unflatten(-1, (C, C))
    return lower - lower.mT


def channels_of(entries: int) -> int:
    """Return C, for the number of strict lower-triangle entries C(C-1)/2."""
    C = (1 + math.isqrt(1 + 8 * entries)) // 2
    if entries != C * (C - 1) // 2:
        raise ValueError(f"theta needs C(C-1)/2 entries for some C, got {entries}")
    return C


def _places(device: torch.device, C: int) -> Tensor:
    """Return where the strict lower triangle lies in a flat C x C matrix, row by row."""
    row, col = torch.tril_indices(C, C, -1, device=device)
    return row * C + col


def _taylor(device: torch.device) -> Tensor:
    """Return the 17 coefficients of the Taylor polynomial."""
    return torch.tensor(_TAYLOR, dtype=torch.float64, device=device)


def _cubics(device: torch.device, squarings: int) -> Tensor:
    """Return (4, 5): p(A / 2^s) as four cubic polynomials in A, highest first, that Horner's rule joins in A^4.

    The highest has the term of degree 16 as well, which makes it quartic.
    """
    scaled = [c * 0.5 ** (squarings * i) for i, c in enumerate(_TAYLOR)]
    rows = [[*scaled[4 * j : 4 * j + 4], scaled[16] if j == 3 else 0.0] for j in (3, 2, 1, 0)]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _differentiable(theta: Tensor) -> Tensor:
    """Return exp(skew(theta)), by operations that autograd, torch.func and torch.export follow."""
    A = skew(theta.to(float64_device(theta.device)).double())
    A2 = A @ A
    A3, A4 = A2 @ A, A2 @ A2
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    U, *lower = torch.tensordot(constant(_cubics, A, SQUARINGS), torch.stack([eye, A, A2, A3, A4]), 1)
    for cubic in lower:
        U = cubic + A4 @ U
    for _ in range(SQUARINGS):
        U = U @ U
    return U.to(theta.device, torch.promote_types(theta.dtype, torch.float32))


# --- the registered operator ----------------------------------------------------------------------


def forward(theta: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return U for theta (batch, C(C-1)/2), and what `backward` needs. Records no gradient."""
    C = channels_of(theta.shape[-1])
    with counted_as("matrix exponential", macs=(6 + SQUARINGS) * theta.shape[0] * C**3):
        if _has_kernels(theta):
            return _forward_by_kernels(theta, C)
        U, saved = _forward(theta.to(float64_device(theta.device)), C)
    return U.to(theta.device), saved


def _forward(theta: Tensor, C: int) -> tuple[Tensor, list[Tensor]]:
    # I, A .. A^4; V .. W; W^2 .. U. Room for the most squarings: the compiler needs a shape that no value decides.
    saved = theta.new_empty(9 + SQUARINGS, len(theta), C, C, dtype=torch.float64)
    eye, A, A2, A3, A4, *steps = saved.unbind()
    lower = theta.new_zeros(len(theta), C * C, dtype=torch.float64)
    lower = lower.index_copy_(1, constant(_places, theta, C), theta.double()).view(-1, C, C)
    torch.sub(lower, lower.mT, out=A)
    torch.bmm(A, A, out=A2)
    squarings = _squarings(A2)
    eye.zero_().diagonal(dim1=1, dim2=2).fill_(1)
    torch.bmm(A2, A, out=A3)
    torch.bmm(A2, A2, out=A4)
    torch.mm(constant(_cubics, theta, squarings), saved[:5].view(5, -1), out=saved[5:9].view(4, -1))
    for j in range(3):
        steps[j + 1].baddbmm_(A4, steps[j])
    for j in range(3, 3 + squarings):
        torch.bmm(steps[j], steps[j], out=steps[j + 1])
    U = steps[3 + squarings]
    return U.to(torch.promote_types(theta.dtype, torch.float32), copy=True), [saved, theta.new_full((), squarings)]


def _squarings(A2: Tensor) -> int:
    """Return how many squarings A needs, by the norm of A^2; 8 on a GPU, where the host would have to wait for it."""
    if A2.device.type != "cpu" or is_fake(A2) or A2.numel() == 0:
        return SQUARINGS
    # The eigenvalues of A come in pairs: the largest one is in the norm of A^2 twice.
    norm = math.sqrt(torch.linalg.vector_norm(A2, dim=(1, 2)).max().item() / math.sqrt(2))
    if not norm < MAX_NORM * 2**SQUARINGS:  # or not a number
        return SQUARINGS
    return math.ceil(math.log2(norm / MAX_NORM)) if norm > MAX_NORM else 0


def backward(g: Tensor, theta: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """Return the gradient of theta for the gradient g of U.

    Args:
        g: (batch, C, C).
        theta: any tensor of its dtype.
        saved: from `forward`.
    """
    if len(saved) > 2:
        return _backward_by_kernels(g, *saved).to(theta.dtype)
    return _backward(g.to(saved[0].device), *saved).to(g.device, theta.dtype)


def _backward(g: Tensor, values: Tensor, count: Tensor) -> Tensor:
    squarings = SQUARINGS if count.device.type != "cpu" or is_fake(count) else int(count)
    _, A, A2, _, A4, *steps = values[: 9 + squarings].unbind()
    g = g.double()
    for W in reversed(steps[3:-1]):  # W W
        W = W.mT
        g = torch.bmm(g, W).baddbmm_(W, g)
    # Powers of a skew matrix are skew or symmetric: no transposes from here on.
    cubics = [g]
    for _ in range(3):  # cubic + A4 V
        cubics.insert(0, torch.bmm(A4, cubics[0]))
    powers = torch.mm(constant(_cubics, g, squarings).t(), torch.stack(cubics).view(4, -1))
    _, dA, dA2, dA3, dA4 = powers.view(5, *g.shape).unbind()
    for V, g in zip(steps[:3], cubics[1:], strict=True):
        dA4.baddbmm_(g, V.mT)
    dA2.baddbmm_(dA3, A, alpha=-1).baddbmm_(dA4, A2).baddbmm_(A2, dA4)
    dA.baddbmm_(A2, dA3).baddbmm_(dA2, A, alpha=-1).baddbmm_(A, dA2, alpha=-1)
    return (dA - dA.mT).flatten(1).index_select(1, constant(_places, g, A.shape[-1]))


def _autograd(theta: Tensor) -> tuple[Tensor, list[Tensor]]:
    if wants_gradient([theta]):
        return _Basis.apply(theta), []
    results: tuple[Tensor, list[Tensor]] = _BASIS.without_autograd(theta)
    return results


class _Basis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor) -> Tensor:
        U, saved = _BASIS.without_autograd(theta)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(theta, *saved)
        return U

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Tensor | None:
        if g is None:
            return None
        theta, *saved = ctx.saved_tensors
        return _GRADIENT(g, theta, saved)


def _gradient_autograd(g: Tensor, theta: Tensor, saved: list[Tensor]) -> Tensor:
    if not wants_gradient([g, theta]):
        return _GRADIENT.without_autograd(g, theta, saved)
    (d,) = torch.autograd.grad(_differentiable(theta), theta, g, create_graph=True)
    return d


_BASIS = TorchOperator("basis(Tensor theta) -> (Tensor, Tensor[])", forward, _autograd)
_GRADIENT = TorchOperator(
    "basis_backward(Tensor g, Tensor theta, Tensor[] saved) -> Tensor", backward, _gradient_autograd
)


# --- by kernels, on a GPU -------------------------------------------------------------------------


def _has_kernels(theta: Tensor) -> bool:
    """True on a GPU, except for float64, whose gradient the kernels do not compute to float64 accuracy."""
    return theta.is_cuda and theta.dtype != torch.float64 and 0 < len(theta) < 2**16 and has_triton()


def _forward_by_kernels(theta: Tensor, C: int) -> tuple[Tensor, list[Tensor]]:
    """Return the results of `forward` in half the launches. What the gradient needs is saved in pairs of float16."""
    from chasm.ops.kernels import basis as kernels  # imports triton, which is not installed everywhere

    powers = theta.new_empty(4 + SQUARINGS, len(theta), C, C, dtype=torch.float64)
    A, *squares, A2, A3, A4 = powers.unbind()
    kernels.skew(theta, 0.5**SQUARINGS, A)
    torch.bmm(A, A, out=A2)
    torch.bmm(A2, A, out=A3)
    torch.bmm(A2, A2, out=A4)
    kernels.cubics(A, A2, A3, A4, constant(_taylor, A), powers[1:5])  # in memory that the squares take over later
    for j in (2, 1, 0):
        squares[j].baddbmm_(A4, squares[j + 1])
    for W, square in pairwise(squares):
        torch.bmm(W, W, out=square)
    U = torch.bmm(squares[-1], squares[-1])
    single, *pairs = kernels.halves(powers, U, constant(_exponentials, U))
    return single, [U, *pairs]


def _backward_by_kernels(g: Tensor, U: Tensor, powers: Tensor, nodes: Tensor) -> Tensor:
    """Return the gradient of theta to float32 accuracy, by products of pairs of float16 that amplify no rounding error.

    In g = U (S + K) with S symmetric and K skew only K has an effect, but S may be large: it leaves in float64. Then
    g = W W K becomes g W^T + W^T g = W (K + W K W^T) by each U = W W down to W = exp(2A), halved so that it never
    grows. There the gradient of 2A is the mean of exp(tA) K exp(-tA) for t from 0 to 2: with t = 1 + s and g = W K
    that of exp((s - 1) A) g exp((-s - 1) A), which is a sum over few s.
    """
    from chasm.ops.kernels import basis as kernels

    K, largest = kernels.skew_part(U, g)
    *squared, last = powers.unbind(1)
    g = kernels.product_of_pairs(last, K, largest)
    for W in reversed(squared):
        g = kernels.product_of_pairs(g, W.mT, factor=0.5, both=True)
    g = kernels.product_of_pairs(g, nodes.permute(0, 3, 1, 2, 4))
    return kernels.product_of_pairs(nodes.flatten(3), g, largest, factor=2.0, triangle=True)


def _exponentials(device: torch.device) -> Tensor:
    """Return (4, 9): coefficients with which `halves` sums exp((s - 1) A) for s and -s of _NODES, times root weights.

    The fit holds for all eigenvalues ia of A up to norm 200, and is as good as polynomials of degree 8.
    """
    a = 200 * 0.5**SQUARINGS * torch.linspace(0, math.pi / 2, 65, dtype=torch.float64)[:-1].cos()
    s = a.new_tensor([*(-s for s in reversed(_NODES)), *_NODES])
    weights = a.new_tensor([*reversed(_WEIGHTS), *_WEIGHTS]) / 2
    summed = torch.stack([*((1j * a) ** p for p in range(5)), *(torch.exp(1j * k * a) for k in (1, -1, 2, -2))], 1)
    wanted = weights.sqrt() * torch.exp(1j * a[:, None] * (s - 1))
    Q, R = torch.linalg.qr(torch.cat([summed.real, summed.imag]))  # torch.linalg.lstsq has no fake form
    fit = torch.linalg.solve_triangular(R, Q.mT @ torch.cat([wanted.real, wanted.imag]), upper=True)
    return fit.mT.contiguous().to(device)
