"""Products of small matrices (batch, m, n), in few launches: those of a matrix exponential and its gradient.

They run in float64. Where float32 accuracy is enough, a number x is stored as a pair (2, ...) of float16,
x = upper + lower / 2^11, because matrix units multiply float16 fast. A pair has 22 bits and reaches from 2^-36 to 2^16.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels.launch import cdiv, is_blackwell, is_large_card, launch
from chasm.ops.library import is_fake

MANY_CHANNELS = 1024  # from here on larger blocks are faster
BLOCK = 1024  # numbers of a block of an elementwise kernel
TILE = 32  # rows and columns of a block of a kernel that transposes


@triton.jit
def _add_block(total, p_ptr, q_ptr, m, n, k, M, N, K, p_row, p_column, q_row, q_column):
    """Return total + p[m, k] q[k, n]."""
    p = tl.load(p_ptr + m[:, None] * p_row + k[None, :] * p_column, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    q = tl.load(q_ptr + k[:, None] * q_row + n[None, :] * q_column, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    return tl.dot(p.to(tl.float64), q.to(tl.float64), total, out_dtype=tl.float64)


@triton.jit
def _product_kernel(
    p_ptr, q_ptr, out_ptr, largest_ptr, M, N, K, p_batch, p_row, p_column, q_batch, q_row, q_column,
    SKEW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, column blocks, batch): out = p q, contiguous.

    With SKEW, out is the skew part of p q, for square matrices: only blocks at or above the diagonal compute, and they
    write the mirrored numbers, too. The largest number of every block goes to (batch, row blocks, column blocks).
    """
    b = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_ptr += b * p_batch
    q_ptr += b * q_batch
    inside, steps = (m < M)[:, None] & (n < N)[None, :], tl.cdiv(K, BLOCK_K)
    if SKEW:
        inside = inside & (m[:, None] <= n[None, :])
        steps = tl.where((tl.program_id(1) + 1) * BLOCK_N > tl.program_id(0) * BLOCK_M, steps, 0)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float64)
    transposed = total
    for step in range(steps):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        total = _add_block(total, p_ptr, q_ptr, m, n, k, M, N, K, p_row, p_column, q_row, q_column)
        if SKEW:
            transposed = _add_block(
                transposed, q_ptr, p_ptr, m, n, k, N, M, K, q_column, q_row, p_column, p_row
            )  # fmt: skip
    if SKEW:
        total = 0.5 * total - 0.5 * transposed
    at = b * M * N + m[:, None] * N + n[None, :]
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=inside)
    if SKEW:
        tl.store(out_ptr + b * M * N + n[None, :] * N + m[:, None], -total, mask=inside & (m[:, None] < n[None, :]))
        bits = tl.abs(total.to(tl.float32)).to(tl.int32, bitcast=True)  # ordered as the numbers are, NaN above all
        place = (b * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
        tl.store(largest_ptr + place, tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True))


@triton.jit
def _pair(x):
    upper = x.to(tl.float16)
    return upper, ((x - upper.to(x.dtype)) * 2048).to(tl.float16)


@triton.jit
def _load_pair(ptr, part, row, column, i, j, rows, columns, scale, NUMBERS: tl.constexpr):
    """Return [i, j] of a pair. With NUMBERS, the tensor is float32: it is scaled and split into a pair."""
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = i[:, None] * row + j[None, :] * column
    upper = tl.load(ptr + at, mask=inside, other=0.0)
    if NUMBERS:
        upper, lower = _pair(upper * scale)
    else:
        lower = tl.load(ptr + part + at, mask=inside, other=0.0)
    return upper, lower


@triton.jit
def _add_pairs(total, p, p_lower, q, q_lower):
    """Return total + p q. Matrix units truncate their sums, so each block is summed alone and added in float32."""
    small = tl.dot(p_lower, q, tl.dot(p, q_lower))
    return total + tl.dot(p, q, small * (1 / 2048))


