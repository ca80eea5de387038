"""The chunked and the Triton form as one PyTorch operator with its own backward.

It is a registered operator and not an `autograd.Function`, so that torch.compile and torch.export see one opaque node
and do not unroll the time steps. There is no second derivative.
"""

from typing import Any

import torch
from torch import Tensor

from chasm.ops.selective_scan import chunked
from chasm.ops.selective_scan.reference import ScanInputs


def _implementation(form: str) -> Any:
    if form == "triton":
        from chasm.ops.selective_scan import kernels  # needs triton

        return kernels
    return chunked


# Inputs have the time axis last, as u (B, D, L). Results have channels last, (B, L, D), as the forms compute them.
_INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? bias, bool softplus, str form"


@torch.library.custom_op("chasm::selective_scan", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def scan(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return y (B, L, D) and the start states of the chunks, which only the backward pass reads."""
    *arguments, form = inputs
    with torch.autocast(inputs[0].device.type, enabled=False):
        return _implementation(form).forward(ScanInputs(*arguments))


@torch.library.custom_op(
    "chasm::selective_scan_backward", mutates_args=(), schema=f"(Tensor dy, Tensor states, {_INPUTS}) -> Tensor[]"
)
def scan_backward(*inputs: Any) -> list[Tensor]:
    """Return the gradients of u, delta, B and C in their dtypes, and of A, D and bias in the dtype of the states."""
    dy, states, *arguments, form = inputs
    of_scan = ScanInputs(*arguments)
    with torch.autocast(inputs[0].device.type, enabled=False):
        gradients = _implementation(form).backward(dy, states, of_scan)
    like = (of_scan.u, of_scan.delta, states, of_scan.B, of_scan.C, states, states)
    return [g.to(x.dtype).contiguous() for g, x in zip(gradients, like, strict=True)]


@scan.register_fake
def _(u: Tensor, delta: Tensor, A: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, channels, length = u.shape
    shape = _implementation(rest[-1]).states_shape(batch, channels, A.shape[1], length, u.device)
    dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
    return u.new_empty(batch, length, channels), u.new_empty(shape, dtype=dtype)


@scan_backward.register_fake
def _(dy: Tensor, states: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, *rest: Any) -> list[Tensor]:
    (batch, channels, length), n = u.shape, A.shape[1]
    rows, columns = (batch, length, channels), (batch, length, n)
    return [
        *(u.new_empty(rows), delta.new_empty(rows), states.new_empty(n, channels)),
        *(B.new_empty(columns), rest[0].new_empty(columns)),
        *(states.new_empty(channels), states.new_empty(channels)),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.softplus, ctx.form = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    states, *tensors = ctx.saved_tensors
    if dy is None:
        return (None,) * 9
    du, ddelta, dA, dB, dC, dD, dbias = scan_backward(dy, states, *tensors, ctx.softplus, ctx.form)
    du, ddelta, dB, dC = (x.transpose(1, 2) for x in (du, ddelta, dB, dC))
    gradients = zip((du, ddelta, dA.t(), dB, dC, dD, dbias), tensors, strict=True)
    return *(None if x is None else dx for dx, x in gradients), None, None


scan.register_autograd(_backward, setup_context=_save)
