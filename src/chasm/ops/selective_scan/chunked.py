"""The selective scan in plain PyTorch, chunk by chunk, forward and backward.

The sequence is cut into chunks of T steps, and P neighbouring chunks form a group. The P recurrences of a group advance
together, with one tensor operation per time step. Everything that is not recurrent (decays, outputs, all gradients) is
one operation for the whole group. Each group passes its last state on to the next. In a group of several chunks the
recurrences start from zero. The true start states S then follow from the ends of the chunks, because the decay over
several steps is exp(A * sum of their deltas), and correct the local result:

    h_t = h_t(local) + exp(A * (delta_1 + .. + delta_t)) * S

The backward pass runs the recurrence of the adjoint, l_t = C_t g_t + a_{t+1} l_{t+1}, from right to left. It needs the
inputs and the start state of each chunk, and computes the states inside a chunk again.

Inside, channels are last: x is (G, T, P, B, D), B and C are (G, T, P, B, N), states (T, P, B, N, D).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.ops.selective_scan.reference import ScanInputs

CHUNK = 64  # T; one state is saved per T steps
# P is chosen so that one time step of a group has about this many elements. Few elements keep a CPU busy, and P = 1
# needs no correction. A GPU needs many, but several copies of a group's T steps are in memory at once.
STEP_ELEMENTS_CPU = 2**10
STEP_ELEMENTS = 2**19

Steps = tuple[Tensor, ...]  # a (T, ...) tensor, unbound
softplus_backward = torch.ops.aten.softplus_backward.default


class Chunking(NamedTuple):
    """G groups of P chunks of T steps: G * P * T >= L."""

    groups: int
    steps: int
    lanes: int


def choose_chunking(batch: int, channels: int, states: int, length: int, device: torch.device) -> Chunking:
    """Choose the number of groups and lanes.

    Args:
        batch: number of samples.
        channels: D.
        states: N.
        length: L.
        device: device of the scan.
    """
    chunks = -(-length // CHUNK)
    wanted = STEP_ELEMENTS_CPU if device.type == "cpu" else STEP_ELEMENTS
    lanes = wanted // max(1, batch * channels * states)
    groups = -(-chunks // max(1, lanes))
    return Chunking(groups, CHUNK, -(-chunks // max(1, groups)))


def states_shape(batch: int, channels: int, states: int, length: int, device: torch.device) -> tuple[int, ...]:
    """Return the shape of the start states of all chunks.

    Args:
        batch: number of samples.
        channels: D.
        states: N.
        length: L.
        device: device of the scan.
    """
    chunks = choose_chunking(batch, channels, states, length, device)
    return (chunks.groups, chunks.lanes, batch, states, channels)


def forward(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Run the scan. Return y, (B, L, D), and the start state of each chunk, (G, P, B, N, D)."""
    u, delta, A, B, C, D, bias, softplus = inputs
    batch, channels, length = u.shape
    chunks = choose_chunking(batch, channels, A.shape[1], length, u.device)
    x, deltas, At, Bs, Cs = _prepare(chunks, u, delta, A, B, C)
    bias = None if bias is None else bias.to(x.dtype)
    skip = None if D is None else D.to(x.dtype)
    dot = _row_times_matrix(u.device)
    starts = x.new_empty(chunks.groups, chunks.lanes, batch, *At.shape)
    y, y_groups = _output(chunks, x)
    carry = x.new_zeros(1, batch, *At.shape)
    decay = x.new_empty(chunks.steps, chunks.lanes, batch, *At.shape)
    h = x.new_empty(chunks.steps + 1, chunks.lanes, batch, *At.shape)  # starts with the state before the first step
    # Views are made once, because making one takes as long as using it.
    decay_t, h_t, h_now, h_end = decay.unbind(), h.unbind(), h[1:], h[-1, -1:]
    for x_g, raw, B_g, C_g, start, out in zip(x, deltas, Bs.mT, Cs, starts, y_groups, strict=True):
        raw = raw if bias is None else raw + bias
        dt = F.softplus(raw) if softplus else raw
        torch.mul(dt.unsqueeze(-2), At, out=decay).exp_()
        torch.mul((dt * x_g).unsqueeze(-2), B_g, out=h_now)
        if chunks.lanes == 1:
            start.copy_(carry)
            h_t[0].copy_(carry)
            _recur(decay_t, h_t)
        else:
            h_t[0].zero_()
            _recur(decay_t, h_t)
            total = (dt.cumsum(0).unsqueeze(-2) * At).exp_()  # (T, P, B, N, D): decay since the start of the chunk
            _chain(carry, total[-1], h_t[-1], start)
            h_now.addcmul_(total, start)
        carry.copy_(h_end)
        out.copy_(dot(C_g, h_now))
        if skip is not None:
            out.addcmul_(x_g, skip)
    return y[:, :length].to(u.dtype).contiguous(), starts


