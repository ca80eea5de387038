"""A chain of axis passes by kernels that read a map once and write it once; bfloat16 on a GPU, without a gradient.

    y = S A_j G_j A_{j-1} S x     of pass j; A_{j-1} only in the first, else it was the A_j of the pass before

S transforms the axis: the Hartley transform, of cos + sin, is real, symmetric and (scaled) its own inverse, and gains
are diagonal in it because they depend on |k| alone. An even length n takes two transforms of n / 2 only: even
frequencies see nothing but x[i] + x[i + n/2], odd ones x[i] - x[i + n/2]. For those cos + sin are taken half a sample
off, which makes their matrix symmetric too.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from chasm.common.cost import counted_as
from chasm.ops.forms.base import Form, Passes
from chasm.ops.forms.triton import Circulants, channel_product, circulant_pass, make_circulants
from chasm.ops.gains import impulse_response
from chasm.ops.kernels.launch import power_of_2
from chasm.ops.kernels.layout import contiguous, is_channels_last
from chasm.ops.library import constant
from chasm.ops.operators import merge


class Fused(Form):
    """Each pass as one Triton kernel."""

    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        # Gain tables of all axes, the circulants of a pass along H, then with bases the channel matrices (m + 1, C, C).
        dims, gains, bases = passes
        constants = [gain_table(g, shape[dim]).to(dtype) for g, dim in zip(gains, dims, strict=True)]
        if 2 in dims:
            column = impulse_response(gains[list(dims).index(2)], shape[2])
            constants += make_circulants(column, dtype)[:2]
        return [*constants, merge(bases).to(dtype)] if bases else constants

    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], save: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # y in the memory format of x (B, C, H, W), NCHW or channels last; `before_local`: NCHW. A program wants its row
        # or column with the channels side by side, or its positions. Where channels come first a column has neither: a
        # pass along H is then one of form "triton", with circulants.
        from chasm.ops.kernels import fused as kernels  # imports triton, which is not installed everywhere

        m, along_h = len(dims), 2 * (2 in dims)
        tables, T = constants[:m], Circulants(*constants[m : m + along_h]) if along_h else None
        mats = constants[-1].unbind() if len(constants) > m + along_h else [None] * (m + 1)
        last = is_channels_last(x)
        A = mats[0]
        for j, (table, dim, after) in enumerate(zip(tables, dims, mats[1:], strict=True), 1):
            if dim == 2 and not last:
                assert T is not None
                x, _ = circulant_pass(T, channel_product(A, x), dim)
                A = after
                continue
            n, products = x.shape[dim], (A is not None) + (after is not None)
            with counted_as("matmul", macs=x.numel() * (n + products * x.shape[1])):
                to_last = last and (not before_local or dim == 2 or j < m)
                x = kernels.fused_pass(x, constant(hartley, x, n, x.dtype), table, scales(n)[2], A, after, dim, to_last)
            A = None
        x = channel_product(A, x)
        return contiguous(x) if before_local else x, []


def _padded(n: int) -> int:
    """Return the rows of a matrix that holds n: a power of two, and no fewer than matrix units take."""
    return power_of_2(n, 64)


def scales(n: int) -> tuple[float, float, float]:
    """Return powers of two for transform and gains, and a factor for the result, which is applied in float32.

    A transform to the mean is then exact in bfloat16, and with n a power of two a flat map stays as it is.
    """
    transform = 2.0 ** -round(math.log2(n / 2) / 2)  # about 1 / sqrt(n / 2), with which it would be orthogonal
    mantissa, exponent = math.frexp(1 / (n * transform**2))  # the sum of two halves is not halved either
    return transform, 2.0 ** (exponent - 1), 2 * mantissa


def hartley(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    """Return the transforms to even and odd frequencies, (2, P, P): symmetric, orthogonal but for scale, zeros around.

    Args:
        device: where they are made.
        n: length of the axis; even.
        dtype: of the features.
    """
    half, P = n // 2, _padded(n // 2)
    i = torch.arange(half, device=device)
    # In units of pi / n, and reduced in integers first.
    even, odd = 4 * i[:, None] * i % (2 * n), (2 * i[:, None] + 1) * (2 * i + 1) % (2 * n)
    angle = torch.stack([even, odd]).double() * (math.pi / n)
    H = torch.zeros(2, P, P, dtype=torch.float64, device=device)
    H[:, :half, :half] = (angle.cos() + angle.sin()) * scales(n)[0]
    return H.to(dtype)


def gain_table(gains: Tensor, n: int) -> Tensor:
    """Return (2, CP/16, P/16, 8, 4, 2, 2, 2): gains (K, C) of even and of odd frequencies; filled with zeros.

    After the first axis, indices are: column / 16, row / 16, row % 8, column / 2 % 4, column / 8 % 2, row / 8 % 2,
    column % 2 of a matrix (P, CP). So a block of 16 x 16 lies in memory as matrix units of Hopper spread a result over
    the threads of a warp and, within each thread, over registers.
    """
    half, C = n // 2, gains.shape[1]
    k = torch.arange(half, device=gains.device) * 2 + torch.arange(2, device=gains.device)[:, None]
    table = gains.new_zeros(2, _padded(half), _padded(C))
    table[:, :half, :C] = gains[torch.minimum(k, n - k)] * scales(n)[1]
    parts = table.unflatten(2, (-1, 2, 4, 2)).unflatten(1, (-1, 2, 8))  # of rows (1 to 3), of columns (4 to 7)
    return parts.permute(0, 4, 1, 3, 6, 5, 2, 7).contiguous()
