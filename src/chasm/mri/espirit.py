"""ESPIRiT: coil sensitivities as eigenvectors, several sets if one is not enough (Uecker et al., MRM 71:990, 2014).

Every patch of the calibration centre, over all coils, lies in the span V of a few kernels. Projecting all patches of
k-space onto V and averaging where they overlap is a convolution: in every pixel, a matrix G(r) of coils x coils.

    G_pq(r) = sum_d h_pq[d] exp(-2 pi i d.r / N),     h_pq[d] = 1/k^2 sum_{b - a = d} (V V^H)[(a, p), (b, q)]

Measured k-space does not change under the projection. Where there is signal, the sensitivities are therefore the
eigenvectors of G with eigenvalue 1. There are two of them where the field of view is too small and the object folds
over itself.
"""

import torch
from torch import Tensor

from chasm.common.precision import float64_device, full_precision

KERNEL = 6  # samples along each axis
MIN_GOOD_COLUMNS = 12  # columns of the centre; maps of fewer have holes where there is signal
MAX_CALIBRATION = 24  # rows and columns of the centre that are used
MIN_EIGENVALUE = 0.001  # relative to the largest eigenvalue of the calibration matrix: smaller ones are noise
CROP = 0.8  # a pixel with a smaller eigenvalue has no signal, hence no sensitivities
ROWS_AT_A_TIME = 32


def espirit_maps(y: Tensor, center: tuple[int, int], sets: int = 1, crop: float = CROP) -> Tensor:
    """Return sensitivity maps from the calibration centre of k-space.

    Args:
        y: k-space (B, Q, H, W).
        center: the first and the end column of the fully sampled centre: `Mask.center`.
        sets: number of sets of maps; 2 if the object is larger than the field of view.
        crop: a map is zero where its eigenvalue is smaller.

    Returns:
        (B, Q, H, W), or (B, sets, Q, H, W) for several sets. The squares of a set sum to 1 where it is not zero. Its
        phase is relative to the first principal component of the coils.

    Example:
        >>> y = torch.randn(1, 3, 16, 16, dtype=torch.complex64)
        >>> espirit_maps(y, (4, 12), sets=2).shape
        torch.Size([1, 2, 3, 16, 16])
    """
    first, end = center
    height, coils = y.shape[-2], y.shape[1]
    columns, rows = min(end - first, MAX_CALIBRATION), min(height, MAX_CALIBRATION)
    if columns < KERNEL or rows < KERNEL:
        needed = f"ESPIRiT needs {KERNEL} or more centre columns, fully sampled: got {max(0, end - first)}"
        raise ValueError(f"{needed}: use estimate_maps (--maps lowres)")
    if not 1 <= sets <= coils:
        raise ValueError(f"{sets} sets of maps for {coils} coils: expected 1 to {coils}")
    left = (first + end - columns) // 2
    top = height // 2 - rows // 2
    each = [_maps(k, k[:, top : top + rows, left : left + columns], sets, crop) for k in y]
    maps = torch.stack(each)
    return maps[:, 0] if sets == 1 else maps


def _maps(kspace: Tensor, calibration: Tensor, sets: int, crop: float) -> Tensor:
    """Return maps (sets, Q, H, W) from k-space (Q, H, W) and its centre (Q, h, w)."""
    H, W = kspace.shape[-2:]
    with full_precision(kspace):
        kernels = _correlations(calibration)  # (2k - 1, 2k - 1, Q, Q)
        flat = calibration.flatten(1)
        reference = torch.linalg.eigh(flat @ flat.mH).eigenvectors[:, -1]  # the strongest combination of coils
        along_columns = torch.einsum("yxpq,xw->wypq", kernels, _phase_factors(W, kspace))
        waves, maps = _phase_factors(H, kspace), []
        for start in range(0, H, ROWS_AT_A_TIME):
            matrix = torch.einsum("wypq,yh->hwpq", along_columns, waves[:, start : start + ROWS_AT_A_TIME])
            values, vectors = torch.linalg.eigh(matrix)
            chosen = vectors[..., -sets:].flip(-1)  # (h, W, Q, sets), the largest first
            phase = torch.einsum("q,hwqs->hws", reference.conj(), chosen)
            chosen = chosen * torch.exp(-1j * phase.angle())[:, :, None]
            maps.append(torch.where(values[..., -sets:].flip(-1)[:, :, None] >= crop, chosen, 0))
        return torch.cat(maps).permute(3, 2, 0, 1).contiguous()


def _correlations(calibration: Tensor) -> Tensor:
    """Return the convolution h of the equation above, (2k - 1, 2k - 1, Q, Q)."""
    coils, k = len(calibration), KERNEL
    patches = calibration.unfold(1, k, 1).unfold(2, k, 1)  # (Q, n, m, k, k)
    patches = patches.permute(1, 2, 3, 4, 0).flatten(0, 1).flatten(1)  # (patches, k k Q)
    values, vectors = torch.linalg.eigh(patches.T @ patches.conj())
    span = vectors[:, values > MIN_EIGENVALUE * values[-1]]
    projection = (span @ span.mH).reshape(k, k, coils, k, k, coils)
    h = torch.zeros(2 * k - 1, 2 * k - 1, coils, coils, dtype=projection.dtype, device=projection.device)
    for y in range(k):
        for x in range(k):  # (p, b_y, b_x, q) -> (b_y, b_x, p, q)
            h[k - 1 - y : 2 * k - 1 - y, k - 1 - x : 2 * k - 1 - x] += projection[y, x].permute(1, 2, 0, 3)
    return h / k**2


def _phase_factors(n: int, like: Tensor) -> Tensor:
    """Return exp(-2 pi i d r / n), (2k - 1, n), for the distances d of a kernel and the centred pixels r."""
    home = float64_device(like.device)
    d = torch.arange(1 - KERNEL, KERNEL, device=home, dtype=torch.float64)
    r = torch.arange(n, device=home, dtype=torch.float64) - n // 2
    angle = -2 * torch.pi * d[:, None] * r / n
    return torch.polar(torch.ones_like(angle), angle).to(like.device, like.dtype)