def backward(grad: Tensor, starts: Tensor, inputs: ScanInputs) -> tuple[Tensor, ...]:
    """Compute the gradients of the scan.

    Args:
        grad: gradient of y, (B, L, D).
        starts: start states from `forward`.
        inputs: the arguments of `forward`.

    Returns:
        The gradients of u and delta, (B, L, D), A, (N, D), B and C, (B, L, N), D and bias, (D,).
    """
    u, delta, A, B, C, D, bias, softplus = inputs
    batch, channels, length = u.shape
    chunks = choose_chunking(batch, channels, A.shape[1], length, u.device)
    x, deltas, At, Bs, Cs = _prepare(chunks, u, delta, A, B, C)
    bias = None if bias is None else bias.to(x.dtype)
    dy = _group(chunks, grad.transpose(1, 2).to(x.dtype))
    dot = _row_times_matrix(u.device)
    (du, du_groups), (ddelta, ddelta_groups) = _output(chunks, x), _output(chunks, x)
    (dB, dB_groups), (dC, dC_groups) = _output(chunks, Bs.squeeze(-2)), _output(chunks, Cs.squeeze(-2))
    dA = torch.zeros_like(At)
    carry = x.new_zeros(1, batch, *At.shape)
    decay, adjoint = (x.new_empty(chunks.steps, chunks.lanes, batch, *At.shape) for _ in range(2))
    h = x.new_empty(chunks.steps + 1, chunks.lanes, batch, *At.shape)
    decay_t, h_t, adjoint_t = decay.unbind(), h.unbind(), adjoint.unbind()
    h_before, h_now, h_columns, adjoint_columns, first = h[:-1], h[1:], h[1:].mT, adjoint.mT, adjoint[0, :1]
    sources = [v.unbind() for v in (x, deltas, Bs, Bs.mT, Cs.mT, dy.unsqueeze(-2), starts)]
    for g in reversed(range(chunks.groups)):
        x_g, raw, B_g, B_column, C_column, dy_g, start = (v[g] for v in sources)
        raw = raw if bias is None else raw + bias
        dt = F.softplus(raw) if softplus else raw
        dt_n, dtx = dt.unsqueeze(-2), (dt * x_g).unsqueeze(-2)
        torch.mul(dt_n, At, out=decay).exp_()
        torch.mul(dtx, B_column, out=h_now)
        h_t[0].copy_(start)
        _recur(decay_t, h_t)

        torch.mul(dy_g, C_column, out=adjoint)
        if chunks.lanes == 1:
            adjoint_t[-1].add_(carry)
            _recur_back(decay_t, adjoint_t)
        else:
            _recur_back(decay_t, adjoint_t)
            rest = torch.zeros_like(dt)  # sum of the deltas after each step
            rest[:-1] = dt[1:].flip(0).cumsum(0).flip(0)
            total = ((rest[0] + dt[0]).unsqueeze(-2) * At).exp_()
            enters = torch.empty_like(total)  # goes from right to left, so the last chunk comes first
            _chain(carry, total.flip(0), (decay_t[0] * adjoint_t[0]).flip(0), enters)
            adjoint.addcmul_((rest.unsqueeze(-2) * At).exp_(), enters.flip(0))

        dC_groups[g] = dot(dy_g, h_columns)
        dB_groups[g] = dot(dtx, adjoint_columns)
        ddtx = dot(B_g, adjoint)
        torch.mul(dt, ddtx, out=du_groups[g])
        adjoint.mul_(decay)  # now the adjoint of the state before each step
        carry.copy_(first)
        adjoint.mul_(h_before)  # now the gradient of delta * A
        dA += torch.mul(adjoint, dt_n, out=decay).sum((0, 1, 2))
        ddt = adjoint.mul_(At).sum(-2).addcmul_(x_g, ddtx)
        ddelta_groups[g] = softplus_backward(ddt, raw, 1, 20) if softplus else ddt
    if D is not None:
        du_groups.addcmul_(dy, D.to(x.dtype))
    du, ddelta, dB, dC = (v[:, :length].contiguous() for v in (du, ddelta, dB, dC))
    return du, ddelta, dA, dB, dC, (dy * x).sum((0, 1, 2, 3)), ddelta.sum((0, 1))


