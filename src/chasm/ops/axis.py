"""Axis passes: one operator per axis, composed, in several equal forms; one place that chooses the form.

`prepare` turns operators into the constants a form needs at one input size (merged channel matrices, circulants, ...);
`run` applies them. A module in eval keeps what `prepare` returned, in training both happen in every step.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.ops import fused, reference
from chasm.ops.chain import chain, mix
from chasm.ops.circulants import LONGEST, Circulants, circulants, matrices, obstacle
from chasm.ops.gains import impulse_response
from chasm.ops.kernels import traced, transformed
from chasm.ops.kernels.layout import contiguous
from chasm.ops.precision import exact_product, full_precision
from chasm.ops.product import circulant_row, circulant_rows, product
from chasm.ops.transforms import DenseTransform, FourierTransform, Transform

FORMS = {
    "reference": "the paper's equations literally (complex channel products); the oracle",
    "fft": "real FFT of the axes, real channel products on the coefficients, own backward",
    "dft": "as fft, but the transform is a product with cosine and sine matrices; no complex dtype",
    "circulant": "each gain as a circulant matrix per channel; products of real matrices only",
    "triton": "as circulant, by Triton kernels with their own backward; half precision on CUDA",
    "fused": "as dft, an axis by one Triton kernel (channels first: W; H as triton); bfloat16 on CUDA, no gradient",
    "product": "as circulant, image by image and with own backward; what a CPU does best",
}
GPU_FORMS = ("triton", "fused")
LONG = 512  # of an axis on a GPU: beyond, circulants are as large as maps; they are not kept, and not always made
OUTWEIGHED = 4  # times what the batch takes: so large they are not made


class AxisOperator(NamedTuple):
    """One axis of CHASM: M(k) = U diag(gains[k]) U^T along dimension `dim` of (B, C, *spatial)."""

    dim: int
    U: Tensor | None  # (C, C) shared, (K, C, C) untied, None for the identity basis
    gains: Tensor  # (K, C) real, or complex with real DC and Nyquist

    @property
    def untied(self) -> bool:
        return self.U is not None and self.U.ndim == 3


class Choice(NamedTuple):
    form: str
    reason: str


class Prepared(NamedTuple):
    """Constants of one form at one input size."""

    form: str
    dtype: torch.dtype  # inputs are cast to this
    dims: tuple[int, ...]
    mats: list[Tensor | None]  # channel matrices around the gains; "reference" and untied: one per axis
    tables: list[Tensor]  # gains, circulants or first columns of circulants, as the form wants them; untied: none
    circulants: list[Circulants] = []  # noqa: RUF012  of "triton", made from the tables; of "fused", along H
    bases: list[Tensor | None] = []  # noqa: RUF012  of "triton", to which gradients go; mats are constants there
    symmetric: bool = True  # are the operators: real gains
    apart: list[tuple["Prepared", Tensor, Tensor]] = []  # noqa: RUF012  or: passes without their mean gain; it, in two


def choose_form(
    shape: torch.Size,
    operators: list[AxisOperator],
    *,
    device: torch.device,
    grad: bool,
    dtype: torch.dtype = torch.float32,
    form: str = "auto",
    channels_last: bool = False,
) -> Choice:
    """Which form runs on a (B, C, *spatial) input, and why. `grad`: is a backward wanted? `form` forces one.

    `channels_last`: that is how the input lies.
    """
    untied = any(op.untied for op in operators)
    is_complex = any(op.gains.is_complex() for op in operators)
    dims = [op.dim for op in operators]
    no_place = "compiled or transformed code holds no kernels of ours" if transformed() else None
    if form != "auto":
        if form not in FORMS:
            raise ValueError(f"unknown form {form!r}: {suggest(form, ['auto', *FORMS])}")
        if form in ("dft", "circulant", "triton", "fused", "product") and untied:
            raise ValueError(f"form {form!r} needs one basis for all frequencies, got an untied one: use 'fft'")
        if form in ("dft", "fused") and is_complex:
            raise ValueError(f"form {form!r} needs real gains, got complex ones: use 'fft' or 'circulant'")
        if form in GPU_FORMS:
            breaks = torch.compiler.is_compiling() and not torch.compiler.is_exporting()  # its graph, around a kernel
            reason = "it has no gradient" if form == "fused" and grad else None if breaks else no_place
            reason = reason or (fused.obstacle if form == "fused" else obstacle)(shape, dims, device, dtype)
            if reason:
                raise ValueError(f"form {form!r} cannot run: {reason}; use 'auto'")
        return Choice(form, "forced by the user")
    if untied:
        return Choice("fft", "an untied basis needs a matrix per frequency")
    if torch.compiler.is_exporting():
        return Choice("fft", "the form whose shapes stay symbolic in H and W")
    longest = max(shape[d] for d in dims)
    if device.type == "cpu":
        if longest <= 128 and not transformed():
            return Choice("product", "on a CPU products with circulants beat the FFT on axes at most 128 long")
        if longest <= 128 and not (grad and torch.compiler.is_compiling()):
            return Choice("circulant", "as on a CPU by itself, in operations that torch.func and compilers can follow")
        return Choice("fft", "on a CPU the FFT beats products with circulants on axes longer than 128, or traced")
    if dtype.itemsize >= 4 or longest > LONGEST:
        return Choice("fft", "in float32, and on long axes, the FFT beats matrix products on this device")
    if not no_place and any(shape[d] > LONG and shape[d] ** 2 * shape[1] > OUTWEIGHED * shape.numel() for d in dims):
        return Choice("fft", "circulants of a long axis would take far more memory than these features")
    why = no_place or obstacle(shape, dims, device, dtype)
    if why is None:
        if not grad and not is_complex and fused.pays(shape, dims, device, dtype, channels_last):
            return Choice("fused", "no gradient is wanted, and channels and axes fit kernels that make a whole pass")
        return Choice("triton", f"half-precision matrix products beat the FFT up to length {LONGEST}")
    if is_complex:
        form = "circulant" if longest <= LONG else "fft"
    elif grad:
        form = "dft" if longest <= LONG or no_place else "fft"
    else:
        form = "circulant" if longest <= LONG or not no_place else "dft"
    return Choice(form, f"half precision by torch's own operations; not 'triton': {why}")


def prepare(shape: torch.Size, operators: list[AxisOperator], form: str, dtype: torch.dtype) -> Prepared:
    """The constants of `form` for inputs of this shape and dtype. Differentiable in the operators."""
    device = operators[0].gains.device
    if form in ("reference", "fft", "product") or (device.type == "cpu" and form not in GPU_FORMS):
        dtype = torch.promote_types(dtype, torch.float32)  # FFTs, and products on a CPU, never below float32
    halves = form in ("dft", "circulant") and dtype.itemsize == 2 and torch.is_grad_enabled()
    if halves and any(op.U is not None and op.U.requires_grad for op in operators):
        return _prepare_apart(shape, operators, form, dtype)
    return _prepare(shape, operators, form, dtype)


def _prepare_apart(shape: torch.Size, operators: list[AxisOperator], form: str, dtype: torch.dtype) -> Prepared:
    """M(k) = mu + U diag(lambda_k - mu) U^T with a constant mu, whose rounding then stays out of the gradient of U.

    That is one channel product more than merged bases take; see `circulants` for why half precision needs it.
    """
    apart = []
    for op in operators:
        with torch.no_grad():
            gains = op.gains.real if op.gains.is_complex() else op.gains
            first = gains[0, 0]
            beyond = (gains - first).mean()  # nothing to the last bit where all gains are equal
            upper = (first + beyond).to(dtype)
            lower = (first + beyond - upper).to(dtype)
        pass_ = op._replace(gains=op.gains - first - beyond)
        apart.append((_prepare(shape, [pass_], form, dtype), upper, lower))
    return Prepared(form, dtype, tuple(op.dim for op in operators), [], [], apart=apart)


def _prepare(shape: torch.Size, operators: list[AxisOperator], form: str, dtype: torch.dtype) -> Prepared:
    device = operators[0].gains.device
    dims = tuple(op.dim for op in operators)
    mats: list[Tensor | None]
    with full_precision(operators[0].gains):
        if form == "reference":
            eye = torch.eye(shape[1], device=device)
            mats, tables = [eye if op.U is None else op.U for op in operators], [op.gains for op in operators]
        elif any(op.untied for op in operators):
            mats, tables = [channel_operators(op) for op in operators], []
        else:
            if form in GPU_FORMS:
                columns = [impulse_response(op.gains, shape[op.dim]) for op in operators]
            if form == "triton":
                bases = [op.U for op in operators]
                wanted = torch.is_grad_enabled() and any(U is not None and U.requires_grad for U in bases)
                found = [matrices(column.detach(), dtype, wanted) for column in columns]
                with torch.no_grad():
                    mats = [None if A is None else A.to(dtype) for A in merged_matrices(operators)]
                symmetric = not any(op.gains.is_complex() for op in operators)
                return Prepared(form, dtype, dims, mats, columns, found, bases, symmetric)
            mats = merged_matrices(operators)
            if form == "fused":
                return prepare_for_kernels(form, dtype, dims, mats, columns)
            if form == "circulant":
                tables = [circulant(op.gains, shape[op.dim]) for op in operators]
            elif form == "product":
                rows = [circulant_row(op.gains, shape[op.dim], op.dim == len(shape) - 1) for op in operators]
                tables = [row if row.requires_grad else circulant_rows(row) for row in rows]
            else:
                transform = _transform(form, shape, dims)
                place = {dim: i - len(dims) for i, dim in enumerate(sorted(dims))}
                tables = [transform.gains(op.gains, place[op.dim], len(shape) - 2) for op in operators]
    cast = [None if A is None else A.to(dtype) for A in mats]
    wide = torch.promote_types(dtype, torch.complex64)
    return Prepared(form, dtype, dims, cast, [t.to(wide if t.is_complex() else dtype) for t in tables])


def prepare_for_kernels(
    form: str,
    dtype: torch.dtype,
    dims: tuple[int, ...],
    mats: list[Tensor | None],
    columns: list[Tensor],
    symmetric: bool = True,
) -> Prepared:
    """Constants of "triton" or "fused", without a gradient, of merged matrices and the circulants' first columns."""
    cast = [None if A is None else A.to(dtype).contiguous() for A in mats]
    if form == "triton":
        found = [matrices(column, dtype) for column in columns]
        return Prepared(form, dtype, dims, cast, columns, found, [None] * len(dims), symmetric)
    gains = [torch.fft.rfft(column).real.mT for column in columns]
    tables = [fused.gain_table(g, column.shape[1]).to(dtype) for g, column in zip(gains, columns, strict=True)]
    along_h = [matrices(column, dtype) for column, dim in zip(columns, dims, strict=True) if dim == 2]
    return Prepared(form, dtype, dims, cast, tables, along_h)


