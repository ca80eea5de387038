"""DiffFNO: Liu and Tang, "DiffFNO: Diffusion Fourier Neural Operator", CVPR 2025, arXiv 2411.09911.

    a = gelu(irfft2((1 + rho) R X) + P x)           FNO with rebalanced modes, rho real, one per mode
    b = Q (K^T V) / (HW) + x                        Galerkin attention over positions, 8 heads, no softmax
    G = sigmoid(conv1x1[a, b]);  y = G a + (1 - G) b

Reading: there is no public code. Rebalanced FNO, parallel attention operator and gated fusion are the
paper's. The form of the attention is taken from SRNO (Wei and Zhang, CVPR 2023) and the form of the gate is
ours. The paper keeps all modes; they are truncated here, because the parameter count that the CHASM paper
gives implies it. The diffusion process and its ODE solver are not part of a mixer.

Intrinsic: the `+ x` of the attention branch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.mixers._spectral import WideConv2d, full_precision, is_empty, upcast
from chasm.mixers.base import Facts, Mixer, register_mixer
from chasm.mixers.fno_d import SpectralConv


class GalerkinAttention(nn.Module):
    """Q (K^T V) / N with K and V normalised inside each head: linear in the number N of positions.

    Args:
        channels: the number of channels, C.
        heads: number of heads; must divide the channels.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    no_decay_parameters = ("k_weight", "k_bias", "v_weight", "v_bias")

    def __init__(self, channels: int, heads: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.heads = heads
        d = channels // heads
        self.qkv = WideConv2d(channels, 3 * channels, 1, bias=False, device=device, dtype=dtype)
        self.k_weight = nn.Parameter(torch.ones(heads, 1, d, device=device, dtype=dtype))
        self.k_bias = nn.Parameter(torch.zeros(heads, 1, d, device=device, dtype=dtype))
        self.v_weight = nn.Parameter(torch.ones(heads, 1, d, device=device, dtype=dtype))
        self.v_bias = nn.Parameter(torch.zeros(heads, 1, d, device=device, dtype=dtype))

    @staticmethod
    def normalise(t: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return t with mean 0 and deviation 1 along its last axis, times weight plus bias.

        Args:
            t: (B, heads, N, d).
            weight: (heads, 1, d).
            bias: (heads, 1, d).
        """
        std, mean = torch.std_mean(t, -1, keepdim=True)  # unbiased, and eps is added to the deviation
        return torch.addcmul(upcast(bias), (t - mean) / (std + 1e-5), upcast(weight))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each (B, heads, N, d).

        Half precision is never used: a head has few channels, and if they are nearly equal, the norm makes their
        rounding errors as large as the channels.
        """
        B, C, H, W = x.shape
        # channels are head-major: inside a head q, then k, then v
        qkv = self.qkv(x).reshape(B, self.heads, 3, C // self.heads, H * W)
        q, k, v = (t.mT for t in qkv.unbind(2))
        return q, self.normalise(k, self.k_weight, self.k_bias), self.normalise(v, self.v_weight, self.v_bias)

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            q, k, v = self.project(x)
            y = (k.mT @ v / k.shape[-2]).mT @ q.mT  # (B, heads, d, N): channels first, as x has them
        return y.reshape(x.shape).to(x.dtype)


@register_mixer("difffno")
class DiffFNO(Mixer):
    """The operator of DiffFNO: rebalanced FNO and Galerkin attention, fused by a gate.

    Args:
        channels: the number of channels, C.
        size: not used; nothing here depends on the size of a map.
        modes: (m1, m2), the modes kept along H and W.
        heads: number of heads of the attention; must divide the channels and leave at least two in each.
        residual: whether to add the identity path; a host that adds its own switches it off.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    owns_residual = True
    spectral_parameters = ("spectral", "rho")
    complex_parameters = ("spectral",)
    facts = Facts(
        "dynamic Fourier response",
        "frequency-conditioned",
        "spectral branch as FNO, fewer modes on small maps; attention averages over positions",
        shared_basis="no explicit",
        paper_params="4.77M",
        note="reading: no public code; attention after SRNO; 4.77M counts complex once (as two: 9.49M)",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        modes: tuple[int, int] = (16, 16),
        heads: int = 8,
        residual: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or channels % heads or channels < 2 * heads:
            raise ValueError(f"expected heads that divide channels, two or more in each, got {heads} and {channels}")
        self.channels, self.residual = channels, residual
        self.spectral = SpectralConv(channels, channels, modes, device=device, dtype=dtype)
        self.rho = nn.Parameter(torch.zeros(2, *self.spectral.modes, device=device, dtype=dtype))
        self.bypass = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)
        self.attention = GalerkinAttention(channels, heads, device=device, dtype=dtype)
        self.gate = nn.Conv2d(2 * channels, channels, 1, device=device, dtype=dtype)

    def branches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the FNO branch and the attention branch make of x."""
        a = F.gelu(self.spectral(x, 1 + upcast(self.rho)).to(x.dtype) + self.bypass(x))
        b = self.attention(x)
        return a.to(x.dtype), b + x if self.residual else b

    def forward(self, x: Tensor) -> Tensor:
        if is_empty(x, self.channels):
            return x
        a, b = self.branches(x)
        gate = self.gate(torch.cat((a, b), 1)).sigmoid()
        return torch.lerp(b, a, gate.to(x.dtype))
