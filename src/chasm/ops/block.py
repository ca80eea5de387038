"""The operator `chasm::block`: a chain of axis passes and, where asked, the layers around it, with its own backward.

In training one function leads from the parameters of a mixer to its output, and another one back:

    parameters -> gains and bases -> constants of the form -> passes -> layers -> output

A module in eval computes the constants once (`prepare`) and keeps them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chasm.common.precision import full_precision, upcast
from chasm.ops import basis, local, reference
from chasm.ops.forms.base import Form, Passes
from chasm.ops.forms.fft import FFT, frequency_product
from chasm.ops.forms.fft_kernels import FFTKernels
from chasm.ops.forms.fused import Fused
from chasm.ops.forms.triton import Triton
from chasm.ops.gains import gains_adjoint, gains_of, stepped
from chasm.ops.kernels import has_triton
from chasm.ops.kernels.layout import channels_last, contiguous, is_channels_last
from chasm.ops.library import FirstOrderOnly, TorchOperator, wants_gradient
from chasm.ops.operators import AxisOperator, AxisSource

_FORMS: dict[str, Form] = {"fft": FFT(), "triton": Triton(), "fused": Fused()}
_FFT_KERNELS = FFTKernels()
_COMPUTED = "computed"  # the kind of gain of a chain that hands over gains and bases instead of parameters


class Chain(NamedTuple):
    """Axis passes, one after the other, in one form."""

    form: str  # one that can run, see `dispatch.choose_form`; "none" for no passes at all
    dtype: torch.dtype  # of the features that enter and leave the passes
    # One for each pass, in order; all with a basis, or none. Plain forms and `prepare` take operators only.
    operators: Sequence[AxisOperator] | Sequence[AxisSource]
    constants: Sequence[Tensor] = ()  # computed from the operators by `prepare`, which then get no gradient

    @property
    def is_plain(self) -> bool:
        """True if it runs in plain torch operations, which torch.func, torch.export and second derivatives follow."""
        if self.form == "reference" or not self.operators:
            return self.form == "reference"
        first = self.operators[0]
        return isinstance(first, AxisOperator) and first.U is not None and first.U.ndim == 3


def prepare(chain: Chain, shape: torch.Size) -> Chain:
    """Return the chain with its constants for inputs (B, C, *spatial) with any batch. They record no gradient."""
    if chain.is_plain:
        return chain
    dims, operands, *_ = _unpack(chain.operators)
    gains = operands.tables
    with torch.no_grad(), full_precision(gains[0]):
        form = _form(chain.form, gains[0], chain.dtype, not gains[0].is_complex())
        constants = form.prepare(shape, Passes(dims, gains, operands.bases), chain.dtype, False)
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
        mean = torch.stack([run(x, [chain]) for chain in chains]).mean(0)
        y = run(mean, [Chain("none", chains[0].dtype, [])], layers=layers, residual=residual)
        # A mean is contiguous whatever x is. Plain forms also run in torch.func, where vmap hides the memory format.
        to_last = not chains[0].is_plain and is_channels_last(x)
        return y.contiguous(memory_format=torch.channels_last) if to_last else y
    chain = chains[0]
    if chain.is_plain:
        return _run_plain(x, chain)
    if chain.form == "none" and not layers:
        return x
    dims, (tables, phases, bases, _), gain, scale = _unpack(chain.operators)
    is_real = not phases and not (tables and tables[0].is_complex())
    add_input = residual is x
    settings = BlockSettings(chain.form, dims, gain, scale, chain.dtype, add_input, is_real)
    lists = tables, phases, bases, layers, chain.constants
    output: Tensor = _BLOCK(x, None if add_input else residual, *lists, *settings, False, False)[0]
    return output


def can_join_layers(x: Tensor, chains: Sequence[Chain]) -> bool:
    """Return True if `run` can compute the layers around these chains: by kernels, or on a CPU in the form "fft"."""
    dtype, form = chains[0].dtype, chains[0].form
    if chains[0].is_plain or x.ndim != 4:
        return False
    if x.is_cuda or local.IS_INTERPRETED:
        return local.obstacle(x, dtype) is None
    fits = x.device.type == "cpu" and x.dtype == dtype and dtype in (torch.float32, torch.float64)
    return fits and form == "fft" and len(chains) == 1 and x.is_contiguous()


def _form(name: str, x: Tensor, dtype: torch.dtype, is_real: bool) -> Form:
    """Return the form of a name for features on the device of x, with real gains or not."""
    by_kernels = name == "fft" and is_real and x.is_cuda and dtype != torch.float64 and has_triton()
    return _FFT_KERNELS if by_kernels else _FORMS[name]


def _run_plain(x: Tensor, chain: Chain) -> Tensor:
    with full_precision(x):
        z = upcast(x)
        for op in chain.operators:
            assert isinstance(op, AxisOperator)
            if chain.form == "reference":
                U = torch.eye(x.shape[1], device=x.device) if op.U is None else op.U
                gains_dtype = torch.promote_types(z.dtype, torch.complex64) if op.gains.is_complex() else z.dtype
                z = reference.axis_pass(z, U.to(z.dtype), op.gains.to(gains_dtype), op.dim)
            else:
                z = frequency_product(z, op)
        return z.to(x.dtype)


# --- what the registered operator takes: lists of tensors and settings, for a schema knows no records ---


class Operands(NamedTuple):
    """The tensors that gradients go to."""

    tables: Sequence[Tensor]  # for each pass its gain table; with computed gains the gains (K, C) themselves
    phases: Sequence[Tensor]  # for each pass its phase table; empty unless gains are complex
    bases: Sequence[Tensor]  # for each pass its theta, or the basis U (C, C) if that was computed; empty for U = 1
    layers: Sequence[Tensor] = ()  # the parameters of `local`, or none

    @property
    def spectral(self) -> list[Tensor]:
        """All but those of the layers."""
        return [*self.tables, *self.phases, *self.bases]


class BlockSettings(NamedTuple):
    """Everything else that decides what the operator computes."""

    form: str
    dims: Sequence[int]  # the axis of each pass
    gain: str  # the kind of gain, or `_COMPUTED`
    scale: float  # the step scale
    dtype: torch.dtype  # that the passes compute in
    add_input: bool  # x itself is the residual
    is_real: bool  # all gains are


def _unpack(operators: Sequence[Any]) -> tuple[list[int], Operands, str, float]:
    """Return the axis of every pass, the operands, the kind of gain and the step scale."""
    dims: list[int] = []
    tables: list[Tensor] = []
    phases: list[Tensor] = []
    bases: list[Tensor] = []
    gain, scale = _COMPUTED, 1.0
    for op in operators:
        dims.append(op.dim)
        if isinstance(op, AxisSource):
            _, U, table, phase, gain, scale = op
            phases += [] if phase is None else [phase]
        else:
            _, U, table = op
        tables.append(table)
        bases += [] if U is None else [U]
    return dims, Operands(tables, phases, bases), gain, scale


# --- forward and backward, without autograd -------------------------------------------------------------


def _forward(
    x: Tensor,
    residual: Tensor | None,
    tables: list[Tensor],
    phases: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
    constants: list[Tensor],
    *settings_and_flags: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Return the output, and what a backward needs: gains and bases, constants computed here, and saved maps.

    The flags are `save`: a backward follows, and `trains`: it computes gradients of the spectral parameters. Without
    `save` the lists are empty. An empty tensor stands for x, which an operator may not return.
    """
    *fields, save, trains = settings_and_flags
    settings, operands = BlockSettings(*fields), Operands(tables, phases, bases, layers)
    spectra: list[Tensor] = []
    new_constants: list[Tensor] = []
    saved: list[Tensor] = []
    with full_precision(x):
        y = x.to(settings.dtype)
        y = y if settings.form == "fused" and is_channels_last(y) else contiguous(y)
        if settings.form != "none":
            form = _form(settings.form, x, settings.dtype, settings.is_real)
            if not constants:
                spectra = _gains_and_bases(operands, settings, x.shape)
                passes = _passes(operands, spectra, settings)
                constants = new_constants = form.prepare(x.shape, passes, settings.dtype, trains)
            y, saved = form.forward(y, settings.dims, constants, trains, bool(layers))
        if layers:
            y, saved_by_layers = local.forward(y, x if settings.add_input else residual, layers, save)
            saved = [*saved_by_layers, *saved]
        if not settings.add_input and residual is None:
            y = y.to(x.dtype if layers else settings.dtype)
        y = channels_last(y) if is_channels_last(x) else contiguous(y)
    y = y.clone() if y is x else y
    if not save:
        return y, [], [], []
    return y, spectra if trains else [], new_constants, [x.new_empty(0) if t is x else t for t in saved]


