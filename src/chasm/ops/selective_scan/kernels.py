"""The selective scan by the Triton kernels of `kernels_triton`, which says what they do and in which order."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from chasm.ops.selective_scan.kernels_triton import (
    _adjoint_kernel,
    _backward_kernel,
    _carry_kernel,
    _forward_kernel,
    _rows_kernel,
)
from chasm.ops.selective_scan.reference import ScanInputs

CHUNK = 64  # T; one state is saved per T steps
FORWARD = {"BLOCK_D": 32, "num_warps": 1}
BACKWARD = {"BLOCK_D": 32, "num_warps": 1}
NOTE = 8  # 4, or a multiple of it that divides T
CARRY = {"BLOCK_J": 16, "BLOCK_D": 32, "num_warps": 1}
ROWS = {"BLOCK_M": 32, "BLOCK_L": 64, "num_warps": 4}

LOG2E = 1.4426950408889634


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


def forward(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Run the scan. Return y, (B, L, D), and the start state of each chunk, (B, J, N, D)."""
    u = inputs.u
    batch, channels, length = u.shape
    s = states_shape(batch, channels, inputs.A.shape[1], length, u.device)
    states = torch.empty(s, device=u.device)
    y = torch.empty(batch, s.length, s.channels, device=u.device, dtype=u.dtype)
    if u.numel():
        rows = _prepare(s, inputs)
        sums = torch.empty(batch, s.chunks, s.channels, device=u.device)
        grid = (s.chunks, s.channels // FORWARD["BLOCK_D"], batch)
        constants = {"T": CHUNK, "N": s.states, **FORWARD}
        with torch.cuda.device_of(u):
            _forward_kernel[grid](*rows, states, sums, y, s.channels, LAST=False, **constants)
            _carry(s, states, sums, rows[2], reverse=False)
            _forward_kernel[grid](*rows, states, sums, y, s.channels, LAST=True, **constants)
    return y[:, :length, :channels].contiguous(), states


def backward(dy: Tensor, states: Tensor, inputs: ScanInputs) -> tuple[Tensor, ...]:
    """Compute the gradients of the scan.

    Args:
        dy: gradient of y, (B, L, D).
        states: start states from `forward`.
        inputs: the arguments of `forward`.

    Returns:
        The gradients of u and delta, (B, L, D), A, (N, D), B and C, (B, L, N), D and bias, (D,).
    """
    u, n = inputs.u, inputs.A.shape[1]
    batch, channels, length = u.shape
    s = states_shape(batch, channels, n, length, u.device)
    parts = s.channels // BACKWARD["BLOCK_D"]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=u.device, dtype=dtype)

    du, ddelta = (empty(batch, s.length, s.channels, dtype=x.dtype) for x in (u, inputs.delta))
    dB, dC = (empty(parts, batch, s.length, s.states) for _ in range(2))
    dA, adjoint = empty(*s), empty(*s)
    dD, dbias, sums = (empty(batch, s.chunks, s.channels) for _ in range(3))
    notes = empty(batch, s.chunks, CHUNK // NOTE, s.states, s.channels)
    if u.numel():
        u, dt, A2, B, C, skip = _prepare(s, inputs)
        dy = F.pad(dy, (0, s.channels - channels, 0, s.length - length)) if dy.shape != u.shape else dy.contiguous()
        constants = {"T": CHUNK, "NOTE": NOTE, "N": s.states}
        with torch.cuda.device_of(u):
            _adjoint_kernel[s.chunks, s.channels // FORWARD["BLOCK_D"], batch](
                dy, u, dt, A2, B, C, states, adjoint, sums, notes, s.channels, **constants, **FORWARD
            )
            _carry(s, adjoint, sums, A2, reverse=True)
            _backward_kernel[s.chunks, parts, batch](
                *(dy, u, dt, A2, B, C, skip, adjoint, notes, du, ddelta, dA, dB, dC, dD, dbias, s.channels),
                **constants, **BACKWARD, SOFTPLUS=inputs.softplus,
            )  # fmt: skip
    du, ddelta = (x[:, :length, :channels].contiguous() for x in (du, ddelta))
    dB, dC = (x.sum(0)[:, :length, :n] for x in (dB, dC))
    dD, dbias = (x.sum((0, 1))[:channels] for x in (dD, dbias))
    return du, ddelta, dA.sum((0, 1))[:n, :channels], dB, dC, dD, dbias


def _prepare(s: Sizes, inputs: ScanInputs) -> tuple[Tensor, ...]:
    """Return u and step sizes (B, L, D), A (N, D), B and C (B, L, N), and D (D,)."""
    u, delta, A, B, C, D, bias, softplus = inputs
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
