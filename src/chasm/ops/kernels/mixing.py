"""The product of a channel matrix (C, C), C <= 128, with float32 features (B, C, S) as a Triton kernel.

cuBLAS multiplies float32 on the slow units, or in TF32, which has 10 bits. Here every number is split into two of
float16, and three products of the parts give float32 accuracy on the fast units. Float16 has a small range of
exponents, so A and each block of positions are scaled by a power of two to its upper end.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels.launch import cdiv, is_blackwell, launch, multiprocessors, power_of_2
from chasm.ops.library import is_fake

BLOCK_S = 64  # positions of a block


@triton.jit
def _bins(first, BINS, NEIGHBOURS, BLOCK_S: tl.constexpr):
    """Return (s // NEIGHBOURS) % BINS of BLOCK_S positions from `first` on, exactly, without a division for each."""
    ahead = first % NEIGHBOURS + tl.arange(0, BLOCK_S)
    few = ((ahead + 0.5) * (1.0 / NEIGHBOURS)).to(tl.int32)
    bins = first // NEIGHBOURS % BINS + tl.where(NEIGHBOURS < BLOCK_S, few, (ahead >= NEIGHBOURS).to(tl.int32))
    return bins - BINS * ((bins + 0.5) * (1.0 / BINS)).to(tl.int32)


@triton.jit
def _store(
    y, gain, y_ptr, bias_ptr, add_ptr, c, s, C, S,
    GAIN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store gain * y + bias + add, for y at positions s and channels c."""
    if GAIN:
        y *= gain
    y, c, s = tl.trans(y), c[:, None], s[None, :]  # the order of memory
    at, inside = c * S + s, (s < S) & (c < C)
    if BIAS:
        y += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(add_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y, mask=inside)


@triton.jit
def _magnitudes(x):
    """Return the bits of |x|, which sort as the numbers do; 0 where x is not finite."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit
def _exponent(largest):
    """Return the e with 2^14 <= largest 2^-e < 2^15, from the bits of the largest number; -126 if that is smaller."""
    return tl.maximum((largest >> 23) - 141, -126)


@triton.jit
def _power(e):
    """Return 2^e for -126 <= e <= 127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x, exponent):
    """Return x 2^-exponent, less than 2^15, as the sum of two float16 numbers.

    The error is at most 2^-23 of x, or 2^-39 of the largest number of the block. A position with inf or NaN gives NaN.
    """
    x *= _power(-exponent)
    upper = x.to(tl.float16)
    return upper, (x - upper.to(tl.float32)).to(tl.float16)


@triton.jit
def _scaled_back(y, exponent):
    """Return y 2^exponent, in two steps, because the power alone may overflow."""
    half = exponent >> 1
    return y * _power(half) * _power(exponent - half)


@triton.jit
def _weights(a_ptr, C, n, k):
    """Return A[n, k] as (k, n)."""
    return tl.load(a_ptr + n[None, :] * C + k[:, None], mask=(n < C)[None, :] & (k < C)[:, None], other=0.0)


@triton.jit
def _add_halves(y, x_upper, x_lower, upper, lower):
    """Return y + x w, both in parts. The product of the lower parts is left out: it is 2^-22 of the rest or less."""
    y = tl.dot(x_upper, lower, y)
    y = tl.dot(x_lower, upper, y)
    return tl.dot(x_upper, upper, y)


@triton.jit
def _product_kernel(
    x_ptr, y_ptr, a_ptr, gain_ptr, bias_ptr, add_ptr, C, S, BINS, NEIGHBOURS, WALKERS,
    C0: tl.constexpr, C1: tl.constexpr, BLOCK_S: tl.constexpr,
    GAIN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (walkers * B,): programs walk over blocks of positions. C channels are a block of C0 and, if C1, one of C1.

    Positions are the rows of the product, so that A stays in shared memory and x is transposed on its way there.
    """
    walker = tl.program_id(0) % WALKERS
    start = (tl.program_id(0) // WALKERS).to(tl.int64) * C * S
    x_ptr, y_ptr, add_ptr = x_ptr + start, y_ptr + start, add_ptr + start
    c0, c1 = tl.arange(0, C0), C0 + tl.arange(0, max(C1, 1))
    a00 = _weights(a_ptr, C, c0, c0)
    largest = tl.max(_magnitudes(a00))
    if C1 > 0:
        a10, a01, a11 = _weights(a_ptr, C, c0, c1), _weights(a_ptr, C, c1, c0), _weights(a_ptr, C, c1, c1)
        largest = tl.maximum(largest, tl.max(_magnitudes(a10)))
        largest = tl.maximum(largest, tl.max(_magnitudes(a01)))
        largest = tl.maximum(largest, tl.max(_magnitudes(a11)))
    a_exponent = _exponent(largest)
    u00, l00 = _halves(a00, a_exponent)
    if C1 > 0:
        u10, l10 = _halves(a10, a_exponent)
        u01, l01 = _halves(a01, a_exponent)
        u11, l11 = _halves(a11, a_exponent)
    for tile in range(walker, tl.cdiv(S, BLOCK_S), WALKERS):
        s = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = (s < S)[:, None]
        x0 = tl.load(x_ptr + c0[None, :] * S + s[:, None], mask=inside & (c0 < C)[None, :], other=0.0)
        gain0, gain1 = 1.0, 1.0
        if GAIN:
            bins = _bins(tile * BLOCK_S, BINS, NEIGHBOURS, BLOCK_S)  # gains are loaded during the product
            gain0 = tl.load(gain_ptr + bins[:, None] * C + c0[None, :], mask=(c0 < C)[None, :], other=0.0)
            if C1 > 0:
                gain1 = tl.load(gain_ptr + bins[:, None] * C + c1[None, :], mask=(c1 < C)[None, :], other=0.0)
        sizes = _magnitudes(x0)
        if C1 > 0:
            x1 = tl.load(x_ptr + c1[None, :] * S + s[:, None], mask=inside & (c1 < C)[None, :], other=0.0)
            # One maximum over both blocks: the first is folded to the width of the second in registers.
            sizes = tl.maximum(tl.max(tl.reshape(sizes, [BLOCK_S, C0 // C1, C1]), 1), _magnitudes(x1))
        exponent = _exponent(tl.max(sizes))
        upper, lower = _halves(x0, exponent)
        y0 = _add_halves(tl.zeros([BLOCK_S, C0], tl.float32), upper, lower, u00, l00)
        if C1 > 0:
            y1 = _add_halves(tl.zeros([BLOCK_S, C1], tl.float32), upper, lower, u01, l01)
            x1_upper, x1_lower = _halves(x1, exponent)
            y0 = _add_halves(y0, x1_upper, x1_lower, u10, l10)
            y1 = _add_halves(y1, x1_upper, x1_lower, u11, l11)
        exponent += a_exponent
        if C1 > 0:
            y1 = _scaled_back(y1, exponent)
            _store(y1, gain1, y_ptr, bias_ptr, add_ptr, c1, s, C, S, GAIN, BIAS, ADD)
        y0 = _scaled_back(y0, exponent)
        _store(y0, gain0, y_ptr, bias_ptr, add_ptr, c0, s, C, S, GAIN, BIAS, ADD)


def channel_blocks(C: int) -> tuple[int, int]:
    """Return two powers of two, each 16 or more (the second may be 0), whose sum is C or more: 96 = 64 + 32.

    Matrix units need powers of two.
    """
    C0 = max(16, 1 << (C.bit_length() - 1))
    return (C0, 0) if C <= C0 else (C0, power_of_2(C - C0, 16))


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
    """Return gain * (A X) + bias + add.

    Args:
        A: (C, C) with C <= 128.
        X: contiguous float32 (B, C, S).
        gain: (C, n). Position s has the gain of bin (s // neighbours) % n. None: 1.
        neighbours: positions in a row that share a bin.
        bias: (C,), any dtype.
        add: a map like X, any dtype.
        out: where the result goes; a new tensor by default.
    """
    Y = torch.empty_like(X) if out is None else out
    if is_fake(X):
        return Y
    B, C, S = X.shape
    # Four products of 64 channels at a time take more tensor memory than a Blackwell card has, one of 128 does not.
    C0, C1 = (128, 0) if C > 96 and is_blackwell(X.device) else channel_blocks(C)
    walkers = min(cdiv(S, BLOCK_S), max(1, cdiv(4 * multiprocessors(X), B)))
    bins = 1 if gain is None else gain.shape[1]
    gain = None if gain is None else gain.mT  # the gains of a position lie side by side
    terms = (X if t is None else t.contiguous() for t in (gain, bias, add))
    launch(
        _product_kernel, (walkers * B,), X, Y, A.contiguous(), *terms, C, S, bins, neighbours, walkers,
        C0=C0, C1=C1, BLOCK_S=BLOCK_S, GAIN=gain is not None, BIAS=bias is not None, ADD=add is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return Y
