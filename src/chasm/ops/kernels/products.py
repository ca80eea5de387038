"""Products over the channels of features (B, C, H, W), and over their positions, as Triton kernels. Sums in float32.

`product` does in one pass what cuBLAS needs several for: a bias, a second map to add, rows that are not aligned.
`gram` is faster than cuBLAS where the result has too few blocks to fill the card. float32 is never rounded to TF32:
products of up to 128 channels use `mixing`; the others split every number into two of TF32, which has the exponents of
float32, and sum three products.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import mixing
from chasm.ops.kernels.launch import alignment, cdiv, is_large_card, launch, multiprocessors, power_of_2
from chasm.ops.library import is_fake

MAX_KEPT_CHANNELS = 128  # the matrix of more channels does not fit into one program


@triton.jit
def _upper_part(x):
    """Return a float32 rounded to TF32. Truncation would leave remainders of one sign, whose errors add up."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _add_product(y, x, upper, lower):
    """Return y + x w for w in two parts.

    Matrix units truncate their sums. A sum over more than channels therefore starts at y = 0 in every block.
    """
    x_upper = _upper_part(x)
    y = tl.dot(x - x_upper, upper, y, input_precision="tf32")
    y = tl.dot(x_upper, lower, y, input_precision="tf32")
    return tl.dot(x_upper, upper, y, input_precision="tf32")


