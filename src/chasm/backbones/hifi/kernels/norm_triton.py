"""The kernels of `norm`: float32 inside, deterministic (sums over programs go through memory, no atomics).

    forward    _moments_kernel     x -> mean and squared deviations of parts of channels
               _combine_kernel     of samples: their mean m and 1 / deviation r
               _apply_kernel       y = gelu(n), n = w xhat + b, xhat = (x - m) r
    backward   _sums_kernel        with h = g gelu'(n): parts of the sums of h and of h xhat
               _gradient_kernel    gx = r (w h - mean of w h - xhat * mean of w h xhat), means over a sample

The map is (rows, N), a row the image of one channel of one sample. A program walks along one of `splits` equal parts of
a row, BLOCK numbers at a time.
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import cdiv, power_of_2
from chasm.ops.kernels.circulant import unit
from chasm.ops.kernels.local_triton import _normal

WALK = {"BLOCK": 1024, "num_warps": 4}
COMBINE = {"BLOCK": 1024, "num_warps": 4}
PROGRAMS = 2112  # as many as an H200 holds at once: where rows are fewer, they are split


@triton.jit
def _part(N, splits, BLOCK: tl.constexpr):
    """-> number of the row, and of it the first position and the end of this program's part; both at whole blocks."""
    pid = tl.program_id(0)
    blocks, part = tl.cdiv(N, BLOCK), pid % splits
    return pid // splits, part * blocks // splits * BLOCK, (part + 1) * blocks // splits * BLOCK


@triton.jit
def _constants(row, C, stats_ptr, weight_ptr, bias_ptr):
    """-> m and r of the row's sample, w and b of its channel."""
    b, c = row // C, row % C
    w, bias = tl.load(weight_ptr + c).to(tl.float32), tl.load(bias_ptr + c).to(tl.float32)
    return tl.load(stats_ptr + 2 * b), tl.load(stats_ptr + 2 * b + 1), w, bias


