"""FSEL: Sun et al., "Frequency-Spatial Entanglement Learning for Camouflaged Object Detection", ECCV 2024.

    y = x + Fattn(LN x) + Sattn(LN x)               one LN over channels, shared

Fattn: channel attention between full complex spectra, no projections, beside a gated spectrum; both come
back as magnitudes. Sattn: channel attention between 3x3/5x5 grouped convolutions, beside such a pair. Both
intrinsic, as are LN and the residual: the token-mixing half of the published transformer block.

Reading: the published block also has a feed-forward network, which a host brings itself. Its entangled form
(EFFN) is kept as the labelled extra ``part="f+effn"``: x <- x + Fattn(x), then x <- x + EFFN(x), without LN,
the subset whose size prints as in the CHASM paper. Deviation: EFFN uses orthonormal transforms, because with
the published unnormalised ones its output grows with H*W, and only the batch norm after it absorbs that.

Float16 weights: running statistics of an unnormalised spectrum can exceed its range; use bfloat16 or
autocast.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.mixers._spectral import full_precision, is_empty, wide
from chasm.mixers.base import Facts, Mixer, register_mixer
from chasm.registry import near


def squeeze_gate(channels: int, hidden: int, **like: Any) -> nn.Sequential:
    """A gate in (0, 1) for every channel and bin, from the real part of the spectrum: no pooling."""
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 1, **like),
        nn.BatchNorm2d(hidden, **like),
        nn.ReLU(),
        nn.Conv2d(hidden, channels, 1, **like),
        nn.Sigmoid(),
    )


def gated(gate: nn.Sequential, Z: Tensor) -> Tensor:
    """gate(Re Z) Z; call with autocast off."""
    weights: Tensor = gate(Z.real.to(gate[0].weight.dtype))  # type: ignore[arg-type]
    return wide(weights) * Z


def channel_scores(q: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    """tau q k^T of the unit-norm channels: (B, heads, c, N) twice -> (B, heads, c, c). No conjugate."""
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * wide(tau)


class FrequencyAttention(nn.Module):
    spectral_parameters = ("tau", "gate")

    def __init__(self, channels: int, heads: int, inverse_axes: str, **like: Any) -> None:
        super().__init__()
        self.heads, self.inverse_axes = heads, inverse_axes
        self.tau = nn.Parameter(torch.ones(heads, 1, 1, **like))
        self.project = nn.Conv2d(2 * channels, channels, 1, bias=False, **like)
        self.gate = squeeze_gate(channels, channels // 16, **like)

    def attention(self, z: Tensor) -> Tensor:
        """(B, heads, c, N) spectra -> (B, heads, c, c) complex weights; each row sums to 1 + i."""
        scores = channel_scores(z, z, self.tau)
        return torch.complex(scores.real.softmax(-1), scores.imag.softmax(-1))

    def local(self, Z: Tensor) -> Tensor:
        return torch.fft.ifft2(gated(self.gate, Z)).abs()

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        with full_precision(x):
            Z = torch.fft.fft2(wide(x))
            z = Z.reshape(B, self.heads, C // self.heads, H * W)
            y = self.attention(z) @ z
            if self.inverse_axes == "spatial":
                y = y.reshape(B, C, H, W)
            y = torch.fft.ifft2(y).abs()  # official: over (channel in head, H*W), the axes it has at this point
            y = torch.cat((y.reshape(B, C, H, W), self.local(Z)), 1).to(x.dtype)
        return self.project(y)


def pairwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """conv(x) of a convolution with two channels in and one out per group: a depthwise one, then sums of neighbours.

    For the weights' gradient of groups this narrow cuDNN goes through them one by one.
    """
    C, half, k = conv.in_channels, conv.out_channels, conv.kernel_size
    y = F.conv2d(x, conv.weight.reshape(C, 1, *k), padding=conv.padding, groups=C)
    even, odd = y.unflatten(1, (half, 2)).unbind(2)
    return even + odd


class GroupedPair(nn.Module):
    """3x3 and 5x5 convolutions, each C -> C/2 in C/2 groups, side by side."""

    def __init__(self, channels: int, **like: Any) -> None:
        super().__init__()
        half = channels // 2
        self.conv3 = nn.Conv2d(channels, half, 3, padding=1, groups=half, bias=False, **like)
        self.conv5 = nn.Conv2d(channels, half, 5, padding=2, groups=half, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((pairwise(self.conv3, x), pairwise(self.conv5, x)), 1)


class SpatialAttention(nn.Module):
    no_decay_parameters = ("tau",)

    def __init__(self, channels: int, heads: int, **like: Any) -> None:
        super().__init__()
        self.heads = heads
        self.tau = nn.Parameter(torch.ones(heads, 1, 1, **like))
        self.q, self.k, self.v = (
            nn.Sequential(nn.Conv2d(channels, channels, 1, **like), GroupedPair(channels, **like)) for _ in range(3)
        )
        self.local = GroupedPair(channels, **like)
        self.project = nn.Conv2d(2 * channels, channels, 1, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        q, k, v = (
            wide(branch(x)).reshape(B, self.heads, C // self.heads, H * W) for branch in (self.q, self.k, self.v)
        )
        with full_precision(x):  # the norms sum over every position
            y = channel_scores(q, k, self.tau).softmax(-1) @ v
        return self.project(torch.cat((y.reshape(x.shape).to(x.dtype), self.local(x)), 1))


class EntangledFFN(nn.Module):
    """The published feed-forward network, with orthonormal transforms."""

    spectral_parameters = ("gate_in", "gate_cat")

    def __init__(self, channels: int, **like: Any) -> None:
        super().__init__()
        hidden = channels // 16
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, **like)
        self.grouped = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=channels, bias=False, **like)
        self.project = nn.Conv2d(4 * channels, channels, 1, bias=False, **like)
        self.gate_in = squeeze_gate(channels, hidden, **like)
        self.gate_cat = squeeze_gate(2 * channels, hidden, **like)

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            f = gated(self.gate_in, torch.fft.fft2(wide(x), norm="ortho")).abs()  # a spectrum, used as a map
        d = wide(self.depthwise(x))
        c = torch.cat((F.gelu(f) * f, F.gelu(d) * d), 1)  # (B, 2C, H, W)
        with full_precision(x):
            f = torch.fft.ifft2(gated(self.gate_cat, torch.fft.fft2(c, norm="ortho")), norm="ortho").abs()
        return self.project(torch.cat((f.to(x.dtype), self.grouped(c.to(x.dtype))), 1))


@register_mixer("fsel")
class FSEL(Mixer):
    """``inverse_axes``: "official" (the code's, over channel-in-head and H*W) or "spatial" (over H and W).
    ``part``: "f+s" (frequency and spatial attention) or the labelled extra "f+effn"."""

    owns_residual = True
    facts = Facts(
        "frequency selection",
        "learned enhancement",
        "no size-dependent parameters",
        shared_basis="no explicit",
        paper_params="0.06M",
        note="LN, frequency and spatial attention have 0.08M; the reading part='f+effn' has 0.06M",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: tuple[int, ...] | None = None,
        heads: int = 8,
        inverse_axes: str = "official",
        part: str = "f+s",
        residual: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if channels < 16 or channels % 2 or heads < 1 or channels % heads:
            raise ValueError(
                f"expected an even channels >= 16 that heads divide, got channels={channels}, heads={heads}"
            )
        for option, value, known in (
            ("inverse_axes", inverse_axes, ("official", "spatial")),
            ("part", part, ("f+s", "f+effn")),
        ):
            if value not in known:
                raise ValueError(f"unknown {option} {value!r}: {near(value, known)}")
        like = {"device": device, "dtype": dtype}
        self.channels, self.residual = channels, residual
        self.frequency = FrequencyAttention(channels, heads, inverse_axes, **like)
        self.effn: EntangledFFN | None = None
        if part == "f+s":
            self.norm = nn.LayerNorm(channels, **like)
            self.spatial = SpatialAttention(channels, heads, **like)
        else:
            self.effn = EntangledFFN(channels, **like)

    def forward(self, x: Tensor) -> Tensor:
        if is_empty(x, self.channels):
            return x
        if self.effn is None:
            z = self.norm(x.movedim(1, -1)).movedim(-1, 1)
            y = self.frequency(z) + self.spatial(z)
        else:
            y = self.frequency(x)
            y = y + self.effn(x + y)
        return (x + y if self.residual else y).to(x.dtype)