@triton.jit
def _exponent(largest_ptr, BLOCKS):
    """Return the power of 2 of the largest of BLOCKS positive numbers, as the bits of a normal float32."""
    bits = tl.zeros([1024], tl.int32)
    for start in range(0, BLOCKS, 1024):
        at = start + tl.arange(0, 1024)
        bits = tl.maximum(bits, tl.load(largest_ptr + at, mask=at < BLOCKS, other=0.0).to(tl.int32, bitcast=True))
    return tl.minimum(tl.maximum(tl.max(bits, 0) & 0x7F800000, 1 << 23), 253 << 23)


@triton.jit
def _pairs_kernel(
    p_ptr, q_ptr, out_ptr, largest_ptr, factor, C, K, TERMS, BLOCKS,
    p_part, p_batch, p_row, p_column, q_part, q_term, q_batch, q_row, q_column,
    BOTH: tl.constexpr, NUMBERS: tl.constexpr, TRIANGLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks of all terms, column blocks, batch): out (2, batch, terms, C, C) = factor p q, last term first.

    With BOTH it is p q + q p. With NUMBERS, q is float32 instead of a pair, and is divided by the power of 2 of its
    largest number. With TRIANGLE, out is the part below the diagonal, times that power, in float32.
    """
    b = tl.program_id(2).to(tl.int64)
    rows = tl.cdiv(C, BLOCK_M)
    term, block = tl.program_id(0) // rows, tl.program_id(0) % rows
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_ptr += b * p_batch
    q_ptr += b * q_batch + term * q_term
    scale, steps = 1.0, tl.cdiv(K, BLOCK_K)
    if NUMBERS:
        scale = ((254 << 23) - _exponent(largest_ptr + b * BLOCKS, BLOCKS)).to(tl.float32, bitcast=True)
    if TRIANGLE:
        steps = tl.where((block + 1) * BLOCK_M - 1 > tl.program_id(1) * BLOCK_N, steps, 0)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        p, p_lower = _load_pair(p_ptr, p_part, p_row, p_column, m, k, C, K, scale, False)
        q, q_lower = _load_pair(q_ptr, q_part, q_row, q_column, k, n, K, C, scale, NUMBERS)
        total = _add_pairs(total, p, p_lower, q, q_lower)
        if BOTH:
            q, q_lower = _load_pair(q_ptr, q_part, q_row, q_column, m, k, C, K, scale, False)
            p, p_lower = _load_pair(p_ptr, p_part, p_row, p_column, k, n, K, C, scale, False)
            total = _add_pairs(total, q, q_lower, p, p_lower)
    total *= factor
    if TRIANGLE:
        total *= _exponent(largest_ptr + b * BLOCKS, BLOCKS).to(tl.float32, bitcast=True)
        at = b * (C * (C - 1) // 2) + _triangle(m[:, None], n[None, :])
        tl.store(out_ptr + at, total, mask=(m < C)[:, None] & (m[:, None] > n[None, :]))
    else:
        at = (b * TERMS + TERMS - 1 - term) * C * C + m[:, None] * C + n[None, :]
        inside = (m < C)[:, None] & (n < C)[None, :]
        upper, lower = _pair(total)
        tl.store(out_ptr + at, upper, mask=inside)
        tl.store(out_ptr + tl.num_programs(2).to(tl.int64) * TERMS * C * C + at, lower, mask=inside)


@triton.jit
def _halves_kernel(
    matrices_ptr, u_ptr, t_ptr, single_ptr, powers_ptr, nodes_ptr, C,
    SQUARINGS: tl.constexpr, NODES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks of each power and of the nodes, column blocks, batch): the results of `halves`."""
    b = tl.program_id(2).to(tl.int64)
    rows = tl.cdiv(C, TILE)
    j, block = tl.program_id(0) // rows, tl.program_id(0) % rows
    m = block * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (m < C)[:, None] & (n < C)[None, :]
    SIZE = tl.num_programs(2).to(tl.int64) * C * C
    here = m[:, None] * C + n[None, :]
    at = b * C * C + here
    if j < SQUARINGS:
        if j < SQUARINGS - 1:
            w = tl.load(matrices_ptr + (2 + j) * SIZE + at, mask=inside, other=0.0)
        else:
            w = tl.load(u_ptr + at, mask=inside, other=0.0)
            tl.store(single_ptr + at, w.to(tl.float32), mask=inside)
        upper, lower = _pair(w)
        tl.store(powers_ptr + j * SIZE + at, upper, mask=inside)
        tl.store(powers_ptr + (SQUARINGS + j) * SIZE + at, lower, mask=inside)
    else:
        a = tl.load(matrices_ptr + at, mask=inside, other=0.0)
        a2 = tl.load(matrices_ptr + (SQUARINGS + 1) * SIZE + at, mask=inside, other=0.0)
        a3 = tl.load(matrices_ptr + (SQUARINGS + 2) * SIZE + at, mask=inside, other=0.0)
        a4 = tl.load(matrices_ptr + (SQUARINGS + 3) * SIZE + at, mask=inside, other=0.0)
        v = tl.load(matrices_ptr + SIZE + at, mask=inside, other=0.0)
        v2 = tl.load(matrices_ptr + 2 * SIZE + at, mask=inside, other=0.0)
        there = matrices_ptr + SIZE + b * C * C + n[:, None] * C + m[None, :]
        opposite = (n < C)[:, None] & (m < C)[None, :]
        v_t = tl.trans(tl.load(there, mask=opposite, other=0.0))
        v2_t = tl.trans(tl.load(there + SIZE, mask=opposite, other=0.0))
        eye = tl.where(m[:, None] == n[None, :], 1.0, 0.0)
        at = b * C * C * NODES + m[:, None] * NODES * C + n[None, :]
        for r in tl.static_range(NODES):
            t = t_ptr + 9 * r
            x = tl.load(t) * eye + tl.load(t + 1) * a + tl.load(t + 2) * a2
            x += tl.load(t + 3) * a3 + tl.load(t + 4) * a4 + tl.load(t + 5) * v + tl.load(t + 6) * v_t
            x += tl.load(t + 7) * v2 + tl.load(t + 8) * v2_t
            upper, lower = _pair(x)
            tl.store(nodes_ptr + r * C + at, upper, mask=inside)
            tl.store(nodes_ptr + NODES * SIZE + r * C + at, lower, mask=inside)


