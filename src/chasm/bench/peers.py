"""Blocks that people use where CHASM could stand, in plain torch, to be timed beside it. Each adds its input.

depthwise-7x7       x + P GELU(D x), D a depthwise 7x7 and P a 1x1: CHASM's own wrapper with a wider window
convnext            ConvNeXt (Liu et al., 2022): x + P_2 GELU(P_1 LN(D x)), four times the channels inside
window-attention    heads of 32 channels in windows of 8x8, as in Swin (Liu et al., 2021), without shift and bias
attention           heads of 32 channels over all positions, as in a ViT
"""

import torch.nn.functional as F
from torch import Tensor, nn

WINDOW, HEAD = 8, 32


class Depthwise7x7(nn.Module):
    """What a spatial mixer without a global view costs: (B, C, H, W) -> same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.pointwise = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pointwise(F.gelu(self.depthwise(x)))


class ConvNeXt(nn.Module):
    """(B, C, H, W) -> same; its products over the channels run on (B, H, W, C), as in the authors' code."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.body = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(self.depthwise(x).movedim(1, -1))).movedim(-1, 1)


class MapAttention(nn.Module):
    """(B, C, H, W) -> same, C a multiple of 32; within windows, with zeros beyond the map, or over all positions."""

    def __init__(self, channels: int, window: int | None = None) -> None:
        super().__init__()
        if channels % HEAD:
            raise ValueError(f"attention has heads of {HEAD} channels, got {channels}: leave it out")
        self.window = window
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        h, w = (self.window, self.window) if self.window else x.shape[2:]
        z = F.pad(x, (0, -x.shape[3] % w, 0, -x.shape[2] % h))
        B, C, H, W = z.shape
        tokens = z.view(B, C, H // h, h, W // w, w).permute(0, 2, 4, 3, 5, 1).reshape(-1, h * w, C)
        q, k, v = self.qkv(tokens).view(-1, h * w, 3, C // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tokens.shape))
        y = y.view(B, H // h, W // w, h, w, C).permute(0, 5, 1, 3, 2, 4).reshape(B, C, H, W)
        return x + y[..., : x.shape[2], : x.shape[3]]


PEERS = {
    "depthwise-7x7": Depthwise7x7,
    "convnext": ConvNeXt,
    "window-attention": lambda channels: MapAttention(channels, WINDOW),
    "attention": MapAttention,
}
DEFAULT_PEERS = ("depthwise-7x7", "convnext", "window-attention")  # attention over a whole large map takes minutes
