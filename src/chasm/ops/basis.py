"""theta -> skew-symmetric A -> orthogonal U = exp(A), in plain matrix products.

Scaling and squaring with a fixed number of steps: exp(A) = (p(A / 2^s))^(2^s), p the Taylor polynomial of degree 16.
Nothing depends on the values of A, so there is no host synchronisation and the call can be compiled, captured
in a CUDA graph and batched over many bases. All of it runs in float64: TF32 and autocast never touch float64
products, so a basis is as orthogonal under those settings as without them.
"""

import math

import torch
from torch import Tensor

from chasm.ops._cost import counted_as
from chasm.ops.constants import constant

# |A|/2^8 <= 0.78 for spectral norms up to 200: the Taylor remainder is then below 1e-16. Beyond that accuracy
# fades gently (1e-8 at 450), so a basis far outside the range of trained ones is still orthogonal in float32.
SQUARINGS = 8
_TAYLOR = [1 / math.factorial(i) for i in range(17)]


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
    return torch.tensor(_TAYLOR[:16], dtype=torch.float64, device=device).view(4, 4, 1, 1, 1)


def orthogonal_basis(theta: Tensor) -> Tensor:
    """U = exp(skew(theta)) for theta (..., C(C-1)/2), any leading batch; in theta's dtype, at least float32."""
    out_dtype = torch.promote_types(theta.dtype, torch.float32)
    # Apple GPUs have no float64; theta is small enough to go through the CPU.
    work_device = torch.device("cpu") if theta.device.type == "mps" else theta.device
    A = skew(theta.to(work_device, torch.float64)) * 0.5**SQUARINGS
    batch, A = A.shape, A.flatten(0, -3) if A.ndim > 2 else A[None]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    with counted_as("matrix exponential"):
        A2 = A @ A
        A3, A4 = A2 @ A, A2 @ A2
        # Degree 16 in six products: Horner's rule in A^4 over four cubic polynomials in A.
        cubics = (constant(_taylor, A) * torch.stack([eye, A, A2, A3])).sum(1)  # (4, batch, C, C)
        U = torch.add(cubics[3], A4, alpha=_TAYLOR[16])
        for j in (2, 1, 0):
            U = torch.baddbmm(cubics[j], A4, U)
        for _ in range(SQUARINGS):
            U = U @ U
    return U.view(batch).to(theta.device, out_dtype)
