"""Gain table Gamma (B, C) -> gains lambda (K, C) at the K = n//2 + 1 rFFT bins of an axis of length n."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from chasm.common.cost import counted_as
from chasm.common.precision import float64_device
from chasm.common.tracing import is_exporting
from chasm.ops.library import constant
from chasm.ops.operators import exact_product

UNIT_GAIN = math.log(math.e - 1)  # softplus of this is 1
MAX_COSINES = 512  # longer axes use the FFT instead of a stored matrix of cosines


def interpolation_matrix(device: torch.device, K: int, B: int, dtype: torch.dtype) -> Tensor:
    """Return the (K, B) matrix of linear interpolation on the normalised frequency k/(K-1), end points aligned.

    B = K gives I exactly. It is a matrix, because torch's own interpolation has no deterministic backward on CUDA.

    Args:
        device: where it is made.
        K: frequencies to read the table at.
        B: bins of the table.
        dtype: of the table.
    """
    k, b = torch.arange(K, device=device), torch.arange(B, device=device)
    steps = max(K - 1, 1)
    # Hat functions 1 - |k/(K-1) - b/(B-1)| (B-1), with the difference taken in integers so that it is exact.
    distance = (k[:, None] * (B - 1) - b * steps).abs().to(dtype) / steps
    return (1 - distance).clamp(min=0)


def table_at(table: Tensor, n: int) -> Tensor:
    """Return the table (B, ...) read at the rFFT bins of length n, (K, ...), in float32 or wider."""
    K, B = n // 2 + 1, table.shape[0]
    if table.dtype.itemsize < 4:
        table = table.float()
    if not is_exporting() and K == B:  # the matrix would be the identity
        return table
    W = constant(interpolation_matrix, table, K, B, table.dtype)
    with counted_as("interpolation"):
        return exact_product(W, table)


def positive_gains(table: Tensor, n: int) -> Tensor:
    """Return softplus(Gamma) at the rFFT bins of length n."""
    return softplus(table_at(table, n))


def signed_gains(table: Tensor, n: int) -> Tensor:
    """Return Gamma itself at the rFFT bins of length n."""
    return table_at(table, n)


def complex_gains(table: Tensor, phase_table: Tensor, n: int) -> Tensor:
    """Return softplus(Gamma) e^{i phi}, with phi = 0 at DC and, for even n, at Nyquist: the output stays real.

    Args:
        table: Gamma (B, C).
        phase_table: phi (B, C).
        n: length of the axis.
    """
    return torch.polar(positive_gains(table, n), table_at(phase_table, n) * constant(_has_phase, table, n))


def _has_phase(device: torch.device, n: int) -> Tensor:
    """Return (K, 1): 0 at DC and Nyquist, else 1."""
    k = torch.arange(n // 2 + 1, device=device)
    return ((k > 0) & (2 * k != n)).to(torch.float32)[:, None]


# --- from the parameters of a mixer, and back -----------------------------------------------------------


def stepped(parameter: Tensor, scale: float, start: float = 0.0) -> Tensor:
    """Return start + scale * parameter, with the gradient of that handed to the parameter as it is.

    A step of any first-order optimiser then moves the result `scale` times as far as it would move the result
    itself: Adam and Lion step by the learning rate whatever the gradient, SGD in proportion to it.

    Args:
        parameter: as it is stored.
        scale: the step scale.
        start: what a parameter of zero stands for.
    """
    if scale == 1 and start == 0:
        return parameter
    scaled = torch.add(parameter, parameter.detach(), alpha=scale - 1)
    return scaled + start if start else scaled


def gains_of(table: Tensor, phase_table: Tensor | None, gain: str, scale: float, n: int) -> Tensor:
    """Return the gains of a mixer at the rFFT bins of length n.

    Args:
        table: (B, C) as it is stored: zeros are gains of one.
        phase_table: (B, C) as it is stored, of complex gains.
        gain: "positive", "signed" or "complex".
        scale: the step scale.
        n: length of the axis.
    """
    if gain == "signed":
        return signed_gains(stepped(table, scale, 1.0), n)
    table = stepped(table, scale, UNIT_GAIN)
    if phase_table is None:
        return positive_gains(table, n)
    return complex_gains(table, stepped(phase_table, scale), n)


def gains_adjoint(d: Tensor, gains: Tensor, bins: int, gain: str, n: int) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the tables of Gamma and, for complex gains, of phi. Records nothing.

    Args:
        d: gradient of the gains (K, C).
        gains: as `gains_of` returned them.
        bins: rows B of the tables.
        gain: "positive", "signed" or "complex".
        n: length of the axis.
    """
    if gain == "signed":
        return _table_adjoint(d, bins), None
    if gain == "positive":  # the slope of softplus is 1 - exp(-softplus)
        return _table_adjoint(d * -torch.expm1(-gains), bins), None
    size, d_log = gains.abs(), d * gains.conj()  # the gradient of the logarithm of the gains
    d_phase = d_log.imag * constant(_has_phase, d, n)
    return _table_adjoint(d_log.real / size * -torch.expm1(-size), bins), _table_adjoint(d_phase, bins)


