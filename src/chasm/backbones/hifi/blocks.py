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

from chasm.backbones.base import extend
from chasm.backbones.hifi.kernels.norm import norm_gelu
from chasm.backbones.hifi.ssm import ChannelNorm, Depthwise, ModulatedSSM, Pointwise
from chasm.common.registry import suggest
from chasm.ops.kernels import observed, traced
from chasm.ops.kernels.local import obstacle


class SampleNorm(nn.GroupNorm):
    """GroupNorm with one group: a sample is normalised as a whole."""

    def __init__(self, width: int) -> None:
        super().__init__(1, width)

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        """With `gelu`, which is for those whom `joins` allows it, its GELU too, by kernels of our own."""
        return norm_gelu(x, self.weight, self.bias, self.eps) if gelu else super().forward(x)

    def joins(self, after: nn.Module, x: Tensor) -> bool:
        """Whether what comes after is a GELU that can be one with the norm, with nobody looking in between."""
        if type(after) is not nn.GELU or after.approximate != "none" or "forward" in vars(after):
            return False
        if observed(self) or observed(after) or traced(x) or traced(self.weight):
            return False
        return obstacle(x) is None and x.shape[1:2] == self.weight.shape


class Layers(nn.Sequential):
    """Layers one after another, a SampleNorm and its GELU as one where they join."""

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(self)
        for layer in layers:
            if isinstance(layer, SampleNorm):
                after = next(layers, nn.Identity())
                x = layer(x, gelu=True) if layer.joins(after, x) else after(layer(x))
            else:
                x = layer(x)
        return x


class InvertedBottleneck(nn.Module):
    """x + GELU(1x1(GELU(GN(dw3x3(GELU(GN(1x1(x))))))), expanding the channels inside."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        inner = expansion * width
        depthwise = Depthwise(inner, bias=False)
        nn.init.trunc_normal_(depthwise.weight, std=0.02)
        self.body = Layers(
            Pointwise(width, inner),
            SampleNorm(inner),
            nn.GELU(),
            depthwise,
            SampleNorm(inner),
            nn.GELU(),
            Pointwise(inner, width),
            nn.GELU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def double(x: Tensor, dim: int) -> Tensor:
    """Bilinear x2 along one axis, half-pixel centres: (3 x[i] + x[i -+ 1]) / 4, borders repeated.

    Equals F.interpolate, whose backward adds in no fixed order on CUDA.
    """
    n = x.shape[dim]
    before = torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, n - 1)], dim)
    after = torch.cat([x.narrow(dim, 1, n - 1), x.narrow(dim, n - 1, 1)], dim)
    pairs = torch.stack([torch.lerp(x, before, 0.25), torch.lerp(x, after, 0.25)], dim + 1)
    return pairs.flatten(dim, dim + 1)


class BinomialLowPass(nn.Module):
    """[1 4 6 4 1] / 16 per axis with reflected borders, every second sample, bilinear back. H, W even.

    The authors decimate both axes in the second convolution; decimating each in its own is the same map.
    """

    taps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("taps", torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        C = x.shape[1]
        row = self.taps.to(x.dtype).view(1, 1, 1, 5).expand(C, 1, 1, 5)
        x = F.conv2d(extend(x, 3, 2, 2), row, stride=(1, 2), groups=C)
        x = F.conv2d(extend(x, 2, 2, 2), row.transpose(2, 3), stride=(2, 1), groups=C)
        return double(double(x, 2), 3)


class HaarLowPass(nn.Module):
    """The orthonormal Haar LL band, (a + b + c + d) / 2 = twice the 2x2 mean, bilinear back. H, W even."""

    def forward(self, x: Tensor) -> Tensor:
        return double(double(2 * F.avg_pool2d(x, 2), 2), 3)


class ChannelGate(nn.Module):
    """x * sigmoid(dw3x3(GELU(1x1(x)))), of the spatial mean where `pooled`."""

    def __init__(self, width: int, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.mix = nn.Conv2d(width, width, 1)
        self.depthwise = Depthwise(width)

    def forward(self, x: Tensor) -> Tensor:
        s = x.mean((2, 3), keepdim=True) if self.pooled else x
        return x * torch.sigmoid(self.depthwise(F.gelu(self.mix(s))))


class DropPath(nn.Module):
    """Drops the whole branch of a sample at the given rate, in training only."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return x
        keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) >= self.rate
        return x * (keep / (1 - self.rate)).to(x.dtype)


LOWPASS = {"binomial": BinomialLowPass, "haar": HaarLowPass}
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
    drop_path: float = 0.3  # of the last block; the rate grows linearly from 0

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width must be even, since a block works on two halves, got {self.width}")
        for option, value, known in (("lowpass", self.lowpass, LOWPASS), ("gate", self.gate, GATES)):
            if value not in known:
                raise ValueError(f"unknown {option} {value!r}: {suggest(value, known)}")


class HiFiBlock(nn.Module):
    """(B, C, H, W) with even H and W -> what the block adds to it, and its balance loss, which is zero here.

    The host adds it through `drop_path`, so that a slot can come between.
    """

    def __init__(self, options: BlockOptions, drop_path: float) -> None:
        super().__init__()
        half = options.width // 2
        self.lowpass = LOWPASS[options.lowpass]()
        self.ib_low = InvertedBottleneck(half, options.expansion)
        self.ib_0 = InvertedBottleneck(half, options.expansion)
        self.ib_1 = InvertedBottleneck(half, options.expansion)
        self.norm_low = ChannelNorm(half)
        self.norm_high = ChannelNorm(half)
        self.ssm = ModulatedSSM(half, options.state, options.kernel, options.dropout)
        self.gate = ChannelGate(options.width, options.gate == "pooled")
        self.drop_path = DropPath(drop_path)

    def fuse(self, high: Tensor, residual: Tensor) -> Tensor:
        """How the detail that the low-pass removed enters the high stream."""
        return high + residual

    def streams(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the two streams, high first, on the channels again."""
        high, low = x.chunk(2, 1)
        t = self.ib_low(low)
        low = self.lowpass(t)
        high = self.ib_0(self.fuse(high, t - low))
        return torch.cat([self.ib_1(high), self.ssm(self.norm_low(low), self.norm_high(high))], 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(self.streams(x)), x.new_zeros((), dtype=torch.float32)
