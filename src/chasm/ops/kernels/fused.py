"""One axis pass as one Triton kernel, see `forms.fused`: transform, channel product, gains, channel product, transform.

A program takes one row or column of an image with all its channels, (n, C), after the other. The two transforms and
the two channel matrices stay in shared memory, and everything between the transforms stays in registers. So a pass
reads and writes each number once, and its time is that of the arithmetic.

Channels are filled up to a power of two, 64 or more. Blocks of 64 and 32 would waste less at C = 96, but the assembler
of Triton 3.6 (ptxas 12.8) mixes up the addresses of blocks of 32.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import IS_INTERPRETED
from chasm.ops.kernels.launch import launch, multiprocessors
from chasm.ops.library import is_fake


@triton.jit
def _weights(a_ptr, C: tl.constexpr, c):
    """Return A[n, k] as (k, n)."""
    k, n = c[:, None], c[None, :]
    return tl.load(a_ptr + n * C + k, mask=(k < C) & (n < C), other=0.0)


@triton.jit
def _gains(g_ptr, P: tl.constexpr, CP: tl.constexpr):
    """Return the gains (P, CP) from the order in which `forms.fused.gain_table` stored them.

    In that order, the 16 bytes that a thread loads at once are the gains of its own results.
    """
    g = tl.load(g_ptr + tl.arange(0, P * CP))
    g = tl.reshape(g, [CP // 16, P // 16, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(g, (1, 5, 2, 0, 4, 3, 6)), [P, CP]).to(tl.float32)


@triton.jit
def _filtered(H, x, g_ptr, a, b, P: tl.constexpr, CP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Return B G A H x for one half of the frequencies."""
    s = tl.dot(H, x, input_precision="ieee")
    if BEFORE:
        s = tl.dot(s.to(H.dtype), a, input_precision="ieee")
    s *= _gains(g_ptr, P, CP)
    if AFTER:
        s = tl.dot(s.to(H.dtype), b, input_precision="ieee")
    return s.to(H.dtype)


@triton.jit
def _prefetch(address):
    """Load into the L2 cache. There are too few registers to load the next row itself."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _pass_kernel(
    x_ptr, y_ptr, h_ptr, g_ptr, a_ptr, b_ptr, ROWS, R, X_IMAGE, X_ROW, X_STEP, Y_IMAGE, Y_ROW, Y_STEP,
    C: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, CP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    X_LAST: tl.constexpr, Y_LAST: tl.constexpr, SCALE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Grid (programs,). ROWS rows of 2 HALF positions, R of them to an image.

    With X_LAST, channels of x have stride 1 and positions X_STEP; otherwise the reverse. Y_LAST says the same of y.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    p, c = tl.arange(0, P)[:, None], tl.arange(0, CP)[None, :]
    live = (p < HALF) & (c < C)
    x_at, x_half = p * X_STEP + c, HALF * X_STEP
    if not X_LAST:
        x_at, x_half = p + c * X_STEP, HALF
    y_at, y_half = p * Y_STEP + c, HALF * Y_STEP
    if not Y_LAST:
        y_at, y_half = p + c * Y_STEP, HALF
    square = p * P + tl.arange(0, P)[None, :]
    even, odd = tl.load(h_ptr + square), tl.load(h_ptr + P * P + square)
    a, b = even, even
    if BEFORE:
        a = _weights(a_ptr, C, tl.arange(0, CP))
    if AFTER:
        b = _weights(b_ptr, C, tl.arange(0, CP))
    for row in range(tl.program_id(0), ROWS, tl.num_programs(0)):
        start = x_ptr + (row // R).to(tl.int64) * X_IMAGE + row % R * X_ROW
        first = tl.load(start + x_at, mask=live, other=0.0).to(tl.float32)
        second = tl.load(start + x_half + x_at, mask=live, other=0.0).to(tl.float32)
        e, o = (first + second).to(dtype), (first - second).to(dtype)
        if PREFETCH:
            ahead = tl.minimum(row + tl.num_programs(0), ROWS - 1)
            start = x_ptr + (ahead // R).to(tl.int64) * X_IMAGE + ahead % R * X_ROW
            if X_LAST:  # at most 256 bytes each, two lines of the cache
                i = tl.minimum(tl.arange(0, 2 * P), 2 * HALF - 1) * X_STEP
                _prefetch(start + i)
                _prefetch(start + i + (C - 1))
            else:  # at most 512 bytes
                i = tl.minimum(tl.arange(0, CP), C - 1) * X_STEP
                _prefetch(start + i)
                _prefetch(start + i + min(64, 2 * HALF - 1))
                _prefetch(start + i + min(128, 2 * HALF - 1))
                _prefetch(start + i + min(192, 2 * HALF - 1))
        e = _filtered(even, e, g_ptr, a, b, P, CP, BEFORE, AFTER)
        o = _filtered(odd, o, g_ptr + P * CP, a, b, P, CP, BEFORE, AFTER)
        e, o = tl.dot(even, e, input_precision="ieee"), tl.dot(odd, o, input_precision="ieee")
        if SCALE != 1:
            e, o = e * SCALE, o * SCALE
        start = y_ptr + (row // R).to(tl.int64) * Y_IMAGE + row % R * Y_ROW
        tl.store(start + y_at, (e + o).to(dtype), mask=live)
        tl.store(start + y_half + y_at, (e - o).to(dtype), mask=live)


def fused_pass(
    x: Tensor,
    transform: Tensor,
    table: Tensor,
    scale: float,
    before: Tensor | None,
    after: Tensor | None,
    dim: int,
    to_last: bool,
) -> Tensor:
    """Return one axis pass of x. All matrices are contiguous and of the dtype of x.

    Args:
        x: (B, C, H, W), with stride 1 in C or in `dim`.
        transform: `forms.fused.hartley`.
        table: `forms.fused.gain_table`.
        scale: the last of `forms.fused.scales`.
        before: channel matrix (C, C) applied before the gains, or None.
        after: channel matrix (C, C) applied after the gains, or None.
        dim: the axis, 2 or 3.
        to_last: return channels last, else NCHW.
    """
    y = torch.empty_like(x, memory_format=torch.channels_last if to_last else torch.contiguous_format)
    if is_fake(x):
        return y
    B, C, H, W = x.shape
    n, other = (H, 3) if dim == 2 else (W, 2)
    CP, P, rows = 16 * table.shape[1], 16 * table.shape[2], B * x.shape[other]
    long = P > 64  # shared memory then holds one program instead of two
    from_last = x.stride(1) == 1
    steps = [t.stride(dim) if is_last else t.stride(1) for t, is_last in ((x, from_last), (y, to_last))]
    launch(
        _pass_kernel, (min(multiprocessors(x) * (1 if long else 2), rows),),
        x, y, transform, table, x if before is None else before, x if after is None else after,
        rows, x.shape[other], x.stride(0), x.stride(other), steps[0], y.stride(0), y.stride(other), steps[1],
        C=C, HALF=n // 2, P=P, CP=CP, BEFORE=before is not None, AFTER=after is not None, X_LAST=from_last,
        Y_LAST=to_last, SCALE=scale, PREFETCH=not IS_INTERPRETED, num_warps=8 if long else 4, num_stages=1,
    )  # fmt: skip
    return y
