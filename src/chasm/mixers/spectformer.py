"""SpectFormer: Patro et al., "SpectFormer: Frequency and Attention is what you need in a Vision
Transformer", arXiv 2304.06446.

    X = rfft2(x);  Y[c, k] = K[c, k] X[c, k];  y = irfft2(Y)          (orthonormal transforms)

Its spectral gating is, operator for operator, the GFNet filter; what the paper adds is the order of blocks
in the backbone (spectral ones first, attention after), which is the host's. As a mixer it is therefore a
coarse-filter GFNet: the filter stays at the published default grid, 14x8, and is resized to the map in
every forward pass. Reading: the published model never resizes in forward; bilinear with aligned corners is
our choice.

Reading: the CHASM paper's FLOPs give this block two dense C x C products per position more than GFNet, and its taxonomy
says "token/channel"; the published gate has none (docs/paper_checked.md). ``projections=True`` puts one 1x1 convolution
before and one after the filter, which has that cost.
"""

from typing import Any

import torch
from torch import Tensor, nn

from chasm.mixers._spectral import check_pair, is_empty
from chasm.mixers.base import Facts, Mixer, register_mixer
from chasm.mixers.gfnet import global_filter


@register_mixer("spectformer")
class SpectFormer(Mixer):
    """The spectral gating of SpectFormer.

    Args:
        channels: the number of channels, C.
        size: not used; the filter is stored for `grid` whatever the size of the host's maps.
        grid: the map (H, W) the filter is stored for.
        projections: whether to mix channels by a 1x1 convolution before and after the filter: a reading, see above.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    resize_mode = "bilinear"
    spectral_parameters = ("filter",)
    complex_parameters = ("filter",)
    facts = Facts(
        "spectral attention",
        "token/channel",
        "coarse filter resized in forward (bilinear, a reading)",
        shared_basis="no explicit",
        paper_params="0.02M",
        note="0.02M is the default 14x8 filter, complex as two reals; the operator is GFNet's, diagonal",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        grid: tuple[int, int] = (14, 14),
        projections: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        h, w = check_pair("grid", grid)
        self.filter = nn.Parameter(torch.randn(h, w // 2 + 1, channels, 2, device=device, dtype=dtype) * 0.02)
        like: dict[str, Any] = {"device": device, "dtype": dtype, "bias": False}
        self.enter = nn.Conv2d(channels, channels, 1, **like) if projections else None
        self.leave = nn.Conv2d(channels, channels, 1, **like) if projections else None

    def forward(self, x: Tensor) -> Tensor:
        if is_empty(x, self.channels):
            return x
        if self.enter is None or self.leave is None:
            return global_filter(x, self.filter, self.resize_mode)
        return self.leave(global_filter(self.enter(x), self.filter, self.resize_mode))
