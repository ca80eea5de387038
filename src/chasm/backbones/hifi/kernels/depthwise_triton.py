"""Triton kernels of `depthwise`: float32 inside, deterministic (sums over programs go through memory, no atomics).

    forward    _convolve_kernel    y = the 3x3 of x, plus the bias
    backward   _convolve_kernel    gx = the 3x3 of g with the taps in reverse order
               _weight_kernel      sums of g x over a strip for every tap, and of g for the bias

x is contiguous (B, H, W, C). A program goes down a strip of BLOCK_W columns by BLOCK_C channels, row by row. A row of x
is loaded once, at three shifts, and meets the three rows of the output around it.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_W, BLOCK_C, WARPS = 16, 64, 2
ROWS, STAGES = 16, 3  # rows of a strip; rows are loaded STAGES - 1 ahead
WEIGHT_ROWS = 64  # of a strip of `_weight_kernel`: fewer strips leave fewer sums to add up


@triton.jit
def _strip(H, W, C, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the strip's number, first and end row, columns (BLOCK_W, 1), channels (BLOCK_C,), and start of its map.

    Strips of neighbouring channels come one after the other, because they share lines of memory.
    """
    groups, columns, strips = tl.cdiv(C, BLOCK_C), tl.cdiv(W, BLOCK_W), tl.cdiv(H, ROWS)
    pid = tl.program_id(0)
    part = pid // groups
    c = pid % groups * BLOCK_C + tl.arange(0, BLOCK_C)
    w = part % columns * BLOCK_W + tl.arange(0, BLOCK_W)
    first = part // columns % strips * ROWS
    start = tl.cast(part // (columns * strips), tl.int64) * H * W * C
    return part, first, tl.minimum(first + ROWS, H), w[:, None], c, start


@triton.jit
def _load(ptr, h, H, W, C, w, c):
    """Return row h of a map at columns w, with zeros outside the map."""
    width = tl.where((h >= 0) & (h < H), W, 0)
    live = (c[None, :] < C) & (w >= 0) & (w < width)
    return tl.load(ptr + (h * W + w) * C + c[None, :], mask=live, other=0.0).to(tl.float32)


@triton.jit
def _load_tap(weight_ptr, number, C, c, REVERSED: tl.constexpr):
    """Return one of the nine taps of the channels c, (1, BLOCK_C)."""
    if REVERSED:
        number = 8 - number
    return tl.load(weight_ptr + c * 9 + number, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _convolve_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, H, W, C,
    REVERSED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    _, first, end, w, c, start = _strip(H, W, C, ROWS, BLOCK_W, BLOCK_C)
    k00 = _load_tap(weight_ptr, 0, C, c, REVERSED)
    k01 = _load_tap(weight_ptr, 1, C, c, REVERSED)
    k02 = _load_tap(weight_ptr, 2, C, c, REVERSED)
    k10 = _load_tap(weight_ptr, 3, C, c, REVERSED)
    k11 = _load_tap(weight_ptr, 4, C, c, REVERSED)
    k12 = _load_tap(weight_ptr, 5, C, c, REVERSED)
    k20 = _load_tap(weight_ptr, 6, C, c, REVERSED)
    k21 = _load_tap(weight_ptr, 7, C, c, REVERSED)
    k22 = _load_tap(weight_ptr, 8, C, c, REVERSED)
    empty = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    if HAS_BIAS:
        empty += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    above, here = empty, empty  # output rows h - 1 and h, as far as they are summed
    x_ptr += start
    y_ptr += start
    for h in tl.range(first - 1, end + 1, num_stages=STAGES):
        left = _load(x_ptr, h, H, W, C, w - 1, c)
        centre = _load(x_ptr, h, H, W, C, w, c)
        right = _load(x_ptr, h, H, W, C, w + 1, c)
        above += k20 * left + k21 * centre + k22 * right
        live = (c[None, :] < C) & (w < tl.where(h > first, W, 0))
        tl.store(y_ptr + ((h - 1) * W + w) * C + c[None, :], above.to(y_ptr.dtype.element_ty), mask=live)
        above = here + k10 * left + k11 * centre + k12 * right
        here = empty + k00 * left + k01 * centre + k02 * right


@triton.jit
def _store_tap(sums_ptr, number, values, C, c):
    """Store the sum over the columns of values (BLOCK_W, BLOCK_C) as that of one of the nine taps."""
    tl.store(sums_ptr + c * 9 + number, tl.sum(values, 0), mask=c < C)


@triton.jit
def _weight_kernel(
    g_ptr, x_ptr, taps_ptr, bias_ptr, H, W, C,
    ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """taps (strips, C, 9): sums of g x over the x of a strip; bias (strips, C): those of g."""
    part, first, end, w, c, start = _strip(H, W, C, ROWS, BLOCK_W, BLOCK_C)
    x_ptr += start
    g_ptr += start
    above, here = _load(g_ptr, first - 1, H, W, C, w, c), _load(g_ptr, first, H, W, C, w, c)  # rows h - 1 and h of g
    zero = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    s00, s01, s02, s10, s11, s12, s20, s21, s22, total = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    for h in range(first, end):
        left = _load(x_ptr, h, H, W, C, w - 1, c)
        centre = _load(x_ptr, h, H, W, C, w, c)
        right = _load(x_ptr, h, H, W, C, w + 1, c)
        below = _load(g_ptr, h + 1, H, W, C, w, c)
        s00 += below * left
        s01 += below * centre
        s02 += below * right
        s10 += here * left
        s11 += here * centre
        s12 += here * right
        s20 += above * left
        s21 += above * centre
        s22 += above * right
        total += here
        above, here = here, below
    taps_ptr += part * C * 9
    _store_tap(taps_ptr, 0, s00, C, c)
    _store_tap(taps_ptr, 1, s01, C, c)
    _store_tap(taps_ptr, 2, s02, C, c)
    _store_tap(taps_ptr, 3, s10, C, c)
    _store_tap(taps_ptr, 4, s11, C, c)
    _store_tap(taps_ptr, 5, s12, C, c)
    _store_tap(taps_ptr, 6, s20, C, c)
    _store_tap(taps_ptr, 7, s21, C, c)
    _store_tap(taps_ptr, 8, s22, C, c)
    tl.store(bias_ptr + part * C + c, tl.sum(total, 0), mask=c < C)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the 3x3 of every channel. All tensors are contiguous.

    Args:
        x: (B, H, W, C).
        weight: (C, 1, 3, 3).
        bias: (C,), or None.
    """
    return _convolve(x, weight, bias, REVERSED=False)


def convolve_adjoint(g: Tensor, weight: Tensor) -> Tensor:
    """Return the adjoint of the 3x3 of every channel. Both tensors are contiguous.

    Args:
        g: (B, H, W, C).
        weight: (C, 1, 3, 3).
    """
    return _convolve(g, weight, None, REVERSED=True)


def weight_gradients(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weight (C, 1, 3, 3) and the bias (C,), in float32. Both tensors are contiguous.

    Args:
        g: gradient of the output (B, H, W, C).
        x: (B, H, W, C).
    """
    _, H, W, C = x.shape
    strips = _strips(x, WEIGHT_ROWS)
    taps = torch.empty(strips, C, 1, 3, 3, device=x.device, dtype=torch.float32)
    bias = taps.new_empty(strips, C)
    with torch.cuda.device_of(x):
        _weight_kernel[(strips * triton.cdiv(C, BLOCK_C),)](
            g, x, taps, bias, H, W, C,
            ROWS=WEIGHT_ROWS, BLOCK_W=BLOCK_W, BLOCK_C=BLOCK_C, num_warps=WARPS,
        )  # fmt: skip
    return taps.sum(0), bias.sum(0)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, REVERSED: bool) -> Tensor:
    _, H, W, C = x.shape
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _convolve_kernel[(_strips(x, ROWS) * triton.cdiv(C, BLOCK_C),)](
            x, weight, weight if bias is None else bias, y, H, W, C, REVERSED=REVERSED, HAS_BIAS=bias is not None,
            ROWS=ROWS, BLOCK_W=BLOCK_W, BLOCK_C=BLOCK_C, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return y


def _strips(x: Tensor, rows: int) -> int:
    """Return how many strips of so many rows the maps x (B, H, W, C) have."""
    return x.shape[0] * triton.cdiv(x.shape[1], rows) * triton.cdiv(x.shape[2], BLOCK_W)
