"""Products over the channels of features (B, C, H, W), and over their positions, as Triton kernels. Sums in float32.

`product` is what a library has no one pass for (a bias, a second map to add, rows that are not aligned); `gram` what it
may have too few result blocks for. Their float32 is never TF32 alone: up to 128 channels see `mixing`; else, and in
sums of positions, every number is split in two of TF32, which have all exponents, and three products are summed.
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import cdiv, mixing, power_of_2, roomy
from chasm.ops.kernels.circulant import unit

# Products of half precision, where there are enough of them of large blocks; and of float32
PRODUCT = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
PRODUCT_LARGE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4}
PRODUCT_FLOAT32 = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
PRODUCT_PROGRAMS = 132  # one for every multiprocessor of an H200
WALK = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
WALK_PROGRAMS = 528  # four for every multiprocessor of an H200
WEIGHT = {"BLOCK_M": 128, "BLOCK_K": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
WEIGHT_FLOAT32 = {"BLOCK_M": 128, "BLOCK_K": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3}
WEIGHT_FLOAT32_FEW = {"BLOCK_M": 64, "BLOCK_K": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}  # up to 64 channels
BOTH = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 4}
BOTH_PROGRAMS = 132  # one for every multiprocessor of an H200
WEIGHT_PROGRAMS = 132  # among which W's gradient is divided: one for every multiprocessor of an H200


@triton.jit
def _upper_part(x):
    """A float32 rounded to what TF32 holds. To cut it off would leave parts of one sign, whose errors add up."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _add_product(y, x, upper, lower):
    """y + x w for w in two parts.

    Matrix units cut off where others round: what sums over more than channels starts at y = 0 in every block.
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
    """The same for half precision and few channels: W stays with a program, positions walk past it."""
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
    """Parts (splits, C, C) of the sum over b of g[b] a[b]^T, and with SUMS (splits, C) of that of g."""
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
        total = tl.sum(sums, 1) if SPLIT else tl.max(sums, 1)  # sixteen times the same
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
    """W a + bias + x: W (C, C) on the channels of contiguous a (B, C, H, W), of one dtype. `out`: like a by default."""
    out = torch.empty_like(a) if out is None else out
    B, C, N = a.shape[0], a.shape[1], a.shape[2] * a.shape[3]
    tensors = (W, a, W if bias is None else bias.contiguous(), a if x is None else x, out)
    terms = {"BIAS": bias is not None, "RESIDUAL": x is not None, "UNIT": unit(N)}
    few = C <= 128 and roomy(a)
    if few and a.dtype == torch.float32:
        mixing.product(W, a.flatten(2), bias=bias, add=x, out=out.flatten(2))
        return out
    with torch.cuda.device_of(a):
        if few:
            walkers = min(cdiv(N, WALK["BLOCK_N"]), max(1, cdiv(WALK_PROGRAMS, B)))
            sizes = (C, N // unit(N), walkers, *W.stride())
            block = max(16, power_of_2(C))
            _walk_kernel[(walkers * B,)](*tensors, *sizes, BLOCK_C=block, **terms, **WALK)
        else:
            large = C > 192 and cdiv(C, 128) * cdiv(N, 128) * B >= PRODUCT_PROGRAMS
            half = PRODUCT_LARGE if large else PRODUCT
            constants = _blocks(PRODUCT_FLOAT32 if a.dtype == torch.float32 else half, a, "BLOCK_K")
            grid = (cdiv(C, constants["BLOCK_M"]) * cdiv(N, constants["BLOCK_N"]) * B,)
            _product_kernel[grid](*tensors, C, N // unit(N), *W.stride(), **terms, **constants)
    return out


def gram(g: Tensor, a: Tensor) -> Tensor:
    """Sum over batch and positions of g a^T, (C, C) in float32, for contiguous (B, C, ..)."""
    return _gram_by_library(g, a) if _library_sums(a) else _gram_parts(g, a).sum(0)


def gram_and_sum(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """And the sum of g, (C,)."""
    if _library_sums(a):
        return _gram_by_library(g, a), g.flatten(2).sum(2, dtype=torch.float32).sum(0)  # at once it takes twice as long
    sums = torch.empty(WEIGHT_PROGRAMS, a.shape[1], device=a.device, dtype=torch.float32)
    parts = _gram_parts(g, a, sums)
    return parts.sum(0), sums[: len(parts)].sum(0)


def _library_sums(a: Tensor) -> bool:
    """Whether a library's product of every image is faster (timed on an H200).

    Its blocks of the result must be enough to fill the card, unless there is one image, whose positions it shares out
    as the kernel does; and the results of all images not much larger than the maps.
    """
    B, C, N = *a.shape[:2], a.shape[2:].numel()
    blocks = B * cdiv(C, 128) ** 2
    if not a.is_cuda or a.dtype.itemsize > 2 or N % 8:
        return False
    if C > 2 * N or (2 * C > N and blocks > 2 * WEIGHT_PROGRAMS):
        return False
    if C <= 128:
        return N <= 2048 and WEIGHT_PROGRAMS // 2 <= blocks <= 2 * WEIGHT_PROGRAMS
    return B == 1 or N <= 8192 or blocks >= 16


def _gram_by_library(g: Tensor, a: Tensor) -> Tensor:
    return torch.bmm(g.flatten(2), a.flatten(2).mT, out_dtype=torch.float32).sum(0)


def product_and_gram(W: Tensor, q: Tensor, e: Tensor) -> tuple[Tensor, Tensor] | None:
    """W q and gram(q, e) in one pass over q; None where a program cannot hold what that takes."""
    B, C, N = q.shape[0], q.shape[1], q.shape[2] * q.shape[3]
    if C > 128 or q.dtype.itemsize > 2 or not roomy(q):
        return None
    walkers = min(cdiv(N, BOTH["BLOCK_N"]), max(1, BOTH_PROGRAMS // B))
    out = torch.empty_like(q)
    parts = torch.empty(walkers * B, C, C, device=q.device, dtype=torch.float32)
    block = max(16, power_of_2(C))
    with torch.cuda.device_of(q):
        _both_kernel[(walkers * B,)](
            W, q, e, out, parts, C, N // unit(N), walkers, *W.stride(), UNIT=unit(N), BLOCK_C=block, **BOTH
        )
    return out, parts.sum(0)


def _gram_parts(g: Tensor, a: Tensor, sums: Tensor | None = None) -> Tensor:
    """(splits, C, C), at most WEIGHT_PROGRAMS of them; sums: where as many (C,) of g go."""
    C, N = a.shape[1], a.shape[2:].numel()
    single = WEIGHT_FLOAT32 if C > 64 else WEIGHT_FLOAT32_FEW
    constants = _blocks(single if a.dtype == torch.float32 else WEIGHT, a, "BLOCK_N")
    tiles = cdiv(C, constants["BLOCK_M"]) * cdiv(C, constants["BLOCK_K"])
    blocks = a.shape[0] * cdiv(N, constants["BLOCK_N"])
    splits = max(1, min(blocks, WEIGHT_PROGRAMS // tiles))
    parts = torch.empty(splits, C, C, device=a.device, dtype=torch.float32)
    tensors = (g, a, parts, parts if sums is None else sums)
    with torch.cuda.device_of(a):
        _weight_kernel[(tiles * splits,)](
            *tensors, C, N // unit(N), blocks, splits, UNIT=unit(N), SUMS=sums is not None, **constants
        )
    return parts


def _blocks(options: dict[str, Any], a: Tensor, summed: str) -> dict[str, Any]:
    """No larger than the channels of a need, 16 at least; half as much of what is summed where memory is short."""
    options = options if roomy(a) else {**options, summed: options[summed] // 2}
    most = max(16, power_of_2(a.shape[1]))
    return {**options, **{key: min(options[key], most) for key in ("BLOCK_M", "BLOCK_K")}}
