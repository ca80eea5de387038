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
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # T; one state is saved per T steps
FORWARD = {"BLOCK_D": 32, "num_warps": 1}
BACKWARD = {"BLOCK_D": 32, "num_warps": 1}
NOTE = 8  # 4, or a multiple of it that divides T
CARRY = {"BLOCK_J": 16, "BLOCK_D": 32, "num_warps": 1}
ROWS = {"BLOCK_M": 32, "BLOCK_L": 64, "num_warps": 4}

LOG2E = 1.4426950408889634


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
    kept = (m < M_out)[:, None] & (t < L_out)[None, :]
    tl.store(out_ptr + (b * L_out + t[None, :]) * M_out + m[:, None], tl.where(inside, x, 0.0), mask=kept)


@triton.jit
def _step(h, at, n_at, u_ptr, dt_ptr, B_ptr, A):
    """h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t."""
    x, dt, bt = tl.load(u_ptr + at), tl.load(dt_ptr + at), tl.load(B_ptr + n_at)
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
    if LAST:
        h = tl.load(states_ptr + chunk * N * D + tile)
        skip = tl.load(D_ptr + d)
        for _ in range(T):
            ct = tl.load(C_ptr + n_at)
            h = _step(h, at, n_at, u_ptr, dt_ptr, B_ptr, A)
            tl.store(y_ptr + at, tl.sum(h * ct[:, None], 0) + skip * tl.load(u_ptr + at))
            at += D
            n_at += N
    else:
        h = tl.zeros([N, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_D], tl.float32)
        for _ in range(T):
            total += tl.load(dt_ptr + at)
            h = _step(h, at, n_at, u_ptr, dt_ptr, B_ptr, A)
            at += D
            n_at += N
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
        for _ in range(NOTE):
            dt = tl.load(dt_ptr + back)
            g, ct = tl.load(dy_ptr + back), tl.load(C_ptr + n_back)
            h = _step(h, at, n_at, u_ptr, dt_ptr, B_ptr, A)
            adjoint = tl.exp2(A * dt[None, :]) * (adjoint + ct[:, None] * g[None, :])
            total += dt
            at += D
            n_at += N
            back -= D
            n_back -= N
    tl.store(adjoint_ptr + chunk * N * D + tile, adjoint)
    tl.store(sums_ptr + chunk * D + d, total)


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
        # From the note before these four steps to the states before each of them.
        s0 = tl.load(notes_at + first // NOTE * N * D)
        for i in range(first % NOTE):
            past = first % NOTE - i
            s0 = _step(s0, at - past * D, n_at - past * N, u_ptr, dt_ptr, B_ptr, A)
        s1 = _step(s0, at, n_at, u_ptr, dt_ptr, B_ptr, A)
        s2 = _step(s1, at + D, n_at + N, u_ptr, dt_ptr, B_ptr, A)
        s3 = _step(s2, at + 2 * D, n_at + 2 * N, u_ptr, dt_ptr, B_ptr, A)
        at += 3 * D
        n_at += 3 * N
        for r in tl.static_range(4):
            before = s0
            if r == 0:
                before = s3
            elif r == 1:
                before = s2
            elif r == 2:
                before = s1
            g, x, dt = tl.load(dy_ptr + at), tl.load(u_ptr + at), tl.load(dt_ptr + at)
            bt, ct = tl.load(B_ptr + n_at), tl.load(C_ptr + n_at)
            decay = tl.exp2(A * dt[None, :])
            decayed = decay * before
            adjoint += ct[:, None] * g[None, :]  # of h_t
            dC = tl.sum((decayed + bt[:, None] * (dt * x)[None, :]) * g[None, :], 1)
            dB = tl.sum(adjoint * (dt * x)[None, :], 1)
            dx = tl.sum(adjoint * bt[:, None], 0)  # of dt_t u_t
            log_decay = adjoint * decayed  # of dt_t A
            dA += log_decay * dt[None, :]
            ddt = tl.sum(log_decay * A, 0) * 0.6931471805599453 + x * dx
            if SOFTPLUS:  # its derivative is 1 - exp(-dt)
                ddt *= tl.where(dt < 0.03, dt * (1.0 - dt * (0.5 - dt * 0.16666667)), 1.0 - tl.exp(-dt))
            adjoint = adjoint * decay  # of h_{t-1}
            dD += g * x
            dbias += ddt
            tl.store(dC_ptr + part + n_at, dC)
            tl.store(dB_ptr + part + n_at, dB)
            tl.store(du_ptr + at, dt * dx + skip * g)
            tl.store(ddelta_ptr + at, ddt)
            at -= D
            n_at -= N
    tl.store(dA_ptr + chunk * N * D + tile, dA)
    tl.store(dD_ptr + chunk * D + d, dD)
    tl.store(dbias_ptr + chunk * D + d, dbias)


class Sizes(NamedTuple):
    """Sizes filled up to whole blocks."""

    batch: int
    chunks: int
    states: int
    channels: int

    @property
    def length(self) -> int:
        return self.chunks * CHUNK


def states_shape(batch: int, channels: int, states: int, length: int, device: torch.device) -> Sizes:
    """Return the shape of the start states of all chunks.

    Args:
        batch: number of samples.
        channels: D.
        states: N.
        length: L.
        device: device of the scan; has no effect.
    """
    block = max(kernel["BLOCK_D"] for kernel in (FORWARD, BACKWARD, CARRY))
    return Sizes(batch, -(-length // CHUNK), triton.next_power_of_2(int(states)), -(-channels // block) * block)


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None, softplus: bool
) -> tuple[Tensor, Tensor]:
    """Run the scan.

    Args:
        u: input, (B, D, L).
        delta: step sizes before bias and softplus, (B, D, L).
        A: negative, (D, N).
        B: (B, N, L).
        C: (B, N, L).
        D: weights of u in the output, (D,), or None.
        bias: added to delta, (D,), or None.
        softplus: apply softplus to the step sizes.

    Returns:
        y, (B, L, D), and the start state of each chunk, (B, J, N, D).
    """
    batch, channels, length = u.shape
    s = states_shape(batch, channels, A.shape[1], length, u.device)
    states = torch.empty(s, device=u.device)
    y = torch.empty(batch, s.length, s.channels, device=u.device, dtype=u.dtype)
    if u.numel():
        rows = _prepare(s, u, delta, A, B, C, D, bias, softplus)
        sums = torch.empty(batch, s.chunks, s.channels, device=u.device)
        grid = (s.chunks, s.channels // FORWARD["BLOCK_D"], batch)
        constants = {"T": CHUNK, "N": s.states, **FORWARD}
        with torch.cuda.device_of(u):
            _forward_kernel[grid](*rows, states, sums, y, s.channels, LAST=False, **constants)
            _carry(s, states, sums, rows[2], reverse=False)
            _forward_kernel[grid](*rows, states, sums, y, s.channels, LAST=True, **constants)
    return y[:, :length, :channels].contiguous(), states


def backward(
    dy: Tensor,
    states: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradients of the scan.

    Args:
        dy: gradient of y, (B, L, D).
        states: start states from `forward`.
        u: input, (B, D, L).
        delta: step sizes before bias and softplus, (B, D, L).
        A: negative, (D, N).
        B: (B, N, L).
        C: (B, N, L).
        D: weights of u in the output, (D,), or None.
        bias: added to delta, (D,), or None.
        softplus: apply softplus to the step sizes.

    Returns:
        The gradients of u and delta, (B, L, D), A, (N, D), B and C, (B, L, N), D and bias, (D,).
    """
    batch, channels, length = u.shape
    n = A.shape[1]
    s = states_shape(batch, channels, n, length, u.device)
    parts = s.channels // BACKWARD["BLOCK_D"]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=u.device, dtype=dtype)

    du, ddelta = (empty(batch, s.length, s.channels, dtype=x.dtype) for x in (u, delta))
    dB, dC = (empty(parts, batch, s.length, s.states) for _ in range(2))
    dA, adjoint = empty(*s), empty(*s)
    dD, dbias, sums = (empty(batch, s.chunks, s.channels) for _ in range(3))
    notes = empty(batch, s.chunks, CHUNK // NOTE, s.states, s.channels)
    if u.numel():
        u, dt, A2, B, C, skip = _prepare(s, u, delta, A, B, C, D, bias, softplus)
        dy = F.pad(dy, (0, s.channels - channels, 0, s.length - length)) if dy.shape != u.shape else dy.contiguous()
        constants = {"T": CHUNK, "NOTE": NOTE, "N": s.states}
        with torch.cuda.device_of(u):
            _adjoint_kernel[s.chunks, s.channels // FORWARD["BLOCK_D"], batch](
                dy, u, dt, A2, B, C, states, adjoint, sums, notes, s.channels, **constants, **FORWARD
            )
            _carry(s, adjoint, sums, A2, reverse=True)
            _backward_kernel[s.chunks, parts, batch](
                *(dy, u, dt, A2, B, C, skip, adjoint, notes, du, ddelta, dA, dB, dC, dD, dbias, s.channels),
                **constants, **BACKWARD, SOFTPLUS=softplus,
            )  # fmt: skip
    du, ddelta = (x[:, :length, :channels].contiguous() for x in (du, ddelta))
    dB, dC = (x.sum(0)[:, :length, :n] for x in (dB, dC))
    dD, dbias = (x.sum((0, 1))[:channels] for x in (dD, dbias))
    return du, ddelta, dA.sum((0, 1))[:n, :channels], dB, dC, dD, dbias


def _prepare(
    s: Sizes, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return u and step sizes (B, L, D), A (N, D), B and C (B, L, N), and D (D,)."""
    channels, n = A.shape
    fill = (0, s.channels - channels)
    A2 = F.pad(A.t().float() * LOG2E, (*fill, 0, s.states - n)).contiguous()
    skip = A2.new_zeros(s.channels) if D is None else F.pad(D.float(), fill)
    dt = _rows(delta, s.length, s.channels, bias, softplus)
    B, C = (_rows(x, s.length, s.states) for x in (B, C))
    return _rows(u, s.length, s.channels), dt, A2, B, C, skip


def _rows(x: Tensor, length: int, width: int, bias: Tensor | None = None, softplus: bool = False) -> Tensor:
    batch = x.shape[0]
    out = torch.empty(batch, length, width, device=x.device)
    grid = (triton.cdiv(length, ROWS["BLOCK_L"]), triton.cdiv(width, ROWS["BLOCK_M"]), batch)
    with torch.cuda.device_of(x):
        _rows_kernel[grid](
            *(x, x if bias is None else bias.contiguous(), out, *x.shape[1:], *x.stride(), width, length),
            BIAS=bias is not None, SOFTPLUS=softplus, **ROWS,
        )  # fmt: skip
    return out


def _carry(s: Sizes, states: Tensor, sums: Tensor, A: Tensor, reverse: bool) -> None:
    grid = (s.channels // CARRY["BLOCK_D"], s.states, s.batch)
    _carry_kernel[grid](states, sums, A, s.channels, s.chunks, N=s.states, REVERSE=reverse, **CARRY)
