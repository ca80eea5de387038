"""theta -> skew-symmetric A -> orthogonal U = exp(A), in plain matrix products.

Scaling and squaring with a fixed number of steps: exp(A) = (p(A / 2^s))^(2^s), p the Taylor polynomial of degree 16.
Nothing depends on the values of A, so there is no host synchronisation and the call can be compiled, captured
in a CUDA graph and batched over many bases. All of it runs in float64: TF32 and autocast never touch float64
products, so a basis is as orthogonal under those settings as without them. On a CUDA device the gradient of theta in
float32 is computed in float32.
"""

import math
from typing import Any

import torch
from torch import Tensor

from chasm.ops._cost import counted_as
from chasm.ops.constants import constant
from chasm.ops.kernels import traced, transformed, triton_runs

# |A|/2^8 <= 0.78 for spectral norms up to 200: the Taylor remainder is then below 1e-16. Beyond that accuracy
# fades gently (1e-8 at 450), so a basis far outside the range of trained ones is still orthogonal in float32.
SQUARINGS = 8
_TAYLOR = [1 / math.factorial(i) for i in range(17)]
# sin(w)/w, the mean of cos(w s) for |s| < 1, as a mean over two s: to 5e-9 for w up to 1.2, 2 |A|/2^8 at norm 150.
_NODES = [0.33827115, 0.8598559102]
_WEIGHTS = [0.6497086626, 0.3502913324]


def channels_of(entries: int) -> int:
    """C from the number of strict lower-triangle entries C(C-1)/2."""
    C = (1 + math.isqrt(1 + 8 * entries)) // 2
    if entries != C * (C - 1) // 2:
        raise ValueError(f"theta needs C(C-1)/2 entries for some C, got {entries}")
    return C


def skew(theta: Tensor) -> Tensor:
    """theta (..., C(C-1)/2) -> A (..., C, C) with theta row by row in the strict lower triangle and -A^T above."""
    C = channels_of(theta.shape[-1])
    lower = theta.new_zeros(*theta.shape[:-1], C * C).index_copy(-1, constant(_places, theta, C), theta)
    lower = lower.unflatten(-1, (C, C))
    return lower - lower.mT


def _places(device: torch.device, C: int) -> Tensor:
    """Of the strict lower triangle in a flat C x C matrix, row by row."""
    row, col = torch.tril_indices(C, C, -1, device=device)
    return row * C + col


def _taylor(device: torch.device) -> Tensor:
    return torch.tensor(_TAYLOR, dtype=torch.float64, device=device)


def orthogonal_basis(theta: Tensor) -> Tensor:
    """U = exp(skew(theta)) for theta (..., C(C-1)/2), any leading batch; in theta's dtype, at least float32."""
    out_dtype = torch.promote_types(theta.dtype, torch.float32)
    # Apple GPUs have no float64; theta is small enough to go through the CPU.
    flat = theta.cpu() if theta.device.type == "mps" else theta
    flat = flat.flatten(0, -2) if flat.ndim > 1 else flat[None]
    with counted_as("matrix exponential"):
        if torch.is_grad_enabled() and theta.requires_grad and not transformed():
            U = _Exponential.apply(flat)[0]
        else:
            U = _exponential(flat)[0]
    return U.view(*theta.shape[:-1], *U.shape[1:]).to(theta.device, out_dtype)


def _kernels_fit(theta: Tensor) -> bool:
    """Whether kernels of ours may run, for theta (batch, C(C-1)/2): a third of the launches."""
    if torch.is_grad_enabled() and theta.requires_grad:  # autograd cannot see into kernels
        return False
    return theta.is_cuda and theta.numel() > 0 and len(theta) < 2**16 and not traced(theta) and triton_runs()


def _exponential(theta: Tensor, kept: Tensor | None = None) -> tuple[Tensor, ...]:
    """exp(skew(theta)) in float64 for theta (batch, C(C-1)/2), and what was met on the way.

    Where kernels fit, kept (4 + SQUARINGS, batch, C, C) is memory for the scaled A, what was squared, A^2, A^3, A^4.
    """
    fused = _kernels_fit(theta)
    place = [None] * (4 + SQUARINGS) if kept is None else kept.unbind()
    if fused:
        from chasm.ops.kernels import small  # imports triton, which not everybody has

        A = small.skew(theta, channels_of(theta.shape[-1]), 0.5**SQUARINGS, place[0])
    else:
        A = skew(theta.to(torch.float64)) * 0.5**SQUARINGS
    A2 = torch.bmm(A, A, out=place[-3])
    A3, A4 = torch.bmm(A2, A, out=place[-2]), torch.bmm(A2, A2, out=place[-1])
    t = constant(_taylor, A)
    # Degree 16 in six products: Horner's rule in A^4 over four cubic polynomials in A, the last with the term of A^16.
    if fused:
        cubics = small.cubics(A, A2, A3, A4, t, None if kept is None else kept[1:5])  # free again when squares come
    else:
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
        cubics = (t[:16].view(4, 4, 1, 1, 1) * torch.stack([eye, A, A2, A3])).sum(1)  # (4, batch, C, C)
        cubics = torch.stack([*cubics[:3], torch.add(cubics[3], A4, alpha=_TAYLOR[16])])
    steps = [cubics[3]]
    for j in (2, 1, 0):
        add = cubics[j].baddbmm_ if fused else cubics[j].baddbmm  # in place: a library copies what it adds to
        steps.append(add(A4, steps[-1]))
    for j in range(SQUARINGS):
        steps.append(torch.bmm(steps[-1], steps[-1], out=place[2 + j] if j < SQUARINGS - 1 else None))
    return steps[-1], A, A2, A4, *steps[:-1]


