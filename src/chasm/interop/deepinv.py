"""Hosts and MRI operators of chasm in deepinv, and those of deepinv in chasm.

    physics = to_physics(operator, size=(H, W))       # our Operator as their MRI or MultiCoilMRI
    operator = to_operator(physics)                   # the reverse
    model = HostReconstructor(host)                   # model(y, physics), for their Trainer and losses
    denoiser = HostDenoiser(host)                     # denoiser(x, sigma), in their VarNet, MoDL and plug-and-play

Both sides use the centred, orthonormal Fourier transform and keep complex images as two channels, so that forward and
adjoint agree exactly. They differ in where complex numbers become channels: their k-space of many coils is real,
(B, 2, N, H, W), ours complex, (B, N, H, W). `to_kspace` and `from_kspace` translate.
"""

from typing import Any, TypeAlias

import torch
from deepinv.models import Denoiser, Reconstructor
from deepinv.physics import MRI, MultiCoilMRI
from torch import Tensor

from chasm.backbones.base import Backbone
from chasm.mri import Operator
from chasm.mri.fft import to_channels, to_complex

Physics: TypeAlias = MRI | MultiCoilMRI


def to_physics(operator: Operator, size: tuple[int, int] | None = None) -> Physics:
    """Return the same measurement as an object of deepinv.

    Args:
        operator: mask and coil sensitivities.
        size: (H, W) of the images; needed where neither the mask nor the maps tell it.

    Returns:
        `MRI` for one coil, `MultiCoilMRI` for many.

    Raises:
        ValueError: if the size is not known, or the mask differs between coils.
    """
    mask, maps = operator.mask, operator.maps
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    if mask.shape[1] != 1:
        raise ValueError(f"expected one mask for all coils, got {tuple(mask.shape)}: deepinv has one for all of them")
    H, W = size or (maps if maps is not None else mask).shape[-2:]
    if size is None and maps is None and mask.shape[-2] == 1:
        raise ValueError(f"a mask of shape {tuple(operator.mask.shape)} does not tell the size: pass size=(H, W)")
    real = torch.float64 if maps is not None and maps.dtype == torch.complex128 else torch.float32
    full = mask.to(real).expand(mask.shape[0], 2, H, W).contiguous()
    if maps is None:
        return MRI(mask=full, device=full.device)
    return MultiCoilMRI(mask=full, coil_maps=maps, device=full.device)


def to_operator(physics: Physics) -> Operator:
    """Return the measurement of a deepinv physics as an `Operator`.

    Raises:
        ValueError: if it measures volumes, or is no MRI.
    """
    if not isinstance(physics, MRI | MultiCoilMRI):
        raise ValueError(f"expected deepinv's MRI or MultiCoilMRI, got {type(physics).__name__}")
    if physics.three_d:
        raise ValueError("expected slices, got three_d=True: reconstruct a volume slice by slice")
    mask: Tensor = physics.mask[:, :1]
    return Operator(mask, physics.coil_maps if isinstance(physics, MultiCoilMRI) else None)


def to_kspace(y: Tensor) -> Tensor:
    """Return measurements of deepinv, (B, 2, H, W) or (B, 2, N, H, W), as complex k-space (B, N, H, W).

    >>> to_kspace(torch.zeros(1, 2, 5, 8, 8)).shape, to_kspace(torch.zeros(1, 2, 8, 8)).shape
    (torch.Size([1, 5, 8, 8]), torch.Size([1, 1, 8, 8]))
    """
    return torch.complex(y[:, 0], y[:, 1]) if y.ndim == 5 else to_complex(y)


def from_kspace(y: Tensor, physics: Physics) -> Tensor:
    """Return complex k-space (B, N, H, W) as measurements of a deepinv physics: real, with two channels."""
    return torch.stack((y.real, y.imag), 1) if isinstance(physics, MultiCoilMRI) else to_channels(y)


class HostReconstructor(Reconstructor):
    """A host as reconstruction model: model(y, physics) is the image, two channels for real and imaginary part.

    The host gets the adjoint of the measurements as image, and mask, sensitivities and measurements for its data
    consistency. Nothing is scaled: train and use it on data of one scale.

    Args:
        host: a host from `chasm.create_backbone`, with two channels in and out.

    Example:
        >>> import chasm
        >>> host = chasm.create_backbone("unet", mixer="chasm", size=16, width=4, depth=1, levels=(0,))
        >>> physics = MRI(mask=torch.ones(16, 16))
        >>> HostReconstructor(host)(physics(torch.randn(1, 2, 16, 16)), physics).shape
        torch.Size([1, 2, 16, 16])
    """

    def __init__(self, host: Backbone) -> None:
        super().__init__()
        _require_complex(host)
        self.host = host

    def forward(self, y: Tensor, physics: Physics, **kwargs: Any) -> Tensor:
        """Return the image.

        Args:
            y: measurements in deepinv's format.
            physics: the physics that measured them.
            **kwargs: ignored, for the arguments of other models of deepinv.
        """
        operator = to_operator(physics)
        kspace = to_kspace(y)
        mask = operator.mask
        maps = None if operator.maps is None else operator.maps.expand(len(y), -1, -1, -1)
        x = to_channels(operator.adjoint(kspace))
        image: Tensor = self.host(x, mask=mask, maps=maps, measured=kspace)
        return image


class HostDenoiser(Denoiser):
    """A host as denoiser: denoiser(x, sigma). It does not use the noise level.

    Args:
        host: a host from `chasm.create_backbone`, with as many channels in as out and without data consistency.
    """

    def __init__(self, host: Backbone) -> None:
        super().__init__()
        if host.in_channels != host.out_channels:
            raise ValueError(f"a denoiser keeps its channels, got {host.in_channels} in and {host.out_channels} out")
        self.host = host

    def forward(self, x: Tensor, sigma: float | Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the denoised image.

        Args:
            x: image (B, C, H, W).
            sigma: noise level; not used.
            **kwargs: ignored.
        """
        image: Tensor = self.host(x)
        return image


def _require_complex(host: Backbone) -> None:
    if (host.in_channels, host.out_channels) != (2, 2):
        got = f"{host.in_channels} in and {host.out_channels} out"
        raise ValueError(f"a complex image is two channels, got a host with {got}: build one with in_channels=2")
