"""The selective scan as Triton kernels, forward and backward; float32 inside, deterministic (no atomics).

A program computes one chunk of T time steps for BLOCK_D channels of one sample, so the grid is (chunks, channel blocks,
batch). Its state is an (N, BLOCK_D) tile. The forward pass runs four kernels:

    _rows_kernel      puts channels last in u, delta, B and C, and computes step sizes from delta, bias and softplus
    _forward_kernel   runs every chunk from a zero state, for its end state and its sum of step sizes
    _carry_kernel     computes the true start states, chunk after chunk, with decays exp(A * sum of step sizes)
    _forward_kernel   runs every chunk from its true start state, for y

The backward pass mirrors it. _adjoint_kernel goes through every chunk from both ends at once: from the right with the
adjoint, and from the left with the state, of which it writes one in NOTE to memory. After _carry_kernel from the right,
_backward_kernel goes back through the chunk and keeps four states in registers.

Inside, u, the step sizes and y are (B, L, D), B and C are (B, L, N), and states are (B, J, N, D). L, D and N are padded
to whole blocks, so that no load or store needs a mask: where u, B, C and dy are zero, no gradient flows back. A is
multiplied by log2(e), for exp2.

Loops take four steps at a time, first all their loads, then the arithmetic, then all stores: a load may not overtake a
store, so a step by itself would wait for memory every time.
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

import triton
import triton.language as tl


@triton.jit
def _rows_kernel(
    x_ptr, bias_ptr, out_ptr, M, L, stride_b, stride_m, stride_l, M_out, L_out,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """(B, M, L) of any strides -> contiguous (B, L, M), filled up with zeros; softplus(x + bias) where asked."""
    t = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = tl.program_id(2).to(tl.int64)
    inside = (m < M)[:, None] & (t < L)[None, :]
    x = tl.load(x_ptr + b * stride_b + m[:, None] * stride_m + t[None, :] * stride_l, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    if SOFTPLUS:  # log1p(e^x), and x beyond 20, as torch has it
        e = tl.exp(tl.minimum(x, 20.0))
        w = 1.0 + e
        log1p = tl.where(w == 1.0, e, tl.log(w) * (e / tl.where(w == 1.0, 1.0, w - 1.0)))
        x = tl.where(x > 20.0, x, log1p)
    is_output = (m < M_out)[:, None] & (t < L_out)[None, :]
    tl.store(out_ptr + (b * L_out + t[None, :]) * M_out + m[:, None], tl.where(inside, x, 0.0), mask=is_output)


@triton.jit
def _inputs(at, n_at, u_ptr, dt_ptr, B_ptr):
    """Return u, dt and B of one step; backward kernels also load dy, dt and C with it."""
    return tl.load(u_ptr + at), tl.load(dt_ptr + at), tl.load(B_ptr + n_at)


@triton.jit
def _step(h, x, dt, bt, A):
    """h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t."""
    return tl.exp2(A * dt[None, :]) * h + bt[:, None] * (dt * x)[None, :]


@triton.jit
def _forward_kernel(
    u_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, states_ptr, sums_ptr, y_ptr, D,
    T: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, N)
    tile = n[:, None] * D + d[None, :]
    A = tl.load(A_ptr + tile)
    at, n_at = chunk * T * D + d, chunk * T * N + n
    h = tl.zeros([N, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    if LAST:
        h = tl.load(states_ptr + chunk * N * D + tile)
        skip = tl.load(D_ptr + d)
    for _ in range(T // 4):
        x0, dt0, b0 = _inputs(at, n_at, u_ptr, dt_ptr, B_ptr)
        x1, dt1, b1 = _inputs(at + D, n_at + N, u_ptr, dt_ptr, B_ptr)
        x2, dt2, b2 = _inputs(at + 2 * D, n_at + 2 * N, u_ptr, dt_ptr, B_ptr)
        x3, dt3, b3 = _inputs(at + 3 * D, n_at + 3 * N, u_ptr, dt_ptr, B_ptr)
        if LAST:
            c0, c1 = tl.load(C_ptr + n_at), tl.load(C_ptr + n_at + N)
            c2, c3 = tl.load(C_ptr + n_at + 2 * N), tl.load(C_ptr + n_at + 3 * N)
            h = _step(h, x0, dt0, b0, A)
            y0 = tl.sum(h * c0[:, None], 0) + skip * x0
            h = _step(h, x1, dt1, b1, A)
            y1 = tl.sum(h * c1[:, None], 0) + skip * x1
            h = _step(h, x2, dt2, b2, A)
            y2 = tl.sum(h * c2[:, None], 0) + skip * x2
            h = _step(h, x3, dt3, b3, A)
            y3 = tl.sum(h * c3[:, None], 0) + skip * x3
            tl.store(y_ptr + at, y0)
            tl.store(y_ptr + at + D, y1)
            tl.store(y_ptr + at + 2 * D, y2)
            tl.store(y_ptr + at + 3 * D, y3)
        else:
            total += (dt0 + dt1) + (dt2 + dt3)
            h = _step(h, x0, dt0, b0, A)
            h = _step(h, x1, dt1, b1, A)
            h = _step(h, x2, dt2, b2, A)
            h = _step(h, x3, dt3, b3, A)
        at += 4 * D
        n_at += 4 * N
    if not LAST:
        tl.store(states_ptr + chunk * N * D + tile, h)
        tl.store(sums_ptr + chunk * D + d, total)


@triton.jit
def _carry_kernel(
    states_ptr, sums_ptr, A_ptr, D, J,
    N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """In place: what each chunk sends on when it starts from zero -> what enters it."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK_J)
    A = tl.load(A_ptr + n * D + d)
    h = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, J, BLOCK_J):
        k = first + row
        j = k
        if REVERSE:
            j = J - 1 - k
        live = (k < J)[:, None] & (d < D)[None, :]
        at = states_ptr + ((b * J + j[:, None]) * N + n) * D + d[None, :]
        sent = tl.load(at, mask=live, other=0.0)
        decay = tl.exp2(A[None, :] * tl.load(sums_ptr + (b * J + j[:, None]) * D + d[None, :], mask=live, other=0.0))
        # One load for BLOCK_J chunks hides the memory; a row is then picked out by a masked sum.
        enters = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
        for i in tl.static_range(BLOCK_J):
            pick = (row == i)[:, None]
            enters = tl.where(pick, h[None, :], enters)
            h = tl.sum(tl.where(pick, decay, 0.0), 0) * h + tl.sum(tl.where(pick, sent, 0.0), 0)
        tl.store(at, enters, mask=live)