def run(x: Tensor, prepared: Prepared, *, wrapped: bool = False) -> Tensor:
    """Apply prepared operators, first to last, to x (B, C, *spatial); returns x's shape and dtype.

    `wrapped`: a depthwise convolution follows; return the memory format it likes best where that costs nothing
    (form "product" channels last, for a CPU; form "fused" channels first, for kernels).
    """
    return run_beside(x, prepared, wrapped=wrapped)[0]


def run_beside(x: Tensor, prepared: Prepared, *, wrapped: bool = False) -> tuple[Tensor, Tensor]:
    """The same, and x again to add the result to: form "triton" then sums the two gradients of x on the way."""
    if x.shape[0] == 0:
        return x.clone(), x  # FFT libraries refuse an empty batch
    form, dtype, dims, mats, tables, *_ = prepared
    if form == "fused":
        z = fused.fused(x.to(dtype), tables, prepared.circulants, mats, dims, first=wrapped)
        return z.to(x.dtype), x
    z = contiguous(x.to(dtype))
    for one, upper, lower in prepared.apart:
        z = torch.addcmul(torch.addcmul(run(z, one), z, lower), z, upper)
    if prepared.apart:
        return z.to(x.dtype), x
    with full_precision(x):
        if form == "reference":
            for U, gains, dim in zip(mats, tables, dims, strict=True):
                assert U is not None
                z = reference.axis_pass(z, U, gains, dim)
        elif not tables:
            for M, dim in zip(mats, dims, strict=True):
                assert M is not None
                z = _frequency_product(M, z, dim)
        elif form == "triton":
            z, again = circulants(z, prepared.circulants, tables, mats, prepared.bases, dims, prepared.symmetric)
            x = again if x.dtype == dtype else x
        elif form == "product":
            z = product(z, dims, tables, mats, channels_last=wrapped)
        elif form == "circulant":
            z = channel_product(mats[0], z)
            for A, T, dim in zip(mats[1:], tables, dims, strict=True):
                z = channel_product(A, circulant_product(T, z, dim))
        else:
            # The transformed axes go last, in the order they stand.
            last = list(range(x.ndim - len(dims), x.ndim))
            unscaled = z.is_cuda and mats[-1] is not None and not traced(z)
            transform = _transform(form, x.shape, dims, unscaled)
            z = chain(_moved(z, sorted(dims), last), tables, mats, transform)
            z = _moved(z, last, sorted(dims))
    return z.to(x.dtype), x


