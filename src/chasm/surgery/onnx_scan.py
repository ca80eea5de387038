"""The selective scan in ONNX: a Scan over time, which every runtime knows. Imports onnxscript, so import it late."""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op

import chasm.ops.selective_scan.op as _registered  # noqa: F401  (registers the operator)


@script()
def recurrence(state: FLOAT, A: FLOAT, delta: FLOAT, u: FLOAT, B: FLOAT, C: FLOAT) -> FLOAT:
    """Return y of h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t, y_t = C_t h_t, with time first: (L, B, D).

    Args:
        state: h_0 (B, D, N).
        A: (D, N).
        delta: (L, B, D).
        u: (L, B, D).
        B: (L, B, N).
        C: (L, B, N).
    """

    @graph()
    def step(h, d_t, u_t, B_t, C_t):  # type: ignore[no-untyped-def]
        last = op.Constant(value_ints=[-1])
        d = op.Unsqueeze(d_t, last)  # (B, D, 1)
        decay = op.Exp(op.Mul(d, A))  # (B, D, N)
        enters = op.MatMul(op.Unsqueeze(op.Mul(d_t, u_t), last), op.Unsqueeze(B_t, op.Constant(value_ints=[1])))
        h_next = op.Add(op.Mul(decay, h), enters)
        y_t = op.Squeeze(op.MatMul(h_next, op.Unsqueeze(C_t, last)), last)  # (B, D)
        return h_next, y_t

    _, y = op.Scan(state, delta, u, B, C, body=step, num_scan_inputs=4)
    return y


def selective_scan(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, bias: Any = None, softplus: bool = False, form: str = ""
) -> tuple[Any, Any]:
    """Convert ``chasm::selective_scan``, without its second output, which is for the backward pass.

    Args:
        u: (B, D, L).
        delta: (B, D, L).
        A: (D, N).
        B: (B, N, L).
        C: (B, N, L).
        D: (D,) or None.
        bias: (D,) or None, added to delta.
        softplus: whether delta is taken through it.
        form: is ignored.

    Returns:
        y (B, L, D), and zeros.
    """
    if bias is not None:
        delta = op.Add(delta, op.Unsqueeze(bias, op.Constant(value_ints=[-1])))
    if softplus:
        delta = op.Softplus(delta)
    start = op.Mul(op.ReduceSum(delta, op.Constant(value_ints=[-1]), keepdims=1), op.Constant(value_float=0.0))
    steps = [op.Transpose(x, perm=[2, 0, 1]) for x in (delta, u, B, C)]  # (L, B, D or N)
    y = op.Transpose(recurrence(op.Mul(start, A), A, *steps), perm=[1, 0, 2])  # (B, L, D)
    if D is not None:
        y = op.Add(y, op.Mul(op.Transpose(u, perm=[0, 2, 1]), D))
    return y, op.Identity(start)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.chasm.selective_scan.default: selective_scan}
