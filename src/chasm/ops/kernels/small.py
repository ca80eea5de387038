"""Small matrices (batch, m, n): what a matrix exponential and its gradient need, in few launches.

In float64; what needs no more than float32 runs on the matrix units for TF32, every number in two parts.
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import cdiv
from chasm.ops.kernels.mixing import add_product, upper_part

PRODUCTS = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 2, "num_stages": 3}
# In float32; the larger for all of a large matrix, of which half would be too few blocks.
SPLIT = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 2, "num_stages": 3}
SPLIT_LARGE = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
BLOCK = 1024  # of elementwise kernels


@triton.jit
def _add_block(
    total, p_ptr, q_ptr, m, n, k, M, N, K, p_row, p_column, q_row, q_column, SPLIT: tl.constexpr
):  # fmt: skip
    """total + p[m, k] q[k, n]."""
    p = tl.load(p_ptr + m[:, None] * p_row + k[None, :] * p_column, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    q = tl.load(q_ptr + k[:, None] * q_row + n[None, :] * q_column, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    if SPLIT:
        q = q.to(tl.float32)
        upper = upper_part(q)
        total += add_product(tl.zeros_like(total), p.to(tl.float32), upper, q - upper)
    else:
        total = tl.dot(p.to(tl.float64), q.to(tl.float64), total, out_dtype=tl.float64)
    return total


@triton.jit
def _products_kernel(
    z_ptr, p_ptr, q_ptr, r_ptr, s_ptr, out_ptr, alpha, beta, M, N, K,
    p_batch, p_row, p_column, q_batch, q_row, q_column, r_batch, r_row, r_column, s_batch, s_row, s_column,
    ADD: tl.constexpr, TWO: tl.constexpr, SKEW: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, column blocks, batch): out = z + alpha p q + beta r s; z and out contiguous.

    Of a SKEW out only blocks that reach the diagonal or beyond do anything; what they find above it they mirror.
    """
    b = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, steps = (m < M)[:, None] & (n < N)[None, :], tl.cdiv(K, BLOCK_K)
    if SKEW:
        inside = inside & (m[:, None] <= n[None, :])
        steps = tl.where((tl.program_id(1) + 1) * BLOCK_N > tl.program_id(0) * BLOCK_M, steps, 0)
    first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if SPLIT else tl.float64)
    second = first
    for step in range(steps):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        first = _add_block(
            first, p_ptr + b * p_batch, q_ptr + b * q_batch, m, n, k, M, N, K, p_row, p_column, q_row, q_column, SPLIT
        )
        if TWO:
            second = _add_block(
                *(second, r_ptr + b * r_batch, s_ptr + b * s_batch, m, n, k, M, N, K),
                r_row, r_column, s_row, s_column, SPLIT,
            )  # fmt: skip
    total = alpha * first
    if TWO:
        total += beta * second
    at = b * M * N + m[:, None] * N + n[None, :]
    if ADD:
        total += tl.load(z_ptr + at, mask=inside, other=0.0)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=inside)
    if SKEW:
        tl.store(out_ptr + b * M * N + n[None, :] * N + m[:, None], -total, mask=inside & (m[:, None] < n[None, :]))


@triton.jit
def _triangle(i, j):
    """Place of (i, j), i > j, in a strict lower triangle row by row."""
    return i * (i - 1) // 2 + j


