"""FSEL: Sun et al., "Frequency-Spatial Entanglement Learning for Camouflaged Object Detection", ECCV 2024.

    y = x + Fattn(LN x) + Sattn(LN x)               one LN over channels, shared

Fattn: channel attention between full complex spectra, no projections, beside a gated spectrum; both come
back as magnitudes. Sattn: channel attention between 3x3/5x5 grouped convolutions, beside such a pair. Both
intrinsic, as are LN and the residual: the token-mixing half of the published transformer block.

Reading: the published block also has a feed-forward network, which a host brings itself. Its entangled form
(EFFN) is kept as the labelled extra ``part="f+effn"``: x <- x + Fattn(x), then x <- x + EFFN(x), without LN,
the subset whose size prints as in the CHASM paper. Deviation: EFFN uses orthonormal transforms (``norm="ortho"``),
because with the published unnormalised ones (``norm="backward"``) its output grows with H*W, and only the batch norm
after it absorbs that.

Float16 weights: running statistics of an unnormalised spectrum can exceed its range; use bfloat16 or
autocast.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.common.cost import counted_as
from chasm.common.registry import suggest
from chasm.common.tracing import has_hooks, is_unchanged
from chasm.mixers._spectral import full_precision, is_empty, rfft2, upcast
from chasm.mixers.base import Facts, Mixer, register_mixer


def squeeze_gate(channels: int, hidden: int, **like: Any) -> nn.Sequential:
    """Return a gate in (0, 1) for every channel and bin, made from the real part of the spectrum without pooling."""
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 1, **like),
        nn.BatchNorm2d(hidden, **like),
        nn.ReLU(),
        nn.Conv2d(hidden, channels, 1, **like),
        nn.Sigmoid(),
    )


def whole(half: Tensor, width: int) -> Tensor:
    """Return all bins (..., H, W) of a quantity (..., H, W//2+1) that is equal at k and -k, like |Z| of a real map."""
    return torch.cat((half, mirrored(half[..., 1 : (width + 1) // 2], -2).flip(-1)), -1)


def mirrored(x: Tensor, *axes: int) -> Tensor:
    """Return x with index n moved to -n, modulo the length, along these axes."""
    return x.flip(axes).roll((1,) * len(axes), axes)


def gated(gate: nn.Sequential, Z: Tensor, width: int) -> Tensor:
    """Return gate(Re Z) Z for the half spectrum of real maps; call it with autocast off.

    Args:
        gate: a gate of `squeeze_gate`.
        Z: (B, C, H, width//2+1).
        width: W of the maps.
    """
    if has_hooks(gate):
        weights: Tensor = gate(whole(Z.real, width).to(gate[0].weight.dtype))  # type: ignore[arg-type]
        return upcast(weights)[..., : Z.shape[-1]] * Z
    squeeze, norm, relu, expand, sigmoid = gate
    hidden = squeeze(Z.real.to(squeeze.weight.dtype))  # type: ignore[arg-type]
    hidden = norm(whole(hidden, width))[..., : Z.shape[-1]]  # the statistics are those of all bins
    return upcast(sigmoid(expand(relu(hidden)))) * Z


def channel_weights(q: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    """Return softmax(tau q k^T) of unit-norm channels inside each head, (B, C, C) with zeros between heads.

    Args:
        q: queries (B, H, W, C).
        k: keys (B, H, W, C).
        tau: temperature (heads, 1, 1).
    """
    C = q.shape[-1]
    head = torch.arange(C, device=q.device) // (C // len(tau))
    with counted_as("matmul", macs=q.numel() * C // len(tau)):  # those inside heads
        products = (q.mT @ k).sum(1)  # row by row of the map: few long sums would leave most of a GPU idle
    q_norm, k_norm = (torch.linalg.vector_norm(t, dim=(1, 2)).clamp_min(1e-12) for t in (q, k))
    scores = products / (q_norm[:, :, None] * k_norm[:, None]) * upcast(tau)[head, 0]
    return scores.masked_fill(head[:, None] != head, -torch.inf).softmax(-1)


def weighted_channels(x: Tensor, weights: Tensor, heads: int) -> Tensor:
    """Return sums of the channels of x, weighted by the attention.

    Args:
        x: values (B, H, W, C).
        weights: (B, C, C), zero between heads.
        heads: number of heads; only products inside heads are counted.
    """
    with counted_as("matmul", macs=x.numel() * x.shape[-1] // heads):
        return x @ weights.mT[:, None]


class FrequencyAttention(nn.Module):
    """Attention A between the spectra z of the channels of a head, A = softmax(Re S) + i softmax(Im S), S = tau z z^T.

    The maps are real, so Im S = 0, and Re S is the product of a map and a mirrored one. A z is then the spectrum of
    softmax(Re S) x + i mean(x), which needs no complex product.

    Args:
        channels: the number of channels, C.
        heads: number of heads; must divide the channels.
        inverse_axes: see `FSEL`.
        **like: device and dtype of the parameters.
    """

    spectral_parameters = ("tau", "gate")

    def __init__(self, channels: int, heads: int, inverse_axes: str, **like: Any) -> None:
        super().__init__()
        self.heads, self.inverse_axes = heads, inverse_axes
        self.tau = nn.Parameter(torch.ones(heads, 1, 1, **like))
        self.project = nn.Conv2d(2 * channels, channels, 1, bias=False, **like)
        self.gate = squeeze_gate(channels, channels // 16, **like)

    def attention(self, x: Tensor) -> Tensor:
        """Return the real part (B, C, C) of the weights for maps (B, H, W, C); the imaginary part is heads / C."""
        return channel_weights(x, mirrored(x, 1, 2), self.tau)

    def attended(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return |inverse transform of A z| for the same maps as (B, C, H, W) and as (B, H, W, C)."""
        C, H, W = x.shape[1:]
        official = self.inverse_axes == "official"
        scale = self.heads / (C * H * W) if official else 1.0  # the inverse's, taken to the smallest factors
        real = weighted_channels(rows, self.attention(rows) * scale, self.heads).movedim(-1, 1)
        real = real.contiguous().unflatten(1, (self.heads, -1))
        imag = x.unflatten(1, (self.heads, -1)).mean(2, keepdim=True) * scale
        y = torch.complex(real, imag.expand_as(real))
        if official:  # back over (channel in head, H*W), the axes it has at this point
            y = torch.fft.ifft2(torch.fft.fft2(y).flatten(-2), norm="forward")
        return y.abs().reshape(x.shape)

    def local(self, x: Tensor) -> Tensor:
        """Return the magnitudes of the map behind the gated spectrum of x."""
        return torch.fft.irfft2(gated(self.gate, rfft2(x, "backward"), x.shape[-1]), x.shape[-2:]).abs()

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            maps = upcast(x)
            rows, maps = maps.movedim(1, -1), maps.contiguous()
            y = torch.cat((self.attended(maps, rows), self.local(maps)), 1).to(x.dtype)
        return self.project(y)


def pairwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply a convolution with two channels in and one out per group: a depthwise one, then sums of neighbours.

    cuDNN computes the gradient of the weights of such narrow groups one by one.
    """
    if not is_unchanged(nn.Conv2d, conv):
        y: Tensor = conv(x)
        return y
    C, half, k = conv.in_channels, conv.out_channels, conv.kernel_size
    maps = F.conv2d(x, conv.weight.reshape(C, 1, *k), padding=conv.padding, groups=C)
    even, odd = maps.unflatten(1, (half, 2)).unbind(2)
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
    """Channel attention between grouped convolutions, beside one more pair of them.

    Args:
        channels: the number of channels, C.
        heads: number of heads; must divide the channels.
        **like: device and dtype of the parameters.
    """

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
        q, k, v = (upcast(branch(x)).movedim(1, -1) for branch in (self.q, self.k, self.v))  # (B, H, W, C)
        with full_precision(x):  # the norms sum over every position
            y = weighted_channels(v, channel_weights(q, k, self.tau), self.heads)
        return self.project(torch.cat((y.movedim(-1, 1).to(x.dtype), self.local(x)), 1))


class EntangledFFN(nn.Module):
    """The published feed-forward network.

    Args:
        channels: the number of channels, C.
        norm: norm of the transforms, "ortho" or "backward".
        **like: device and dtype of the parameters.
    """

    spectral_parameters = ("gate_in", "gate_cat")

    def __init__(self, channels: int, norm: str, **like: Any) -> None:
        super().__init__()
        self.norm = norm
        hidden = channels // 16
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, **like)
        self.grouped = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=channels, bias=False, **like)
        self.project = nn.Conv2d(4 * channels, channels, 1, bias=False, **like)
        self.gate_in = squeeze_gate(channels, hidden, **like)
        self.gate_cat = squeeze_gate(2 * channels, hidden, **like)

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[-2:]
        with full_precision(x):
            f = gated(self.gate_in, rfft2(x, self.norm), W)
            f = whole(f.abs(), W)  # a spectrum, used as a map
        d = upcast(self.depthwise(x))
        c = torch.cat((F.gelu(f) * f, F.gelu(d) * d), 1)  # (B, 2C, H, W)
        with full_precision(x):
            f = gated(self.gate_cat, rfft2(c, self.norm), W)
            f = torch.fft.irfft2(f, (H, W), norm=self.norm).abs()
        return self.project(torch.cat((f.to(x.dtype), self.grouped(c.to(x.dtype))), 1))


@register_mixer("fsel")
class FSEL(Mixer):
    """The token-mixing half of the FSEL block.

    Args:
        channels: C; even, and at least 16.
        size: not used; nothing here depends on the size of a map.
        heads: number of heads; must divide the channels.
        inverse_axes: axes of the inverse FFT: "official" (the code's, channel-in-head and H*W) or "spatial" (H, W).
        part: "f+s" (frequency and spatial attention) or the labelled extra "f+effn".
        norm: norm of the transforms inside the EFFN: "ortho", or "backward" as in the published code.
        residual: whether to add the identity path; a host that adds its own switches it off.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

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
        size: int | tuple[int, ...] | None = None,
        heads: int = 8,
        inverse_axes: str = "official",
        part: str = "f+s",
        norm: str = "ortho",
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
            ("norm", norm, ("ortho", "backward")),
        ):
            if value not in known:
                raise ValueError(f"unknown {option} {value!r}: {suggest(value, known)}")
        like = {"device": device, "dtype": dtype}
        self.channels, self.residual = channels, residual
        self.frequency = FrequencyAttention(channels, heads, inverse_axes, **like)
        self.effn: EntangledFFN | None = None
        if part == "f+s":
            self.norm = nn.LayerNorm(channels, **like)
            self.spatial = SpatialAttention(channels, heads, **like)
        else:
            self.effn = EntangledFFN(channels, norm, **like)

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
