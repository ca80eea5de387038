"""Image and overlap metrics. `chasm.tasks.protocols` defines the meaning of a reported number."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Rows = dict[str, Tensor]  # each (B, ...): one row per slice


def _exact(x: Tensor) -> Tensor:
    """Convert to float64, so that sums of squares do not cancel, or to float32 on Apple GPUs, which have no float64."""
    return x.float() if x.device.type == "mps" else x.double()


def _pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if output.shape != target.shape or output.ndim != 4:
        got = f"{tuple(output.shape)} and {tuple(target.shape)}"
        raise ValueError(f"expected output and target of one shape (B, C, H, W), got {got}")
    return _exact(output), _exact(target)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each image of (B, C, H, W): (B,)."""
    a, b = _pair(output, target)
    return (a - b).square().mean((1, 2, 3))


def psnr(output: Tensor, target: Tensor, data_range: Tensor | float) -> Tensor:
    """Return the PSNR of each image in dB, (B,): 10 log10(range^2 / MSE), infinite for equal images.

    Args:
        output: images, (B, C, H, W).
        target: images of the same shape.
        data_range: a number, or one per image, (B,).

    >>> target = torch.ones(1, 1, 8, 8)
    >>> psnr(target - 0.1, target, data_range=1).item()  # doctest: +ELLIPSIS
    19.99...
    """
    error = mse(output, target)
    return 10 * torch.log10(torch.as_tensor(data_range, device=error.device).to(error.dtype) ** 2 / error)


def nmse(output: Tensor, target: Tensor) -> Tensor:
    """Return the normalised squared error of each image of (B, C, H, W), |output - target|^2 / |target|^2: (B,)."""
    a, b = _pair(output, target)
    return (a - b).square().sum((1, 2, 3)) / b.square().sum((1, 2, 3))


def ssim(output: Tensor, target: Tensor, data_range: Tensor | float) -> Tensor:
    """Return the structural similarity of each image, averaged over channels, (B,).

    As scikit-image computes it by default: 7x7 uniform window, sample covariance, K1 = 0.01, K2 = 0.03, and only
    windows that lie inside the image.

    Args:
        output: images, (B, C, H, W).
        target: images of the same shape.
        data_range: a number, or one per image, (B,).
    """
    a, b = _pair(output, target)
    window = 7
    if min(a.shape[-2:]) < window:
        raise ValueError(f"SSIM needs images of {window}x{window} or more, got {tuple(a.shape[-2:])}")
    r = torch.as_tensor(data_range, device=a.device).to(a.dtype).reshape(-1, 1, 1, 1)
    c1, c2 = (0.01 * r) ** 2, (0.03 * r) ** 2

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, window, stride=1)

    unbias = window**2 / (window**2 - 1)
    ma, mb = mean(a), mean(b)
    va, vb, cov = (unbias * (mean(p) - q) for p, q in ((a * a, ma * ma), (b * b, mb * mb), (a * b, ma * mb)))
    similarity = (2 * ma * mb + c1) * (2 * cov + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2))
    return similarity.mean((1, 2, 3))


def overlap_counts(output: Tensor, target: Tensor, regions: Mapping[str, Sequence[int]]) -> Rows:
    """Count the pixels of each region in both maps, in the output and in the target: (B, 3) by name.

    Args:
        output: label maps, (B, H, W).
        target: label maps of the same shape.
        regions: the classes of each region, by its name.
    """
    rows = {}
    for name, classes in regions.items():
        members = torch.as_tensor(classes, device=output.device)
        a, b = torch.isin(output, members), torch.isin(target, members)
        rows[name] = torch.stack([x.flatten(1).sum(1) for x in (a & b, a, b)], dim=1)
    return rows


def dice_iou(counts: Tensor) -> tuple[float, float]:
    """Return Dice and IoU of a region from its row of `overlap_counts`. A region that is empty in both maps scores 1.

    >>> dice_iou(torch.tensor([1, 2, 2]))
    (0.5, 0.3333333333333333)
    """
    both, a, b = (float(c) for c in counts)
    if a + b == 0:
        return 1.0, 1.0
    return 2 * both / (a + b), both / (a + b - both)
