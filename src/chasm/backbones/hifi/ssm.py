"""The state-space layer of HiFi-Mamba: a Mamba scan over the low stream, conditioned on the high stream.

    [q, z] = W_in a;   u = SiLU(dw3x3(q));   r = W_cond b
    (delta, B, C) = W_x u;   (B', C') = W_x' r;   B <- B + MLP(B');   C <- C + MLP(C')
    delta, B, C <- dilated depthwise conv along the sequence (7 taps, step 2, not causal)
    y = scan(u, softplus(W_delta delta + b), A = -exp(A_log), B, C) + D_skip u;   out = W_out (y * SiLU(z))

Tokens are in raster order, one direction. Maps stay (B, channels, H, W), so that a linear map over channels
is a 1x1 convolution and no transpose is needed before the scan. The authors' code also holds a LayerNorm on y
that is never called and projects r to a delta part that is thrown away; both are left out (2 D + R D
parameters).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.hifi.layers import (
    ChannelMap,
    Depthwise,
    NormalChannelMap,
    TokenMap,
    along_sequence,
    over_channels,
)
from chasm.common.tracing import is_unchanged
from chasm.ops.selective_scan import selective_scan


class GatedMLP(nn.Module):
    """Maps the N channels of each token to N: GELU(first half) * second half of 12 N hidden channels."""

    def __init__(self, state: int) -> None:
        super().__init__()
        self.expand = NormalChannelMap(state, 12 * state)
        self.project = NormalChannelMap(6 * state, state)

    def forward(self, x: Tensor) -> Tensor:
        if is_unchanged(NormalChannelMap, self.expand):
            # Two products instead of two halves of one: the gradient of halves is a copy of both into one map.
            gate, value = (over_channels(x, weight) for weight in self.expand.weight.chunk(2))
        else:
            gate, value = self.expand(x).chunk(2, 1)
        return self.project(F.gelu(gate) * value)


class ModulatedSSM(nn.Module):
    """Maps low and high, each (B, width, H, W), to (B, width, H, W), without an identity path.

    Args:
        width: channels of each stream.
        state: size of the state of the scan.
        kernel: taps along the token sequence, an odd number.
        dropout: rate on the output.
    """

    no_decay_parameters = ("A_log", "D_skip")

    def __init__(self, width: int, state: int = 16, kernel: int = 7, dropout: float = 0.0) -> None:
        super().__init__()
        if kernel % 2 == 0:
            raise ValueError(f"the kernel along the sequence must be odd to keep its length, got {kernel}")
        inner, rank = 2 * width, math.ceil(width / 16)
        self.splits = (rank, state, state)
        self.in_proj = NormalChannelMap(width, 2 * inner)
        self.conv = Depthwise(inner)
        self.cond_proj = NormalChannelMap(width, inner)
        self.x_proj = ChannelMap(inner, sum(self.splits))
        self.cond_x_proj = ChannelMap(inner, 2 * state)
        self.modulate_B = GatedMLP(state)
        self.modulate_C = GatedMLP(state)
        self.sequence_convs = nn.ModuleList(
            nn.Conv1d(n, n, kernel, padding=kernel - 1, dilation=2, groups=n, bias=False) for n in self.splits
        )
        self.delta_proj = TokenMap(rank, inner)
        self.delta_bias = nn.Parameter(torch.empty(inner))
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D_skip = nn.Parameter(torch.ones(inner))
        self.out_proj = NormalChannelMap(inner, width)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights that Mamba initialises in its own way: A, step sizes, and the conditioning."""
        rank, state, _ = self.splits
        self.cond_x_proj.weight.copy_(self.x_proj.weight[rank:])
        self.A_log.copy_(torch.arange(1, state + 1, device=self.A_log.device).float().log())
        nn.init.uniform_(self.delta_proj.weight, -(rank**-0.5), rank**-0.5)
        # Step sizes log-uniform in [1e-3, 1e-1]: the bias is softplus^-1 of them.
        low, high = math.log(1e-3), math.log(1e-1)
        tau = self.delta_bias.uniform_(low, high).exp().clamp(min=1e-4)
        self.delta_bias.copy_(tau + torch.log(-torch.expm1(-tau)))

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        q, z = self.in_proj(low).chunk(2, 1)
        u = F.silu(self.conv(q))  # (B, D, H, W)
        delta, B, C = self.x_proj(u).split(self.splits, 1)
        B_cond, C_cond = self.cond_x_proj(self.cond_proj(high)).chunk(2, 1)
        parts = torch.cat([delta, B + self.modulate_B(B_cond), C + self.modulate_C(C_cond)], 1)
        # From here along the raster sequence: (B, R, L), (B, N, L), (B, N, L)
        delta, B, C = self._along_sequence(parts.flatten(2)).split(self.splits, 1)
        y = selective_scan(
            u.flatten(2),
            self.delta_proj(delta),
            -torch.exp(self.A_log),
            B,
            C,
            self.D_skip,
            delta_bias=self.delta_bias,
            delta_softplus=True,
        )  # (B, D, L), float32 inside also under autocast
        return self.dropout(self.out_proj(y.unflatten(2, u.shape[2:]) * F.silu(z)))

    def _along_sequence(self, parts: Tensor) -> Tensor:
        """Return the convolutions of delta, B and C along the sequence, as one convolution where that is possible."""
        if is_unchanged(nn.Conv1d, *self.sequence_convs):
            taps = torch.cat([conv.weight for conv in self.sequence_convs])  # type: ignore[misc]
            return along_sequence(parts, taps, dilation=2)
        each = zip(self.sequence_convs, parts.split(self.splits, 1), strict=True)
        return torch.cat([conv(part) for conv, part in each], 1)
