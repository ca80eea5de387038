"""End-to-end variational network (Sriram et al., MICCAI 2020): unrolled reconstruction in k-space.

    K_0 = measured k-space;  K_{t+1} = K_t - eta_t mask (K_t - K_0) - F(S U_t(sum_coils conj(S) F^-1(K_t)))
    U_t(image) = std * U-Net((image - mean) / std) + mean

Intrinsic: every cascade has its own U-Net and weight eta; mean and standard deviation are those of each image, for real
and imaginary part apart; the U-Net of the fastMRI baseline without shortcut and without global residual; zero padding
on both sides to a multiple of 16. Twelve cascades of width 18 and depth 4. The slots are those of the U-Net host, in
every cascade.

With ``sensitivities="learned"``, as in the public code, S is made by one more U-Net of width 8, which sees the
fully sampled centre of each coil: S = V(F^-1(centre)) / root-sum-of-squares over coils. Without, it comes with the
measurement (`chasm.mri.estimate_maps` in the tasks).

Readings. The public code ends with the root-sum-of-squares of the coils. Here the coils are added with their
sensitivities as weights, which keeps the phase. With learned sensitivities, the k-space of the result is multiplied by
the sensitivities of the measurement, because the caller has no others. One coil has the sensitivity 1. The weight eta_0
of the public code is left out: K_0 is the measured k-space, so it has no effect. If no column is missing, the centre is
all of k-space (the public code then takes one column).
29,452,067 parameters, and 484,898 for the sensitivities.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.base import Backbone, Size, make_slots, padded_size, register_backbone
from chasm.backbones.measurement import Measurement
from chasm.backbones.unet import UNet
from chasm.common.registry import suggest

MULTIPLE = 16  # divides padded sizes, whatever the depth
SENSITIVITIES = ("given", "learned")
MIN_STD = 1e-6  # times the root mean square of the image, so that an imaginary part of rounding errors stays small


def mean_phase(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (B, 1, 1, 1) of the mean phase of images (B, 2, H, W), weighted by their power."""
    total = (image * torch.linalg.vector_norm(image, dim=1, keepdim=True)).sum((2, 3), keepdim=True)
    length = torch.linalg.vector_norm(total, dim=1, keepdim=True)
    cos, sin = (total / torch.where(length == 0, 1, length)).split(1, 1)
    return torch.where(length == 0, 1, cos), sin


