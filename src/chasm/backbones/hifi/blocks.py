"""The block of HiFi-Mamba (Chen et al., 2025): split the channels, filter one half, scan it under the other.

    X = [X_h, X_l];  t = IB_w(X_l);  low = LP(t);  high = IB_0(X_h + t - low)
    Y = gate([IB_1(high), SSM(LN low, LN high)]);  X <- X + Y

Read from the authors' code: the order of the steps, the two low-pass filters (Haar in V1, binomial later),
the two channel gates, and where normalisation sits. V1 drops paths on the SSM's output instead of on Y; its
rate is zero, so only the later place exists here.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.hifi.kernels.norm import NormGELU
from chasm.backbones.hifi.layers import (
    LOW_PASS,
    ChannelMap,
    ChannelNorm,
    Depthwise,
    Filters,
    NormalChannelMap,
    low_pass,
)
from chasm.backbones.hifi.ssm import ModulatedSSM
from chasm.common.registry import suggest


class InvertedBottleneck(nn.Module):
    """x + GELU(1x1(GELU(GN(dw3x3(GELU(GN(1x1(x)))))))), with `expansion` times the channels inside."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        inner = expansion * width
        depthwise = Depthwise(inner, bias=False)
        nn.init.trunc_normal_(depthwise.weight, std=0.02)
        self.body = nn.Sequential(
            NormalChannelMap(width, inner),
            NormGELU(inner),
            depthwise,
            NormGELU(inner),
            NormalChannelMap(inner, width),
            nn.GELU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class ChannelGate(nn.Module):
    """x * sigmoid(dw3x3(GELU(1x1(s)))), where s is the spatial mean of x if `pooled`, else x."""

    def __init__(self, width: int, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.mix = ChannelMap(width, width, bias=True)
        self.depthwise = Depthwise(width)

    def forward(self, x: Tensor) -> Tensor:
        s = x.mean((2, 3), keepdim=True) if self.pooled else x
        return x * torch.sigmoid(self.depthwise(F.gelu(self.mix(s))))


class DropPath(nn.Module):
    """Drop the whole branch of a sample at the given rate, in training only."""

    rate: Tensor  # a tensor, so that blocks with different rates share one compiled graph

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.is_active = rate > 0
        self.register_buffer("rate", torch.tensor(rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.is_active and self.training):
            return x
        keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) >= self.rate
        return x * (keep / (1 - self.rate)).to(x.dtype)


GATES = ("pooled", "full")


@dataclass(frozen=True)
class BlockOptions:
    """What a block is built from. The defaults are those of the main host."""

    width: int = 96
    state: int = 16
    expansion: int = 5
    kernel: int = 7  # taps along the token sequence
    lowpass: str = "binomial"
    gate: str = "pooled"
    dropout: float = 0.1  # on the output of the SSM
    drop_path: float = 0.3  # rate of the last block; it grows linearly from 0

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width must be even, since a block works on two halves, got {self.width}")
        for option, value, known in (("lowpass", self.lowpass, LOW_PASS), ("gate", self.gate, GATES)):
            if value not in known:
                raise ValueError(f"unknown {option} {value!r}: {suggest(value, known)}")


class HiFiBlock(nn.Module):
    """Maps x (B, C, H, W) with even H and W to x + drop_path(Y), and to a balance loss, which is zero here.

    A host that puts a slot between asks for Y alone.

    Args:
        options: options of the block.
        drop_path: rate at which training drops this block.
    """

    def __init__(self, options: BlockOptions, drop_path: float) -> None:
        super().__init__()
        half = options.width // 2
        self.ib_low = InvertedBottleneck(half, options.expansion)
        self.ib_0 = InvertedBottleneck(half, options.expansion)
        self.ib_1 = InvertedBottleneck(half, options.expansion)
        self.norm_low = ChannelNorm(half)
        self.norm_high = ChannelNorm(half)
        self.ssm = ModulatedSSM(half, options.state, options.kernel, options.dropout)
        self.gate = ChannelGate(options.width, options.gate == "pooled")
        self.drop_path = DropPath(drop_path)

    def fuse(self, high: Tensor, residual: Tensor) -> Tensor:
        """Return the high stream with the detail that the low-pass removed."""
        return high + residual

    def streams(self, x: Tensor, filters: Filters) -> Tensor:
        """Return the two streams of x (B, C, H, W), high first, concatenated along the channels."""
        high, low = x.chunk(2, 1)
        t = self.ib_low(low)
        low = low_pass(t, filters)
        high = self.ib_0(self.fuse(high, t - low))
        return torch.cat([self.ib_1(high), self.ssm(self.norm_low(low), self.norm_high(high))], 1)

    def branch(self, x: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
        """Return Y of the equations above, and the balance loss."""
        return self.gate(self.streams(x, filters)), x.new_zeros((), dtype=torch.float32)

    def forward(self, x: Tensor, filters: Filters, is_added: bool = True) -> tuple[Tensor, Tensor]:
        y, balance = self.branch(x, filters)
        return (x + self.drop_path(y) if is_added else y), balance
