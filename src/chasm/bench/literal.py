"""The CHASM block written directly from the paper's equations: the baseline for the times of all forms."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate, softplus

import chasm
from chasm.common.precision import full_precision, upcast
from chasm.ops import reference


class LiteralBlock(torch.nn.Module):
    """Computes the block of a `chasm.CHASM` from its parameters, and rebuilds both bases in every call."""

    def __init__(self, mixer: chasm.CHASM) -> None:
        super().__init__()
        self.mixer = mixer

    def core(self, x: Tensor) -> Tensor:
        """Return the spectral core of x, (B, C, H, W)."""
        with full_precision(x):  # cuFFT has no bfloat16, so the core runs in float32 under autocast too
            z = upcast(x)
            for dim, axis in ((2, "ch"), (3, "cw")):
                theta, gain_table, _ = self.mixer.axis_parameters(axis)
                assert theta is not None
                U = reference.basis(theta)
                table = gain_table.T[None]  # (1, C, B)
                bins = x.shape[dim] // 2 + 1
                gains = softplus(interpolate(table, bins, mode="linear", align_corners=True)[0].T)
                z = reference.axis_pass(z, U, gains, dim)
            return z.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert self.mixer.refine is not None
        assert self.mixer.fuse is not None
        y: Tensor = self.mixer.fuse(gelu(self.mixer.refine(self.core(x))))
        return x + y if self.mixer.residual else y
