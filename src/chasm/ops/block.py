"""The operator `chasm::block`: a chain of axis passes and, where asked, the layers around it, with its own backward.

`prepare` turns the operators of a chain into the constants that a form needs at one input size, `run` applies them. A
module in eval keeps what `prepare` returned; in training both happen in every step, and gradients go to the operators.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chasm.common.precision import full_precision
from chasm.ops import local, reference
from chasm.ops.forms import circulant, fft, fused, triton
from chasm.ops.kernels.layout import channels_last, contiguous, is_channels_last
from chasm.ops.library import FirstOrderOnly, Operator, wants_gradient
from chasm.ops.operators import AxisOperator

_FORMS: dict[str, Any] = {"fft": fft, "circulant": circulant, "triton": triton, "fused": fused}


class Prepared(NamedTuple):
    """A chain of axis passes in one form, for inputs of one size and dtype."""

    form: str  # "none" is the identity
    dtype: torch.dtype  # of the features inside
    dims: list[int]
    constants: list[Tensor]  # empty for a form in plain torch operations, which computes with the operators themselves
    symmetric: bool = True  # are the operators: real gains
    operators: list[AxisOperator] = []  # noqa: RUF012  to which gradients go; none where no gradient is wanted


def identity(dtype: torch.dtype) -> Prepared:
    """No passes at all."""
    return Prepared("none", dtype, [], [])


def prepare(shape: torch.Size, operators: Sequence[AxisOperator], form: str, dtype: torch.dtype) -> Prepared:
    """What a form needs to apply operators to inputs of one size. Gradients go to the operators if they require any.

    Args:
        shape: (B, C, *spatial); the batch does not matter.
        operators: one for each pass, in order; all with a basis, or none.
        form: a form that can run, see `dispatch.choose_form`.
        dtype: of the features that enter and leave.
    """
    dims, gains = [op.dim for op in operators], [op.gains for op in operators]
    bases = [op.U for op in operators if op.U is not None]
    if form == "reference" or any(U.ndim == 3 for U in bases):
        return Prepared(form, dtype, dims, [], operators=list(operators))
    trains = wants_gradient([*gains, *bases])
    constants = _PREPARE.op(shape, dims, gains, bases, form, dtype, trains)
    symmetric = not any(g.is_complex() for g in gains)
    return Prepared(form, dtype, dims, constants, symmetric, list(operators) if trains else [])


def run(
    x: Tensor, chains: Sequence[Prepared], *, layers: Sequence[Tensor] = (), residual: Tensor | None = None
) -> Tensor:
    """Apply a chain of axis passes to x (B, C, *spatial), or the mean of several chains; then the layers around them.

    Args:
        x: features of any real dtype and memory format. The result has the same, or without layers the chain's dtype.
        chains: what `prepare` returned for features of this size.
        layers: parameters of the layers that follow (see `local.forward`), where `can_join_layers`; or none.
        residual: added to the result of those layers; may be x.
    """
    if len(chains) == 1:
        return _run_one(x, chains[0], layers, residual)
    y = torch.stack([_run_one(x, chain, (), None) for chain in chains]).mean(0)
    return _run_one(y, identity(chains[0].dtype), layers, residual)


def _run_one(x: Tensor, chain: Prepared, layers: Sequence[Tensor], residual: Tensor | None) -> Tensor:
    form, dtype, dims, constants, symmetric, operators = chain
    if form == "none" and not layers:
        return x
    if form != "none" and not constants:
        return _plain(x, chain)
    gains, bases = [op.gains for op in operators], [op.U for op in operators if op.U is not None]
    add_input = residual is x
    rest = None if add_input else residual
    y: Tensor = _BLOCK.op(x, rest, gains, bases, layers, constants, form, dims, dtype, add_input, symmetric, False)[0]
    return y


def can_join_layers(x: Tensor, chains: Sequence[Prepared]) -> bool:
    """True if `run` can take the layers around these chains: by kernels, or on a CPU in the form made for it."""
    dtype = chains[0].dtype
    if any(chain.form != "none" and not chain.constants for chain in chains):
        return False  # in plain torch operations
    if local.obstacle(x, dtype) is None:
        return True
    fits = x.device.type == "cpu" and x.ndim == 4 and x.is_contiguous() and x.dtype == dtype
    return fits and dtype in (torch.float32, torch.float64) and [c.form for c in chains] == ["circulant"]


def _plain(x: Tensor, chain: Prepared) -> Tensor:
    """The forms that torch.func, torch.export and second derivatives can follow."""
    with full_precision(x):
        z = x.to(torch.promote_types(x.dtype, torch.float32))
        for op in chain.operators:
            if chain.form == "reference":
                U = torch.eye(x.shape[1], device=x.device) if op.U is None else op.U
                wide = torch.promote_types(z.dtype, torch.complex64) if op.gains.is_complex() else z.dtype
                z = reference.axis_pass(z, U.to(z.dtype), op.gains.to(wide), op.dim)
            else:
                z = fft.frequency_product(z, op)
        return z.to(x.dtype)


# --- the registered operators ---------------------------------------------------------------------


def _prepare(
    shape: list[int],
    dims: list[int],
    gains: list[Tensor],
    bases: list[Tensor],
    form: str,
    dtype: torch.dtype,
    trains: bool,
) -> list[Tensor]:
    with full_precision(gains[0]):
        constants: list[Tensor] = _FORMS[form].prepare(torch.Size(shape), dims, gains, bases, dtype, trains)
    return constants


def _prepare_autograd(*args: Any) -> Any:
    return _PREPARE.without_autograd(*args)  # gradients pass it by: `block` sends them to the operators


_PREPARE: Operator = Operator(
    "prepare(SymInt[] shape, int[] dims, Tensor[] gains, Tensor[] bases, str form, ScalarType dtype, bool trains)"
    " -> Tensor[]",
    _prepare,
    _prepare_autograd,
)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    gains: list[Tensor],
    bases: list[Tensor],
    parameters: list[Tensor],
    constants: list[Tensor],
    form: str,
    dims: list[int],
    dtype: torch.dtype,
    add_input: bool,
    symmetric: bool,
    keep: bool,
) -> list[Tensor]:
    """The result, then what the backward needs; an empty tensor stands for x, which an operator may not return."""
    kept: list[Tensor] = []
    with full_precision(x):
        z = x.to(dtype)
        if not (form == "fused" and is_channels_last(z)):
            z = contiguous(z)
        y = z
        if form != "none":
            trains = keep and bool(gains)
            y, kept = _FORMS[form].forward(z, dims, constants, trains, before_local=bool(parameters))
        if parameters:
            y, more = local.forward(y, x if add_input else residual, parameters, keep)
            kept = [*more, *kept]
        if not add_input and residual is None:
            y = y.to(x.dtype)
        y = channels_last(y) if is_channels_last(x) else contiguous(y)
    return [y.clone() if y is x else y, *(x.new_empty(0) if t is x else t for t in kept)]


def _backward(
    g: Tensor,
    gains: list[Tensor],
    bases: list[Tensor],
    parameters: list[Tensor],
    constants: list[Tensor],
    kept: list[Tensor],
    form: str,
    dims: list[int],
    dtype: torch.dtype,
    add_input: bool,
    symmetric: bool,
    x_dtype: torch.dtype,
    to_last: bool,
    needs_x: bool,
) -> list[Tensor]:
    """The gradients of x if it needs one, of gains, bases and parameters; x is of x_dtype, and channels last or not."""
    with full_precision(g):
        g = contiguous(g)
        gz = g.to(dtype)
        add = gz if add_input and x_dtype == dtype else None  # the forms add it on their way
        found: list[Tensor] = []
        if parameters:
            n = local.count_kept(gz)
            gz, *found = local.backward(gz, kept[:n], parameters)
            kept = kept[n:]
        if form == "none":
            dx = gz if add is None else gz + add
        elif needs_x or gains:
            dx, d_gains, d_bases = _FORMS[form].backward(
                contiguous(gz), kept, dims, gains, bases, constants, needs_x, add, symmetric
            )
            found = [*(d.to(t.dtype) for d, t in zip([*d_gains, *d_bases], [*gains, *bases], strict=True)), *found]
        if needs_x:
            dx = dx.to(x_dtype) if add is not None or not add_input else g + dx
            found = [channels_last(dx) if to_last else dx, *found]
    return found


def _autograd(
    x: Tensor,
    residual: Tensor | None,
    gains: list[Tensor],
    bases: list[Tensor],
    parameters: list[Tensor],
    constants: list[Tensor],
    *arguments: Any,
) -> list[Tensor]:
    if not wants_gradient((x, residual, *gains, *bases, *parameters)):
        return _BLOCK.without_autograd(x, residual, gains, bases, parameters, constants, *arguments)
    return list(_Block.apply(arguments, len(gains), len(bases), constants, x, residual, *gains, *bases, *parameters))


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        arguments: tuple[Any, ...],
        n_gains: int,
        n_bases: int,
        constants: list[Tensor],
        x: Tensor,
        residual: Tensor | None,
        *operands: Tensor,
    ) -> tuple[Tensor, ...]:
        """operands: gains, bases, parameters of the layers."""
        ctx.ends = n_gains, n_gains + n_bases, len(operands), len(operands) + len(constants)
        gains, bases, parameters = _cut(operands, ctx.ends[:2])
        y, *kept = _BLOCK.without_autograd(x, residual, gains, bases, parameters, constants, *arguments[:-1], True)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *constants, *(x if t.ndim == 1 else t for t in kept))
        ctx.arguments = (*arguments[:-1], x.dtype, is_channels_last(x))
        ctx.residual_dtype = None if residual is None else residual.dtype
        return y, *kept

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> Any:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_x, needs_residual = ctx.needs_input_grad[4:6]
        found = _GRADIENT.op(g, *_cut(ctx.saved_tensors, ctx.ends), *ctx.arguments, needs_x)
        d_residual = g.to(ctx.residual_dtype) if needs_residual else None
        return None, None, None, None, found[0] if needs_x else None, d_residual, *found[needs_x:]


def _cut(tensors: Sequence[Tensor], ends: Sequence[int]) -> list[Sequence[Tensor]]:
    """Slices that end there, and the rest."""
    return [tensors[a:b] for a, b in pairwise((0, *ends, len(tensors)))]


def _gradient_autograd(g: Tensor, *args: Any) -> list[Tensor]:
    gains, bases, parameters = args[:3]
    if not wants_gradient((g, *gains, *bases, *parameters)):
        return _GRADIENT.without_autograd(g, *args)
    return list(FirstOrderOnly.apply(_GRADIENT, (g, *args), g, *gains, *bases, *parameters))


_SHARED = "str form, int[] dims, ScalarType dtype, bool add_input, bool symmetric"
_BLOCK = Operator(
    "block(Tensor x, Tensor? residual, Tensor[] gains, Tensor[] bases, Tensor[] parameters, Tensor[] constants,"
    f" {_SHARED}, bool keep) -> Tensor[]",
    _forward,
    _autograd,
)
_GRADIENT = Operator(
    "block_backward(Tensor g, Tensor[] gains, Tensor[] bases, Tensor[] parameters, Tensor[] constants, Tensor[] kept,"
    f" {_SHARED}, ScalarType x_dtype, bool to_last, bool needs_x) -> Tensor[]",
    _backward,
    _gradient_autograd,
)
