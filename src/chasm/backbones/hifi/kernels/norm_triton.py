"""Triton kernels of `norm`: float32 inside, deterministic (sums over programs go through memory, no atomics).

    forward    _moments_kernel     x -> count, mean and squared deviations of every part of a sample
               _combine_kernel     parts -> mean m and r = 1 / deviation of every sample
               _apply_kernel       y = gelu(n), n = w xhat + b, xhat = (x - m) r
    backward   _sums_kernel        with h = g gelu'(n): sums of h and of h xhat over a part, by channel
               _total_kernel       parts -> sums over a sample, by channel
               _gradient_kernel    gx = r (w h - mean of w h - xhat * mean of w h xhat), means over a sample;
                                   one program adds up the samples for the gradients of weight and bias

x is contiguous (B, P, C): P positions with their C channels. A part is a run of positions of one sample. A program
walks along one part, ROWS positions at a time.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels.local_triton import _normal

# A program is one warp, so that a sum over positions stays in its registers. A sum across warps would take longer than
# the rest of the kernel.
TILE = 256  # numbers that a program holds at once
MAX_PARTS = 4096  # parts of all samples together: enough programs to fill a large GPU
TOTAL_BLOCK = 32  # parts and channels that a program of `_total_kernel` holds at once


@triton.jit
def _part(P, parts, ROWS: tl.constexpr):
    """Return the sample, the first and the end position of this program's part. Parts start at whole blocks of ROWS."""
    pid = tl.program_id(0)
    blocks, part = tl.cdiv(P, ROWS), tl.cast(pid % parts, tl.int64)  # part * blocks exceeds 32 bits on large maps
    first, end = part * blocks // parts * ROWS, (part + 1) * blocks // parts * ROWS
    return pid // parts, first.to(tl.int32), tl.minimum(end, P).to(tl.int32)


