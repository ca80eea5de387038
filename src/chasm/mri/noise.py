"""Noise of receiver coils: coils that share noise are made independent before they are combined (prewhitening)."""

import torch
from torch import Tensor

from chasm.common.precision import full_precision


def whitening_matrix(noise: Tensor) -> Tensor:
    """Return the matrix (Q, Q) that makes the noise of Q coils independent and of equal strength.

    With the covariance Psi = L L^H of the noise it is s L^-1, where s^2 is the mean noise power of the coils, so that
    the data keeps its scale.

    Args:
        noise: (Q, samples) complex, measured without a signal.

    Raises:
        ValueError: when there are too few samples to tell the coils apart.

    Example:
        >>> mixing = torch.tensor([[1.0, 0.5], [0.0, 2.0]], dtype=torch.complex64)
        >>> noise = mixing @ torch.randn(2, 100_000, dtype=torch.complex64)
        >>> white = whitening_matrix(noise) @ noise
        >>> torch.allclose(torch.cov(white).abs() / 2.625, torch.eye(2), atol=0.05)
        True
    """
    coils, samples = noise.shape
    if samples < 2 * coils:
        raise ValueError(f"noise of {samples} samples cannot tell {coils} coils apart: {2 * coils} or more are needed")
    with full_precision(noise):
        covariance = torch.cov(noise.to(torch.complex128))
        covariance = covariance.reshape(coils, coils)
        power = covariance.diagonal().real.mean()
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if failed or power <= 0:
            raise ValueError("the noise of some coils is zero or the same: leave such coils out, or do not prewhiten")
        eye = torch.eye(coils, dtype=factor.dtype, device=factor.device)
        matrix: Tensor = power.sqrt() * torch.linalg.solve_triangular(factor, eye, upper=False)
        return matrix.to(torch.complex64)


def prewhiten(kspace: Tensor, noise: Tensor) -> Tensor:
    """Apply `whitening_matrix(noise)` to the coils of k-space (..., Q, H, W)."""
    matrix = whitening_matrix(noise).to(kspace.device)
    return torch.einsum("pq,...qhw->...phw", matrix, kspace)
