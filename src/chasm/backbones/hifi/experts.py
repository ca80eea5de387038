"""The block of HiFi-MambaV2 (Fang et al., 2025): consensus fusion, and a mixture of experts before the gate.

    G = SE(LN X), split as the plain block splits X;  residual = t - LP(t)
    high = G_h + residual;  w = sigmoid(gamma cos(high, residual));  high <- w residual + (1 - w) high
    Y = gate(MoE(W [G, high_out, low_out]));  X <- X + Y
    MoE(x) = shared(x) + p_e expert_e(x), with e = argmax p and p = softmax(router x) at every position
    balance = E sum_e mean(p_e) * share of positions sent to e  (1 where the load is even)

Read from the authors' code. It also creates a 2-way routing convolution and a linear map after the experts
that are never called; they are left out.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.hifi.blocks import BlockOptions, HiFiBlock
from chasm.backbones.hifi.layers import ChannelNorm, Filters, NormalChannelMap
from chasm.common.precision import upcast


class SqueezeExcite(nn.Module):
    """x * sigmoid(W2 ReLU(W1 mean(x))): a gate for every channel (Hu et al., CVPR 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze = NormalChannelMap(width, width // 8)
        self.excite = NormalChannelMap(width // 8, width)

    def forward(self, x: Tensor) -> Tensor:
        s = F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.excite(s))


def linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer that starts from a truncated normal of deviation 0.02, with zero bias."""
    layer = nn.Linear(in_features, out_features)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


class Expert(nn.Sequential):
    """An MLP with twice the channels inside, applied to every position by itself."""

    def __init__(self, width: int) -> None:
        super().__init__(linear(width, 2 * width), nn.GELU(), linear(2 * width, width))


class MixtureOfExperts(nn.Module):
    """Maps (B, C, H, W) to the same shape and a balance loss. Each position runs the shared and one routed expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shared = Expert(width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(4))
        self.router = linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, C, H, W = x.shape
        tokens = x.movedim(1, -1).reshape(-1, C)
        logits = self.router(tokens)
        probability = upcast(logits).softmax(-1)  # (B H W, experts)
        weight, choice = probability.max(-1)
        share = F.one_hot(choice, len(self.experts)).to(probability.dtype).mean(0)
        balance = len(self.experts) * (probability.mean(0) * share).sum()
        # An expert without positions still runs, on zero rows: its gradient is then zero instead of missing.
        rows = _rows_of_experts(choice, len(self.experts))
        routed = torch.cat([expert(tokens[r]) for expert, r in zip(self.experts, rows, strict=True)])
        back = torch.cat(rows).argsort()
        y = self.shared(tokens) + weight[:, None].to(routed.dtype) * routed[back]
        return y.view(B, H, W, C).movedim(-1, 1), balance


def _rows_of_experts(choice: Tensor, experts: int) -> list[Tensor]:
    """Return the positions that go to each expert. Without data, equal shares: any split costs the same."""
    if choice.is_meta:
        return list(torch.arange(len(choice), device="meta").tensor_split(experts))
    return [(choice == e).nonzero().squeeze(1) for e in range(experts)]


class MoEBlock(HiFiBlock):
    """The block of the equations above. Its balance loss is the one of its mixture of experts."""

    def __init__(self, options: BlockOptions, drop_path: float) -> None:
        super().__init__(options, drop_path)
        C = options.width
        if C % 8:
            raise ValueError(f"width must be a multiple of 8 for the squeeze-excite branch, got {C}")
        self.norm = ChannelNorm(C)
        self.squeeze_excite = SqueezeExcite(C)
        self.log_gamma = nn.Parameter(torch.tensor(math.log(2.0)))
        self.merge = NormalChannelMap(2 * C, C, bias=True)
        self.moe = MixtureOfExperts(C)

    def fuse(self, high: Tensor, residual: Tensor) -> Tensor:
        high = high + residual
        lengths = torch.linalg.vector_norm(high, dim=1) * torch.linalg.vector_norm(residual, dim=1)
        cosine = ((high * residual).sum(1) / (lengths + 1e-6)).unsqueeze(1)  # (B, 1, H, W)
        w = torch.sigmoid(self.log_gamma.exp() * cosine)
        return w * residual + (1 - w) * high

    def branch(self, x: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
        g = self.squeeze_excite(self.norm(x))
        y, balance = self.moe(self.merge(torch.cat([g, self.streams(g, filters)], 1)))
        return self.gate(y), balance