@triton.jit
def _product_kernel(
    W_ptr, a_ptr, bias_ptr, x_ptr, out_ptr, C, N_units, stride_m, stride_k,
    UNIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[b] = W a[b] (+ bias) (+ x[b]) for (C, C) on (B, C, N)."""
    N = N_units * UNIT
    rows, columns = tl.cdiv(C, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    m0 = pid % rows * BLOCK_M
    n = pid // rows % columns * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    image = tl.cast(pid // (rows * columns), tl.int64) * C * N
    i, k = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_K)
    m = m0 + i
    out, inside = image + tl.cast(m0, tl.int64) * N + (i * N + n), (m < C) & (n < N)
    w_at, a_at = W_ptr + m * stride_m + k[None, :] * stride_k, a_ptr + image + (k[:, None] * N + n)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, C, BLOCK_K):
        w = tl.load(w_at, mask=(m < C) & (k[None, :] < C - k0), other=0.0)
        a = tl.load(a_at, mask=(k[:, None] < C - k0) & (n < N), other=0.0)
        if a.dtype == tl.float32:
            upper = _upper_part(a)
            acc += _add_product(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), w, upper, a - upper)
        else:
            acc = tl.dot(w, a, acc)
        w_at += BLOCK_K * stride_k
        a_at += BLOCK_K * N
    if BIAS:
        acc += tl.load(bias_ptr + m, mask=m < C, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(x_ptr + out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _walk_kernel(
    W_ptr, a_ptr, bias_ptr, x_ptr, out_ptr, C, N_units, WALKERS, stride_m, stride_k,
    UNIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`_product_kernel` for half precision and few channels: a program keeps W and walks over the positions."""
    N = N_units * UNIT
    walker = tl.program_id(0) % WALKERS
    image = (tl.program_id(0) // WALKERS).to(tl.int64) * C * N
    m, k = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    w = tl.load(W_ptr + m * stride_m + k * stride_k, mask=(m < C) & (k < C), other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + m, mask=m < C, other=0.0).to(tl.float32)
    for tile in range(walker, tl.cdiv(N, BLOCK_N), WALKERS):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at, inside = image + (m * N + n), (m < C) & (n < N)
        y = tl.dot(w, tl.load(a_ptr + at, mask=inside, other=0.0))
        if BIAS:
            y += bias
        if RESIDUAL:
            y += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weight_kernel(
    g_ptr, a_ptr, parts_ptr, sums_ptr, C, N_units, blocks, splits,
    UNIT: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Parts (splits, C, C) of the sum over b of g[b] a[b]^T; with SUMS also parts (splits, C) of the sum of g."""
    N = N_units * UNIT
    rows, columns, per_image = tl.cdiv(C, BLOCK_M), tl.cdiv(C, BLOCK_K), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    m0, k0 = pid % rows * BLOCK_M, pid // rows % columns * BLOCK_K
    split = pid // (rows * columns)
    i, j, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)[None, :]
    m, k = m0 + i, k0 + j
    step = tl.cast(C, tl.int64) * N
    g_at, a_at = g_ptr + m.to(tl.int64)[:, None] * N, a_ptr + k.to(tl.int64)[:, None] * N  # spectra are large
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    SPLIT: tl.constexpr = g_ptr.dtype.element_ty == tl.float32
    sums = tl.zeros([BLOCK_M, BLOCK_N if SPLIT else 16], tl.float32)
    ones = tl.full([BLOCK_N, 16], 1.0, g_ptr.dtype.element_ty)
    first = tl.cast(split, tl.int64) * blocks // splits
    end = (tl.cast(split, tl.int64) + 1) * blocks // splits
    for block in range(first.to(tl.int32), end.to(tl.int32)):
        at = block // per_image * step
        columns_n = block % per_image * BLOCK_N + n
        g = tl.load(g_at + at + columns_n, mask=(m < C)[:, None] & (columns_n < N), other=0.0)
        a = tl.load(a_at + at + columns_n, mask=(k < C)[:, None] & (columns_n < N), other=0.0)
        if SPLIT:  # float32
            upper = _upper_part(a)
            acc += _add_product(tl.zeros([BLOCK_M, BLOCK_K], tl.float32), g, tl.trans(upper), tl.trans(a - upper))
            if SUMS:
                sums += g
        else:
            acc = tl.dot(g, tl.trans(a), acc)
            if SUMS:
                sums = tl.dot(g, ones, sums)  # a sum over n that needs no second copy of g
    part = tl.cast(split, tl.int64) * C
    tl.store(parts_ptr + (part + m[:, None]) * C + k[None, :], acc, mask=(m < C)[:, None] & (k < C)[None, :])
    if SUMS:
        total = tl.sum(sums, 1) if SPLIT else tl.max(sums, 1)  # all 16 columns are equal
        tl.store(sums_ptr + part + m, total, mask=m < tl.where(k0 == 0, C, 0))


@triton.jit
def _both_kernel(
    W_ptr, q_ptr, e_ptr, out_ptr, parts_ptr, C, N_units, WALKERS, stride_m, stride_k,
    UNIT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[b] = W q[b], and parts (programs, C, C) of the sum over b of q[b] e[b]^T, with q read once."""
    N = N_units * UNIT
    pid = tl.program_id(0)
    image = (pid // WALKERS).to(tl.int64) * C * N
    m, k = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    square = (m < C) & (k < C)
    w = tl.load(W_ptr + m * stride_m + k * stride_k, mask=square, other=0.0)
    acc = tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    for tile in range(pid % WALKERS, tl.cdiv(N, BLOCK_N), WALKERS):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at, inside = image + (m * N + n), (m < C) & (n < N)
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        e = tl.load(e_ptr + at, mask=inside, other=0.0)
        acc = tl.dot(q, tl.trans(e), acc)
        tl.store(out_ptr + at, tl.dot(w, q).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(parts_ptr + pid.to(tl.int64) * C * C + m * C + k, acc, mask=square)


def product(
    W: Tensor, a: Tensor, bias: Tensor | None = None, x: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return W a + bias + x.

    Args:
        W: (C, C), of the dtype of a.
        a: contiguous (B, C, H, W).
        bias: (C,).
        x: a map to add, like a.
        out: where the result goes; a new tensor like a by default.
    """
    out = torch.empty_like(a) if out is None else out
    if is_fake(a):
        return out
    B, C, N = a.shape[0], a.shape[1], a.shape[2] * a.shape[3]
    few = C <= MAX_KEPT_CHANNELS and is_large_card(a)
    if few and a.dtype == torch.float32:
        mixing.product(W, a.flatten(2), bias=bias, add=x, out=out.flatten(2))
        return out
    unit = alignment(N)
    tensors = W, a, W if bias is None else bias.contiguous(), a if x is None else x, out
    terms = {"BIAS": bias is not None, "RESIDUAL": x is not None, "UNIT": unit}
    if few:
        walkers = min(cdiv(N, 64), max(1, cdiv(4 * multiprocessors(a), B)))
        launch(
            _walk_kernel, (walkers * B,), *tensors, C, N // unit, walkers, *W.stride(),
            BLOCK_C=power_of_2(C, 16), BLOCK_N=64, **terms, num_warps=4, num_stages=3,
        )  # fmt: skip
    else:
        options = _product_blocks(a)
        grid = (cdiv(C, options["BLOCK_M"]) * cdiv(N, options["BLOCK_N"]) * B,)
        launch(_product_kernel, grid, *tensors, C, N // unit, *W.stride(), **terms, **options)
    return out


def _product_blocks(a: Tensor) -> dict[str, int]:
    B, C, N = a.shape[0], a.shape[1], a.shape[2] * a.shape[3]
    if a.dtype == torch.float32:
        rows, columns, summed, stages = 128, 64, 32, 3
    elif C > 192 and cdiv(C, 128) * cdiv(N, 128) * B >= multiprocessors(a):  # enough large blocks to fill the card
        rows, columns, summed, stages = 128, 128, 32, 4
    else:
        rows, columns, summed, stages = 64, 128, 64, 3
    summed = summed if is_large_card(a) else summed // 2
    most = power_of_2(C, 16)
    blocks = {"BLOCK_M": min(rows, most), "BLOCK_N": columns, "BLOCK_K": min(summed, most)}
    return {**blocks, "num_warps": 4, "num_stages": stages}


def gram(g: Tensor, a: Tensor) -> Tensor:
    """Return the sum over batch and positions of g a^T, (C, C) in float32.

    Args:
        g: contiguous (B, C, ..).
        a: contiguous (B, C, ..).
    """
    return _gram_by_library(g, a) if _library_is_faster(a) else _gram_parts(g, a)[0].sum(0)


def gram_and_sum(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return `gram(g, a)`, and the sum over batch and positions of g, (C,)."""
    if _library_is_faster(a):
        return _gram_by_library(g, a), g.flatten(2).sum(2, dtype=torch.float32).sum(0)  # twice as fast as one sum
    parts, sums = _gram_parts(g, a, with_sums=True)
    return parts.sum(0), sums.sum(0)


def _library_is_faster(a: Tensor) -> bool:
    """Return True if a cuBLAS product of every image is faster (timed on an H200).

    The result must have enough blocks to fill the card, unless there is one image, whose positions cuBLAS distributes
    as the kernel does. And the results of all images must not be much larger than the maps.
    """
    B, C, N = *a.shape[:2], a.shape[2:].numel()
    if not a.is_cuda or a.dtype.itemsize > 2 or N % 8:
        return False
    blocks, full = B * cdiv(C, 128) ** 2, multiprocessors(a)
    if C > 2 * N or (2 * C > N and blocks > 2 * full):
        return False
    if C <= 128:
        return N <= 2048 and full // 2 <= blocks <= 2 * full
    return B == 1 or N <= 8192 or blocks >= 16


def _gram_by_library(g: Tensor, a: Tensor) -> Tensor:
    return torch.bmm(g.flatten(2), a.flatten(2).mT, out_dtype=torch.float32).sum(0)


def product_and_gram(W: Tensor, q: Tensor, e: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return W q and gram(q, e) from one pass over q; None if they do not fit into one program.

    Args:
        W: (C, C), of the dtype of q.
        q: contiguous (B, C, H, W).
        e: contiguous (B, C, H, W).
    """
    B, C, N = q.shape[0], q.shape[1], q.shape[2] * q.shape[3]
    if C > MAX_KEPT_CHANNELS or q.dtype.itemsize > 2 or not is_large_card(q):
        return None
    out = torch.empty_like(q)
    if is_fake(q):
        return out, torch.empty(C, C, device=q.device, dtype=torch.float32)
    unit, walkers = alignment(N), min(cdiv(N, 64), max(1, multiprocessors(q) // B))
    parts = torch.empty(walkers * B, C, C, device=q.device, dtype=torch.float32)
    launch(
        _both_kernel, (walkers * B,), W, q, e, out, parts, C, N // unit, walkers, *W.stride(),
        UNIT=unit, BLOCK_C=power_of_2(C, 16), BLOCK_N=64, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out, parts.sum(0)


def _gram_parts(g: Tensor, a: Tensor, with_sums: bool = False) -> tuple[Tensor, Tensor]:
    """Return parts (splits, C, C) of the gram; if `with_sums` also parts (splits, C) of the sum of g."""
    C = a.shape[1]
    if is_fake(a):
        return a.new_empty(1, C, C, dtype=torch.float32), a.new_empty(1, C, dtype=torch.float32)
    N, unit, options = a.shape[2:].numel(), alignment(a.shape[2:].numel()), _gram_blocks(a)
    tiles = cdiv(C, options["BLOCK_M"]) * cdiv(C, options["BLOCK_K"])
    blocks = a.shape[0] * cdiv(N, options["BLOCK_N"])
    splits = max(1, min(blocks, multiprocessors(a) // tiles))
    parts = torch.empty(splits, C, C, device=a.device, dtype=torch.float32)
    sums = torch.empty(splits, C, device=a.device, dtype=torch.float32) if with_sums else parts
    launch(
        _weight_kernel, (tiles * splits,), g, a, parts, sums, C, N // unit, blocks, splits,
        UNIT=unit, SUMS=with_sums, **options,
    )  # fmt: skip
    return parts, sums


def _gram_blocks(a: Tensor) -> dict[str, Any]:
    if a.dtype != torch.float32:
        rows, summed, warps = 128, 128, 8
    else:
        rows, summed, warps = (128, 32, 8) if a.shape[1] > 64 else (64, 64, 4)
    summed = summed if is_large_card(a) else summed // 2
    rows = min(rows, power_of_2(a.shape[1], 16))
    return {"BLOCK_M": rows, "BLOCK_K": rows, "BLOCK_N": summed, "num_warps": warps, "num_stages": 3}
