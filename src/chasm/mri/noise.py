"""Estimate the noise of receiver coils, and make coils that share noise independent (prewhitening)."""

import math

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
        covariance = torch.cov(noise.to(torch.complex128)).reshape(coils, coils)
        power = covariance.diagonal().real.mean()
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if failed or power <= 0:
            raise ValueError("the noise of some coils is zero or the same: leave those coils out, or do not prewhiten")
        eye = torch.eye(coils, dtype=factor.dtype, device=factor.device)
        matrix: Tensor = power.sqrt() * torch.linalg.solve_triangular(factor, eye, upper=False)
        return matrix.to(torch.complex64)


def edge_noise(kspace: Tensor) -> float:
    """Return the root-mean-square of the noise of one sample, from the samples that are farthest from the centre.

    They are those of the outermost eighth of the rows and the outermost half of the columns. Their median is taken,
    which few strong values do not change. Where the signal reaches the edge of k-space this is more than the noise.
    The result is the root of the mean over coils of E |n|^2, and 0 if nothing was measured.

    Args:
        kspace: (1, Q, H, W), zero frequency in the middle. Where nothing was measured it is zero, up to the rounding
            that a transform to an image and back leaves.

    Example:
        >>> noise = 3 * torch.randn(1, 2, 64, 64, dtype=torch.complex64)
        >>> abs(edge_noise(noise) - 3) < 0.3
        True
    """
    top = float(kspace.abs().max())
    if not top > 0:
        return 0.0
    power = (kspace[0].abs() / top).square()  # the squares of large values are beyond float32
    filled = (power > torch.finfo(power.dtype).eps ** 2).any(0)

    def outermost(used: Tensor, fraction: float) -> Tensor:
        at = used.nonzero()[:, 0]
        order = (at - len(used) // 2).abs().argsort(descending=True, stable=True)
        return at[order[: math.ceil(len(at) * fraction)]]

    rows, columns = outermost(filled.any(1), 1 / 8), outermost(filled.any(0), 1 / 2)
    edge = power[:, rows][:, :, columns].flatten(1)
    # the median of an exponential distribution is log 2 times its mean
    return top * math.sqrt(float((edge.median(1).values / math.log(2)).mean()))