class _Exponential(torch.autograd.Function):
    """theta (batch, C(C-1)/2) -> U, then what its gradient needs of `_exponential`. Half the launches of autograd."""

    @staticmethod
    def forward(theta: Tensor) -> tuple[Tensor, ...]:
        if theta.dtype == torch.float64 or not _kernels_fit(theta):
            U, *rest = _exponential(theta)
            return U.to(torch.promote_types(theta.dtype, torch.float32)), *rest
        C = channels_of(theta.shape[-1])
        kept = torch.empty(4 + SQUARINGS, len(theta), C, C, dtype=torch.float64, device=theta.device)
        U, *_ = _exponential(theta, kept)
        from chasm.ops.kernels import small

        single, *pairs = small.halves(kept, U, constant(_exponentials, U))
        return single, U, *pairs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> Any:
        return None if g is None else _Gradient.apply(g, *ctx.saved_tensors)


class _Gradient(torch.autograd.Function):
    """The backward of `_Exponential`, itself differentiable: the slow way, through autograd."""

    @staticmethod
    def forward(g: Tensor, theta: Tensor, *kept: Tensor) -> Tensor:
        short = len(kept) == 3
        if short and not _kernels_fit(theta):  # recorded now, though the forward was not
            short, kept = False, _exponential(theta)[1:]
        gradient: Any = _gradient_by_pairs if short else _gradient
        return gradient(g, *kept).to(theta.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.steps = len(inputs) - 2
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> Any:
        g, theta = ctx.saved_tensors
        with torch.enable_grad():
            g, theta = g.detach().requires_grad_(), theta.detach().double().requires_grad_()
            (d,) = torch.autograd.grad(_exponential(theta)[0], theta, g.double(), create_graph=True)
            dg, dtheta = torch.autograd.grad(d, (g, theta), gg.double())
        return dg, dtheta.to(gg.dtype), *(None,) * ctx.steps


def _gradient(g: Tensor, A: Tensor, A2: Tensor, A4: Tensor, *steps: Tensor) -> Tensor:
    """Gradient of theta from the gradient g of U, in float64."""
    g = g.to(A.dtype)
    for W in reversed(steps[3:]):  # W W
        g = (g @ W.mT).baddbmm_(W.mT, g)
    # Powers of a skew matrix are skew or symmetric: no transposes from here on.
    cubics, dA4 = [g], torch.zeros_like(g)
    for V in reversed(steps[:3]):  # cubic + A4 V
        dA4.baddbmm_(g, V.mT)
        g = A4 @ g
        cubics.append(g)
    dA4.add_(g, alpha=_TAYLOR[16])
    t = constant(_taylor, g)[:16].view(4, 4, 1, 1, 1)
    _, dA, dA2, dA3 = (t * torch.stack(cubics)[:, None]).sum(0)
    dA2 = dA2.baddbmm_(dA3, A, alpha=-1).baddbmm_(dA4, A2).baddbmm_(A2, dA4)
    dA = dA.baddbmm_(A2, dA3).baddbmm_(dA2, A, alpha=-1).baddbmm_(A, dA2, alpha=-1)
    d = (dA - dA.mT).flatten(1).index_select(1, constant(_places, g, A.shape[-1]))
    return d * 0.5**SQUARINGS


def _exponentials(device: torch.device) -> Tensor:
    """exp((s - 1) A) for s and -s of _NODES, by the root of their weights, as sums of what `small.halves` sums: (4, 9).

    A fit as good as one by polynomials of degree 8, for all eigenvalues ia of A up to norm 200.
    """
    a = 200 * 0.5**SQUARINGS * torch.linspace(0, math.pi / 2, 65, dtype=torch.float64)[:-1].cos()
    s = a.new_tensor([*(-s for s in reversed(_NODES)), *_NODES])
    weights = a.new_tensor([*reversed(_WEIGHTS), *_WEIGHTS]) / 2
    summed = torch.stack([*((1j * a) ** p for p in range(5)), *(torch.exp(1j * k * a) for k in (1, -1, 2, -2))], 1)
    wanted = weights.sqrt() * torch.exp(1j * a[:, None] * (s - 1))
    fit = torch.linalg.lstsq(*(torch.cat([x.real, x.imag]) for x in (summed, wanted))).solution
    return fit.mT.contiguous().to(device)


def _gradient_by_pairs(g: Tensor, U: Tensor, powers: Tensor, nodes: Tensor) -> Tensor:
    """Gradient of theta in float32, by products of pairs of float16: on the way back nothing amplifies rounding.

    In g = U (S + K), S symmetric and K skew, only K has an effect but S may be large: it leaves in float64. Then
    g = W W K becomes g W^T + W^T g = W (K + W K W^T) by each U = W W down to W = exp(2A), halved so that it never
    grows. There the gradient of 2A is the mean of exp(tA) K exp(-tA) for t from 0 to 2: with t = 1 + s and g = W K
    that of exp((s - 1) A) g exp((-s - 1) A), which is a sum over few s.
    """
    from chasm.ops.kernels import small

    K, largest = small.skew_part(U, g)
    *squared, last = powers.unbind(1)
    g = small.pairs(last, K, largest)
    for W in reversed(squared):
        g = small.pairs(g, W.mT, factor=0.5, both=True)
    g = small.pairs(g, nodes.permute(0, 3, 1, 2, 4))
    return small.pairs(nodes.flatten(3), g, largest, factor=2.0, triangle=True)