def _backward(
    g: Tensor,
    tables: list[Tensor],
    phases: list[Tensor],
    bases: list[Tensor],
    layers: list[Tensor],
    spectra: list[Tensor],
    constants: list[Tensor],
    saved: list[Tensor],
    *settings_and_flags: Any,
) -> list[Tensor]:
    """Return the gradients of x if it needs one, then of tables, phases, bases and layers.

    The flags are the dtype of x, whether x is channels last, and whether its gradient is wanted.
    """
    *fields, x_dtype, to_last, needs_x = settings_and_flags
    settings, operands = BlockSettings(*fields), Operands(tables, phases, bases, layers)
    with full_precision(g):
        g = contiguous(g)
        gz = g.to(settings.dtype)
        add = gz if settings.add_input and x_dtype == settings.dtype else None  # the forms add it on their way
        gradients: list[Tensor] = []
        if layers:
            n = local.count_saved(gz)
            gz, *gradients = local.backward(gz, saved[:n], layers)
            saved = saved[n:]
        if settings.form == "none":
            dx = gz if add is None else gz + add
        elif needs_x or tables:
            form = _form(settings.form, gz, settings.dtype, settings.is_real)
            passes = _passes(operands, spectra, settings)
            d, d_gains, d_bases = form.backward(gz, saved, passes, constants, needs_x, add, settings.is_real)
            dx = gz if d is None else d
            spectral = _spectral_gradients(d_gains, d_bases, operands, spectra, settings, g.shape)
            gradients = [*spectral, *gradients]
        if needs_x:
            dx = dx.to(x_dtype) if add is not None or not settings.add_input else g + dx
            gradients = [channels_last(dx) if to_last else dx, *gradients]
    return gradients


