"""The operator `chasm::block`: a chain of axis passes and, where asked, the layers around it, with its own backward.

In training the constants that a form computes with are made from the operators in every step, and gradients go to the
operators. A module in eval makes them once (`prepare`) and keeps them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chasm.common.precision import full_precision
from chasm.ops import local, reference
from chasm.ops.forms import fft_kernels
from chasm.ops.forms.base import Form, Passes
from chasm.ops.forms.fft import FFT, frequency_product
from chasm.ops.forms.fused import Fused
from chasm.ops.forms.triton import Triton
from chasm.ops.kernels.layout import channels_last, contiguous, is_channels_last
from chasm.ops.library import FirstOrderOnly, Operator, wants_gradient
from chasm.ops.operators import AxisOperator, at_least_float32

_FORMS: dict[str, Form] = {"fft": FFT(), "triton": Triton(), "fused": Fused()}
_FFT_KERNELS = fft_kernels.FFTKernels()


class Chain(NamedTuple):
    """Axis passes, one after the other, in one form."""

    form: str  # one that can run, see `dispatch.choose_form`; "none" for no passes at all
    dtype: torch.dtype  # of the features that enter and leave the passes
    operators: Sequence[AxisOperator]  # one for each pass, in order; all with a basis, or none
    constants: Sequence[Tensor] = ()  # made from the operators by `prepare`: then no gradient goes to them

    @property
    def is_plain(self) -> bool:
        """True if it runs in plain torch operations, which torch.func, torch.export and second derivatives follow."""
        if self.form == "reference" or not self.operators:
            return self.form == "reference"
        U = self.operators[0].U
        return U is not None and U.ndim == 3


def prepare(chain: Chain, shape: torch.Size) -> Chain:
    """The chain with constants for inputs of one shape (B, C, *spatial), whose batch does not matter. No gradient."""
    if chain.is_plain:
        return chain
    passes = _passes(chain.operators)
    like = passes.gains[0]
    with torch.no_grad(), full_precision(like):
        form = _form(chain.form, like, chain.dtype, not like.is_complex())
        constants = form.prepare(shape, passes, chain.dtype, False)
    return chain._replace(constants=constants)


def run(x: Tensor, chains: Sequence[Chain], *, layers: Sequence[Tensor] = (), residual: Tensor | None = None) -> Tensor:
    """Apply a chain of axis passes to x (B, C, *spatial), or the mean of several chains; then the layers around them.

    Args:
        x: features of any real dtype and memory format. The result has the same, or without layers the chain's dtype.
        chains: one or more, of the same dtype.
        layers: parameters of the layers that follow (see `local.forward`), where `can_join_layers`; or none.
        residual: added to the result of those layers; may be x.
    """
    if len(chains) > 1:
        y = torch.stack([run(x, [chain]) for chain in chains]).mean(0)
        return run(y, [Chain("none", chains[0].dtype, [])], layers=layers, residual=residual)
    form, dtype, operators, constants = chain = chains[0]
    if chain.is_plain:
        return _run_plain(x, chain)
    if form == "none" and not layers:
        return x
    dims, gains, bases = _passes(operators)
    symmetric, add_input = not (gains and gains[0].is_complex()), residual is x
    result: Tensor = _BLOCK(
        x, None if add_input else residual, gains, bases, layers, constants,
        form, dims, dtype, add_input, symmetric, False, False,
    )[0]  # fmt: skip
    return result


def can_join_layers(x: Tensor, chains: Sequence[Chain]) -> bool:
    """True if `run` can take the layers around these chains: by kernels, or on a CPU in the form made for it."""
    dtype, form = chains[0].dtype, chains[0].form
    if chains[0].is_plain or x.ndim != 4:
        return False
    if x.is_cuda or local.IS_INTERPRETED:
        return local.obstacle(x, dtype) is None
    fits = x.device.type == "cpu" and x.dtype == dtype and dtype in (torch.float32, torch.float64)
    return fits and form == "fft" and len(chains) == 1 and x.is_contiguous()


def _form(name: str, x: Tensor, dtype: torch.dtype, real: bool) -> Form:
    """The form of a name for features on the device of x, with real gains or not."""
    return _FFT_KERNELS if name == "fft" and real and fft_kernels.can_run(x, dtype) else _FORMS[name]


def _passes(operators: Sequence[AxisOperator]) -> Passes:
    bases = [op.U for op in operators if op.U is not None]
    return Passes([op.dim for op in operators], [op.gains for op in operators], bases)


def _run_plain(x: Tensor, chain: Chain) -> Tensor:
    with full_precision(x):
        z = x.to(at_least_float32(x.dtype))
        for op in chain.operators:
            if chain.form == "reference":
                U = torch.eye(x.shape[1], device=x.device) if op.U is None else op.U
                wide = torch.promote_types(z.dtype, torch.complex64) if op.gains.is_complex() else z.dtype
                z = reference.axis_pass(z, U.to(z.dtype), op.gains.to(wide), op.dim)
            else:
                z = frequency_product(z, op)
        return z.to(x.dtype)


# --- the registered operator ----------------------------------------------------------------------


def _forward(
    x: Tensor,
    residual: Tensor | None,
    gains: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
    constants: list[Tensor],
    form: str,
    dims: list[int],
    dtype: torch.dtype,
    add_input: bool,
    symmetric: bool,
    keep: bool,
    trains: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The result; with `keep` also the constants that were made here, and what else a backward needs.

    `trains`: gradients of gains and bases are wanted. An empty tensor stands for x, which an operator may not return.
    """
    made: list[Tensor] = []
    kept: list[Tensor] = []
    with full_precision(x):
        y = z = _entering(x, form, dtype)
        if form != "none":
            how = _form(form, x, dtype, symmetric)
            made = [] if constants else how.prepare(x.shape, Passes(dims, gains, bases), dtype, trains)
            y, kept = how.forward(z, dims, constants or made, trains, bool(layers))
        if layers:
            y, more = local.forward(y, x if add_input else residual, layers, keep)
            kept = [*more, *kept]
        if not add_input and residual is None:
            y = y.to(x.dtype if layers else dtype)
        y = channels_last(y) if is_channels_last(x) else contiguous(y)
    y = y.clone() if y is x else y
    return (y, made, [x.new_empty(0) if t is x else t for t in kept]) if keep else (y, [], [])


