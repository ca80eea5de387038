"""FFC: Chi, Jiang and Mu, "Fast Fourier Convolution", NeurIPS 2020.

    x = [x_l, x_g], the last ratio*C channels global; y = [y_l, y_g]
    y_l = relu(bn(conv_ll x_l + conv_gl x_g))
    y_g = relu(bn(conv_lg x_l + ST x_g))
    ST x_g = conv1x1(u + FU u + LFU u),  u = relu(bn(conv1x1 x_g)) of half the channels

The Fourier unit FU works on the spectrum of u, the local one LFU on the spectra of its four quadrants.

The native unit: layer, batch normalisation and activation, all intrinsic; it has no identity path.
Published defaults: ratio 0.5, 3x3 zero-padded convolutions without bias, local Fourier unit (LFU) on. The
LFU halves both axes; on an odd axis the last row or column is repeated for it and the result cropped (our
extension). Batch normalisation needs more than one value per channel to train: a single 1x1 map (or, with
LFU, one 2x2 map) fails.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.common.precision import autocast_dtype
from chasm.common.tracing import is_traced
from chasm.mixers._spectral import full_precision, irfft2, is_empty, rfft2, upcast
from chasm.mixers.base import Facts, Mixer, register_mixer


class FourierUnit(nn.Module):
    """A 1x1 convolution, batch norm and ReLU over the spectrum, real and imaginary parts as channels.

    Args:
        channels: channels of the map; the spectrum has twice as many.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(self, channels: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 * channels, 2 * channels, 1, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(2 * channels, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        with full_precision(x):
            X = torch.view_as_real(rfft2(x, "ortho")).movedim(-1, 2)  # (B, C, 2, H, K)
            X = X.reshape(B, 2 * C, H, -1)  # c0.re, c0.im, c1.re, ...
            X = F.relu(self.norm(self.conv(X.to(self.conv.weight.dtype))))
            re, im = upcast(X).reshape(B, C, 2, H, -1).unbind(2)
            return irfft2(torch.complex(re, im), (H, W), "ortho").to(x.dtype)


@register_mixer("ffc")
class FFC(Mixer):
    """The FFC unit: convolution with a global branch, batch norm and ReLU.

    Args:
        channels: the number of channels, C.
        size: not used; nothing here depends on the size of a map.
        ratio: share of global channels; they must be a multiple of 8 with `lfu`, else of 2.
        lfu: whether to add the local Fourier unit.
        kernel_size: kernel size of the convolutions; odd.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    spectral_parameters = ("fourier", "local_fourier")
    facts = Facts(
        "Fourier branch",
        "conv./spectral",
        "no size-dependent parameters",
        shared_basis="no explicit",
        paper_params="1.19M",
        note="the native unit has 0.07M at C = 96; no native setting reaches 1.19M, and the unit is left unchanged",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        ratio: float = 0.5,
        lfu: bool = True,
        kernel_size: int = 3,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        g, step = round(ratio * channels), 8 if lfu else 2
        if not 0 < g < channels or abs(g - ratio * channels) > 1e-6 or g % step:
            raise ValueError(
                f"expected ratio*channels inside (0, channels) and a multiple of {step} (lfu={lfu}), "
                f"got {ratio}*{channels} = {ratio * channels:g}"
            )
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"expected an odd kernel_size, got {kernel_size}")
        self.channels, self.split = channels, (channels - g, g)

        def conv(c_in: int, c_out: int) -> nn.Conv2d:
            pad = kernel_size // 2
            return nn.Conv2d(c_in, c_out, kernel_size, padding=pad, bias=False, device=device, dtype=dtype)

        self.conv_ll, self.conv_gl = conv(channels - g, channels - g), conv(g, channels - g)
        self.conv_lg = conv(channels - g, g)
        self.reduce = nn.Conv2d(g, g // 2, 1, bias=False, device=device, dtype=dtype)
        self.norm_u = nn.BatchNorm2d(g // 2, device=device, dtype=dtype)
        self.fourier = FourierUnit(g // 2, device=device, dtype=dtype)
        self.local_fourier = FourierUnit(g // 2, device=device, dtype=dtype) if lfu else None
        self.expand = nn.Conv2d(g // 2, g, 1, bias=False, device=device, dtype=dtype)
        self.norm_l = nn.BatchNorm2d(channels - g, device=device, dtype=dtype)
        self.norm_g = nn.BatchNorm2d(g, device=device, dtype=dtype)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def local(self, unit: FourierUnit, u: Tensor) -> Tensor:
        """Return the Fourier unit of a quarter of the channels of u, with the four quadrants of the map as channels."""
        H, W = u.shape[-2:]
        h, w = (H + 1) // 2, (W + 1) // 2
        q = u[:, : u.shape[1] // 4]
        q = torch.cat((q, q[:, :, H - H % 2 :]), 2)  # repeats the last row where H is odd
        q = torch.cat((q, q[..., W - W % 2 :]), 3)
        q = torch.cat((q[:, :, :h], q[:, :, h:]), 1)
        q = torch.cat((q[..., :w], q[..., w:]), 1)  # top left, bottom left, top right, bottom right
        return unit(q).repeat(1, 1, 2, 2)[:, :, :H, :W]

    def spectral_transform(self, x: Tensor) -> Tensor:
        """Return ST x of the global channels x."""
        u = F.relu(self.norm_u(self.reduce(x)))
        out = u + self.fourier(u)
        if self.local_fourier is not None:
            out = out + self.local(self.local_fourier, u)
        return self.expand(out)

    def forward(self, x: Tensor) -> Tensor:
        if is_empty(x, self.channels):
            return x
        maps = x
        half = (autocast_dtype(x) or x.dtype).itemsize == 2
        if x.is_cuda and half and not is_traced():  # batch norms are several times faster so
            maps = x.contiguous(memory_format=torch.channels_last)
        x_l, x_g = maps.split(self.split, 1)
        y_l = F.relu(self.norm_l(self.conv_ll(x_l) + self.conv_gl(x_g)))
        y_g = F.relu(self.norm_g(self.conv_lg(x_l) + self.spectral_transform(x_g)))
        y = torch.cat((y_l, y_g), 1).to(x.dtype)
        return y.contiguous() if x.is_contiguous() else y
