"""Small matrices (batch, m, n) in float64: what a matrix exponential and its gradient need, in few launches."""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

PRODUCTS = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 2, "num_stages": 3}
BLOCK = 1024  # of elementwise kernels


@triton.jit
def _product(
    p_ptr, q_ptr, b, m, n, M, N, K, p_batch, p_row, p_column, q_batch, q_row, q_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of p[b] q[b]."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float64)
    p_ptr += b * p_batch + m[:, None] * p_row
    q_ptr += b * q_batch + n[None, :] * q_column
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        p = tl.load(p_ptr + k[None, :] * p_column, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        q = tl.load(q_ptr + k[:, None] * q_row, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(p.to(tl.float64), q.to(tl.float64), total, out_dtype=tl.float64)
    return total


@triton.jit
def _products_kernel(
    z_ptr, p_ptr, q_ptr, r_ptr, s_ptr, out_ptr, alpha, beta, M, N, K,
    p_batch, p_row, p_column, q_batch, q_row, q_column, r_batch, r_row, r_column, s_batch, s_row, s_column,
    ADD: tl.constexpr, TWO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, column blocks, batch): out = z + alpha p q + beta r s; z and out contiguous."""
    b = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = alpha * _product(
        p_ptr, q_ptr, b, m, n, M, N, K, p_batch, p_row, p_column, q_batch, q_row, q_column, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if TWO:
        total += beta * _product(
            *(r_ptr, s_ptr, b, m, n, M, N, K, r_batch, r_row, r_column, s_batch, s_row, s_column),
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    at, inside = b * M * N + m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        total += tl.load(z_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


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


@triton.jit
def _cubics_gradient_kernel(g_ptr, t_ptr, da_ptr, da2_ptr, da3_ptr, da4_ptr, SIZE, BLOCK: tl.constexpr):
    """The adjoint of `_cubics_kernel` for gradients g (4, ..); dA^4 is added to."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < SIZE
    da = tl.zeros([BLOCK], tl.float64)
    da2, da3, da4 = da, da, tl.load(da4_ptr + at, mask=live, other=0.0)
    for j in tl.static_range(4):
        g = tl.load(g_ptr + j * SIZE + at, mask=live, other=0.0)
        t = t_ptr + 4 * j
        da += tl.load(t + 1) * g
        da2 += tl.load(t + 2) * g
        da3 += tl.load(t + 3) * g
        if j == 3:
            da4 += tl.load(t + 4) * g
    tl.store(da_ptr + at, da, mask=live)
    tl.store(da2_ptr + at, da2, mask=live)
    tl.store(da3_ptr + at, da3, mask=live)
    tl.store(da4_ptr + at, da4, mask=live)


def products(
    P: Tensor,
    Q: Tensor,
    R: Tensor | None = None,
    S: Tensor | None = None,
    *,
    add: Tensor | None = None,
    signs: tuple[float, float] = (1.0, 1.0),
    out: Tensor | None = None,
) -> Tensor:
    """add + signs[0] P Q + signs[1] R S of (batch, m, k) and (batch, k, n), any strides, float32 or float64.

    Summed in float64, as `out` is unless it is given. `out` may be `add`.
    """
    B, M, K = P.shape
    N = Q.shape[2]
    if out is None:
        out = torch.empty(B, M, N, dtype=torch.float64, device=P.device)
    R_, S_ = (P, Q) if R is None or S is None else (R, S)
    grid = (triton.cdiv(M, PRODUCTS["BLOCK_M"]), triton.cdiv(N, PRODUCTS["BLOCK_N"]), B)
    with torch.cuda.device_of(P):
        _products_kernel[grid](
            *(out if add is None else add, P, Q, R_, S_, out, *signs, M, N, K),
            *(*P.stride(), *Q.stride(), *R_.stride(), *S_.stride()),
            ADD=add is not None, TWO=R is not None, **PRODUCTS,
        )  # fmt: skip
    return out


def skew(theta: Tensor, C: int, scale: float) -> Tensor:
    """theta (batch, C(C-1)/2) -> scale times its skew matrices (batch, C, C), in float64."""
    A = torch.empty(len(theta), C, C, dtype=torch.float64, device=theta.device)
    with torch.cuda.device_of(theta):
        _skew_kernel[triton.cdiv(C * C, BLOCK), len(theta)](theta.contiguous(), A, C, scale, BLOCK=BLOCK)
    return A


def unskew(dA: Tensor, scale: float) -> Tensor:
    """Gradient of theta from that of `skew`."""
    B, C, _ = dA.shape
    d = torch.empty(B, C * (C - 1) // 2, dtype=torch.float64, device=dA.device)
    with torch.cuda.device_of(dA):
        _unskew_kernel[triton.cdiv(C * C, BLOCK), B](dA, d, C, scale, BLOCK=BLOCK)
    return d


def cubics(A: Tensor, A2: Tensor, A3: Tensor, A4: Tensor, t: Tensor) -> Tensor:
    """(4, batch, C, C): the coefficients t (17,) of a polynomial as cubics in A, for Horner's rule in A^4."""
    out = torch.empty(4, *A.shape, dtype=A.dtype, device=A.device)
    with torch.cuda.device_of(A):
        _cubics_kernel[(triton.cdiv(A.numel(), BLOCK),)](
            A, A2, A3, A4, t, out, A.shape[-1], A.numel(), BLOCK=BLOCK
        )  # fmt: skip
    return out


def cubics_gradient(g: Tensor, t: Tensor, dA4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g (4, batch, C, C) -> the gradients of A, A^2 and A^3; that of A^4 is added to dA4."""
    dA, dA2, dA3 = (torch.empty_like(g[0]) for _ in range(3))
    with torch.cuda.device_of(g):
        _cubics_gradient_kernel[(triton.cdiv(dA.numel(), BLOCK),)](
            g, t, dA, dA2, dA3, dA4, dA.numel(), BLOCK=BLOCK
        )  # fmt: skip
    return dA, dA2, dA3
