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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.base import ImageBackbone, Size, make_slots, padded_size, register_backbone
from chasm.backbones.measurement import VolumeMeasurement
from chasm.backbones.unet import norm_act
from chasm.mixers import MIXERS

_PLANE = (1, 2, 2)  # pooling within slices


class ConvBlock3D(nn.Module):
    """Two 3x3x3 convolutions, each followed by `norm_act`.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, out_channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv3d(out_channels, out_channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return norm_act(self.conv2(norm_act(self.conv1(x))))


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
class UNet3D(ImageBackbone):
    """Level l has width * 2^l channels at (D, H / 2^l, W / 2^l); level `depth` is the bottleneck.

    Args:
        mixer: what goes into the slots.
        mixer_options: its options. `ndim=2` makes CHASM act slice by slice, too.
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
        if unknown := [level for level in levels if level not in range(depth + 1)]:
            raise ValueError(f"levels of a U-Net of depth {depth} are 0 to {depth}, got {unknown}")
        self.slices = in_channels // components
        self.multiple = 2**depth
        self.smallest = 2 * self.multiple  # InstanceNorm needs more than one position in the bottleneck
        widths = [width * 2**level for level in range(depth + 1)]
        up = list(reversed(widths[:-1]))
        self.down = nn.ModuleList(ConvBlock3D(a, b) for a, b in zip([components, *widths[:-1]], widths, strict=True))
        self.expand = nn.ModuleList(nn.ConvTranspose3d(2 * c, c, _PLANE, stride=_PLANE, bias=False) for c in up)
        self.up = nn.ModuleList(ConvBlock3D(2 * c, c) for c in up)
        self.head = nn.Conv3d(width, out_channels // self.slices, 1)

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
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.avg_pool3d(x, _PLANE) if level else x)  # (B, width 2^l, D, H / 2^l, W / 2^l) at level l
            if str(level) in self.slots:
                x = x + self.slots[str(level)](x)  # InstanceNorm has normalised x
            skips.append(x)
        x = skips.pop()
        for expand, block in zip(self.expand, self.up, strict=True):
            x = block(torch.cat([norm_act(expand(x)), skips.pop()], 1))
        return self.head(x).transpose(1, 2).flatten(1, 2)