@triton.jit
def _skew_kernel(theta_ptr, a_ptr, C, scale, BLOCK: tl.constexpr):
    """Grid (blocks of a matrix, batch): scale times theta below the diagonal, minus its transpose above, in float64."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    i, j = at // C, at % C
    inside = (i < C) & (i != j)
    place = _triangle(tl.maximum(i, j), tl.minimum(i, j))
    value = tl.load(theta_ptr + b * (C * (C - 1) // 2) + place, mask=inside, other=0.0).to(tl.float64) * scale
    tl.store(a_ptr + b * C * C + at, tl.where(i > j, value, -value), mask=i < C)


@triton.jit
def _unskew_kernel(a_ptr, theta_ptr, C, scale, BLOCK: tl.constexpr):
    """The adjoint of `_skew_kernel`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    i, j = at // C, at % C
    inside = (i < C) & (i > j)
    below = tl.load(a_ptr + b * C * C + at, mask=inside, other=0.0)
    above = tl.load(a_ptr + b * C * C + j * C + i, mask=inside, other=0.0)
    tl.store(theta_ptr + b * (C * (C - 1) // 2) + _triangle(i, j), (below - above) * scale, mask=inside)


@triton.jit
def _cubics_kernel(a_ptr, a2_ptr, a3_ptr, a4_ptr, t_ptr, out_ptr, C, SIZE, BLOCK: tl.constexpr):
    """Grid (blocks of all matrices,): t_4j I + t_4j+1 A + t_4j+2 A^2 + t_4j+3 A^3 j = 0..3; then + t_16 A^4."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < SIZE
    place = at % (C * C)
    eye = tl.where(place // C == place % C, 1.0, 0.0)
    a = tl.load(a_ptr + at, mask=live, other=0.0)
    a2 = tl.load(a2_ptr + at, mask=live, other=0.0)
    a3 = tl.load(a3_ptr + at, mask=live, other=0.0)
    for j in tl.static_range(4):
        t = t_ptr + 4 * j
        value = tl.load(t) * eye + tl.load(t + 1) * a + tl.load(t + 2) * a2 + tl.load(t + 3) * a3
        if j == 3:
            value += tl.load(t + 4) * tl.load(a4_ptr + at, mask=live, other=0.0)
        tl.store(out_ptr + j * SIZE + at, value, mask=live)


def products(
    P: Tensor,
    Q: Tensor,
    R: Tensor | None = None,
    S: Tensor | None = None,
    *,
    add: Tensor | None = None,
    signs: tuple[float, float] = (1.0, 1.0),
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    skew: bool = False,
) -> Tensor:
    """add + signs[0] P Q + signs[1] R S of (batch, m, k) and (batch, k, n), any strides, float32 or float64.

    Summed in this dtype, float64 or float32, as `out` is unless it is given. `out` may be `add`. Where it is known
    to be skew, half of it is computed.
    """
    B, M, K = P.shape
    N = Q.shape[2]
    if out is None:
        out = torch.empty(B, M, N, dtype=dtype, device=P.device)
    R_, S_ = (P, Q) if R is None or S is None else (R, S)
    options = PRODUCTS
    if dtype == torch.float32:
        options = SPLIT if skew or max(M, N) <= 128 else SPLIT_LARGE
    grid = (cdiv(M, options["BLOCK_M"]), cdiv(N, options["BLOCK_N"]), B)
    with torch.cuda.device_of(P):
        _products_kernel[grid](
            *(out if add is None else add, P, Q, R_, S_, out, *signs, M, N, K),
            *(*P.stride(), *Q.stride(), *R_.stride(), *S_.stride()),
            ADD=add is not None, TWO=R is not None, SKEW=skew, SPLIT=dtype == torch.float32, **options,
        )  # fmt: skip
    return out


def skew(theta: Tensor, C: int, scale: float, out: Tensor | None = None) -> Tensor:
    """theta (batch, C(C-1)/2) -> scale times its skew matrices (batch, C, C), in float64."""
    A = torch.empty(len(theta), C, C, dtype=torch.float64, device=theta.device) if out is None else out
    with torch.cuda.device_of(theta):
        _skew_kernel[cdiv(C * C, BLOCK), len(theta)](theta.contiguous(), A, C, scale, BLOCK=BLOCK)
    return A


def unskew(dA: Tensor, scale: float) -> Tensor:
    """Gradient of theta from that of `skew`."""
    B, C, _ = dA.shape
    d = torch.empty(B, C * (C - 1) // 2, dtype=dA.dtype, device=dA.device)
    with torch.cuda.device_of(dA):
        _unskew_kernel[cdiv(C * C, BLOCK), B](dA, d, C, scale, BLOCK=BLOCK)
    return d


def cubics(A: Tensor, A2: Tensor, A3: Tensor, A4: Tensor, t: Tensor, out: Tensor | None = None) -> Tensor:
    """(4, batch, C, C): the coefficients t (17,) of a polynomial as cubics in A, for Horner's rule in A^4."""
    out = torch.empty(4, *A.shape, dtype=A.dtype, device=A.device) if out is None else out
    with torch.cuda.device_of(A):
        _cubics_kernel[(cdiv(A.numel(), BLOCK),)](
            A, A2, A3, A4, t, out, A.shape[-1], A.numel(), BLOCK=BLOCK
        )  # fmt: skip
    return out