def _gains_and_bases(operands: Operands, settings: BlockSettings, shape: torch.Size) -> list[Tensor]:
    """Return the gains of every pass, then all bases in one tensor, then what the gradient of these needs.

    Gains and bases that were computed elsewhere are left out.
    """
    tables, phases, bases, _ = operands
    spectra: list[Tensor] = []
    if settings.gain != _COMPUTED:
        for j, dim in enumerate(settings.dims):
            phase = phases[j] if phases else None
            spectra.append(gains_of(tables[j], phase, settings.gain, settings.scale, shape[dim]))
        if bases and bases[0].ndim == 1:  # they are thetas
            U, saved = basis.forward(stepped(torch.stack(list(bases)), settings.scale))
            spectra += [U, *saved]
    return spectra


def _passes(operands: Operands, spectra: Sequence[Tensor], settings: BlockSettings) -> Passes:
    """Return the passes with the gains and bases of `_gains_and_bases`, or with those that were handed over."""
    dims, m = settings.dims, len(settings.dims)
    if not spectra:
        return Passes(dims, operands.tables, operands.bases)
    return Passes(dims, spectra[:m], spectra[m].unbind() if len(spectra) > m else operands.bases)


def _spectral_gradients(
    d_gains: list[Tensor],
    d_bases: list[Tensor],
    operands: Operands,
    spectra: list[Tensor],
    settings: BlockSettings,
    shape: torch.Size,
) -> list[Tensor]:
    """Return the gradients of tables, phases and bases (or thetas) from those of gains and bases."""
    tables, _, bases, _ = operands
    d_phases: list[Tensor] = []
    if spectra:
        m = len(settings.dims)
        for j, dim in enumerate(settings.dims):
            d_gains[j], d_phase = gains_adjoint(d_gains[j], spectra[j], len(tables[j]), settings.gain, shape[dim])
            d_phases += [] if d_phase is None else [d_phase]
        if len(spectra) > m:
            d_bases = list(basis.backward(torch.stack(d_bases), bases[0], spectra[m + 1 :]).unbind())
    gradients = [*d_gains, *d_phases, *d_bases]
    return [d.to(t.dtype) for d, t in zip(gradients, operands.spectral, strict=True)]


