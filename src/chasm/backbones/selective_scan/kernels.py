"""The selective scan as Triton kernels, forward and backward; float32 inside, deterministic (no atomics).

A program owns one chunk of CHUNK time steps of BLOCK_D channels of one sample: grid (chunks, channel blocks,
batch). Its state is an (N, BLOCK_D) tile with the channels along the lanes, so that with one warp and 32
channels a thread holds all N states of its channel and the sum over N needs no exchange. Three launches:

    _forward_kernel   every chunk from a zero state: its end state and its sum of deltas
    _carry_kernel     chunk after chunk: the true start states, with decays exp(A * sum of deltas)
    _forward_kernel   again, from the true start states: y

The backward pass is the mirror image: _adjoint_kernel, _carry_kernel from the right, _backward_kernel. The last
computes the states again: it notes one in NOTE in memory, then walks back with four of them in registers.

Channels are last in memory here: u, delta, y are (B, L, D), B and C are (B, L, N), states (B, J, N, D).
A comes multiplied by log2(e), for exp2.
"""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # T; a saved state per T steps
FORWARD = {"BLOCK_D": 32, "num_warps": 1}
BACKWARD = {"BLOCK_D": 32, "NOTE": 8, "num_warps": 1}  # NOTE: 4 or a multiple of it that divides T
CARRY = {"BLOCK_J": 16, "BLOCK_D": 32, "num_warps": 1}

LOG2E = 1.4426950408889634


@triton.jit
def _live(index, size, t, L):
    """index < size, and nowhere for a step behind the end of the sequence.

    What is not loaded is 0, and with u = B = C = dy = 0 nothing comes back from behind the end.
    """
    return index < tl.where(t < L, size, 0)


@triton.jit
def _load(at, live):
    return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _delta(raw, SOFTPLUS: tl.constexpr):
    """The step size from delta + bias."""
    if SOFTPLUS:
        e = tl.exp(tl.minimum(raw, 20.0))
        w = 1.0 + e
        log1p = tl.where(w == 1.0, e, tl.log(w) * (e / tl.where(w == 1.0, 1.0, w - 1.0)))
        raw = tl.where(raw > 20.0, raw, log1p)
    return raw


@triton.jit
def _step(h, t, u_at, delta_at, B_at, A, bias, L, D, N, d, n, SOFTPLUS: tl.constexpr):
    """h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t."""
    in_d, in_n = _live(d, D, t, L), _live(n, N, t, L)
    x = _load(u_at + t * D, in_d)
    raw = _load(delta_at + t * D, in_d)
    bt = _load(B_at + t * N, in_n)
    dt = _delta(raw + bias, SOFTPLUS)
    return tl.exp2(A * dt[None, :]) * h + bt[:, None] * (dt * x)[None, :]


