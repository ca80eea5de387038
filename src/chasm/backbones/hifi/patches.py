"""Turn an image into patches of features, and features into an image.

Padding concerns features only. The image that meets k-space always has the size that was measured, so the
measured lines are kept to rounding at any size.
"""

from einops import rearrange
from torch import Tensor, nn

from chasm.backbones.base import Size, pad_to_multiple
from chasm.backbones.hifi.layers import ChannelNorm, NormalChannelMap


class PatchEmbed(nn.Module):
    """Maps an image (B, 2, H, W) to LN(patch conv): (B, C, h, w) with even h and w, as the low-pass filters need."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.multiple = 2 * patch
        self.smallest = 4 * patch  # the binomial filter reflects two positions
        self.conv = nn.Conv2d(2, width, patch, stride=patch)
        self.norm = ChannelNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(self.conv(pad_to_multiple(image, self.multiple, self.smallest)))


class ToImage(nn.Module):
    """Maps features (B, C, h, w) to an image (B, 2, H, W). The order within a patch is row, column, channel."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.linear = NormalChannelMap(width, 2 * patch**2)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        image = rearrange(self.linear(x), "b (p q c) h w -> b c (h p) (w q)", p=self.patch, q=self.patch)
        return image[..., : size[0], : size[1]]