# --- autograd -------------------------------------------------------------------------------------------


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
    operands = Operands(tables, phases, bases, layers)
    spectral = operands.spectral
    trains = not constants and wants_gradient(spectral)
    if not trains and not wants_gradient([x, residual, *layers]):
        results: Any = _BLOCK.without_autograd(x, residual, *operands, constants, *arguments)
        return results
    counts = [*map(len, operands)]
    settings = arguments[:-2]
    return _Block.apply(settings, counts, trains, constants, x, residual, *spectral, *layers), [], [], []


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: tuple[Any, ...],
        counts: list[int],
        trains: bool,
        constants: list[Tensor],
        x: Tensor,
        residual: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        """`tensors` are the lists of the operands, one after the other; `counts` has their lengths."""
        operands = _split(tensors, counts)
        y, spectra, new_constants, saved = _BLOCK.without_autograd(
            x, residual, *operands, constants, *settings, True, trains
        )
        constants = constants or new_constants
        saved = [x if t.ndim == 1 else t for t in saved]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *spectra, *constants, *saved)
        ctx.counts = *counts, len(spectra), len(constants), len(saved)
        ctx.settings, ctx.trains = (*settings, x.dtype, is_channels_last(x)), trains
        ctx.residual_dtype = None if residual is None else residual.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_x, needs_residual = ctx.needs_input_grad[4:6]
        *spectral, layers, spectra, constants, saved = _split(ctx.saved_tensors, ctx.counts)
        frozen = [] if ctx.trains else [None] * sum(map(len, spectral))
        trained = spectral if ctx.trains else ([], [], [])
        gradients = _GRADIENT(g, *trained, layers, spectra, constants, saved, *ctx.settings, needs_x)
        dx, d_residual = gradients[0] if needs_x else None, g.to(ctx.residual_dtype) if needs_residual else None
        return None, None, None, None, dx, d_residual, *frozen, *gradients[needs_x:]


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    """Return slices of these lengths, one after the other."""
    slices, start = [], 0
    for n in counts:
        slices.append(tensors[start : start + n])
        start += n
    return slices


def _gradient_autograd(g: Tensor, *args: Any) -> list[Tensor]:
    tables, phases, bases, layers = args[:4]
    tensors = g, *tables, *phases, *bases, *layers
    if not wants_gradient(tensors):
        return _GRADIENT.without_autograd(g, *args)
    return list(FirstOrderOnly.apply(_GRADIENT, (g, *args), *tensors))


_OPERANDS = "Tensor[] tables, Tensor[] phases, Tensor[] bases, Tensor[] layers"
_SETTINGS = "str form, int[] dims, str gain, float scale, ScalarType dtype, bool add_input, bool is_real"
_BLOCK = TorchOperator(
    f"block(Tensor x, Tensor? residual, {_OPERANDS}, Tensor[] constants, {_SETTINGS}, bool save, bool trains)"
    " -> (Tensor, Tensor[], Tensor[], Tensor[])",
    _forward,
    _autograd,
)
_GRADIENT = TorchOperator(
    f"block_backward(Tensor g, {_OPERANDS}, Tensor[] spectra, Tensor[] constants, Tensor[] saved, {_SETTINGS},"
    " ScalarType x_dtype, bool to_last, bool needs_x) -> Tensor[]",
    _backward,
    _gradient_autograd,
)