def _table_adjoint(d: Tensor, bins: int) -> Tensor:
    """Return the gradient (B, C) of a table, for the gradient of what `table_at` returned."""
    K = len(d)
    return d if bins == K else exact_product(constant(interpolation_matrix, d, K, bins, d.dtype).mT, d)


# --- the filter of an axis as a circulant matrix: no gradients here, the forms have their own ------------


def impulse_response(gains: Tensor, n: int) -> Tensor:
    """Return (C, n): the response of each channel's filter to a unit impulse, the first column of its circulant.

    Only the difference to the first gain is transformed, so that flat gains give the impulse to the last bit.
    """
    first = gains[:1]
    if gains.is_complex() or n > MAX_COSINES:
        impulse = pad((first.real if first.is_complex() else first).mT, (0, n - 1))
        with counted_as("gain transform"):
            return impulse + torch.fft.irfft((gains - first).mT, n=n)
    with counted_as("gain transform"):  # a product with cosines takes a fraction of the launches of an FFT
        column = exact_product((gains - first).mT, _cosines_like(gains, n))
    column[:, 0] += gains[0]
    return column


def impulse_response_adjoint(d: Tensor, gains: Tensor) -> Tensor:
    """Return the gradient (K, C) of the gains for the gradient d (C, n) of their impulse response."""
    n = d.shape[1]
    if not gains.is_complex() and n <= MAX_COSINES:
        return exact_product(_cosines_like(gains, n), d.mT)
    d_gains = torch.fft.rfft(d).mT * constant(_bins_per_coefficient, d, n)[:, None].to(d.dtype) / n
    return d_gains if gains.is_complex() else d_gains.real


def _bins_per_coefficient(device: torch.device, n: int) -> Tensor:
    """Return (K,): the bins of a full FFT that a coefficient of a real one stands for, 1 at DC and Nyquist, else 2."""
    k = torch.arange(n // 2 + 1, device=device)
    return 2 - ((k == 0) | (2 * k == n)).long()


def _cosines_like(gains: Tensor, n: int) -> Tensor:
    """Return (K, n): the inverse real FFT of a real spectrum, in float32 where the kernel for float32 products runs.

    Apple GPUs, which have nothing wider, have it in float32, too.
    """
    exact = gains.dtype == torch.float64 or gains.device.type not in ("cuda", "mps")
    return constant(_cosines, gains, n, torch.float64 if exact else torch.float32)


def _cosines(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    home = float64_device(device)
    k, i = torch.arange(n // 2 + 1, device=home)[:, None], torch.arange(n, device=home)
    cosines = torch.cos((k * i % n).double() * (2 * math.pi / n))  # k i modulo n first: as exact for n = 500 as for 4
    return (cosines * _bins_per_coefficient(home, n)[:, None] / n).to(device, dtype)
