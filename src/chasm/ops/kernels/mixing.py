"""The product of a channel matrix (C, C), C <= 128, with float32 features (B, C, S) as a Triton kernel.

A library multiplies float32 on its slow units, or in TF32, which has 10 bits. Here every number is split in two
of TF32, and three products of the parts (`add_product`) give float32 accuracy on the fast units.
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import cdiv, power_of_2

PRODUCT = {"BLOCK_S": 64, "num_warps": 4, "num_stages": 2}
PROGRAMS = 528  # enough to keep a card busy


@triton.jit
def upper_part(x):
    """A float32 rounded to what TF32 holds. To cut it off would leave parts of one sign, whose errors add up."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _block(a_ptr, C, n, k):
    """A[n, k] as (k, n), in two parts."""
    w = tl.load(a_ptr + n[None, :] * C + k[:, None], mask=(n < C)[None, :] & (k < C)[:, None], other=0.0)
    upper = upper_part(w)
    return upper, w - upper


@triton.jit
def add_product(y, x, upper, lower):
    """y + x w for w in two parts.

    Matrix units cut off where others round: what sums over more than channels starts at y = 0 in every block.
    """
    x_upper = upper_part(x)
    y = tl.dot(x - x_upper, upper, y, input_precision="tf32")
    y = tl.dot(x_upper, lower, y, input_precision="tf32")
    return tl.dot(x_upper, upper, y, input_precision="tf32")


@triton.jit
def _store(
    y, y_ptr, gain_ptr, bias_ptr, add_ptr, at, c, s, C, S, BINS, NEIGHBOURS,
    GAIN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """g y + bias + what is to be added, of channels c at positions s."""
    inside = (s < S)[:, None] & (c < C)[None, :]
    if GAIN:
        bins = (s // NEIGHBOURS % BINS)[:, None]
        y *= tl.load(gain_ptr + c[None, :] * BINS + bins, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if ADD:
        y += tl.load(add_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y, mask=inside)


@triton.jit
def _product_kernel(
    x_ptr, y_ptr, a_ptr, gain_ptr, bias_ptr, add_ptr, C, S, BINS, NEIGHBOURS, WALKERS,
    C0: tl.constexpr, C1: tl.constexpr, BLOCK_S: tl.constexpr,
    GAIN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (walkers * B,), in blocks of positions. The C channels are a block of C0 and, if C1, one of C1."""
    walker = tl.program_id(0) % WALKERS
    start = (tl.program_id(0) // WALKERS).to(tl.int64) * C * S
    c0 = tl.arange(0, C0)
    u00, l00 = _block(a_ptr, C, c0, c0)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        u01, l01 = _block(a_ptr, C, c1, c0)
        u10, l10 = _block(a_ptr, C, c0, c1)
        u11, l11 = _block(a_ptr, C, c1, c1)
    for tile in range(walker, tl.cdiv(S, BLOCK_S), WALKERS):
        s = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = (s < S)[:, None]
        at0 = start + c0[None, :] * S + s[:, None]
        x0 = tl.load(x_ptr + at0, mask=inside & (c0 < C)[None, :], other=0.0)
        y0 = add_product(tl.zeros([BLOCK_S, C0], tl.float32), x0, u00, l00)
        if C1 > 0:
            at1 = start + c1[None, :] * S + s[:, None]
            x1 = tl.load(x_ptr + at1, mask=inside & (c1 < C)[None, :], other=0.0)
            y0 = add_product(y0, x1, u10, l10)
            y1 = add_product(tl.zeros([BLOCK_S, C1], tl.float32), x0, u01, l01)
            y1 = add_product(y1, x1, u11, l11)
            _store(y1, y_ptr, gain_ptr, bias_ptr, add_ptr, at1, c1, s, C, S, BINS, NEIGHBOURS, GAIN, BIAS, ADD)
        _store(y0, y_ptr, gain_ptr, bias_ptr, add_ptr, at0, c0, s, C, S, BINS, NEIGHBOURS, GAIN, BIAS, ADD)


def channel_blocks(C: int) -> tuple[int, int]:
    """C0, C1: powers of two from 16 with C0 + C1 >= C, because matrix units want those; C1 may be 0. 96 = 64 + 32."""
    C0 = max(16, 1 << (C.bit_length() - 1))
    return (C0, 0) if C <= C0 else (C0, max(16, power_of_2(C - C0)))


def product(
    A: Tensor,
    X: Tensor,
    gain: Tensor | None = None,
    neighbours: int = 1,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A (C, C) on contiguous float32 X (B, C, S), then gain (C, n), of bin (s // neighbours) % n at position s.

    To that come bias (C,) and `add`, a map like X; both of any dtype.
    """
    B, C, S = X.shape
    C0, C1 = channel_blocks(C)
    options = dict(PRODUCT)
    block = options.pop("BLOCK_S")
    Y = torch.empty_like(X) if out is None else out
    walkers = min(cdiv(S, block), max(1, cdiv(PROGRAMS, B)))
    bins = 1 if gain is None else gain.shape[1]
    terms = (X if t is None else t.contiguous() for t in (gain, bias, add))
    with torch.cuda.device_of(X):
        _product_kernel[(walkers * B,)](
            X, Y, A.contiguous(), *terms, C, S, bins, neighbours, walkers, C0=C0, C1=C1, BLOCK_S=block,
            GAIN=gain is not None, BIAS=bias is not None, ADD=add is not None, **options,
        )  # fmt: skip
    return Y
