"""Many coils: root-sum-of-squares, sensitivity maps from the fully sampled centre, and fewer virtual coils."""

import torch
from torch import Tensor

from chasm.mri.fft import ifft2c

MIN_SIGNAL = 0.02  # share of the maximum of a low-resolution image; weaker pixels are air


def rss(images: Tensor, dim: int = 1) -> Tensor:
    """Return the root of the sum over coils of squared magnitudes.

    Args:
        images: complex (B, Q, H, W).
        dim: the axis of the coils, which becomes 1.

    >>> rss(torch.tensor([3 + 0j, 4j]).view(1, 2, 1, 1))
    tensor([[[[5.]]]])
    """
    return images.abs().square().sum(dim, keepdim=True).sqrt()


def estimate_maps(y: Tensor, center: tuple[int, int], floor: float = MIN_SIGNAL) -> Tensor:
    """Return sensitivity maps (B, Q, H, W) from the calibration centre of k-space.

    They are low-resolution coil images (the centre square under a Hann window, against ringing) divided by their
    root-sum-of-squares. This needs no fit, and is accurate if the object is smooth at that resolution; `espirit_maps`
    is the more accurate method. Squared maps sum to 1, and to 0 in air.

    Args:
        y: k-space (B, Q, H, W).
        center: the first and the end column of the calibration block: `Mask.center`.
        floor: a pixel is air where the low-resolution image is below this share of its maximum.

    Raises:
        ValueError: when the calibration block has fewer than 2 columns.
    """
    first, end = center
    lines = end - first
    H, W = y.shape[-2:]
    if not 2 <= lines <= W or first < 0 or end > W:
        got = f"columns {first} to {end - 1} of {W}" if lines > 0 else "none"
        raise ValueError(f"coil sensitivities need 2 or more centre columns, fully sampled: got {got}")
    real = y.real.dtype
    columns = hann(torch.arange(W, device=y.device, dtype=real), (first + end - 1) / 2, lines)
    rows = hann(torch.arange(H, device=y.device, dtype=real), float(H // 2), lines)
    low = ifft2c(y * columns * rows[:, None])
    total = rss(low)
    inside = total > floor * total.amax((-2, -1), keepdim=True)
    return torch.where(inside, low / total.clamp_min(torch.finfo(real).tiny), 0)


def compression_matrix(calibration: Tensor, coils: int) -> Tensor:
    """Return the matrix (coils, Q) that combines Q coils into fewer virtual ones that keep the most signal.

    They are the first principal components (Buehrer et al., MRM 57:1131, 2007). Its rows are orthonormal, so that white
    noise stays white. Apply it with `torch.einsum("pq,bqhw->bphw", matrix, y)`.

    Args:
        calibration: k-space (Q, H, W): the centre, or all that was measured.
        coils: the number of virtual coils.

    Example:
        >>> y = torch.randn(6, 8, 8, dtype=torch.complex64)
        >>> matrix = compression_matrix(y, 2)
        >>> torch.allclose(matrix @ matrix.mH, torch.eye(2) + 0j, atol=1e-5)
        True
    """
    available = len(calibration)
    if not 1 <= coils <= available:
        raise ValueError(f"{coils} virtual coils of {available}: expected 1 to {available}")
    flat = calibration.flatten(1).to(torch.complex128)
    vectors = torch.linalg.eigh(flat @ flat.mH).eigenvectors
    return vectors[:, -coils:].flip(1).mH.to(calibration.dtype)


def hann(at: Tensor, middle: float | Tensor, width: int | Tensor) -> Tensor:
    """Return a raised cosine around `middle`, zero beyond its width.

    Args:
        at: positions.
        middle: position of the value 1.
        width: number of whole positions with a weight.
    """
    t = (at - middle) / (width + 1)  # +1: the outermost lines keep a little weight
    return torch.where(t.abs() < 0.5, 0.5 + 0.5 * torch.cos(2 * torch.pi * t), 0)
