"""Gain table Gamma (B, C) -> gains lambda (K, C) at the K = n//2 + 1 rFFT bins of an axis of length n."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from chasm.ops._cost import counted_as
from chasm.ops.constants import constant
from chasm.ops.kernels import traced
from chasm.ops.precision import exact_product

UNIT_GAIN = math.log(math.e - 1)  # softplus of this is 1
LONGEST_BY_PRODUCT = 512  # whose matrix of cosines is kept


def interpolation_matrix(K: int, B: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(K, B): linear interpolation on the normalised frequency k/(K-1), end points aligned. B = K gives I exactly.

    A matrix product, because torch's own interpolation has no deterministic backward on CUDA.
    """
    k, b = torch.arange(K, device=device), torch.arange(B, device=device)
    steps = max(K - 1, 1)
    # Hat functions 1 - |k/(K-1) - b/(B-1)| (B-1), with the difference taken in integers so that it is exact.
    distance = (k[:, None] * (B - 1) - b * steps).abs().to(dtype) / steps
    return (1 - distance).clamp(min=0)


def table_at(table: Tensor, n: int) -> Tensor:
    """The table (B, ...) read at the rFFT bins of length n -> (K, ...), in float32 or wider."""
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    K, B = n // 2 + 1, table.shape[0]
    if not torch.compiler.is_exporting() and K == B:  # the matrix would be the identity
        return table
    W = interpolation_matrix(K, B, table.device, table.dtype)
    with counted_as("interpolation"):
        return exact_product(W, table)


def positive_gains(table: Tensor, n: int) -> Tensor:
    return softplus(table_at(table, n))


def signed_gains(table: Tensor, n: int) -> Tensor:
    return table_at(table, n)


def complex_gains(table: Tensor, phase_table: Tensor, n: int) -> Tensor:
    """softplus(Gamma) e^{i phi}, with phi = 0 at DC and, for even n, at Nyquist: the output stays real."""
    k = torch.arange(n // 2 + 1, device=table.device)
    turns = ((k > 0) & (2 * k != n)).to(torch.float32)[:, None]
    return torch.polar(positive_gains(table, n), table_at(phase_table, n) * turns)


def impulse_response(gains: Tensor, n: int) -> Tensor:
    """(K, C) gains -> (C, n): what the filter of each channel makes of a unit impulse, first column of its circulant.

    Only what gains differ from the first is transformed, so that flat ones give the impulse to the last bit.
    """
    if gains.is_cuda and n <= LONGEST_BY_PRODUCT and gains.dtype == torch.float32 and not traced(gains):
        column: Tensor = _Impulse.apply(gains, n)
        return column
    first = gains[:1]
    impulse = pad((first.real if first.is_complex() else first).mT, (0, n - 1))
    return impulse + torch.fft.irfft((gains - first).mT, n=n)


def _cosines(device: torch.device, n: int) -> Tensor:
    """(K, n): the inverse real FFT of a real spectrum."""
    k, i = torch.arange(n // 2 + 1, device=device)[:, None], torch.arange(n, device=device)
    twice = ((k > 0) & (2 * k != n)) + 1
    return (torch.cos((k * i % n).double() * (2 * math.pi / n)) * twice / n).float()


class _Impulse(torch.autograd.Function):
    """The impulse response of real gains as a product: a fraction of the launches of an FFT and its backward."""

    @staticmethod
    def forward(gains: Tensor, n: int) -> Tensor:
        with counted_as("fft"):  # what it stands for
            column = exact_product((gains - gains[:1]).mT, constant(_cosines, gains, n))
        column[:, 0] += gains[0]
        return column

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.cosines = constant(_cosines, inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        return None if g is None else exact_product(ctx.cosines, g.mT), None
