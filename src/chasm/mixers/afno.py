"""AFNO: Guibas et al., "Adaptive Fourier Neural Operators: Efficient Token Mixers for Transformers", ICLR
2022, arXiv 2111.13587.

    X = rfft2(x), channels in n contiguous blocks of b = C/n                   (orthonormal transforms)
    Y = shrink(relu(X W1 + B1) W2 + B2),  one complex network per block, shared by all bins
    y = irfft2(Y) + x

ReLU and soft-shrinkage act on real and imaginary parts separately, so the block is not shift-equivariant.
Intrinsic: the skip. Published n: 8 in the class, 4 in the ImageNet command; 4 here. Published mode
truncation is off by default (a fraction of 1), and left out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.common.cost import paper_products
from chasm.mixers._spectral import full_precision, irfft2, is_empty, rfft2, upcast
from chasm.mixers.base import Facts, Mixer, register_mixer


def _complex_affine(X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return X W + B in real arithmetic: X (B, n, 2b, N), real parts above imaginary ones; weight (n, b, o, 2)."""
    re, im = weight.unbind(-1)
    # (xr + i xi)(wr + i wi): [xr xi] times [[wr, wi], [-wi, wr]]
    real_form = torch.cat((torch.cat((re, im), -1), torch.cat((-im, re), -1)), -2)  # (n, 2b, 2o)
    offset = torch.cat(bias.unbind(-1), -1)  # (n, 2o)
    with paper_products(lambda: X.numel() // 2 * re.shape[-1]):  # complex products, though four real ones run for each
        return real_form.mT @ X + offset[..., None]


@register_mixer("afno")
class AFNO(Mixer):
    """The AFNO block.

    Args:
        channels: the number of channels, C.
        size: not used; nothing here depends on the size of a map.
        blocks: number of channel blocks; must divide the channels.
        hidden_factor: width of the network inside a block, as a multiple of the block.
        shrink: threshold of the soft-shrinkage.
        residual: whether to add the identity path; a host that adds its own switches it off.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    owns_residual = True
    spectral_parameters = ("w1", "b1", "w2", "b2")
    complex_parameters = ("w1", "b1", "w2", "b2")
    facts = Facts(
        "adaptive Fourier modes",
        "block/channel",
        "no size-dependent parameters",
        shared_basis="no explicit",
        paper_params="0.01M",
        note="0.01M is 4 blocks with a complex number counted as two reals",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        blocks: int = 4,
        hidden_factor: int = 1,
        shrink: float = 0.01,
        residual: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if blocks < 1 or channels % blocks:
            raise ValueError(f"expected blocks to divide channels, got blocks={blocks} and channels={channels}")
        if hidden_factor < 1:
            raise ValueError(f"expected hidden_factor of at least 1, got {hidden_factor}")
        if shrink < 0:
            raise ValueError(f"expected shrink of at least 0, got {shrink}")
        self.channels, self.blocks, self.shrink, self.residual = channels, blocks, shrink, residual
        b = channels // blocks
        hidden = hidden_factor * b

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, 2, device=device, dtype=dtype) * 0.02)

        self.w1, self.b1 = normal(blocks, b, hidden), normal(blocks, hidden)
        self.w2, self.b2 = normal(blocks, hidden, b), normal(blocks, b)

    def forward(self, x: Tensor) -> Tensor:
        if is_empty(x, self.channels):
            return x
        B, C, H, W = x.shape
        n, b, K = self.blocks, C // self.blocks, W // 2 + 1
        with full_precision(x):
            scale = (H * W) ** -0.5  # scale of orthonormal transforms, applied to the small factors
            w1, b1, w2, b2 = upcast(self.w1) * scale, upcast(self.b1), upcast(self.w2) * scale, upcast(self.b2) * scale
            X = torch.view_as_real(rfft2(x, "backward"))  # (B, C, H, K, 2)
            X = X.reshape(B, n, b, H * K, 2).movedim(-1, 2).reshape(B, n, 2 * b, H * K)
            X = F.relu(_complex_affine(X, w1, b1))
            X = F.softshrink(_complex_affine(X, w2, b2), self.shrink * scale)
            re, im = X.reshape(B, n, 2, b, H, K).unbind(2)
            y = irfft2(torch.complex(re, im).reshape(B, C, H, K), (H, W), "forward").to(x.dtype)
        return x + y if self.residual else y
