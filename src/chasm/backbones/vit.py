"""Vision Transformer (Dosovitskiy et al., ICLR 2021) with a convolutional head for images.

    tokens = patch conv(x) + position;  X <- X + attention(LN X);  X <- X + MLP(LN X);  y = head(LN X)

Intrinsic: pre-norm blocks, learned position table, GELU MLP of ratio 4.

Readings, since the CHASM paper names the host and its multiply-adds only: width 256, 12 blocks, 8 heads and
patch 8 with the head below (11.48 G multiply-adds without the attention products; the paper's Baseline has
11.54 G); the slot is the attention branch of blocks 6 and 12, X <- X + mixer(LN X) on the (B, C, H, W) view.
That location follows from the paper's table, in which the Baseline costs four C x C products per token of two
blocks more than a free mixer. The Baseline ("identity" or None) keeps attention. The block supplies the
identity path, so mixers come without their own. Global residual, no data consistency (`data_consistency` adds
HiFi-Mamba's). 10,318,210 parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from chasm.backbones.base import ImageBackbone, Size, make_slots, padded_size, register_backbone


class TokenAttention(nn.Module):
    """Multi-head self-attention over tokens (B, N, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, C) -> same
        q, k, v = rearrange(self.qkv(x), "b n (three h c) -> three b h n c", three=3, h=self.heads)
        return self.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n c -> b n (h c)"))


class Block(nn.Module):
    """A pre-norm transformer block. `attention` is None where a slot of the host takes its place.

    Args:
        width: channels C of a token.
        heads: attention heads.
        mlp_ratio: channels inside the MLP, relative to width.
    """

    attention: TokenAttention | None

    def __init__(self, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = TokenAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU(), nn.Linear(mlp_ratio * width, width))

    def forward(self, x: Tensor, grid: Size, slot: nn.Module | None) -> Tensor:  # (B, N, C) -> same
        y = self.norm1(x)
        if slot is not None:
            y = slot(rearrange(y, "b (h w) c -> b c h w", h=grid[0]).contiguous())
            x = x + rearrange(y, "b c h w -> b (h w) c")
        elif self.attention is not None:
            x = x + self.attention(y)
        return x + self.mlp(self.norm2(x))


@register_backbone("vit")
class ViT(ImageBackbone):
    """Vision Transformer whose attention a mixer replaces in some blocks.

    Args:
        mixer: a name of `chasm.list_mixers()`. None and "identity" keep attention in all blocks.
        mixer_options: options of the mixer.
        in_channels: channels of the input.
        out_channels: channels of the output.
        size: image size that the position table and the mixers are made for. The table is interpolated for others.
        width: channels of a token.
        depth: number of blocks.
        heads: attention heads.
        patch: pixels of a token, along each axis.
        mlp_ratio: channels inside the MLP, relative to width.
        head_width: channels of the convolutions at the end.
        slot_blocks: the blocks whose attention a mixer replaces, counted from 1.
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
        width: int = 256,
        depth: int = 12,
        heads: int = 8,
        patch: int = 8,
        mlp_ratio: int = 4,
        head_width: int = 32,
        slot_blocks: Sequence[int] = (6, 12),
        global_residual: bool | None = None,
        data_consistency: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, global_residual, data_consistency)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        if unknown := [block for block in slot_blocks if block not in range(1, depth + 1)]:
            raise ValueError(f"slot_blocks of a ViT of depth {depth} are 1 to {depth}, got {unknown}")
        self.multiple = self.smallest = patch
        H, W = padded_size(size, patch, patch)
        self.grid = (H // patch, W // patch)
        self.embed = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.empty(1, width, *self.grid))
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.to_pixels = nn.Linear(width, patch**2 * head_width)
        self.head = nn.Sequential(
            nn.Conv2d(head_width, head_width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(head_width, head_width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(head_width, out_channels, 3, padding=1),
        )
        nn.init.trunc_normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

        # Attention is built in every block and removed again, so that all hosts draw the same random numbers.
        replaced = () if mixer in (None, "identity") else slot_blocks
        places = {block: (width, self.grid) for block in replaced}
        self.slots = make_slots(mixer, mixer_options, places)
        for block in replaced:
            self.blocks[block - 1].attention = None  # type: ignore[assignment]

    def net(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        grid: Size = (x.shape[-2], x.shape[-1])
        position: Tensor = self.position
        if grid != self.grid:
            position = F.interpolate(position, size=grid, mode="bicubic", align_corners=False)
        x = (x + position).flatten(2).transpose(1, 2)  # (B, N, C)
        slots = dict(self.slots.items())
        for i, block in enumerate(self.blocks, start=1):
            x = block(x, grid, slots.get(str(i)))
        x = self.to_pixels(self.norm(x))
        x = F.pixel_shuffle(rearrange(x, "b (h w) c -> b c h w", h=grid[0]), self.multiple)
        return self.head(x)  # (B, out_channels, H, W)