def _transform(form: str, shape: torch.Size, dims: tuple[int, ...], unscaled: bool = False) -> Transform:
    sizes = tuple(shape[d] for d in sorted(dims))
    return DenseTransform(sizes) if form == "dft" else FourierTransform(sizes, unscaled)


def channel_operators(op: AxisOperator) -> Tensor:
    """M(k) = U diag(lambda_k) U^T for every frequency, (K, C, C)."""
    if op.U is None:
        return torch.diag_embed(op.gains)
    return exact_product(op.U * op.gains[:, None, :], op.U.mT)


def merged_matrices(operators: list[AxisOperator]) -> list[Tensor | None]:
    """A_0 = U_1^T, A_j = U_{j+1}^T U_j, A_m = U_m: the channel matrices before, between and after the gains."""
    bases = [op.U for op in operators]
    mats: list[Tensor | None] = [None if bases[0] is None else bases[0].mT]
    for U, V in pairwise(bases):
        mats.append(U if V is None else V.mT if U is None else exact_product(V.mT, U))
    return [*mats, bases[-1]]


def circulant(gains: Tensor, n: int) -> Tensor:
    """(K, C) gains -> (C, n, n) matrices T with T[c] v = irfft(gains[:, c] * rfft(v))."""
    column = impulse_response(gains, n)
    i = torch.arange(n, device=gains.device)
    return column[:, (i[:, None] - i) % n]


