"""Circulant passes as Triton kernels: each channel has its own n x n matrix T, applied along H or along W.

A library's batched product would want T once per image. Here a program loads a block of T of one channel once and
takes the maps of all images past it. `matrices` makes T from its first column, `pass_` applies it, `gradient`
makes the gradient of the column.
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import cdiv, power_of_2

PASS = {"BLOCK_T": 128, "BLOCK_X": 64, "num_warps": 8, "num_stages": 4}
PASS_SHORT = {"BLOCK_T": 64, "BLOCK_X": 64, "num_warps": 4, "num_stages": 3}  # up to 128
KEPT = 256  # length up to which a program keeps its block of T
PASS_IN_BLOCKS = {"BLOCK_T": 128, "BLOCK_X": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}  # beyond
WIDE = 512  # length beyond which a block of the result has 256 columns
GRADIENT = {"BLOCK": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
GRADIENT_LONG = {**GRADIENT, "num_warps": 4}  # beyond 256
MATRIX = {"TILE": 8192, "num_warps": 4}  # at most, and at most 16 rows
DIAGONAL = {"BLOCK": 64, "ROWS": 16, "num_warps": 4}
PROGRAMS = 396  # three per multiprocessor of an H200; each then walks over several maps
PROGRAMS_SHORT = 528


@triton.jit
def _pass_kernel(
    t_ptr, scale_ptr, mean_ptr, x_ptr, y_ptr, apart_ptr, C, H, W_units, TILES, STRIDE_T,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, ALONG_H: tl.constexpr, UNIT: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Grid (walkers, blocks of T, C). y = s T x along H, y = s x T^T along W; T (C, n, n), its rows STRIDE_T apart.

    With APART that goes to apart_ptr, and y is it plus mean x.
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
    if APART:
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
            if APART:
                own = tl.load(x_ptr + at, mask=inside, other=0.0)  # under way during the product
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
            if APART:
                own = tl.load(x_ptr + at, mask=inside, other=0.0)
            y = tl.dot(x, T) * scale
        if APART:
            tl.store(apart_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
            y += mean * own.to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pass_in_blocks_kernel(
    t_ptr, scale_ptr, mean_ptr, x_ptr, y_ptr, apart_ptr, C, H, W_units, TILES, STRIDE_T,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr, ALONG_H: tl.constexpr, UNIT: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """As above, with blocks of T and x that come and go: grid (TILES, blocks of T, C), one tile for each program."""
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
    if APART:
        tl.store(apart_ptr + start + at, y.to(y_ptr.dtype.element_ty), mask=inside)
        y += tl.load(mean_ptr) * tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _matrix_kernel(
    column_ptr, t_ptr, scale_ptr, mean_ptr, C, n, WIDTH,
    N: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, C): the column over its largest number, as a circulant; and that number.

    With APART the mean over all channels of what stands on the diagonal is taken off it first.
    """
    c = tl.program_id(1).to(tl.int64)
    mean = 0.0
    if APART:
        channels = tl.arange(0, CHANNELS)
        one = tl.load(column_ptr)
        others = tl.load(column_ptr + channels * n, mask=channels < C, other=one)
        mean = one + tl.sum(others - one, 0) / C  # where all are equal, that number to the last bit
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
    """Grid (blocks of diagonals, C): sums of D (C, n, n) along its wrapped diagonals, D[j, (j + d) % n] over j."""
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


def unit(n: int) -> int:
    """Rows of n numbers start at multiples of this one. Kernels take n as units times UNIT, to know it too."""
    return gcd(n, 16)


def pass_(matrix: Tensor, scale: Tensor, mean: Tensor | None, x: Tensor, along_h: bool) -> tuple[Tensor, Tensor | None]:
    """scale (C,) times matrix (C, n, >= n) along H or W of contiguous x (B, C, H, W).

    With a mean: that plus mean x, and without.
    """
    B, C, H, W = x.shape
    n, other = (H, W) if along_h else (W, H)
    N = max(16, power_of_2(n))
    options = dict(PASS_IN_BLOCKS if N > KEPT else PASS if N > 128 else PASS_SHORT)
    if N > KEPT and unit(W) < 8:
        options["num_warps"] = 4  # faster where rows are not aligned
    elif N > KEPT and n > WIDE:
        options["BLOCK_X" if along_h else "BLOCK_T"] = 256
    block_t = min(options.pop("BLOCK_T"), N)
    block_x = min(options.pop("BLOCK_X"), max(16, power_of_2(other)))
    tiles, blocks = B * cdiv(other, block_x), cdiv(n, block_t)
    y, apart = torch.empty_like(x), None if mean is None else torch.empty_like(x)
    given = (
        matrix, scale, scale if mean is None else mean, x, y, y if apart is None else apart,
        C, H, W // unit(W), tiles, matrix.stride(1),
    )  # fmt: skip
    sizes = {"BLOCK_T": block_t, "BLOCK_X": block_x, "ALONG_H": along_h, "UNIT": unit(W), "APART": mean is not None}
    with torch.cuda.device_of(x):
        if N > KEPT:
            _pass_in_blocks_kernel[tiles, blocks, C](*given, **sizes, **options)
        else:
            walkers = max(1, min(tiles, (PROGRAMS_SHORT if N <= 128 else PROGRAMS) // (blocks * C)))
            _pass_kernel[walkers, blocks, C](*given, N=N, **sizes, **options)
    return y, apart


def gradient(g: Tensor, x: Tensor, along_h: bool) -> Tensor:
    """Gradient (C, n) of the first column of T in y = pass_(T, x), for the gradient g of y."""
    B, C, H, W = x.shape
    n = H if along_h else W
    options = dict(GRADIENT if n <= 256 else GRADIENT_LONG)
    block = min(options.pop("BLOCK"), max(16, power_of_2(n)))
    step = min(options.pop("BLOCK_K"), max(16, power_of_2(W if along_h else H)))
    D = torch.empty(C, n, n, dtype=torch.float32, device=g.device)
    d = torch.empty(C, n, dtype=torch.float32, device=g.device)
    blocks = cdiv(n, block)
    with torch.cuda.device_of(x):
        _gradient_kernel[blocks, blocks, C](
            g, x, D, B, C, H, W // unit(W), BLOCK=block, BLOCK_K=step, ALONG_H=along_h, UNIT=unit(W), **options
        )
        # T[i, j] = column[(i - j) % n], and D is the gradient of T, transposed.
        width = min(DIAGONAL["BLOCK"], power_of_2(n))
        _diagonal_kernel[cdiv(n, width), C](D, d, n, **{**DIAGONAL, "BLOCK": width})
    return d


def matrices(column: Tensor, dtype: torch.dtype, apart: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """First columns (C, n) -> circulants (C, n, n'), rows filled up to whole 16-byte words, and their scales (C,).

    `apart`: less their mean gain, which comes third.
    """
    C, n = column.shape
    width = cdiv(n, 8) * 8
    T = torch.empty(C, n, width, dtype=dtype, device=column.device)
    scale = torch.empty(C, dtype=torch.float32, device=column.device)
    mean = torch.empty((), dtype=torch.float32, device=column.device) if apart else None
    N = power_of_2(width)
    rows = min(16, MATRIX["TILE"] // N)
    with torch.cuda.device_of(column):
        _matrix_kernel[cdiv(n, rows), C](
            column.contiguous(), T, scale, scale if mean is None else mean, C, n, width,
            N=N, CHANNELS=power_of_2(C), ROWS=rows, APART=apart, num_warps=MATRIX["num_warps"],
        )  # fmt: skip
    return T, scale, mean
