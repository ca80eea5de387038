"""Many coils: root-sum-of-squares, and sensitivity maps from the fully sampled centre."""

import torch
from torch import Tensor

from chasm.mri.fft import ifft2c


def rss(images: Tensor, dim: int = 1) -> Tensor:
    """Root of the sum over coils of squared magnitudes: complex (B, Q, H, W) -> real (B, 1, H, W)."""
    return images.abs().square().sum(dim, keepdim=True).sqrt()


def estimate_maps(y: Tensor, center: tuple[int, int], floor: float = 0.02) -> Tensor:
    """Sensitivity maps (B, Q, H, W) from the calibration centre of k-space (B, Q, H, W).

    Low-resolution coil images (the centre square under a Hann window, against ringing) divided by their
    root-sum-of-squares: simple, no fit, and as good as the object is smooth at that resolution. Not ESPIRiT.
    Squared maps sum to 1, and to 0 where the low-resolution image is below `floor` of its maximum (air).
    `center` is the first and the end column of the calibration block: `Mask.center`.
    """
    first, end = center
    lines = end - first
    H, W = y.shape[-2:]
    if not 2 <= lines <= W or first < 0 or end > W:
        got = f"columns {first} to {end - 1} of {W}" if lines > 0 else "none"
        raise ValueError(f"coil sensitivities need 2 or more centre columns, fully sampled: got {got}")
    real = y.real.dtype
    columns = _hann(torch.arange(W, device=y.device, dtype=real), (first + end - 1) / 2, lines)
    rows = _hann(torch.arange(H, device=y.device, dtype=real), float(H // 2), lines)
    low = ifft2c(y * columns * rows[:, None])
    total = rss(low)
    inside = total > floor * total.amax((-2, -1), keepdim=True)
    return torch.where(inside, low / total.clamp_min(torch.finfo(real).tiny), 0)


def _hann(at: Tensor, middle: float, width: int) -> Tensor:
    """Raised cosine of the given width around `middle`, zero beyond it."""
    t = (at - middle) / (width + 1)  # +1: the outermost lines keep a little weight
    return torch.where(t.abs() < 0.5, 0.5 + 0.5 * torch.cos(2 * torch.pi * t), 0)