@triton.jit
def _forward_kernel(
    u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, states_ptr, sums_ptr, y_ptr,
    L, D, N, J,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = (n < N)[:, None] & (d < D)[None, :]
    A = _load(A_ptr + n[:, None] * D + d[None, :], inside)
    bias, skip = _load(bias_ptr + d, d < D), _load(D_ptr + d, d < D)
    state_at = states_ptr + ((b * J + j) * N + n[:, None]) * D + d[None, :]
    rows = b * L * D + d
    u_at, delta_at, y_at = u_ptr + rows, delta_ptr + rows, y_ptr + rows
    B_at, C_at = B_ptr + b * L * N + n, C_ptr + b * L * N + n
    total = tl.zeros([BLOCK_D], tl.float32)
    h = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if LAST:
        h = _load(state_at, inside)
    for i in range(T):
        t = j * T + i
        in_d, in_n = _live(d, D, t, L), _live(n, N, t, L)
        x = _load(u_at + t * D, in_d)
        raw = _load(delta_at + t * D, in_d)
        bt = _load(B_at + t * N, in_n)
        if LAST:
            ct = _load(C_at + t * N, in_n)
        dt = _delta(raw + bias, SOFTPLUS)
        h = tl.exp2(A * dt[None, :]) * h + bt[:, None] * (dt * x)[None, :]
        if LAST:
            tl.store(y_at + t * D, tl.sum(h * ct[:, None], 0) + skip * x, mask=in_d)
        else:
            total += dt
    if not LAST:
        tl.store(state_at, h, mask=inside)
        tl.store(sums_ptr + (b * J + j) * D + d, total, mask=d < D)


@triton.jit
def _carry_kernel(
    states_ptr, sums_ptr, A_ptr, D, N, J, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """In place: what each chunk sends on when it starts from zero -> what enters it."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK_J)
    A = _load(A_ptr + n * D + d, d < D)
    h = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, J, BLOCK_J):
        k = first + row
        j = k
        if REVERSE:
            j = J - 1 - k
        live = (k < J)[:, None] & (d < D)[None, :]
        at = states_ptr + ((b * J + j[:, None]) * N + n) * D + d[None, :]
        sent = _load(at, live)
        decay = tl.exp2(A[None, :] * _load(sums_ptr + (b * J + j[:, None]) * D + d[None, :], live))
        # One load for BLOCK_J chunks hides the memory; a row is then picked out by a masked sum.
        enters = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
        for i in tl.static_range(BLOCK_J):
            pick = (row == i)[:, None]
            enters = tl.where(pick, h[None, :], enters)
            h = tl.sum(tl.where(pick, decay, 0.0), 0) * h + tl.sum(tl.where(pick, sent, 0.0), 0)
        tl.store(at, enters, mask=live)


@triton.jit
def _adjoint_kernel(
    dy_ptr, delta_ptr, A_ptr, C_ptr, bias_ptr, adjoint_ptr, sums_ptr,
    L, D, N, J,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Every chunk from right to left, from zero: the adjoint of its start state, and its sum of deltas."""
    j = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = (n < N)[:, None] & (d < D)[None, :]
    A = _load(A_ptr + n[:, None] * D + d[None, :], inside)
    bias = _load(bias_ptr + d, d < D)
    dy_at, delta_at, C_at = dy_ptr + b * L * D + d, delta_ptr + b * L * D + d, C_ptr + b * L * N + n
    total = tl.zeros([BLOCK_D], tl.float32)
    adjoint = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(T):
        t = j * T + T - 1 - i
        in_d, in_n = _live(d, D, t, L), _live(n, N, t, L)
        g = _load(dy_at + t * D, in_d)
        raw = _load(delta_at + t * D, in_d)
        ct = _load(C_at + t * N, in_n)
        dt = _delta(raw + bias, SOFTPLUS)
        adjoint = tl.exp2(A * dt[None, :]) * (adjoint + ct[:, None] * g[None, :])
        total += dt
    tl.store(adjoint_ptr + ((b * J + j) * N + n[:, None]) * D + d[None, :], adjoint, mask=inside)
    tl.store(sums_ptr + (b * J + j) * D + d, total, mask=d < D)


@triton.jit
def _backward_kernel(
    dy_ptr, u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, states_ptr, adjoint_ptr, notes_ptr,
    du_ptr, ddelta_ptr, dA_ptr, dB_ptr, dC_ptr, dD_ptr, dbias_ptr,
    L, D, N, J,
    T: tl.constexpr, NOTE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = (n < N)[:, None] & (d < D)[None, :]
    tile = n[:, None] * D + d[None, :]
    A = _load(A_ptr + tile, inside)
    bias, skip = _load(bias_ptr + d, d < D), _load(D_ptr + d, d < D)
    chunk = b * J + j
    rows, cols = b * L * D + d, b * L * N + n
    u_at, delta_at, B_at = u_ptr + rows, delta_ptr + rows, B_ptr + cols
    # dB and dC are sums over all channels: each block of channels writes its own part.
    part = (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + b) * L * N + n

    # Forward over the chunk: note the state before every NOTE-th step.
    notes_at = notes_ptr + chunk * (T // NOTE) * N * D + tile
    h = _load(states_ptr + chunk * N * D + tile, inside)
    tl.store(notes_at, h, mask=inside)
    for k in range(1, T // NOTE):
        for i in range(NOTE):
            t = j * T + (k - 1) * NOTE + i
            h = _step(h, t, u_at, delta_at, B_at, A, bias, L, D, N, d, n, SOFTPLUS)
        tl.store(notes_at + k * N * D, h, mask=inside)
    tl.debug_barrier()

    adjoint = _load(adjoint_ptr + chunk * N * D + tile, inside)  # of the state after the chunk
    dA = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dD = tl.zeros([BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_D], tl.float32)
    # Back over the chunk, four steps at a time: from the note before them to the states before each of the four.
    for k in range(T // 4):
        first = T - 4 - 4 * k
        t0 = j * T + first
        s0 = _load(notes_at + first // NOTE * N * D, inside)
        for i in range(first % NOTE):
            s0 = _step(s0, t0 - first % NOTE + i, u_at, delta_at, B_at, A, bias, L, D, N, d, n, SOFTPLUS)
        s1 = _step(s0, t0, u_at, delta_at, B_at, A, bias, L, D, N, d, n, SOFTPLUS)
        s2 = _step(s1, t0 + 1, u_at, delta_at, B_at, A, bias, L, D, N, d, n, SOFTPLUS)
        s3 = _step(s2, t0 + 2, u_at, delta_at, B_at, A, bias, L, D, N, d, n, SOFTPLUS)
        for r in tl.static_range(4):
            before = s0
            if r == 0:
                before = s3
            elif r == 1:
                before = s2
            elif r == 2:
                before = s1
            t = t0 + 3 - r
            in_d, in_n = _live(d, D, t, L), _live(n, N, t, L)
            g = _load(dy_ptr + rows + t * D, in_d)
            x = _load(u_at + t * D, in_d)
            raw = _load(delta_at + t * D, in_d) + bias
            bt = _load(B_at + t * N, in_n)
            ct = _load(C_ptr + cols + t * N, in_n)
            dt = _delta(raw, SOFTPLUS)
            decay = tl.exp2(A * dt[None, :])
            decayed = decay * before
            state = decayed + bt[:, None] * (dt * x)[None, :]
            adjoint += ct[:, None] * g[None, :]  # of h_t
            tl.store(dC_ptr + part + t * N, tl.sum(state * g[None, :], 1), mask=in_n)
            tl.store(dB_ptr + part + t * N, tl.sum(adjoint * (dt * x)[None, :], 1), mask=in_n)
            dx = tl.sum(adjoint * bt[:, None], 0)  # of delta_t u_t
            log_decay = adjoint * decayed  # of delta_t A
            dA += log_decay * dt[None, :]
            ddt = tl.sum(log_decay * A, 0) * 0.6931471805599453 + x * dx
            if SOFTPLUS:
                ddt = tl.where(raw > 20.0, ddt, ddt * tl.sigmoid(raw))
            tl.store(du_ptr + rows + t * D, dt * dx + skip * g, mask=in_d)
            tl.store(ddelta_ptr + rows + t * D, ddt, mask=in_d)
            dD += g * x
            dbias += ddt
            adjoint = adjoint * decay  # of h_{t-1}
    tl.store(dA_ptr + chunk * N * D + tile, dA, mask=inside)
    tl.store(dD_ptr + chunk * D + d, dD, mask=d < D)
    tl.store(dbias_ptr + chunk * D + d, dbias, mask=d < D)


def states_shape(batch: int, channels: int, states: int, length: int, device: torch.device) -> tuple[int, ...]:
    return (batch, -(-length // CHUNK), states, channels)


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None, softplus: bool
) -> tuple[Tensor, Tensor]:
    """-> y (B, L, D), and the start state of every chunk (B, J, N, D)."""
    batch, channels, length = u.shape
    states = torch.empty(states_shape(batch, channels, A.shape[1], length, u.device), device=u.device)
    y = torch.empty(batch, length, channels, device=u.device, dtype=u.dtype)
    if y.numel() == 0:
        return y, states.zero_()
    u, delta, A2, B, C, skip, bias = _prepare(u, delta, A, B, C, D, bias)
    sizes, blocks = _sizes(u, B)
    chunks = sizes[3]
    sums = torch.empty(batch, chunks, channels, device=u.device)
    grid = (chunks, triton.cdiv(channels, FORWARD["BLOCK_D"]), batch)
    arguments = (u, delta, A2, B, C, skip, bias, states, sums, y, *sizes)
    with torch.cuda.device_of(u):
        _forward_kernel[grid](*arguments, SOFTPLUS=softplus, LAST=False, **blocks, **FORWARD)
        _carry(states, sums, A2, reverse=False)
        _forward_kernel[grid](*arguments, SOFTPLUS=softplus, LAST=True, **blocks, **FORWARD)
    return y, states


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
    """dy (B, L, D) -> the gradients of u, delta (B, L, D), A (N, D), B, C (B, L, N), D, bias (D,)."""
    batch, channels, length = u.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=u.device, dtype=dtype)

    du = empty(batch, length, channels, dtype=u.dtype)
    ddelta = empty(batch, length, channels, dtype=delta.dtype)
    parts = triton.cdiv(channels, BACKWARD["BLOCK_D"])
    dB, dC = empty(parts, batch, length, A.shape[1]), empty(parts, batch, length, A.shape[1])
    dA, adjoint = torch.empty_like(states), torch.empty_like(states)
    dD, dbias, sums = (empty(*states.shape[:2], channels) for _ in range(3))
    notes = empty(*states.shape[:2], CHUNK // BACKWARD["NOTE"], *states.shape[2:])
    if u.numel():
        u, delta, A2, B, C, skip, bias = _prepare(u, delta, A, B, C, D, bias)
        dy = dy.contiguous()
        sizes, blocks = _sizes(u, B)
        with torch.cuda.device_of(u):
            _adjoint_kernel[sizes[3], triton.cdiv(channels, FORWARD["BLOCK_D"]), batch](
                dy, delta, A2, C, bias, adjoint, sums, *sizes, SOFTPLUS=softplus, **blocks, **FORWARD
            )
            _carry(adjoint, sums, A2, reverse=True)
            _backward_kernel[sizes[3], parts, batch](
                *(dy, u, delta, A2, B, C, skip, bias, states, adjoint, notes),
                *(du, ddelta, dA, dB, dC, dD, dbias),
                *sizes, SOFTPLUS=softplus, **blocks, **BACKWARD,
            )  # fmt: skip
    return du, ddelta, dA.sum((0, 1)), dB.sum(0), dC.sum(0), dD.sum((0, 1)), dbias.sum((0, 1))


def _prepare(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Channels last; a missing D or bias is a zero one."""
    u, delta, B, C = (x.transpose(1, 2).contiguous() for x in (u, delta, B, C))
    zero = A.new_zeros(A.shape[0])
    skip, bias = (zero if v is None else v.contiguous() for v in (D, bias))
    return u, delta, (A.t().float() * LOG2E).contiguous(), B, C, skip, bias


def _sizes(u: Tensor, B: Tensor) -> tuple[tuple[int, int, int, int], dict[str, int]]:
    length, channels, states = u.shape[1], u.shape[2], B.shape[2]
    return (length, channels, states, triton.cdiv(length, CHUNK)), {
        "T": CHUNK,
        "BLOCK_N": triton.next_power_of_2(states),
    }


def _carry(states: Tensor, sums: Tensor, A: Tensor, reverse: bool) -> None:
    batch, chunks, n, channels = states.shape
    grid = (triton.cdiv(channels, CARRY["BLOCK_D"]), n, batch)
    _carry_kernel[grid](states, sums, A, channels, n, chunks, REVERSE=reverse, **CARRY)