@triton.jit
def _adjoint_kernel(
    dy_ptr, u_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, states_ptr, adjoint_ptr, sums_ptr, notes_ptr, D,
    T: tl.constexpr, NOTE: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every chunk: from the right and from zero, the adjoint of its start; from the left, the notes."""
    chunk = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, N)
    tile = n[:, None] * D + d[None, :]
    A = tl.load(A_ptr + tile)
    h = tl.load(states_ptr + chunk * N * D + tile)
    adjoint = tl.zeros([N, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    at, n_at = chunk * T * D + d, chunk * T * N + n
    back, n_back = at + (T - 1) * D, n_at + (T - 1) * N
    notes_at = notes_ptr + chunk * (T // NOTE) * N * D + tile
    for _ in range(T // NOTE):
        tl.store(notes_at, h)
        notes_at += N * D
        for _ in range(NOTE // 4):
            x0, dt0, b0 = _inputs(at, n_at, u_ptr, dt_ptr, B_ptr)
            x1, dt1, b1 = _inputs(at + D, n_at + N, u_ptr, dt_ptr, B_ptr)
            x2, dt2, b2 = _inputs(at + 2 * D, n_at + 2 * N, u_ptr, dt_ptr, B_ptr)
            x3, dt3, b3 = _inputs(at + 3 * D, n_at + 3 * N, u_ptr, dt_ptr, B_ptr)
            g0, s0, c0 = _inputs(back, n_back, dy_ptr, dt_ptr, C_ptr)
            g1, s1, c1 = _inputs(back - D, n_back - N, dy_ptr, dt_ptr, C_ptr)
            g2, s2, c2 = _inputs(back - 2 * D, n_back - 2 * N, dy_ptr, dt_ptr, C_ptr)
            g3, s3, c3 = _inputs(back - 3 * D, n_back - 3 * N, dy_ptr, dt_ptr, C_ptr)
            h = _step(h, x0, dt0, b0, A)
            adjoint = tl.exp2(A * s0[None, :]) * (adjoint + c0[:, None] * g0[None, :])
            h = _step(h, x1, dt1, b1, A)
            adjoint = tl.exp2(A * s1[None, :]) * (adjoint + c1[:, None] * g1[None, :])
            h = _step(h, x2, dt2, b2, A)
            adjoint = tl.exp2(A * s2[None, :]) * (adjoint + c2[:, None] * g2[None, :])
            h = _step(h, x3, dt3, b3, A)
            adjoint = tl.exp2(A * s3[None, :]) * (adjoint + c3[:, None] * g3[None, :])
            total += (dt0 + dt1) + (dt2 + dt3)
            at += 4 * D
            n_at += 4 * N
            back -= 4 * D
            n_back -= 4 * N
    tl.store(adjoint_ptr + chunk * N * D + tile, adjoint)
    tl.store(sums_ptr + chunk * D + d, total)


@triton.jit
def _back(adjoint, dA, before, g, x, dt, bt, ct, A, SOFTPLUS: tl.constexpr):
    """One step back: adjoint of h_t without the step's own output -> that of h_{t-1}, and the step's gradients."""
    decay = tl.exp2(A * dt[None, :])
    decayed = decay * before
    adjoint += ct[:, None] * g[None, :]  # of h_t
    dC = tl.sum((decayed + bt[:, None] * (dt * x)[None, :]) * g[None, :], 1)
    dB = tl.sum(adjoint * (dt * x)[None, :], 1)
    dx = tl.sum(adjoint * bt[:, None], 0)  # of dt_t u_t
    log_decay = adjoint * decayed  # of dt_t A
    ddt = tl.sum(log_decay * A, 0) * 0.6931471805599453 + x * dx
    if SOFTPLUS:  # its derivative is 1 - exp(-dt)
        ddt *= tl.where(dt < 0.03, dt * (1.0 - dt * (0.5 - dt * 0.16666667)), 1.0 - tl.exp(-dt))
    return adjoint * decay, dA + log_decay * dt[None, :], dx, ddt, dB, dC


@triton.jit
def _backward_kernel(
    dy_ptr, u_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, adjoint_ptr, notes_ptr,
    du_ptr, ddelta_ptr, dA_ptr, dB_ptr, dC_ptr, dD_ptr, dbias_ptr, D,
    T: tl.constexpr, NOTE: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    chunks = tl.num_programs(2).to(tl.int64) * tl.num_programs(0)
    chunk = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, N)
    tile = n[:, None] * D + d[None, :]
    A = tl.load(A_ptr + tile)
    skip = tl.load(D_ptr + d)
    notes_at = notes_ptr + chunk * (T // NOTE) * N * D + tile
    # dB and dC are sums over all channels: each block of channels writes its own part.
    part = tl.program_id(1) * chunks * T * N

    adjoint = tl.load(adjoint_ptr + chunk * N * D + tile)  # of the state after the chunk
    dA = tl.zeros([N, BLOCK_D], tl.float32)
    dD = tl.zeros([BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_D], tl.float32)
    for k in range(T // 4):
        first = T - 4 - 4 * k
        at, n_at = (chunk * T + first) * D + d, (chunk * T + first) * N + n
        x0, dt0, b0 = _inputs(at, n_at, u_ptr, dt_ptr, B_ptr)
        x1, dt1, b1 = _inputs(at + D, n_at + N, u_ptr, dt_ptr, B_ptr)
        x2, dt2, b2 = _inputs(at + 2 * D, n_at + 2 * N, u_ptr, dt_ptr, B_ptr)
        x3, dt3, b3 = _inputs(at + 3 * D, n_at + 3 * N, u_ptr, dt_ptr, B_ptr)
        g0, g1 = tl.load(dy_ptr + at), tl.load(dy_ptr + at + D)
        g2, g3 = tl.load(dy_ptr + at + 2 * D), tl.load(dy_ptr + at + 3 * D)
        c0, c1 = tl.load(C_ptr + n_at), tl.load(C_ptr + n_at + N)
        c2, c3 = tl.load(C_ptr + n_at + 2 * N), tl.load(C_ptr + n_at + 3 * N)
        s0 = tl.load(notes_at + first // NOTE * N * D)
        if NOTE > 4:
            for i in range(first % NOTE // 4):
                past, n_past = at - (first % NOTE - 4 * i) * D, n_at - (first % NOTE - 4 * i) * N
                px0, pt0, pb0 = _inputs(past, n_past, u_ptr, dt_ptr, B_ptr)
                px1, pt1, pb1 = _inputs(past + D, n_past + N, u_ptr, dt_ptr, B_ptr)
                px2, pt2, pb2 = _inputs(past + 2 * D, n_past + 2 * N, u_ptr, dt_ptr, B_ptr)
                px3, pt3, pb3 = _inputs(past + 3 * D, n_past + 3 * N, u_ptr, dt_ptr, B_ptr)
                s0 = _step(s0, px0, pt0, pb0, A)
                s0 = _step(s0, px1, pt1, pb1, A)
                s0 = _step(s0, px2, pt2, pb2, A)
                s0 = _step(s0, px3, pt3, pb3, A)
        s1 = _step(s0, x0, dt0, b0, A)
        s2 = _step(s1, x1, dt1, b1, A)
        s3 = _step(s2, x2, dt2, b2, A)
        adjoint, dA, dx3, ddt3, dB3, dC3 = _back(adjoint, dA, s3, g3, x3, dt3, b3, c3, A, SOFTPLUS)
        adjoint, dA, dx2, ddt2, dB2, dC2 = _back(adjoint, dA, s2, g2, x2, dt2, b2, c2, A, SOFTPLUS)
        adjoint, dA, dx1, ddt1, dB1, dC1 = _back(adjoint, dA, s1, g1, x1, dt1, b1, c1, A, SOFTPLUS)
        adjoint, dA, dx0, ddt0, dB0, dC0 = _back(adjoint, dA, s0, g0, x0, dt0, b0, c0, A, SOFTPLUS)
        dD += (g0 * x0 + g1 * x1) + (g2 * x2 + g3 * x3)
        dbias += (ddt0 + ddt1) + (ddt2 + ddt3)
        for_b, for_c = dB_ptr + part + n_at, dC_ptr + part + n_at
        tl.store(for_b, dB0)
        tl.store(for_b + N, dB1)
        tl.store(for_b + 2 * N, dB2)
        tl.store(for_b + 3 * N, dB3)
        tl.store(for_c, dC0)
        tl.store(for_c + N, dC1)
        tl.store(for_c + 2 * N, dC2)
        tl.store(for_c + 3 * N, dC3)
        tl.store(du_ptr + at, dt0 * dx0 + skip * g0)
        tl.store(du_ptr + at + D, dt1 * dx1 + skip * g1)
        tl.store(du_ptr + at + 2 * D, dt2 * dx2 + skip * g2)
        tl.store(du_ptr + at + 3 * D, dt3 * dx3 + skip * g3)
        tl.store(ddelta_ptr + at, ddt0)
        tl.store(ddelta_ptr + at + D, ddt1)
        tl.store(ddelta_ptr + at + 2 * D, ddt2)
        tl.store(ddelta_ptr + at + 3 * D, ddt3)
    tl.store(dA_ptr + chunk * N * D + tile, dA)
    tl.store(dD_ptr + chunk * D + d, dD)
    tl.store(dbias_ptr + chunk * D + d, dbias)
