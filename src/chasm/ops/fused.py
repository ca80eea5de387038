"""A chain of axis passes by kernels that read a map once and write it once; bfloat16 without gradient.

    y = S A_j G_j A_{j-1} S x     of pass j; A_{j-1} only in the first, else it was the A_j of the pass before

S transforms the axis: the Hartley transform, of cos + sin, is real, symmetric and (scaled) its own inverse, and gains
are diagonal in it because they depend on |k| alone. An even length n takes two transforms of n / 2 only: even
frequencies see nothing but x[i] + x[i + n/2], odd ones x[i] - x[i + n/2]. For those cos + sin are taken half a sample
off, which makes their matrix symmetric too.
"""

import math

import torch
from torch import Tensor

from chasm.ops import circulants
from chasm.ops._cost import counted_as
from chasm.ops.circulants import Circulants, circulant_pass, mixed
from chasm.ops.constants import constant
from chasm.ops.kernels import power_of_2
from chasm.ops.kernels.layout import channels_last, contiguous

LONGEST = 256  # of an axis, and
FEWEST, MOST = 16, 128  # channels: all matrices of a pass stay in shared memory


def obstacle(shape: torch.Size, dims: list[int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on (B, C, H, W) features; None if they can."""
    if any(shape[d] % 2 or shape[d] > LONGEST for d in dims) or not FEWEST <= shape[1] <= MOST:
        return f"it takes {FEWEST} to {MOST} channels and even axes up to {LONGEST}, got {tuple(shape[1:])}"
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"it needs bfloat16 (the mean of a map could overflow in float16), got {dtype}"
    return circulants.obstacle(shape, dims, device, dtype)


def pays(shape: torch.Size, dims: list[int], device: torch.device, dtype: torch.dtype, last: bool) -> bool:
    """Whether the kernels can run, and on an H200 beat those of form "triton". `last`: x has its channels last."""
    if shape[1] < 32 or not (last or (3 in dims and shape[3] >= 96)):
        return False
    return obstacle(shape, dims, device, dtype) is None


def _padded(n: int) -> int:
    """Rows or columns of a matrix that holds n: a power of two, and no fewer than matrix units take."""
    return max(64, power_of_2(n))


def scales(n: int) -> tuple[float, float, float]:
    """Powers of two for transform and gains, and what the result is to be multiplied with, in float32, besides.

    A transform to the mean is then exact in bfloat16, and with n a power of two a flat map stays as it is.
    """
    transform = 2.0 ** -round(math.log2(n / 2) / 2)  # about 1 / sqrt(n / 2), with which it would be orthogonal
    rest, exponent = math.frexp(1 / (n * transform**2))  # the sum of two halves is not halved either
    return transform, 2.0 ** (exponent - 1), 2 * rest


def hartley(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    """(2, P, P): the transforms to even and to odd frequencies, symmetric, orthogonal but for scale; zeros around."""
    half, P = n // 2, _padded(n // 2)
    i = torch.arange(half, device=device)
    # In units of pi / n, and reduced in integers first.
    even, odd = 4 * i[:, None] * i % (2 * n), (2 * i[:, None] + 1) * (2 * i + 1) % (2 * n)
    angle = torch.stack([even, odd]).double() * (math.pi / n)
    H = torch.zeros(2, P, P, dtype=torch.float64, device=device)
    H[:, :half, :half] = (angle.cos() + angle.sin()) * scales(n)[0]
    return H.to(dtype)


def gain_table(gains: Tensor, n: int) -> Tensor:
    """(K, C) gains of an axis of length n -> (2, CP/16, P/16, 8, 4, 2, 2, 2): even, odd frequencies; filled with zeros.

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


def fused(
    x: Tensor,
    tables: list[Tensor],
    T: list[Circulants],
    mats: list[Tensor | None],
    dims: tuple[int, ...],
    *,
    first: bool,
) -> Tensor:
    """The chain on x (B, C, H, W) with tables of `gain_table` and contiguous matrices A_0 .. A_m, all of x's dtype.

    A program wants its row or column with the channels side by side, or its positions. Where channels come first a
    column has neither: passes along H are then those of form "triton", with the circulants T, in turn.
    `first`: return NCHW; else as x is.
    """
    from chasm.ops.kernels import fused as kernels  # imports triton, which not everybody has

    A, *rest = mats
    last = channels_last(x)
    x = x if last else x.contiguous()
    along_h = iter(T)
    for j, (table, dim, after) in enumerate(zip(tables, dims, rest, strict=True), 1):
        if dim == 2 and not last:
            x, _ = circulant_pass(next(along_h), mixed(A, x), along_h=True)
            A = after
            continue
        n, products = x.shape[dim], (A is not None) + (after is not None)
        with counted_as("matmul", macs=x.numel() * (n + products * x.shape[1])):
            to_last = last and (not first or dim == 2 or j < len(dims))
            x = kernels.pass_(x, constant(hartley, x, n, x.dtype), table, scales(n)[2], A, after, dim, to_last)
        A = None
    x = mixed(A, x)
    return contiguous(x) if first else x