@triton.jit
def _moments_kernel(x_ptr, parts_ptr, P, C, parts, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Every lane follows Welford's rule, and the lanes are joined at the end. Summing squares would lose small
    deviations from a large mean."""
    b, first, end = _part(P, parts, ROWS)
    x_ptr += tl.cast(b, tl.int64) * P * C
    row, c = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    mean, squares = tl.zeros([ROWS, BLOCK_C], tl.float32), tl.zeros([ROWS, BLOCK_C], tl.float32)
    seen = 0.0
    for at in range(first, end, ROWS):
        live = (at + row < end) & (c < C)
        x = tl.load(x_ptr + (at + row) * C + c, mask=live, other=0.0).to(tl.float32)
        seen += 1.0
        away = tl.where(live, x - mean, 0.0)
        mean += away * (1.0 / seen)
        squares += tl.where(live, away * (x - mean), 0.0)
    rows = tl.maximum(end - first - row + ROWS - 1, 0) // ROWS  # count of numbers that a lane has seen
    n = tl.where(c < C, rows, 0).to(tl.float32)
    total = ((end - first) * C).to(tl.float32)
    centre = tl.sum(tl.sum(mean * n, 1), 0) / tl.maximum(total, 1.0)
    squares = tl.sum(tl.sum(squares + n * (mean - centre) * (mean - centre), 1), 0)
    at, count = parts_ptr + tl.program_id(0), tl.num_programs(0)
    tl.store(at, total)
    tl.store(at + count, centre)
    tl.store(at + 2 * count, squares)


@triton.jit
def _combine_kernel(parts_ptr, stats_ptr, parts, numbers, eps, BLOCK: tl.constexpr):
    """Grid (B,): statistics (B, 2) = m, r of samples with `numbers` numbers each."""
    b, count = tl.program_id(0), tl.num_programs(0) * parts
    i = tl.arange(0, BLOCK)
    at, live = parts_ptr + b * parts + i, i < parts
    n = tl.load(at, mask=live, other=0.0)
    mean = tl.load(at + count, mask=live, other=0.0)
    squares = tl.load(at + 2 * count, mask=live, other=0.0)
    centre = tl.sum(n * mean, 0) / numbers
    variance = tl.sum(squares + n * (mean - centre) * (mean - centre), 0) / numbers
    tl.store(stats_ptr + 2 * b, centre)
    tl.store(stats_ptr + 2 * b + 1, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _apply_kernel(
    x_ptr, stats_ptr, weight_ptr, bias_ptr, y_ptr, P, C, parts, ROWS: tl.constexpr, BLOCK_C: tl.constexpr
):
    b, first, end = _part(P, parts, ROWS)
    row, c = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    mean, rstd = tl.load(stats_ptr + 2 * b), tl.load(stats_ptr + 2 * b + 1)
    scale = rstd * tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    start = tl.cast(b, tl.int64) * P * C
    for at in range(first, end, ROWS):
        here, live = start + (at + row) * C + c, (at + row < end) & (c < C)
        n = (tl.load(x_ptr + here, mask=live, other=0.0).to(tl.float32) - mean) * scale + bias
        _, half = _normal(n)
        tl.store(y_ptr + here, (n * half).to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _load_adjoint(g_ptr, x_ptr, live, mean, rstd, w, bias):
    """Return h = g gelu'(n), and xhat. h is zero outside the map."""
    g = tl.load(g_ptr, mask=live, other=0.0).to(tl.float32)
    xhat = (tl.load(x_ptr, mask=live, other=0.0).to(tl.float32) - mean) * rstd
    n = xhat * w + bias
    density, half = _normal(n)
    return g * (half + n * density), xhat


@triton.jit
def _sums_kernel(
    g_ptr, x_ptr, stats_ptr, weight_ptr, bias_ptr, sums_ptr, P, C, parts, ROWS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Sums (2, B * parts, C) of h and of h xhat."""
    b, first, end = _part(P, parts, ROWS)
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)
    c = lane[None, :]
    mean, rstd = tl.load(stats_ptr + 2 * b), tl.load(stats_ptr + 2 * b + 1)
    w = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    start = tl.cast(b, tl.int64) * P * C
    total, along = tl.zeros([ROWS, BLOCK_C], tl.float32), tl.zeros([ROWS, BLOCK_C], tl.float32)
    for at in range(first, end, ROWS):
        here, live = start + (at + row) * C + c, (at + row < end) & (c < C)
        h, xhat = _load_adjoint(g_ptr + here, x_ptr + here, live, mean, rstd, w, bias)
        total += h
        along += h * xhat
    at = sums_ptr + tl.program_id(0) * C + lane
    tl.store(at, tl.sum(total, 0), mask=lane < C)
    tl.store(at + tl.num_programs(0) * C, tl.sum(along, 0), mask=lane < C)


@triton.jit
def _total_kernel(sums_ptr, by_sample_ptr, C, parts, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Grid (2 * B, blocks of channels): sums (2 * B, C) over all parts."""
    pid, row, lane = tl.program_id(0), tl.arange(0, ROWS)[:, None], tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c = lane[None, :]
    sums_ptr += pid * parts * C
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for at in range(0, parts, ROWS):
        total += tl.load(sums_ptr + (at + row) * C + c, mask=(at + row < parts) & (c < C), other=0.0)
    tl.store(by_sample_ptr + pid * C + lane, tl.sum(total, 0), mask=lane < C)


@triton.jit
def _gradient_kernel(
    g_ptr, x_ptr, stats_ptr, weight_ptr, bias_ptr, sums_ptr, gx_ptr, gw_ptr, gb_ptr, P, C, parts, B,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """sums (2, B, C): of h and of h xhat over a sample."""
    b, first, end = _part(P, parts, ROWS)
    row, c = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    mean, rstd = tl.load(stats_ptr + 2 * b), tl.load(stats_ptr + 2 * b + 1)
    w = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.load(sums_ptr + b * C + c, mask=c < C, other=0.0)
    along = tl.load(sums_ptr + (B + b) * C + c, mask=c < C, other=0.0)
    numbers = (P * C).to(tl.float32)
    constant, slope = tl.sum(w * total) / numbers, tl.sum(w * along) / numbers
    if tl.program_id(0) == 0:
        total, along = tl.zeros([1, BLOCK_C], tl.float32), tl.zeros([1, BLOCK_C], tl.float32)
        for i in range(B):
            total += tl.load(sums_ptr + i * C + c, mask=c < C, other=0.0)
            along += tl.load(sums_ptr + (B + i) * C + c, mask=c < C, other=0.0)
        tl.store(gb_ptr + c, total.to(gb_ptr.dtype.element_ty), mask=c < C)
        tl.store(gw_ptr + c, along.to(gw_ptr.dtype.element_ty), mask=c < C)
    start = tl.cast(b, tl.int64) * P * C
    for at in range(first, end, ROWS):
        here, live = start + (at + row) * C + c, (at + row < end) & (c < C)
        h, xhat = _load_adjoint(g_ptr + here, x_ptr + here, live, mean, rstd, w, bias)
        gx = rstd * (w * h - constant - xhat * slope)
        tl.store(gx_ptr + here, gx.to(gx_ptr.dtype.element_ty), mask=live)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y like x, and the statistics (B, 2) in float32. All tensors are contiguous.

    Args:
        x: (B, P, C).
        weight: (C,).
        bias: (C,).
        eps: added to the variance.
    """
    B, P, C = x.shape
    grid, parts, blocks = _launch(B, P, C)
    moments = torch.empty(3, grid[0], device=x.device, dtype=torch.float32)
    statistics, y = torch.empty(B, 2, device=x.device, dtype=torch.float32), torch.empty_like(x)
    with torch.cuda.device_of(x):
        _moments_kernel[grid](x, moments, P, C, parts, **blocks)
        _combine_kernel[(B,)](moments, statistics, parts, float(P * C), eps, BLOCK=triton.next_power_of_2(parts))
        _apply_kernel[grid](x, statistics, weight, bias, y, P, C, parts, **blocks)
    return y, statistics


def backward(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias. All tensors are contiguous.

    Args:
        g: gradient of y.
        x: (B, P, C).
        weight: (C,).
        bias: (C,).
        statistics: as `forward` returns them.
    """
    B, P, C = x.shape
    grid, parts, blocks = _launch(B, P, C)
    sums = torch.empty(2, B, parts, C, device=x.device, dtype=torch.float32)
    by_sample = sums.new_empty(2, B, C)
    gx, gw, gb = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    with torch.cuda.device_of(x):
        _sums_kernel[grid](g, x, statistics, weight, bias, sums, P, C, parts, **blocks)
        _total_kernel[2 * B, triton.cdiv(C, TOTAL_BLOCK)](
            sums, by_sample, C, parts, ROWS=TOTAL_BLOCK, BLOCK_C=TOTAL_BLOCK
        )
        _gradient_kernel[grid](g, x, statistics, weight, bias, by_sample, gx, gw, gb, P, C, parts, B, **blocks)
    return gx, gw, gb


def _launch(B: int, P: int, C: int) -> tuple[tuple[int], int, dict[str, int]]:
    """Return the grid, the number of parts of a sample, and the block sizes."""
    block_c = triton.next_power_of_2(C)
    rows = max(1, TILE // block_c)
    parts = max(1, min(MAX_PARTS // B, triton.cdiv(P, rows)))
    return (B * parts,), parts, {"ROWS": rows, "BLOCK_C": block_c, "num_warps": 1}