@triton.jit
def _moments_kernel(x_ptr, parts_ptr, N_units, splits, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Parts (3, rows * splits): how many numbers, their mean, their squared deviations from it.

    Every lane goes along by Welford's rule, and the lanes are joined at the end: no sum of squares, so that a large
    mean does not drown the deviations.
    """
    N = N_units * UNIT
    row, first, end = _part(N, splits, BLOCK)
    x_ptr += tl.cast(row, tl.int64) * N
    i = tl.arange(0, BLOCK)
    mean, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    seen = 0.0
    for at in range(first, end, BLOCK):
        live = at + i < N
        x = tl.load(x_ptr + at + i, mask=live, other=0.0).to(tl.float32)
        seen += 1.0
        away = tl.where(live, x - mean, 0.0)
        mean += away * (1.0 / seen)
        squares += away * (x - mean)
    size = tl.minimum(end, N) - first
    n = (tl.maximum(size - i + BLOCK - 1, 0) // BLOCK).to(tl.float32)  # numbers a lane has seen
    total = size.to(tl.float32)
    centre = tl.sum(mean * n, 0) / total
    squares = tl.sum(squares + n * (mean - centre) * (mean - centre), 0)
    at, count = parts_ptr + tl.program_id(0), tl.num_programs(0)
    tl.store(at, total)
    tl.store(at + count, centre)
    tl.store(at + 2 * count, squares)


@triton.jit
def _combine_kernel(parts_ptr, stats_ptr, per_sample, positions, eps, BLOCK: tl.constexpr):
    """Grid (B,): statistics (B, 2) = m, r of samples of so many positions, from the parts of their channels."""
    b, count = tl.program_id(0), tl.num_programs(0) * per_sample
    parts_ptr += b * per_sample
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, per_sample, BLOCK):
        live = at + i < per_sample
        n = tl.load(parts_ptr + at + i, mask=live, other=0.0)
        total += n * tl.load(parts_ptr + count + at + i, mask=live, other=0.0)
    centre = tl.sum(total, 0) / positions
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, per_sample, BLOCK):
        live = at + i < per_sample
        n = tl.load(parts_ptr + at + i, mask=live, other=0.0)
        away = tl.load(parts_ptr + count + at + i, mask=live, other=0.0) - centre
        total += tl.load(parts_ptr + 2 * count + at + i, mask=live, other=0.0) + n * away * away
    tl.store(stats_ptr + 2 * b, centre)
    tl.store(stats_ptr + 2 * b + 1, 1.0 / tl.sqrt(tl.sum(total, 0) / positions + eps))


@triton.jit
def _apply_kernel(
    x_ptr, stats_ptr, weight_ptr, bias_ptr, y_ptr, C, N_units, splits, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    N = N_units * UNIT
    row, first, end = _part(N, splits, BLOCK)
    mean, rstd, w, bias = _constants(row, C, stats_ptr, weight_ptr, bias_ptr)
    start, i = tl.cast(row, tl.int64) * N, tl.arange(0, BLOCK)
    for at in range(first, end, BLOCK):
        live = at + i < N
        x = tl.load(x_ptr + start + at + i, mask=live, other=0.0).to(tl.float32)
        n = (x - mean) * (rstd * w) + bias
        _, half = _normal(n)
        tl.store(y_ptr + start + at + i, (n * half).to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _load_adjoint(g_ptr, x_ptr, live, mean, rstd, w, bias):
    """-> h = g gelu'(n), xhat; h is zero outside the row."""
    g = tl.load(g_ptr, mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr, mask=live, other=0.0).to(tl.float32)
    xhat = (x - mean) * rstd
    n = xhat * w + bias
    density, half = _normal(n)
    return g * (half + n * density), xhat


@triton.jit
def _sums_kernel(
    g_ptr, x_ptr, stats_ptr, weight_ptr, bias_ptr, sums_ptr, C, N_units, splits,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts (2, rows * splits): sums of h and of h xhat."""
    N = N_units * UNIT
    row, first, end = _part(N, splits, BLOCK)
    mean, rstd, w, bias = _constants(row, C, stats_ptr, weight_ptr, bias_ptr)
    start, i = tl.cast(row, tl.int64) * N, tl.arange(0, BLOCK)
    total, along = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for at in range(first, end, BLOCK):
        here = start + at + i
        h, xhat = _load_adjoint(g_ptr + here, x_ptr + here, at + i < N, mean, rstd, w, bias)
        total += h
        along += h * xhat
    at = sums_ptr + tl.program_id(0)
    tl.store(at, tl.sum(total, 0))
    tl.store(at + tl.num_programs(0), tl.sum(along, 0))


@triton.jit
def _gradient_kernel(
    g_ptr, x_ptr, stats_ptr, weight_ptr, bias_ptr, means_ptr, gx_ptr, B, C, N_units, splits,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """means (2, B): of w h and of w h xhat over a sample."""
    N = N_units * UNIT
    row, first, end = _part(N, splits, BLOCK)
    mean, rstd, w, bias = _constants(row, C, stats_ptr, weight_ptr, bias_ptr)
    constant, slope = tl.load(means_ptr + row // C), tl.load(means_ptr + B + row // C)
    start, i = tl.cast(row, tl.int64) * N, tl.arange(0, BLOCK)
    for at in range(first, end, BLOCK):
        here, live = start + at + i, at + i < N
        h, xhat = _load_adjoint(g_ptr + here, x_ptr + here, live, mean, rstd, w, bias)
        gx = rstd * (w * h - constant - xhat * slope)
        tl.store(gx_ptr + here, gx.to(gx_ptr.dtype.element_ty), mask=live)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """All contiguous -> y like x; statistics (B, 2) in float32."""
    B, C, H, W = x.shape
    grid, splits, sizes, constants = _walk(x)
    parts = torch.empty(3, grid[0], device=x.device, dtype=torch.float32)
    statistics, y = torch.empty(B, 2, device=x.device, dtype=torch.float32), torch.empty_like(x)
    with torch.cuda.device_of(x):
        _moments_kernel[grid](x, parts, *sizes, **constants)
        _combine_kernel[(B,)](parts, statistics, C * splits, float(C * H * W), eps, **COMBINE)
        _apply_kernel[grid](x, statistics, weight, bias, y, C, *sizes, **constants)
    return y, statistics


def backward(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g in x's dtype -> the gradients of x, weight, bias; those of parameters in float32."""
    B, C, H, W = x.shape
    grid, splits, sizes, constants = _walk(x)
    parts, gx = torch.empty(2, B, C, splits, device=x.device, dtype=torch.float32), torch.empty_like(x)
    with torch.cuda.device_of(x):
        _sums_kernel[grid](g, x, statistics, weight, bias, parts, C, *sizes, **constants)
        sums = parts.sum(3) if splits > 1 else parts[..., 0]  # (2, B, C): of h, of h xhat
        means = (sums * weight.float()).sum(2) / (C * H * W)
        _gradient_kernel[grid](g, x, statistics, weight, bias, means, gx, B, C, *sizes, **constants)
    gb, gw = sums.sum(1)
    return gx, gw, gb


def _walk(x: Tensor) -> tuple[tuple[int], int, tuple[int, int], dict[str, Any]]:
    """-> grid, parts of a row, size arguments and constants of the kernels that walk along rows."""
    rows, N = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
    block = min(WALK["BLOCK"], power_of_2(N))
    splits = max(1, min(PROGRAMS // rows, cdiv(N, block)))
    return (rows * splits,), splits, (N // unit(N), splits), {**WALK, "BLOCK": block, "UNIT": unit(N)}
