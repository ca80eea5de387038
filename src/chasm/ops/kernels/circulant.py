"""Circulant passes as Triton kernels: each channel has its own n x n matrix T, applied along H or along W.

A batched product of cuBLAS would load T once per image. Here a program loads a block of T of one channel once and
applies it to the maps of all images. `matrices` makes T from its first column, `circulant_pass` applies it,
`column_gradient` returns the gradient of the column.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels.launch import alignment, cdiv, is_large_card, launch, multiprocessors, power_of_2
from chasm.ops.library import is_fake

MAX_KEPT_MATRIX = 256  # length up to which a program keeps its block of T in shared memory; half of it on small cards


@triton.jit
def _pass_kernel(
    t_ptr, scale_ptr, mean_ptr, x_ptr, y_ptr, rest_ptr, C, H, W_units, TILES, STRIDE_T,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, ALONG_H: tl.constexpr, UNIT: tl.constexpr,
    SPLIT_MEAN: tl.constexpr,
):  # fmt: skip
    """Grid (walkers, blocks of T, C). y = s T x along H, y = s x T^T along W; T (C, n, n), its rows STRIDE_T apart.

    With SPLIT_MEAN, s T x goes to rest_ptr, and y is s T x + mean x.
    """
    c = tl.program_id(2).to(tl.int64)
    W = W_units * UNIT
    n = W
    if ALONG_H:
        n = H
    k = tl.arange(0, N)
    r = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_ptr += c * n * STRIDE_T
    scale = tl.load(scale_ptr + c)
    if SPLIT_MEAN:
        mean = tl.load(mean_ptr)
    if ALONG_H:  # (r, k)
        T = tl.load(t_ptr + r[:, None] * STRIDE_T + k[None, :], mask=(r < n)[:, None] & (k < n)[None, :], other=0.0)
    else:  # (k, r): transposed
        T = tl.load(t_ptr + r[None, :] * STRIDE_T + k[:, None], mask=(r < n)[None, :] & (k < n)[:, None], other=0.0)
    for item in range(tl.program_id(0), TILES, tl.num_programs(0)):
        if ALONG_H:
            tiles = tl.cdiv(W, BLOCK_X)
            start = ((item // tiles).to(tl.int64) * C + c) * H * W
            w = (item % tiles) * BLOCK_X + tl.arange(0, BLOCK_X)
            at = start + r[:, None] * W + w[None, :]
            inside = (r < H)[:, None] & (w < W)[None, :]
            x = tl.load(
                x_ptr + start + k[:, None] * W + w[None, :], mask=(k < H)[:, None] & (w < W)[None, :], other=0.0
            )
            if SPLIT_MEAN:
                own = tl.load(x_ptr + at, mask=inside, other=0.0)  # loaded during the product
            y = tl.dot(T, x) * scale
        else:
            tiles = tl.cdiv(H, BLOCK_X)
            start = ((item // tiles).to(tl.int64) * C + c) * H * W
            h = (item % tiles) * BLOCK_X + tl.arange(0, BLOCK_X)
            at = start + h[:, None] * W + r[None, :]
            inside = (h < H)[:, None] & (r < W)[None, :]
            x = tl.load(
                x_ptr + start + h[:, None] * W + k[None, :], mask=(h < H)[:, None] & (k < W)[None, :], other=0.0
            )
            if SPLIT_MEAN:
                own = tl.load(x_ptr + at, mask=inside, other=0.0)
            y = tl.dot(x, T) * scale
        if SPLIT_MEAN:
            tl.store(rest_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
            y += mean * own.to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pass_in_blocks_kernel(
    t_ptr, scale_ptr, mean_ptr, x_ptr, y_ptr, rest_ptr, C, H, W_units, TILES, STRIDE_T,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr, ALONG_H: tl.constexpr, UNIT: tl.constexpr,
    SPLIT_MEAN: tl.constexpr,
):  # fmt: skip
    """`_pass_kernel` for a T that does not fit into shared memory: grid (TILES, blocks of T, C), one tile a program."""
    c = tl.program_id(2).to(tl.int64)
    W = W_units * UNIT
    n, other = W, H
    if ALONG_H:
        n, other = H, W
    tiles = tl.cdiv(other, BLOCK_X)
    start = ((tl.program_id(0) // tiles).to(tl.int64) * C + c) * H * W
    t_ptr, x_ptr = t_ptr + c * n * STRIDE_T, x_ptr + start
    r = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(0) % tiles * BLOCK_X + tl.arange(0, BLOCK_X)
    if ALONG_H:  # (r, o)
        total = tl.zeros([BLOCK_T, BLOCK_X], tl.float32)
        at, inside = r[:, None] * W + o[None, :], (r < n)[:, None] & (o < other)[None, :]
    else:  # (o, r)
        total = tl.zeros([BLOCK_X, BLOCK_T], tl.float32)
        at, inside = o[:, None] * W + r[None, :], (o < other)[:, None] & (r < n)[None, :]
    for first in range(0, n, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if ALONG_H:
            T = tl.load(t_ptr + r[:, None] * STRIDE_T + k[None, :], mask=(r < n)[:, None] & (k < n)[None, :], other=0.0)
            x = tl.load(x_ptr + k[:, None] * W + o[None, :], mask=(k < n)[:, None] & (o < other)[None, :], other=0.0)
            total = tl.dot(T, x, total)
        else:
            T = tl.load(t_ptr + r[None, :] * STRIDE_T + k[:, None], mask=(r < n)[None, :] & (k < n)[:, None], other=0.0)
            x = tl.load(x_ptr + o[:, None] * W + k[None, :], mask=(o < other)[:, None] & (k < n)[None, :], other=0.0)
            total = tl.dot(x, T, total)
    y = total * tl.load(scale_ptr + c)
    if SPLIT_MEAN:
        tl.store(rest_ptr + start + at, y.to(y_ptr.dtype.element_ty), mask=inside)
        y += tl.load(mean_ptr) * tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _matrix_kernel(
    column_ptr, t_ptr, scale_ptr, mean_ptr, C, n, WIDTH,
    N: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, SPLIT_MEAN: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, C): the column over its largest number, as a circulant; and that number.

    With SPLIT_MEAN, the mean of the diagonals over all channels is subtracted first.
    """
    c = tl.program_id(1).to(tl.int64)
    mean = 0.0
    if SPLIT_MEAN:
        channels = tl.arange(0, CHANNELS)
        one = tl.load(column_ptr)
        others = tl.load(column_ptr + channels * n, mask=channels < C, other=one)
        mean = one + tl.sum(others - one, 0) / C  # exact if all are equal
        tl.store(mean_ptr, mean, mask=(tl.program_id(0) == 0) & (c == 0))
    column_ptr += c * n
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, N)
    column = tl.load(column_ptr + j, mask=j < n, other=0.0) - tl.where(j == 0, mean, 0.0)
    scale = tl.maximum(tl.max(tl.abs(column), 0), 1.1754943508222875e-38)
    inside = (i < n)[:, None] & (j < n)[None, :]
    place = i[:, None] - j[None, :]
    value = tl.load(column_ptr + tl.where(place < 0, place + n, place), mask=inside, other=0.0)
    value = (value - tl.where(place == 0, mean, 0.0)) / scale
    at = t_ptr + c * n * WIDTH + i[:, None] * WIDTH + j[None, :]
    tl.store(at, tl.where(inside, value, 0.0).to(t_ptr.dtype.element_ty), mask=(i < n)[:, None] & (j < WIDTH)[None, :])
    tl.store(scale_ptr + c, scale, mask=tl.program_id(0) == 0)