def _entering(x: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """x as the form takes it."""
    z = x.to(dtype)
    return z if form == "fused" and is_channels_last(z) else contiguous(z)


def _backward(
    g: Tensor,
    gains: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
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
    """The gradients of x if it needs one, of gains, bases and layers. `to_last`: x is channels last."""
    with full_precision(g):
        g = contiguous(g)
        gz = g.to(dtype)
        add = gz if add_input and x_dtype == dtype else None  # the forms add it on their way
        found: list[Tensor] = []
        if layers:
            n = local.count_kept(gz)
            gz, *found = local.backward(gz, kept[:n], layers)
            kept = kept[n:]
        if form == "none":
            dx = gz if add is None else gz + add
        elif needs_x or gains:
            passes = Passes(dims, gains, bases)
            how = _form(form, gz, dtype, symmetric)
            d, d_gains, d_bases = how.backward(gz, kept, passes, constants, needs_x, add, symmetric)
            dx = gz if d is None else d
            pairs = zip([*d_gains, *d_bases], [*gains, *bases], strict=True)
            found = [*[d.to(t.dtype) for d, t in pairs], *found]
        if needs_x:
            dx = dx.to(x_dtype) if add is not None or not add_input else g + dx
            found = [channels_last(dx) if to_last else dx, *found]
    return found


def _autograd(
    x: Tensor,
    residual: Tensor | None,
    gains: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
    constants: list[Tensor],
    *arguments: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    trains = not constants and wants_gradient([*gains, *bases])
    if not trains and not wants_gradient([x, residual, *layers]):
        found: Any = _BLOCK.without_autograd(x, residual, gains, bases, layers, constants, *arguments)
        return found
    counts = len(gains), len(bases)
    return _Block.apply(arguments[:-2], counts, trains, constants, x, residual, *gains, *bases, *layers), [], []


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        arguments: tuple[Any, ...],
        counts: tuple[int, int],
        trains: bool,
        constants: list[Tensor],
        x: Tensor,
        residual: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        """operands: gains and bases, as many as `counts` says, and the parameters of the layers."""
        gains, bases, layers = _cut(operands, (counts[0], sum(counts)))
        y, made, kept = _BLOCK.without_autograd(
            x, residual, gains, bases, layers, constants, *arguments, True, trains
        )  # fmt: skip
        constants = constants or made
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *constants, *[x if t.ndim == 1 else t for t in kept])
        ctx.ends = counts[0], sum(counts), len(operands), len(operands) + len(constants)
        ctx.arguments, ctx.trains = (*arguments, x.dtype, is_channels_last(x)), trains
        ctx.residual_dtype = None if residual is None else residual.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_x, needs_residual = ctx.needs_input_grad[4:6]
        gains, bases, *rest = _cut(ctx.saved_tensors, ctx.ends)
        frozen = [] if ctx.trains else [None] * (len(gains) + len(bases))
        trained = (gains, bases) if ctx.trains else ([], [])
        found = _GRADIENT(g, *trained, *rest, *ctx.arguments, needs_x)
        dx, d_residual = found[0] if needs_x else None, g.to(ctx.residual_dtype) if needs_residual else None
        return None, None, None, None, dx, d_residual, *frozen, *found[needs_x:]


def _cut(tensors: Sequence[Tensor], ends: Sequence[int]) -> list[Sequence[Tensor]]:
    """Slices that end there, and the rest."""
    return [tensors[a:b] for a, b in pairwise((0, *ends, len(tensors)))]


def _gradient_autograd(g: Tensor, *args: Any) -> list[Tensor]:
    gains, bases, layers = args[:3]
    tensors = g, *gains, *bases, *layers
    if not wants_gradient(tensors):
        return _GRADIENT.without_autograd(g, *args)
    return list(FirstOrderOnly.apply(_GRADIENT, (g, *args), *tensors))


_SHARED = "str form, int[] dims, ScalarType dtype, bool add_input, bool symmetric"
_BLOCK = Operator(
    "block(Tensor x, Tensor? residual, Tensor[] gains, Tensor[] bases, Tensor[] layers, Tensor[] constants,"
    f" {_SHARED}, bool keep, bool trains) -> (Tensor, Tensor[], Tensor[])",
    _forward,
    _autograd,
)
_GRADIENT = Operator(
    "block_backward(Tensor g, Tensor[] gains, Tensor[] bases, Tensor[] layers, Tensor[] constants, Tensor[] kept,"
    f" {_SHARED}, ScalarType x_dtype, bool to_last, bool needs_x) -> Tensor[]",
    _backward,
    _gradient_autograd,
)
