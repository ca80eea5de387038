"""Reconstruction without learning: total variation and SENSE.

    min_x  1/2 ||A x - y||^2 + lam ||grad x||_{2,1}        total variation of the complex image (Lustig et al., 2007)
    min_x  1/2 ||A x - y||^2 + lam/2 ||x||^2               SENSE (Pruessmann et al., 2001), by conjugate gradients

Total variation is solved by ADMM on z = grad x (Boyd et al., 2011): a linear solve for x, shrinkage for z. With one
coil both A^H A and the (periodic) grad^H grad are diagonal in k-space and the solve is exact; with several it is a few
steps of conjugate gradients.

>>> from chasm.mri import Operator, create_mask
>>> A = Operator(create_mask("equispaced", 32).tensor())
>>> y = A.forward(torch.ones(1, 1, 32, 32))
>>> total_variation(A, y, iterations=5).shape
torch.Size([1, 1, 32, 32])
"""

from collections.abc import Callable

import torch
from torch import Tensor

from chasm.mri.operators import Operator


def total_variation(A: Operator, y: Tensor, lam: float = 3e-3, iterations: int = 50) -> Tensor:
    """Return complex images (B, M, H, W) with little total variation, all slices at once.

    Args:
        A: the measurement. With several sets of maps, each set has an image.
        y: k-space, as `A.forward` returns it.
        lam: weight of the total variation, in units of each slice's largest zero-filled magnitude. Scaling the data, or
            the maps, then scales the image and changes nothing else.
        iterations: steps of ADMM.
    """
    if lam <= 0 or iterations < 1:
        raise ValueError(f"total variation needs lam > 0 and iterations >= 1, got {lam:g} and {iterations}")
    A, scale = _normalised(A)
    back = A.adjoint(y)
    weight = _weight(A, back, lam)
    rho = 10 * lam  # measured: converges in about 50 iterations for lam from 1e-3 to 1e-2
    x, z = back, _grad(back)
    u = torch.zeros_like(z)
    for _ in range(iterations):
        x = _solve(A, rho, back + rho * _grad_adjoint(z - u), x)
        g = _grad(x) + u
        z = g * (1 - weight / rho / _length(g).clamp_min(1e-20)).clamp_min(0)
        u = g - z
    return x / scale.to(x.device)


def sense(A: Operator, y: Tensor, lam: float = 1e-2, iterations: int = 50) -> Tensor:
    """Return complex images (B, 1, H, W) from several coils: least squares with a little damping.

    Args:
        A: the measurement, with maps.
        y: k-space, as `A.forward` returns it.
        lam: damping, relative to the largest sum of squares of the maps. At 0.01, image content that the coils tell
            apart with more than a hundredth of that power is kept; the rest, mostly noise, is damped.
        iterations: steps of conjugate gradients.

    Example:
        >>> from chasm.mri import create_mask
        >>> maps = torch.stack([torch.ones(8, 8), torch.linspace(-1, 1, 8).expand(8, 8)])[None] + 0j
        >>> A = Operator(create_mask("equispaced-plain", 8, 2).tensor(), maps)
        >>> x = torch.randn(1, 1, 8, 8) + 0j
        >>> torch.allclose(sense(A, A.forward(x), 1e-6), x, atol=1e-2)
        True
    """
    if A.maps is None or lam < 0 or iterations < 1:
        raise ValueError(f"SENSE needs maps, lam >= 0 and iterations >= 1, got {lam:g} and {iterations}")
    A, scale = _normalised(A)
    back = A.adjoint(y)
    x = _conjugate_gradients(lambda x: A.normal(x) + lam * x, back, torch.zeros_like(back), iterations)
    return x / scale.to(x.device)


def _normalised(A: Operator) -> tuple[Operator, Tensor]:
    """Return the operator with its maps scaled to norm 1, and the scale, by which the image must be divided."""
    if A.maps is None:
        return A, torch.ones(())
    power = A.maps.abs().square().sum(-3).flatten(1).amax(1)  # largest power of the coils
    scale = power.sqrt().clamp_min(torch.finfo(power.dtype).tiny)[:, None, None, None]
    return Operator(A.mask, A.maps / (scale if A.maps.ndim == 4 else scale[..., None])), scale


def objective(A: Operator, y: Tensor, x: Tensor, lam: float) -> Tensor:
    """Return the value that `total_variation` minimises, for each slice: (B,).

    Args:
        A: the measurement.
        y: k-space.
        x: complex images.
        lam: weight of the total variation, as in `total_variation`.
    """
    misfit = (A.forward(x) - y).abs().square().sum((1, 2, 3)) / 2
    return misfit + (_weight(A, A.adjoint(y), lam) * _length(_grad(x))).sum((1, 2, 3))


def _weight(A: Operator, back: Tensor, lam: float) -> Tensor:
    """Return lam in the units of each image. The images of several sets of maps share one value."""
    return lam * back.abs().amax((-2, -1) if A.maps is None else (1, 2, 3), keepdim=True)


def _grad(x: Tensor) -> Tensor:
    """Return periodic forward differences along H and W, stacked in front: (2, B, M, H, W)."""
    return torch.stack([x.roll(-1, -2) - x, x.roll(-1, -1) - x])


def _grad_adjoint(g: Tensor) -> Tensor:
    return g[0].roll(1, -2) - g[0] + g[1].roll(1, -1) - g[1]


def _length(g: Tensor) -> Tensor:
    return g.abs().square().sum(0).sqrt()


def _solve(A: Operator, rho: float, b: Tensor, start: Tensor) -> Tensor:
    """Return (A^H A + rho grad^H grad)^-1 b."""
    if A.maps is None:
        H, W = b.shape[-2:]
        h, w = (torch.arange(n, device=b.device, dtype=b.real.dtype) for n in (H, W))
        laplacian = 4 * torch.sin(torch.pi * w / W) ** 2 + 4 * torch.sin(torch.pi * h / H)[:, None] ** 2
        mask = torch.fft.ifftshift(A.mask, dim=(-2, -1))
        # Neither term determines an unmeasured zero frequency: it stays at zero.
        return torch.fft.ifft2(torch.fft.fft2(b) / (mask + rho * laplacian).clamp_min(1e-12))
    return _conjugate_gradients(lambda x: A.normal(x) + rho * _grad_adjoint(_grad(x)), b, start, 8)


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], b: Tensor, x: Tensor, steps: int) -> Tensor:
    """Solve apply(x) = b, starting from x. Each slice has its own step sizes."""

    def dot(p: Tensor, q: Tensor) -> Tensor:
        return (p.conj() * q).real.sum((1, 2, 3), keepdim=True)

    r = b - apply(x)
    p, rr = r, dot(r, r)
    for _ in range(steps):
        q = apply(p)
        step = rr / dot(p, q).clamp_min(1e-30)
        x, r = x + step * p, r - step * q
        new = dot(r, r)
        p, rr = r + new / rr.clamp_min(1e-30) * p, new
    return x