def _prepare(chunks: Chunking, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """Return u and delta (G, T, P, B, D), A (N, D), B and C (G, T, P, B, 1, N)."""
    dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
    u, delta, B, C = (_group(chunks, v.to(dtype)) for v in (u, delta, B, C))
    return u, delta, A.t().to(dtype).contiguous(), B.unsqueeze(-2), C.unsqueeze(-2)


def _group(chunks: Chunking, x: Tensor) -> Tensor:
    """Rearrange (B, M, L) to (G, T, P, B, M), padded with zeros: where u = C = 0, no gradient flows back."""
    batch, width, length = x.shape
    # Both ways to (L, B, M) are fast: torch transposes a matrix, or copies rows if M is already last.
    x = x.reshape(batch * width, length).t() if x.is_contiguous() else x.permute(2, 0, 1)
    x = x.reshape(length, batch, width)
    if missing := chunks.groups * chunks.lanes * chunks.steps - length:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return x.reshape(chunks.groups, chunks.lanes, chunks.steps, batch, width).transpose(1, 2).contiguous()


def _output(chunks: Chunking, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory of shape (B, padded L, M), and a view of it as (G, T, P, B, M)."""
    batch, width = like.shape[-2:]
    memory = like.new_empty(batch, chunks.groups, chunks.lanes, chunks.steps, width)
    return memory.flatten(1, 3), memory.permute(1, 3, 2, 0, 4)


def _row_times_matrix(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of (..., 1, K) and (..., K, M): their product, also if the user allows inexact products."""
    backends: Any = torch.backends
    backend = {"cpu": backends.mkldnn, "cuda": backends.cuda}.get(device.type)
    if backend is not None and backend.matmul.fp32_precision in ("none", "ieee"):
        return lambda row, matrix: (row @ matrix).squeeze(-2)
    return lambda row, matrix: (row.mT * matrix).sum(-2)


def _recur(decay: Steps, x: Steps) -> None:
    """Compute x_t += a_t x_{t-1} in place for t = 1..T, where x starts with x_0."""
    for a, before, now in zip(decay, x, x[1:], strict=False):
        now.addcmul_(a, before)


def _recur_back(decay: Steps, x: Steps) -> None:
    """Compute x_t += a_{t+1} x_{t+1} in place for t = T-1..1."""
    for a, after, now in zip(decay[:0:-1], x[::-1], x[-2::-1], strict=False):
        now.addcmul_(a, after)


def _chain(first: Tensor, decay: Tensor, end: Tensor, out: Tensor) -> None:
    """Compute the state that enters each chunk of a group: S_1 = first, S_{p+1} = decay_p S_p + end_p."""
    out[:1] = first
    for p in range(1, len(out)):
        torch.addcmul(end[p - 1], decay[p - 1], out[p - 1], out=out[p])