@triton.jit
def _triangle(i, j):
    """Return the place of (i, j), i > j, in a strict lower triangle that is stored row by row."""
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


def product(P: Tensor, Q: Tensor) -> Tensor:
    """Return P Q in the dtype of P, summed in float64.

    Args:
        P: (batch, m, k), float32 or float64, any strides.
        Q: (batch, k, n), float32 or float64, any strides.
    """
    out = torch.empty(len(P), P.shape[1], Q.shape[2], dtype=P.dtype, device=P.device)
    _launch_product(P, Q, out, skew=False)
    return out


def skew_part(U: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return (U^T g - g^T U) / 2 in float32, summed in float64, and the largest of its numbers in each block.

    Args:
        U: (batch, C, C).
        g: (batch, C, C).
    """
    K = torch.empty(U.shape, dtype=torch.float32, device=U.device)
    return K, _launch_product(U.mT, g, K, skew=True)


def _launch_product(P: Tensor, Q: Tensor, out: Tensor, skew: bool) -> Tensor:
    """Write P Q, or its skew part, to out. Return the largest number of each block of a skew part."""
    (B, M, K), N = P.shape, Q.shape[2]
    rows, columns, summed, stages = (16, 32, 32, 3) if M < MANY_CHANNELS else (32, 32, 16, 4)
    grid = cdiv(M, rows), cdiv(N, columns), B
    largest = torch.empty(B, grid[0] * grid[1], dtype=torch.float32, device=P.device) if skew else out
    if not is_fake(P):
        launch(
            _product_kernel, grid, P, Q, out, largest, M, N, K, *P.stride(), *Q.stride(),
            SKEW=skew, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=summed, num_warps=2, num_stages=stages,
        )  # fmt: skip
    return largest


def product_of_pairs(
    P: Tensor,
    Q: Tensor,
    largest: Tensor | None = None,
    *,
    factor: float = 1.0,
    both: bool = False,
    triangle: bool = False,
) -> Tensor:
    """Return factor * P Q as a pair (2, batch, C, C).

    Args:
        P: a pair (2, batch, C, k), any strides.
        Q: a pair (2, batch, k, C), any strides. With several terms (2, terms, batch, k, C), their products are the rows
            of (2, batch, terms C, C), the last term first. Or float32 numbers (batch, k, C), which are divided by a
            power of 2 before they are split.
        largest: with float32 Q, the largest numbers of its blocks, as `skew_part` returns them. They give the power.
        factor: of the product.
        both: return factor * (P Q + Q P).
        triangle: multiply by the power of 2 again, and return only the part below the diagonal, in float32:
            (batch, C (C - 1) / 2).
    """
    _, B, C, K = P.shape
    numbers, terms = Q.ndim == 3, Q.shape[1] if Q.ndim == 5 else 1
    strides = {3: (0, 0), 4: (*Q.stride()[:1], 0), 5: ()}[Q.ndim] + Q.stride()[Q.ndim == 4 :]
    shape, dtype = ((B, C * (C - 1) // 2), torch.float32) if triangle else ((2, B, terms * C, C), torch.float16)
    out = torch.empty(shape, dtype=dtype, device=P.device)
    if is_fake(P):
        return out
    # With `both`, twice as many blocks are loaded and summed at a time: too many for the memory of a Blackwell block.
    fits = is_large_card(P) and not (both and is_blackwell(P.device))
    if C >= MANY_CHANNELS and fits:
        block, summed, warps = 128, 32, 8
    elif C > 128 or triangle:  # a triangle has several times as many terms to sum
        block, summed, warps = 64, 64 if fits else 32, 4
    else:
        block, summed, warps = 32, 32, 2
    launch(
        _pairs_kernel, (terms * cdiv(C, block), cdiv(C, block), B),
        *(P, Q, out, out if largest is None else largest, factor, C, K, terms),
        *(0 if largest is None else largest.shape[1], *P.stride(), *strides),
        BOTH=both, NUMBERS=numbers, TRIANGLE=triangle,
        BLOCK_M=block, BLOCK_N=block, BLOCK_K=summed, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def halves(matrices: Tensor, U: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, in low precision, the matrices of a matrix exponential that its gradient needs.

    Args:
        matrices: (A; V, V^2, V^4, ...; A^2, A^3, A^4), each (batch, C, C).
        U: the last square (batch, C, C).
        t: coefficients (nodes, 9).

    Returns:
        U in float32; V^2, V^4, ..., U as pairs (2, squarings, batch, C, C); and for each node the sum of I, A, A^2,
        A^3, A^4, V, V^T, V^2 and V^2T with coefficients t, as pairs (2, batch, C, nodes, C).
    """
    (B, C, _), squarings = U.shape, len(matrices) - 4
    single = torch.empty(U.shape, dtype=torch.float32, device=U.device)
    powers = torch.empty(2, squarings, *U.shape, dtype=torch.float16, device=U.device)
    nodes = torch.empty(2, B, C, len(t), C, dtype=torch.float16, device=U.device)
    if not is_fake(U):
        launch(
            _halves_kernel, ((squarings + 1) * cdiv(C, TILE), cdiv(C, TILE), B), matrices, U, t, single, powers, nodes,
            C, SQUARINGS=squarings, NODES=len(t), TILE=TILE, num_warps=8,
        )  # fmt: skip
    return single, powers, nodes


def skew(theta: Tensor, scale: float, out: Tensor) -> None:
    """Write scale times the skew matrices of theta, in float64.

    Args:
        theta: the numbers below the diagonal, (batch, C (C - 1) / 2).
        scale: a factor.
        out: (batch, C, C).
    """
    C = out.shape[-1]
    if not is_fake(theta):
        launch(_skew_kernel, (cdiv(C * C, BLOCK), len(theta)), theta.contiguous(), out, C, scale, BLOCK=BLOCK)


def cubics(A: Tensor, A2: Tensor, A3: Tensor, A4: Tensor, t: Tensor, out: Tensor) -> None:
    """Write a polynomial of degree 16 in A as four cubics, the last with a term of degree 4.

    Args:
        A: (batch, C, C).
        A2: A^2.
        A3: A^3.
        A4: A^4.
        t: the 17 coefficients.
        out: (4, batch, C, C).
    """
    if not is_fake(A):
        launch(_cubics_kernel, (cdiv(A.numel(), BLOCK),), A, A2, A3, A4, t, out, A.shape[-1], A.numel(), BLOCK=BLOCK)