def turned(image: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return images (B, 2, H, W) with a phase added whose cosine and sine are given."""
    real, imag = image.split(1, 1)
    return torch.cat((real * cos - imag * sin, real * sin + imag * cos), 1)


class Refinement(nn.Module):
    """The U-Net of one cascade on normalised images: maps (B, 2, H, W) to the same shape."""

    def __init__(self, unet: UNet) -> None:
        super().__init__()
        self.unet = unet

    def padded(self, size: Sequence[int]) -> Size:
        """Return the size of the padded images that the U-Net gets."""
        return padded_size(size, max(MULTIPLE, self.unet.multiple), self.unet.smallest)

    def forward(self, image: Tensor, slots: Mapping[str, nn.Module] = MappingProxyType({})) -> Tensor:
        H, W = image.shape[-2:]
        mean = image.mean((2, 3), keepdim=True)
        rms = torch.linalg.vector_norm(image, dim=(1, 2, 3), keepdim=True) / (2 * H * W) ** 0.5
        std = torch.maximum(image.std((2, 3), keepdim=True), MIN_STD * rms + torch.finfo(image.dtype).tiny)
        height, width = self.padded((H, W))
        # (height - H) // 2, without a negative number to divide: torch.export splits the sum, and ONNX rounds to zero
        top, left = height // 2 - (H + 1) // 2, width // 2 - (W + 1) // 2
        x = F.pad((image - mean) / std, (left, width - W - left, top, height - H - top))
        x = self.unet.layers(x, slots)[..., top : top + H, left : left + W]
        return std * x + mean


class SensitivityNet(nn.Module):
    """Makes coil sensitivities (B, M, 2, H, W) from the fully sampled centre of k-space.

    Args:
        unet: looks at the image of one coil at a time.
    """

    def __init__(self, unet: UNet) -> None:
        super().__init__()
        self.refinement = Refinement(unet)

    def forward(self, measurement: Measurement) -> Tensor:
        coils = measurement.coil_images(centre_columns(measurement.mask))
        maps = self.refinement(coils.flatten(0, 1)).unflatten(0, coils.shape[:2])
        total = maps.square().sum((1, 2), keepdim=True)
        return torch.where(total == 0, 0, maps * torch.where(total == 0, 1, total).rsqrt())


def centre_columns(mask: Tensor) -> Tensor:
    """Return True for the columns (..., 1, W) of the block around the middle that was measured without a gap.

    It has as many columns to the left of W // 2 as from there to the right.

    Args:
        mask: True where k-space was measured, (..., H or 1, W); the middle row counts.

    >>> centre_columns(torch.tensor([[True, False, True, True, True, True, False, True]])).int()
    tensor([[0, 0, 1, 1, 1, 1, 0, 0]], dtype=torch.int32)
    """
    row = mask[..., mask.shape[-2] // 2, :].to(torch.int64)
    at = torch.arange(row.shape[-1], device=mask.device)
    width = torch.ones_like(at).sum()  # a tensor, because an exported program may run at another size
    middle = width // 2
    missing = 1 - row  # gaps are counted from the middle outwards, because ONNX has no product of all values so far
    gaps_right = (missing * (at >= middle)).cumsum(-1)
    gaps_left = (missing * (at < middle)).flip(-1).cumsum(-1).flip(-1)
    right = ((at >= middle) & (gaps_right == 0)).sum(-1, keepdim=True)
    left = ((at < middle) & (gaps_left == 0)).sum(-1, keepdim=True)
    count = torch.where(row.sum(-1, keepdim=True) == width, width, (2 * torch.minimum(left, right)).clamp_min(1))
    first = (width - count + 1) // 2
    return ((at >= first) & (at < first + count)).unsqueeze(-2)


@register_backbone("varnet")
class VarNet(Backbone):
    """Variational network. Call model(x, mask=mask) with the zero-filled image x (B, 2, H, W).

    Args:
        mixer: a name of `chasm.list_mixers()`, for the slots. None and "identity" leave them empty.
        mixer_options: options of the mixer.
        in_channels: 2.
        out_channels: 2.
        size: image size the mixers are made for.
        cascades: the number of refinements, each followed by data consistency.
        width: channels at the first level of each U-Net; some mixers need a multiple of 4, as FFC does.
        depth: poolings of each U-Net.
        levels: those of each U-Net with a slot.
        sensitivities: "given" with the measurement, or "learned": several coils have sensitivities that a network
            makes from the centre of their k-space.
        sensitivity_width: channels at the first level of that network.
        sensitivity_depth: its poolings.
        align_phase: turn the measurement so that the mean phase of its zero-filled image is zero, and turn the result
            back. The phase of a scan as a whole carries no information, and the network then treats all of them alike.
            For sensitivities that are given.
    """

    def __init__(
        self,
        mixer: str | None = "identity",
        mixer_options: Mapping[str, Any] | None = None,
        in_channels: int = 2,
        out_channels: int = 2,
        size: Size = (256, 256),
        *,
        cascades: int = 12,
        width: int = 18,
        depth: int = 4,
        levels: Sequence[int] = (2, 3, 4),
        sensitivities: str = "given",
        sensitivity_width: int = 8,
        sensitivity_depth: int = 4,
        align_phase: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels)
        self._require_complex_images()
        if sensitivities not in SENSITIVITIES:
            raise ValueError(f"unknown sensitivities {sensitivities!r}: {suggest(sensitivities, SENSITIVITIES)}")
        if align_phase and sensitivities == "learned":
            raise ValueError("align_phase needs sensitivities that are given: leave it out, or sensitivities='learned'")
        if cascades < 1:
            raise ValueError(f"VarNet needs 1 or more cascades, got {cascades}")
        plain: dict[str, Any] = {"dec_shortcut": False, "global_residual": False}
        refinements = [
            Refinement(UNet(None, size=size, width=width, depth=depth, levels=levels, **plain)) for _ in range(cascades)
        ]
        self.refinements = nn.ModuleList(refinements)
        self.eta = nn.Parameter(torch.ones(cascades - 1))
        self.levels, self.align_phase = tuple(levels), align_phase

        H, W = refinements[0].padded(size)
        self.slots = make_slots(
            mixer,
            mixer_options,
            {
                self._place(cascade, level): (width * 2**level, (H >> level, W >> level))
                for cascade in range(cascades)
                for level in levels
            },
        )
        self.sensitivity_net: SensitivityNet | None = None
        if sensitivities == "learned":
            shape: dict[str, Any] = {"width": sensitivity_width, "depth": sensitivity_depth, "levels": ()}
            self.sensitivity_net = SensitivityNet(UNet(None, size=size, **shape, **plain))

    def _place(self, cascade: int, level: int) -> int:
        return 100 * cascade + level

    def place_of(self, slot: int) -> tuple[int, int]:
        """Return the cascade and the level of a slot, both from 0, by its number in `slots`."""
        return divmod(slot, 100)

    def slots_of(self, cascade: int) -> dict[str, nn.Module]:
        """Return the mixers of one cascade by the name of their level."""
        slots = dict(self.slots.items())
        return {str(level): slots[str(self._place(cascade, level))] for level in self.levels} if slots else {}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the refinements in place, without the Fourier transforms between them.

        All of them share one graph; in training the first, whose input needs no gradient, has its own.
        """
        for refinement in self.refinements:
            refinement.compile(*args, **kwargs)
        if self.sensitivity_net is not None:
            self.sensitivity_net.refinement.compile(*args, **kwargs)

    def run(
        self, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        measurement = self.measurement.of(x, mask, maps, measured)
        if self.sensitivity_net is None or maps is None:
            return self.image_of(measurement), x.new_zeros(())
        own = measurement.with_maps(self.sensitivity_net(measurement))
        return measurement.rephased(own.reduce(self.restore(own)), own), x.new_zeros(())

    def image_of(self, measurement: Measurement) -> Tensor:
        """Return the image (B, 2, H, W) that is restored from a measurement, with the phase of the measurement."""
        if not self.align_phase:
            return measurement.reduce(self.restore(measurement))
        cos, sin = mean_phase(measurement.reduce(torch.where(measurement.mask, measurement.kspace, 0)))
        aligned = measurement.turned(cos, -sin)
        return turned(aligned.reduce(self.restore(aligned)), cos, sin)

    def learned_maps(self, measured: Tensor, mask: Tensor) -> Tensor:
        """Return the sensitivities, complex (B, M, H, W), that a host with ``sensitivities="learned"`` makes.

        Args:
            measured: k-space of every coil, complex (B, M, H, W).
            mask: nonzero where it was measured.
        """
        if self.sensitivity_net is None:
            raise ValueError('sensitivities are given, not learned: build the host with sensitivities="learned"')
        measurement = Measurement(mask > 0, measured, None, (measured.shape[-2], measured.shape[-1]))
        maps = self.sensitivity_net(measurement)  # (B, M, 2, H, W)
        return torch.complex(maps[:, :, 0], maps[:, :, 1])

    def restore(self, measurement: Measurement) -> Tensor:
        """Return the k-space of every coil after all cascades: complex (B, M, H, W)."""
        start = k = torch.where(measurement.mask, measurement.kspace, 0)
        for cascade, refinement in enumerate(self.refinements):
            refined = measurement.expand(refinement(measurement.reduce(k), self.slots_of(cascade)))
            if cascade:
                k = k - self.eta[cascade - 1] * torch.where(measurement.mask, k - start, 0)
            k = k - refined
        return k
