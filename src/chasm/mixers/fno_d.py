"""FNO-D: a Fourier Neural Operator layer (Li et al., ICLR 2021, arXiv 2010.08895) with a learned
deformation.

    u = x sampled at p + d(x)                       d: 3x3 convolution to two offsets in pixels, zero at init
    v = irfft2(R X) + P x,   X = rfft2(u)           R: one dense C x C complex matrix per kept mode
    y = Q gelu(v)                                   P, Q: 1x1 convolutions with bias

Reading: no public method of this name fits a vision mixer. D is read as deformation, in the spirit of
Geo-FNO (arXiv 2207.05209), which deforms coordinates by a network shared across layers, where we predict
offsets from the features. ``deform=False`` is the plain dense layer, which the other starts as. The output
projection Q is a reading too. The linear bypass P is not an identity path: the slot adds the residual.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.common.tracing import is_exporting
from chasm.mixers._spectral import (
    WideConv2d,
    check_pair,
    complex_of_pairs,
    full_precision,
    irfft2,
    is_empty,
    upcast,
)
from chasm.mixers.base import Facts, Mixer, register_mixer


class SpectralConv(nn.Module):
    """The FNO layer: dense channel mixing on the m1 lowest rows of either sign and the m2 lowest columns.

    On a map with fewer bins than modes the two sets of rows are cut so that they do not overlap: every row is
    then kept once (the published slices overwrite each other and leave weights without gradient).

    Args:
        c_in: channels of the input.
        c_out: channels of the output.
        modes: (m1, m2), the modes kept along H and W.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        modes: tuple[int, int],
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        m1, m2 = self.modes = check_pair("modes", modes)

        def uniform() -> nn.Parameter:
            return nn.Parameter(torch.rand(c_in, c_out, m1, m2, 2, device=device, dtype=dtype) / (c_in * c_out))

        self.r_pos, self.r_neg = uniform(), uniform()  # rows 0 .. m1-1 and -m1 .. -1

    def forward(self, x: Tensor, gains: Tensor | None = None) -> Tensor:
        """Return (B, c_out, H, W) for x (B, c_in, H, W) in wide precision; `gains` (2, m1, m2) scale the weights."""
        (H, W), (m1, m2) = x.shape[-2:], self.modes
        top, bottom, columns = min(m1, (H + 1) // 2), min(m1, H // 2), min(m2, W // 2 + 1)
        with full_precision(x):
            if is_exporting():
                return self._in_pairs(x, gains, top, bottom, columns)
            r_pos, r_neg = complex_of_pairs(self.r_pos), complex_of_pairs(self.r_neg)
            if gains is not None:
                r_pos, r_neg = r_pos * upcast(gains[0]), r_neg * upcast(gains[1])
            # Only the kept columns go through the transform along H.
            X = torch.fft.fft(torch.fft.rfft(upcast(x))[..., :columns], dim=-2)
            low = torch.einsum("bihw,iohw->bohw", X[:, :, :top], r_pos[:, :, :top, :columns])
            high = torch.einsum("bihw,iohw->bohw", X[:, :, H - bottom :], r_neg[:, :, m1 - bottom :, :columns])
            middle = low.new_zeros(*low.shape[:2], H - top - bottom, columns)
            return irfft2(torch.cat((low, middle, high), 2), (H, W), "backward")

    def _in_pairs(self, x: Tensor, gains: Tensor | None, top: int, bottom: int, columns: int) -> Tensor:
        """Compute the same with real and imaginary parts as a last axis of two.

        ONNX can transform complex numbers, but it cannot slice, pad or mix them.
        """
        H, W = x.shape[-2:]
        pos, neg = upcast(self.r_pos), upcast(self.r_neg)  # (c_in, c_out, m1, m2, 2)
        if gains is not None:
            pos, neg = pos * upcast(gains[0])[..., None], neg * upcast(gains[1])[..., None]
        spectrum = torch.view_as_real(torch.fft.rfft(upcast(x)))[..., :columns, :]
        X = torch.view_as_real(torch.fft.fft(complex_of_pairs(spectrum), dim=-2))
        low = _mix_pairs(X[:, :, :top], pos[:, :, :top, :columns])
        high = _mix_pairs(X[:, :, H - bottom :], neg[:, :, self.modes[0] - bottom :, :columns])
        middle = low.new_zeros(*low.shape[:2], H - top - bottom, columns, 2)
        all_columns = F.pad(torch.cat((low, middle, high), 2), (0, 0, 0, W // 2 + 1 - columns))
        return irfft2(complex_of_pairs(all_columns), (H, W), "backward")


def _mix_pairs(X: Tensor, R: Tensor) -> Tensor:
    """Return R X for every mode, all in pairs: X (B, c_in, h, w, 2), R (c_in, c_out, h, w, 2)."""
    (a, b), (c, d), equation = X.unbind(-1), R.unbind(-1), "bihw,iohw->bohw"
    real = torch.einsum(equation, a, c) - torch.einsum(equation, b, d)
    return torch.stack((real, torch.einsum(equation, a, d) + torch.einsum(equation, b, c)), -1)


def deform_map(x: Tensor, offsets: Tensor) -> Tensor:
    """Sample x at each pixel plus its offset (B, 2, H, W), channel 0 along W: bilinear, border reflected."""
    H, W = x.shape[-2:]
    with full_precision(x):
        x, offsets = upcast(x), upcast(offsets)
        column = torch.arange(W, device=x.device) + offsets[:, 0]  # (B, H, W), in pixels
        row = torch.arange(H, device=x.device)[:, None] + offsets[:, 1]
        grid = torch.stack((column * 2 / max(W - 1, 1) - 1, row * 2 / max(H - 1, 1) - 1), -1)  # [-1, 1] spans the map
        return F.grid_sample(x, grid, "bilinear", "reflection", align_corners=True)


@register_mixer("fno-d")
class FNOD(Mixer):
    """The FNO layer with a learned deformation.

    Args:
        channels: the number of channels, C.
        size: (H, W) of the maps it is meant for. No weight depends on it; it says which modes they have.
        modes: (m1, m2), the modes kept along H and W.
        deform: whether to deform the map first; False gives the plain dense FNO layer.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    spectral_parameters = ("spectral",)
    complex_parameters = ("spectral",)
    facts = Facts(
        "learned FNO response",
        "mode-wise",
        "exact on band-limited maps (H >= 2*m1, W >= 2*m2-2); below, fewer modes; offsets in pixels",
        shared_basis="no explicit",
        paper_params="4.74M",
        note="reading: deformation, output projection; 4.74M counts complex once (as two: 9.46M)",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        modes: tuple[int, int] = (16, 16),
        deform: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.size = None if size is None else check_pair("size", size)
        self.spectral = SpectralConv(channels, channels, modes, device=device, dtype=dtype)
        self.bypass = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)
        self.project = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)
        self.offset: nn.Conv2d | None = None
        if deform:
            self.offset = WideConv2d(channels, 2, 3, padding=1, device=device, dtype=dtype)
            nn.init.zeros_(self.offset.weight)
            nn.init.zeros_(self.offset.bias)  # type: ignore[arg-type]

    def offsets(self, x: Tensor) -> Tensor:
        """Return sampling positions in pixels, (B, 2, H, W). Half precision would round them to whole pixels."""
        assert self.offset is not None
        with full_precision(x):
            offsets: Tensor = self.offset(x)
            return offsets

    def forward(self, x: Tensor) -> Tensor:
        if is_empty(x, self.channels):
            return x
        u = x if self.offset is None else deform_map(x, self.offsets(x))
        v = self.spectral(u).to(x.dtype) + self.bypass(x)
        return self.project(F.gelu(v)).to(x.dtype)
