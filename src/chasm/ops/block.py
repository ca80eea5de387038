"""The operator `chasm::block`: a chain of axis passes and, where asked, the layers around it, with its own backward.

In training one function leads from the parameters of a mixer to its output, and back: gains and bases, the constants
that a form computes with, the passes, the layers. A module in eval makes the constants once (`prepare`) and keeps them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chasm.common.precision import full_precision
from chasm.ops import basis, local, reference
from chasm.ops.forms.base import Form, Passes
from chasm.ops.forms.fft import FFT, frequency_product
from chasm.ops.forms.fft_kernels import FFTKernels
from chasm.ops.forms.fused import Fused
from chasm.ops.forms.triton import Triton
from chasm.ops.gains import gains_adjoint, gains_of, stepped
from chasm.ops.kernels import has_triton
from chasm.ops.kernels.layout import channels_last, contiguous, is_channels_last
from chasm.ops.library import FirstOrderOnly, Operator, wants_gradient
from chasm.ops.operators import AxisOperator, AxisSource, at_least_float32

_FORMS: dict[str, Form] = {"fft": FFT(), "triton": Triton(), "fused": Fused()}
_FFT_KERNELS = FFTKernels()
_GIVEN = "given"  # the kind of gain of a chain that hands over gains and bases instead of parameters


class Chain(NamedTuple):
    """Axis passes, one after the other, in one form."""

    form: str  # one that can run, see `dispatch.choose_form`; "none" for no passes at all
    dtype: torch.dtype  # of the features that enter and leave the passes
    # One for each pass, in order; all with a basis, or none. Plain forms and `prepare` take operators only.
    operators: Sequence[AxisOperator] | Sequence[AxisSource]
    constants: Sequence[Tensor] = ()  # made from the operators by `prepare`: then no gradient goes to them

    @property
    def is_plain(self) -> bool:
        """True if it runs in plain torch operations, which torch.func, torch.export and second derivatives follow."""
        if self.form == "reference" or not self.operators:
            return self.form == "reference"
        first = self.operators[0]
        return isinstance(first, AxisOperator) and first.U is not None and first.U.ndim == 3


def prepare(chain: Chain, shape: torch.Size) -> Chain:
    """The chain with constants for inputs of one shape (B, C, *spatial), whose batch does not matter. No gradient."""
    if chain.is_plain:
        return chain
    dims, gains, _, bases, *_ = _unpack(chain.operators)
    with torch.no_grad(), full_precision(gains[0]):
        form = _form(chain.form, gains[0], chain.dtype, not gains[0].is_complex())
        constants = form.prepare(shape, Passes(dims, gains, bases), chain.dtype, False)
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
    dims, tables, phases, bases, gain, scale = _unpack(operators)
    is_real, add_input = not phases and not (tables and tables[0].is_complex()), residual is x
    result: Tensor = _BLOCK(
        x, None if add_input else residual, tables, phases, bases, layers, constants,
        form, dims, gain, scale, dtype, add_input, is_real, False, False,
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


def _form(name: str, x: Tensor, dtype: torch.dtype, is_real: bool) -> Form:
    """The form of a name for features on the device of x, with real gains or not."""
    return _FFT_KERNELS if name == "fft" and is_real and _has_fft_kernels(x, dtype) else _FORMS[name]


def _has_fft_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    return x.is_cuda and dtype != torch.float64 and has_triton()


def _unpack(
    operators: Sequence[Any],
) -> tuple[list[int], list[Tensor], list[Tensor], list[Tensor], str, float]:
    """Of each pass its axis, table, phase table and theta, then the kind of gain and the step scale.

    Where operators are handed over, tables are gains and thetas are bases. There is a list for phases and for bases,
    empty if the chain has none.
    """
    dims: list[int] = []
    tables, phases, bases = [], [], []
    gain, scale = _GIVEN, 1.0
    for op in operators:
        dims.append(op.dim)
        if isinstance(op, AxisSource):
            _, U, table, phase, gain, scale = op
            phases += [] if phase is None else [phase]
        else:
            _, U, table = op
        tables.append(table)
        bases += [] if U is None else [U]
    return dims, tables, phases, bases, gain, scale


def _run_plain(x: Tensor, chain: Chain) -> Tensor:
    with full_precision(x):
        z = x.to(at_least_float32(x.dtype))
        for op in chain.operators:
            assert isinstance(op, AxisOperator)
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
    tables: list[Tensor],
    phases: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
    constants: list[Tensor],
    form: str,
    dims: list[int],
    gain: str,
    scale: float,
    dtype: torch.dtype,
    add_input: bool,
    is_real: bool,
    keep: bool,
    trains: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """The result; with `keep` also what was made here of the parameters, the constants, and what else a backward needs.

    `trains`: gradients of the parameters are wanted. An empty tensor stands for x, which an operator may not return.
    """
    made: list[Tensor] = []
    new: list[Tensor] = []
    kept: list[Tensor] = []
    with full_precision(x):
        y = z = _entering(x, form, dtype)
        if form != "none":
            how = _form(form, x, dtype, is_real)
            if not constants:
                if gain != _GIVEN:
                    for j, dim in enumerate(dims):
                        made.append(gains_of(tables[j], phases[j] if phases else None, gain, scale, x.shape[dim]))
                    if bases and bases[0].ndim == 1:  # they are thetas
                        U, needed = basis.forward(stepped(torch.stack(bases), scale))
                        made += [U, *needed]
                constants = new = how.prepare(x.shape, _passes(dims, tables, bases, made), dtype, trains)
            y, kept = how.forward(z, dims, constants, trains, bool(layers))
        if layers:
            y, more = local.forward(y, x if add_input else residual, layers, keep)
            kept = [*more, *kept]
        if not add_input and residual is None:
            y = y.to(x.dtype if layers else dtype)
        y = channels_last(y) if is_channels_last(x) else contiguous(y)
    y = y.clone() if y is x else y
    if not keep:
        return y, [], [], []
    for i, t in enumerate(kept):
        if t is x:
            kept[i] = x.new_empty(0)
    return y, made if trains else [], new, kept


def _passes(dims: Sequence[int], tables: Sequence[Tensor], bases: Sequence[Tensor], made: Sequence[Tensor]) -> Passes:
    """Gains and bases of the passes: those that were made of parameters, or those that were handed over."""
    m = len(dims)
    if not made:
        return Passes(dims, tables, bases)
    return Passes(dims, made[:m], made[m].unbind() if len(made) > m else bases)


def _entering(x: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """x as the form takes it."""
    z = x.to(dtype)
    return z if form == "fused" and is_channels_last(z) else contiguous(z)


def _backward(
    g: Tensor,
    tables: list[Tensor],
    phases: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
    made: list[Tensor],
    constants: list[Tensor],
    kept: list[Tensor],
    form: str,
    dims: list[int],
    gain: str,
    scale: float,
    dtype: torch.dtype,
    add_input: bool,
    is_real: bool,
    x_dtype: torch.dtype,
    to_last: bool,
    needs_x: bool,
) -> list[Tensor]:
    """The gradients of x if it needs one, of tables, phases, bases and layers. `to_last`: x is channels last."""
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
        elif needs_x or tables:
            how, passes = _form(form, gz, dtype, is_real), _passes(dims, tables, bases, made)
            d, d_gains, d_bases = how.backward(gz, kept, passes, constants, needs_x, add, is_real)
            dx = gz if d is None else d
            d_phases: list[Tensor] = []
            if made:
                for j, dim in enumerate(dims):
                    d_gains[j], d_phase = gains_adjoint(d_gains[j], made[j], len(tables[j]), gain, g.shape[dim])
                    d_phases += [] if d_phase is None else [d_phase]
                if len(made) > len(dims):
                    d_bases = list(basis.backward(torch.stack(d_bases), bases[0], made[len(dims) + 1 :]).unbind())
            pairs = zip([*d_gains, *d_phases, *d_bases], [*tables, *phases, *bases], strict=True)
            found = [*[d.to(t.dtype) for d, t in pairs], *found]
        if needs_x:
            dx = dx.to(x_dtype) if add is not None or not add_input else g + dx
            found = [channels_last(dx) if to_last else dx, *found]
    return found


def _autograd(
    x: Tensor,
    residual: Tensor | None,
    tables: list[Tensor],
    phases: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
    constants: list[Tensor],
    *arguments: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    operands = *tables, *phases, *bases
    trains = not constants and wants_gradient(operands)
    if not trains and not wants_gradient([x, residual, *layers]):
        found: Any = _BLOCK.without_autograd(x, residual, tables, phases, bases, layers, constants, *arguments)
        return found
    counts = len(tables), len(phases), len(bases), len(layers)
    return _Block.apply(arguments[:-2], counts, trains, constants, x, residual, *operands, *layers), [], [], []


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        arguments: tuple[Any, ...],
        counts: tuple[int, ...],
        trains: bool,
        constants: list[Tensor],
        x: Tensor,
        residual: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        """operands: tables, phases, bases and the parameters of the layers, as many as `counts` says."""
        parts = _cut(operands, counts)
        y, made, new, kept = _BLOCK.without_autograd(x, residual, *parts, constants, *arguments, True, trains)
        constants = constants or new
        for i, t in enumerate(kept):
            if t.ndim == 1:
                kept[i] = x
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *made, *constants, *kept)
        ctx.counts = *counts, len(made), len(constants), len(kept)
        ctx.arguments, ctx.trains = (*arguments, x.dtype, is_channels_last(x)), trains
        ctx.residual_dtype = None if residual is None else residual.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_x, needs_residual = ctx.needs_input_grad[4:6]
        tables, phases, bases, *rest = _cut(ctx.saved_tensors, ctx.counts)
        frozen = [] if ctx.trains else [None] * (len(tables) + len(phases) + len(bases))
        trained = (tables, phases, bases) if ctx.trains else ([], [], [])
        found = _GRADIENT(g, *trained, *rest, *ctx.arguments, needs_x)
        dx, d_residual = found[0] if needs_x else None, g.to(ctx.residual_dtype) if needs_residual else None
        return None, None, None, None, dx, d_residual, *frozen, *found[needs_x:]


def _cut(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    """Slices of these lengths, one after the other."""
    found, start = [], 0
    for n in counts:
        found.append(tensors[start : start + n])
        start += n
    return found


def _gradient_autograd(g: Tensor, *args: Any) -> list[Tensor]:
    tables, phases, bases, layers = args[:4]
    tensors = g, *tables, *phases, *bases, *layers
    if not wants_gradient(tensors):
        return _GRADIENT.without_autograd(g, *args)
    return list(FirstOrderOnly.apply(_GRADIENT, (g, *args), *tensors))


_OPERANDS = "Tensor[] tables, Tensor[] phases, Tensor[] bases, Tensor[] layers"
_SHARED = "str form, int[] dims, str gain, float scale, ScalarType dtype, bool add_input, bool is_real"
_BLOCK = Operator(
    f"block(Tensor x, Tensor? residual, {_OPERANDS}, Tensor[] constants, {_SHARED}, bool keep, bool trains)"
    " -> (Tensor, Tensor[], Tensor[], Tensor[])",
    _forward,
    _autograd,
)
_GRADIENT = Operator(
    f"block_backward(Tensor g, {_OPERANDS}, Tensor[] made, Tensor[] constants, Tensor[] kept, {_SHARED},"
    " ScalarType x_dtype, bool to_last, bool needs_x) -> Tensor[]",
    _backward,
    _gradient_autograd,
)