@triton.jit
def _diagonal_kernel(d_ptr, out_ptr, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Grid (blocks of diagonals, C): sums over j of D[j, (j + d) % n], the wrapped diagonals of D (C, n, n)."""
    c = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d_ptr += c * n * n
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j0 in range(0, n, ROWS):
        j = j0 + tl.arange(0, ROWS)
        column = j[:, None] + d[None, :]
        column = tl.where(column >= n, column - n, column)
        total += tl.load(d_ptr + j[:, None] * n + column, mask=(j < n)[:, None] & (d < n)[None, :], other=0.0)
    tl.store(out_ptr + c * n + d, tl.sum(total, 0), mask=d < n)


@triton.jit
def _gradient_kernel(
    g_ptr, x_ptr, d_ptr, B, C, H, W_units,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, ALONG_H: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, column blocks, C): D[c] = sum over images of x g^T along H, of x^T g along W; D (C, n, n)."""
    c = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    W = W_units * UNIT
    n = W
    m = H
    if ALONG_H:
        n = H
        m = W
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    steps = tl.cdiv(m, BLOCK_K)
    for item in range(B * steps):
        start = ((item // steps).to(tl.int64) * C + c) * H * W
        k = (item % steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        live_x = (i < n)[:, None] & (k < m)[None, :]
        live_g = (j < n)[None, :] & (k < m)[:, None]
        if ALONG_H:
            x = tl.load(x_ptr + start + i[:, None] * W + k[None, :], mask=live_x, other=0.0)
            g = tl.load(g_ptr + start + j[None, :] * W + k[:, None], mask=live_g, other=0.0)
        else:
            x = tl.load(x_ptr + start + k[None, :] * W + i[:, None], mask=live_x, other=0.0)
            g = tl.load(g_ptr + start + k[:, None] * W + j[None, :], mask=live_g, other=0.0)
        total = tl.dot(x, g, total)
    tl.store(d_ptr + (c * n + i[:, None]) * n + j[None, :], total, mask=(i < n)[:, None] & (j < n)[None, :])


def _pass_blocks(n: int, other: int, aligned: bool, along_h: bool, large: bool) -> tuple[bool, dict[str, Any]]:
    """Return whether a program keeps its block of T, and block sizes for axes of lengths n and `other`."""
    N = power_of_2(n, 16)
    keeps = (MAX_KEPT_MATRIX if large else MAX_KEPT_MATRIX // 2) >= N
    if keeps:
        block_t, block_x, warps, stages = (128, 64, 8, 4) if N > 128 else (64, 64, 4, 3)
    else:
        block_t, block_x, warps, stages = 128, 128, 8 if aligned else 4, 3 if large else 2
        if n > 2 * MAX_KEPT_MATRIX and aligned and large:
            block_t, block_x = (128, 256) if along_h else (256, 128)  # 256 columns of the result
    blocks = {"BLOCK_T": min(block_t, N), "BLOCK_X": min(block_x, power_of_2(other, 16))}
    return keeps, {**blocks, **({"N": N} if keeps else {"BLOCK_K": 64}), "num_warps": warps, "num_stages": stages}


def circulant_pass(
    matrix: Tensor, scale: Tensor, mean: Tensor | None, x: Tensor, along_h: bool
) -> tuple[Tensor, Tensor | None]:
    """Apply one circulant per channel along H or W.

    Args:
        matrix: circulants (C, n, n or more), as `matrices` returns them.
        scale: (C,).
        mean: a scalar, or None.
        x: contiguous (B, C, H, W).
        along_h: along H, else along W.

    Returns:
        (scale matrix x, None) without a mean; else (scale matrix x + mean x, scale matrix x).
    """
    y, rest = torch.empty_like(x), None if mean is None else torch.empty_like(x)
    if is_fake(x):
        return y, rest
    B, C, H, W = x.shape
    n, other = (H, W) if along_h else (W, H)
    unit = alignment(W)
    keeps, options = _pass_blocks(n, other, unit >= 8, along_h, is_large_card(x))
    tiles, blocks = B * cdiv(other, options["BLOCK_X"]), cdiv(n, options["BLOCK_T"])
    tensors = matrix, scale, scale if mean is None else mean, x, y, y if rest is None else rest
    sizes = C, H, W // unit, tiles, matrix.stride(1)
    options |= {"ALONG_H": along_h, "UNIT": unit, "SPLIT_MEAN": mean is not None}
    if keeps:  # each program walks over several maps
        programs = multiprocessors(x) * (3 if options["N"] > 128 else 4)
        walkers = max(1, min(tiles, programs // (blocks * C)))
        launch(_pass_kernel, (walkers, blocks, C), *tensors, *sizes, **options)
    else:
        launch(_pass_in_blocks_kernel, (tiles, blocks, C), *tensors, *sizes, **options)
    return y, rest


def column_gradient(g: Tensor, x: Tensor, along_h: bool) -> Tensor:
    """Return the gradient (C, n) of the first column of T.

    Args:
        g: gradient of the result of a pass, contiguous (B, C, H, W).
        x: input of the pass, contiguous (B, C, H, W).
        along_h: the pass was along H, else along W.
    """
    B, C, H, W = x.shape
    n, other = (H, W) if along_h else (W, H)
    D = torch.empty(C, n, n, dtype=torch.float32, device=g.device)
    d = torch.empty(C, n, dtype=torch.float32, device=g.device)
    if is_fake(x):
        return d
    block, step, unit = min(128, power_of_2(n, 16)), min(64, power_of_2(other, 16)), alignment(W)
    options = {"num_warps": 8 if n <= 256 else 4, "num_stages": 3 if is_large_card(x) else 2}
    launch(
        _gradient_kernel, (cdiv(n, block), cdiv(n, block), C), g, x, D, B, C, H, W // unit,
        BLOCK=block, BLOCK_K=step, ALONG_H=along_h, UNIT=unit, **options,
    )  # fmt: skip
    # T[i, j] = column[(i - j) % n], and D is the gradient of T, transposed.
    width = min(64, power_of_2(n))
    launch(_diagonal_kernel, (cdiv(n, width), C), D, d, n, BLOCK=width, ROWS=16, num_warps=4)
    return d


def matrices(column: Tensor, dtype: torch.dtype, split_mean: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return circulants (C, n, n') with rows padded to whole 16-byte words, their scales (C,), and their mean gain.

    Args:
        column: first columns (C, n).
        dtype: of the circulants.
        split_mean: subtract the mean gain from the circulants. Else the third result is None.
    """
    C, n = column.shape
    width = cdiv(n, 8) * 8
    T = torch.empty(C, n, width, dtype=dtype, device=column.device)
    scale = torch.empty(C, dtype=torch.float32, device=column.device)
    mean = torch.empty((), dtype=torch.float32, device=column.device) if split_mean else None
    if is_fake(column):
        return T, scale, mean
    N = power_of_2(width)
    rows = min(16, 8192 // N)
    launch(
        _matrix_kernel, (cdiv(n, rows), C), column.contiguous(), T, scale, scale if mean is None else mean, C, n, width,
        N=N, CHANNELS=power_of_2(C), ROWS=rows, SPLIT_MEAN=split_mean, num_warps=4,
    )  # fmt: skip
    return T, scale, mean