def channel_product(A: Tensor | None, x: Tensor) -> Tensor:
    """(C, C) matrix on the channels of (B, C, *spatial); None is the identity."""
    return x if A is None else mix(A, x.flatten(2)).view(x.shape)


def circulant_product(T: Tensor, x: Tensor, dim: int) -> Tensor:
    """T (C, n, n) along dimension dim of x (B, C, *spatial)."""
    last = dim == x.ndim - 1
    # (B, C, before, n, after); along the last axis the product is z T^T, with `before` as the rows.
    z = (
        x.reshape(*x.shape[:2], x.shape[2:-1].numel(), x.shape[-1])
        if last
        else x.reshape(*x.shape[:2], x.shape[2:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel())
    )
    if torch.is_grad_enabled() or transformed() or (not last and z.shape[2] > 1):
        return (torch.matmul(z, T.mT) if last else torch.matmul(T[:, None], z)).view(x.shape)
    # Image by image: broadcasting would copy T once per image.
    z = z if last else z[:, :, 0]
    out = torch.empty_like(z)
    for image, result in zip(z, out, strict=True):
        torch.bmm(image, T.mT, out=result) if last else torch.bmm(T, image, out=result)
    return out.view(x.shape)


def _frequency_product(M: Tensor, x: Tensor, dim: int) -> Tensor:
    """M (K, C, C), one matrix per frequency, along dimension dim of x."""
    X = torch.fft.rfft(x.movedim(dim, -1))
    Z = torch.view_as_complex(torch.einsum("kcd,bd...kr->bc...kr", M, torch.view_as_real(X)).contiguous())
    return _moved(torch.fft.irfft(Z, n=x.shape[dim]), [x.ndim - 1], [dim])


def _moved(x: Tensor, source: list[int], target: list[int]) -> Tensor:
    """x with dimensions moved, contiguous. Never a view: torch's compiler cannot lay out one whose size is free where a
    convolution reads it and a backward keeps it.
    """
    return x if source == target else x.movedim(source, target).contiguous()
