"""Between features and the measured image: patches in, patches out, and hard data consistency.

Padding concerns features only. The image that meets k-space always has the size that was measured, so the
measured lines are kept to rounding at any size.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from chasm.backbones.base import Size, pad_to_multiple
from chasm.backbones.hifi.layers import ChannelNorm, Pointwise
from chasm.mri.fft import fft2c, ifft2c, to_channels, to_complex


class PatchEmbed(nn.Module):
    """Image (B, 2, H, W) -> LN(patch conv), (B, C, h, w) with h, w even, as the low-pass filters need."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.multiple = 2 * patch
        self.smallest = 4 * patch  # the binomial filter reflects two positions
        self.conv = nn.Conv2d(2, width, patch, stride=patch)
        self.norm = ChannelNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(self.conv(pad_to_multiple(image, self.multiple, self.smallest)))


class ToImage(nn.Module):
    """Features (B, C, h, w) -> image (B, 2, H, W), a token's patch in order (row, column, channel)."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.linear = Pointwise(width, 2 * patch**2)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        image = rearrange(self.linear(x), "b (p q c) h w -> b c (h p) (w q)", p=self.patch, q=self.patch)
        return image[..., : size[0], : size[1]]


class Measurement(NamedTuple):
    """What the scanner gave, with k-space centred (zero frequency in the middle). M coils, 1 without maps."""

    mask: Tensor  # bool, broadcastable to (B, M, H, W)
    kspace: Tensor  # complex (B, M, H, W); only entries under the mask count
    maps: Tensor | None  # complex (B, M, H, W)
    size: Size

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None) -> "Measurement":
        """From the arguments of a host; a single coil's k-space is that of the zero-filled image x."""
        B, _, H, W = x.shape
        if mask is None:
            raise ValueError("HiFi-Mamba enforces data consistency: pass the sampling mask as mask=...")
        if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], (W, H, 1, B), strict=False)):
            raise ValueError(f"mask must broadcast to ({B}, 1, {H}, {W}), got {tuple(mask.shape)}")
        if maps is not None and measured is None:
            raise ValueError("coil maps need the k-space of every coil: pass measured=..., shaped as maps")
        coils = 1 if maps is None else maps.shape[1]
        for name, value in (("maps", maps), ("measured", measured)):
            if value is not None and (not value.is_complex() or value.shape != (B, coils, H, W)):
                raise ValueError(
                    f"{name} must be complex ({B}, {coils}, {H}, {W}), got {value.dtype} {tuple(value.shape)}"
                )
        kspace = fft2c(to_complex(x)) if measured is None else measured
        return cls(mask > 0, kspace, maps, (H, W))

    def enforce(self, image: Tensor) -> Tensor:
        """(B, 2, H, W) -> same, its k-space replaced where it was measured."""
        im = to_complex(image)  # (B, 1, H, W), float32 under autocast too
        k = fft2c(im if self.maps is None else self.maps * im)
        im = ifft2c(torch.where(self.mask, self.kspace, k))
        return to_channels(im if self.maps is None else (self.maps.conj() * im).sum(1, keepdim=True))
