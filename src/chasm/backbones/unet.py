"""U-Net (Ronneberger, Fischer, Brox, MICCAI 2015) in the form of the fastMRI baseline (Zbontar et al., 2018).

    ConvBlock(x) = [3x3 conv, InstanceNorm, LeakyReLU 0.2] twice
    down: ConvBlock, slot, average-pool 2;  up: 2x2 transposed conv, norm, activation, concat skip, ConvBlock

Intrinsic: widths that double per level, average pooling, norms without affine, convolutions without bias.

Readings, since the CHASM paper names the host and its multiply-adds only: width 32 and four poolings; the
1x1 shortcut around every decoder block (`dec_shortcut`: 12.59 G multiply-adds at 256 x 256 with it, 12.05 G
without; the paper's Baseline has 12.56 G); slots after the blocks of levels 2, 3 and the bottleneck (128
channels at 1/4, 256 at 1/8, 512 at 1/16 resolution), feeding both skip and pooling; a global residual where
input and output channels agree; no data consistency (`data_consistency` adds HiFi-Mamba's). 7,930,498
parameters, 7,756,418 without the shortcut.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.base import ImageBackbone, Size, make_slots, padded_size, register_backbone

MAX_DEPTH = 16  # poolings that halve the image: a larger number is a slip, or a config from elsewhere


class ConvBlock(nn.Module):
    """Two convolutions of 3 positions per axis, each followed by `norm_act`.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        shortcut: add a 1x1 convolution of the input to the output.
        conv: `nn.Conv2d` or `nn.Conv3d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        shortcut: bool = False,
        conv: type[nn.Conv2d] | type[nn.Conv3d] = nn.Conv2d,
    ) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, out_channels, 3, padding=1, bias=False)
        self.conv2 = conv(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut = conv(in_channels, out_channels, 1, bias=False) if shortcut else None

    def forward(self, x: Tensor) -> Tensor:
        y = norm_act(self.conv2(norm_act(self.conv1(x))))
        return y if self.shortcut is None else y + self.shortcut(x)


def norm_act(x: Tensor) -> Tensor:
    """Return LeakyReLU(InstanceNorm(x)) with slope 0.2."""
    return F.leaky_relu(F.instance_norm(x), 0.2)


class LevelsBackbone(ImageBackbone):
    """The levels of a U-Net, for images and volumes. Level l has width * 2^l channels at size / 2^l.

    A subclass calls `make_levels`, makes its slots, and calls `layers`.

    Attributes:
        conv: the class of convolutions.
        transposed: the class of transposed convolutions.
        pool: averages over windows.
        window: size of the window of a pooling.
    """

    conv: Any = nn.Conv2d
    transposed: Any = nn.ConvTranspose2d
    pool: Any = staticmethod(F.avg_pool2d)
    window: tuple[int, ...] = (2, 2)

    def make_levels(
        self,
        in_channels: int,
        out_channels: int,
        width: int,
        depth: int,
        levels: Sequence[int],
        shortcut: bool = False,
    ) -> list[int]:
        """Make the blocks of all levels.

        Args:
            in_channels: channels that `layers` gets.
            out_channels: channels that `layers` returns.
            width: channels at level 0.
            depth: number of poolings.
            levels: those with a slot.
            shortcut: a 1x1 shortcut around every decoder block.

        Returns:
            The channels of each level.

        Raises:
            ValueError: if there are more poolings than an image allows, or a slot is in a level that does not exist.
        """
        if not 0 <= depth <= MAX_DEPTH:
            raise ValueError(f"expected a U-Net of depth 0 to {MAX_DEPTH}, got {depth}")
        if unknown := [level for level in levels if level not in range(depth + 1)]:
            raise ValueError(f"levels of a U-Net of depth {depth} are 0 to {depth}, got {unknown}")
        self.multiple = 2**depth
        self.smallest = 2 * self.multiple  # InstanceNorm needs more than one position in the bottleneck
        conv, window = self.conv, self.window
        widths = [width * 2**level for level in range(depth + 1)]
        up = list(reversed(widths[:-1]))
        inputs = zip([in_channels, *widths[:-1]], widths, strict=True)
        self.down = nn.ModuleList(ConvBlock(a, b, conv=conv) for a, b in inputs)
        self.expand = nn.ModuleList(self.transposed(2 * c, c, window, stride=window, bias=False) for c in up)
        self.up = nn.ModuleList(ConvBlock(2 * c, c, shortcut, conv) for c in up)
        self.head = conv(width, out_channels, 1)
        return widths

    def layers(self, x: Tensor, slots: Mapping[str, nn.Module]) -> Tensor:
        """Return the output of all layers.

        Args:
            x: (B, in_channels, H, W) or (B, in_channels, D, H, W), where `multiple` divides H and W.
            slots: mixers by the name of their level.
        """
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x, self.window) if level else x)  # (B, width 2^l, H / 2^l, W / 2^l) at level l
            if str(level) in slots:
                x = x + slots[str(level)](x)  # InstanceNorm has normalised x
            skips.append(x)
        x = skips.pop()
        for expand, block in zip(self.expand, self.up, strict=True):
            x = block(torch.cat([norm_act(expand(x)), skips.pop()], 1))
        return self.head(x)


@register_backbone("unet")
class UNet(LevelsBackbone):
    """U-Net with slots. Level l has width * 2^l channels at size / 2^l; level `depth` is the bottleneck.

    Args:
        mixer: a name of `chasm.list_mixers()`, for the slots. None and "identity" leave them empty.
        mixer_options: options of the mixer.
        in_channels: channels of the input.
        out_channels: channels of the output.
        size: image size the mixers are made for.
        width: channels at level 0.
        depth: number of poolings.
        levels: those with a slot.
        dec_shortcut: a 1x1 shortcut around every decoder block.
        global_residual: add the input to the output. None adds it if input and output channels agree.
        data_consistency: put the measured k-space back at the end. Without it, mask, maps and measured are ignored.
    """

    def __init__(
        self,
        mixer: str | None = "identity",
        mixer_options: Mapping[str, Any] | None = None,
        in_channels: int = 2,
        out_channels: int = 2,
        size: Size = (256, 256),
        *,
        width: int = 32,
        depth: int = 4,
        levels: Sequence[int] = (2, 3, 4),
        dec_shortcut: bool = True,
        global_residual: bool | None = None,
        data_consistency: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, global_residual, data_consistency)
        widths = self.make_levels(in_channels, out_channels, width, depth, levels, dec_shortcut)
        H, W = padded_size(size, self.multiple, self.smallest)
        places = {level: (widths[level], (H >> level, W >> level)) for level in levels}
        self.slots = make_slots(mixer, mixer_options, places)

    def net(self, x: Tensor) -> Tensor:
        return self.layers(x, dict(self.slots.items()))
