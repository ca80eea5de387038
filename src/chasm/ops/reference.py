"""The paper's equations, literally: the oracle every other form is tested against. Never optimised.

    X^[k] = rfft(X)[k],   Z^[k] = M(k) X^[k],   Z = irfft(Z^),   M(k) = U diag(lambda_k) U^T

M(k) is real and acts by complex linear extension. U = exp(A) with A skew-symmetric, lambda = softplus(Interp(Gamma)).
Works in any float dtype the FFT takes; tests use float64.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus


def skew(theta: Tensor) -> Tensor:
    """Return A (..., C, C), A = -A^T, with theta (..., C(C-1)/2) row by row in the strict lower triangle."""
    channels = (1 + int((1 + 8 * theta.shape[-1]) ** 0.5 + 0.5)) // 2
    rows, cols = torch.tril_indices(channels, channels, -1, device=theta.device)
    A = theta.new_zeros(*theta.shape[:-1], channels, channels)
    A[..., rows, cols] = theta
    return A - A.mT


def basis(theta: Tensor) -> Tensor:
    """Return U = exp(A) in SO(C)."""
    return torch.linalg.matrix_exp(skew(theta))


def interpolate(table: Tensor, K: int) -> Tensor:
    """Return Gamma (B, C) at K frequencies, linear in the normalised frequency k/(K-1) with both end points aligned."""
    B = table.shape[0]
    rows = []
    for k in range(K):
        position = k * (B - 1) / (K - 1) if K > 1 else 0.0
        low = min(int(position), max(B - 2, 0))
        t = position - low
        rows.append(table[low] if t == 0 else (1 - t) * table[low] + t * table[low + 1])
    return torch.stack(rows)


def gains(table: Tensor, n: int, kind: str = "positive", phase_table: Tensor | None = None) -> Tensor:
    """Return lambda (K, C), K = n//2 + 1, for an axis of length n.

    Args:
        table: Gamma (B, C).
        n: length of the axis.
        kind: "positive", "signed" or "complex".
        phase_table: phi (B, C) of complex gains, which counts as 0 at DC and Nyquist.
    """
    K = n // 2 + 1
    values = interpolate(table, K)
    if kind == "signed":
        return values
    values = softplus(values)
    if kind == "complex":
        assert phase_table is not None
        phase = interpolate(phase_table, K)
        real_bins = [0, K - 1] if n % 2 == 0 else [0]
        keep = torch.ones(K, 1, dtype=phase.dtype, device=phase.device)
        keep[real_bins] = 0
        values = torch.polar(values, phase * keep)
    return values


def axis_pass(x: Tensor, U: Tensor, lam: Tensor, dim: int) -> Tensor:
    """One axis pass.

    Args:
        x: (B, C, *spatial).
        U: (C, C) shared, or (K, C, C) untied.
        lam: gains (K, C).
        dim: the axis of x.
    """
    n = x.shape[dim]
    X = torch.fft.rfft(x, dim=dim)  # (B, C, .., K, ..)
    X = X.movedim(1, -1).movedim(dim - 1, -2)  # (B, .., K, C): the coefficient vector of a frequency comes last
    U = U.to(X.dtype)  # real, applied by complex linear extension
    k = "k" if U.ndim == 3 else ""
    V = torch.einsum(f"{k}dc,...kd->...kc", U, X)  # U^T v
    Z = torch.einsum(f"{k}cd,...kd->...kc", U, lam * V)  # M(k) v = U (lambda_k * (U^T v))
    return torch.fft.irfft(Z.movedim(-2, dim - 1).movedim(-1, 1), n=n, dim=dim)
