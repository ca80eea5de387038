"""A U-Net for volumes: that of `chasm.backbones.unet` with three axes (Çiçek et al., MICCAI 2016).

    ConvBlock(x) = [3x3x3 conv, InstanceNorm, LeakyReLU 0.2] twice
    down: ConvBlock, slot, average-pool 1x2x2;  up: 1x2x2 transposed conv, norm, activation, concat skip, ConvBlock

The slices of a volume come as channels (B, slices * components, H, W), as the task "volume" gives them, so that
training, scores and reports are those of images. Inside, features are (B, C, D, H, W).

Readings: slices are never pooled, since a block has few of them. Slots have three axes: CHASM mixes along all of them
(`ndim=3`), and mixers for two axes act slice by slice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.base import Size, make_slots, padded_size, register_backbone
from chasm.backbones.measurement import VolumeMeasurement
from chasm.backbones.unet import LevelsBackbone
from chasm.mixers import MIXERS


class SliceBySlice(nn.Module):
    """Applies a mixer for two axes to every slice of (B, C, D, H, W).

    Args:
        mixer: maps (B, C, H, W) to the same shape.
    """

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        slices = x.transpose(1, 2).flatten(0, 1)  # (B D, C, H, W)
        y: Tensor = self.mixer(slices)
        return y.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


@register_backbone("unet-3d")
class UNet3D(LevelsBackbone):
    """Level l has width * 2^l channels at (D, H / 2^l, W / 2^l); level `depth` is the bottleneck.

    Args:
        mixer: mixer in the slots.
        mixer_options: options of the mixer. `ndim=2` makes CHASM also act slice by slice.
        in_channels: slices times components.
        out_channels: slices times components; as many slices as the input.
        size: height and width that the tables of the mixers are made for.
        width: channels of the first level.
        depth: number of poolings.
        levels: those with a slot.
        components: channels of a slice, 2 for complex ones.
        global_residual: whether the input is added to the output; by default if their channels agree.
        data_consistency: put the measured k-space back at the end, as `VolumeMeasurement` says. Without it, mask and
            measured are ignored.

    Raises:
        ValueError: if the channels are not a whole number of slices.
    """

    measurement = VolumeMeasurement
    conv = nn.Conv3d
    transposed = nn.ConvTranspose3d
    pool = staticmethod(F.avg_pool3d)
    window = (1, 2, 2)  # slices are never pooled

    def __init__(
        self,
        mixer: str | None = "identity",
        mixer_options: Mapping[str, Any] | None = None,
        in_channels: int = 2,
        out_channels: int = 2,
        size: Size = (256, 256),
        *,
        width: int = 16,
        depth: int = 3,
        levels: Sequence[int] = (1, 2, 3),
        components: int = 2,
        global_residual: bool | None = None,
        data_consistency: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, global_residual, data_consistency)
        if data_consistency and components != 2:
            raise ValueError(f"data consistency needs complex slices, components=2, got {components}")
        if in_channels % components or out_channels % (in_channels // components):
            raise ValueError(
                f"expected {components} channels for every slice, and as many slices out as in, got "
                f"in_channels={in_channels} and out_channels={out_channels}: set components"
            )
        self.slices = in_channels // components
        widths = self.make_levels(components, out_channels // self.slices, width, depth, levels)
        H, W = padded_size(size, self.multiple, self.smallest)
        options = dict(mixer_options or {})
        has_axes = mixer is not None and "ndim" in MIXERS.options(mixer)
        ndim = options.setdefault("ndim", 3) if has_axes else 2
        sizes = {level: (self.slices, H >> level, W >> level) for level in levels}
        self.slots = make_slots(mixer, options, {n: (widths[n], s[-ndim:]) for n, s in sizes.items()})
        if ndim == 2:
            for level, slot in self.slots.items():
                self.slots[level] = SliceBySlice(slot)

    def net(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.slices, -1)).transpose(1, 2)  # (B, components, D, H, W)
        return self.layers(x, dict(self.slots.items())).transpose(1, 2).flatten(1, 2)
