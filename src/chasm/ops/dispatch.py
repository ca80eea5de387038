"""Choose the form that runs, from kinds, sizes, dtype and device, before anything is computed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from chasm.common.registry import suggest
from chasm.ops.kernels import IS_INTERPRETED, has_triton
from chasm.ops.kernels.launch import has_large_blocks, is_blackwell

FORMS = {
    "reference": "the paper's equations literally (complex channel products); the oracle",
    "fft": "real FFT of the axes, real channel products on the coefficients, own backward",
    "triton": "each gain as a circulant matrix per channel, matrix products by Triton kernels; half precision on CUDA",
    "fused": "an axis by one Triton kernel (channels first: W; H as triton); bfloat16 on CUDA, no gradient",
}
GPU_FORMS = ("triton", "fused")

MAX_TRITON_AXIS = 2048
MAX_KEPT_CIRCULANT = 512  # longer circulants are as large as maps: they are not kept in eval
MAX_CIRCULANT_RATIO = 4  # fall back to the FFT once long circulants need 4x the memory of the input
MAX_FUSED_AXIS = 256
MIN_FUSED_CHANNELS, MAX_FUSED_CHANNELS = 16, 128  # all matrices of a pass stay in shared memory
MIN_FAST_FUSED_CHANNELS, MIN_FAST_FUSED_WIDTH = 32, 96  # below, an H200 is faster with "triton"


class Choice(NamedTuple):
    """A form and the reason it was chosen."""

    form: str
    reason: str


def choose_form(
    shape: torch.Size,
    dims: Sequence[int],
    *,
    basis: str,
    gain: str,
    device: torch.device,
    dtype: torch.dtype,
    grad: bool,
    channels_last: bool = False,
    transformed: bool = False,
    form: str = "auto",
) -> Choice:
    """Return the form that runs on an input, and why.

    Args:
        shape: `(B, C, *spatial)` of the input.
        dims: the axes that passes run along.
        basis: "shared", "identity" or "untied".
        gain: "positive", "signed" or "complex".
        device: of the input.
        dtype: of the input, or what autocast makes of it.
        grad: whether a backward follows.
        channels_last: whether the input lies in memory that way.
        transformed: whether only plain torch operations can follow (`tracing.is_transformed`).
        form: a form to force, or "auto".

    Raises:
        ValueError: if the forced form is unknown or cannot run.
    """
    if form != "auto":
        return _forced(form, shape, dims, basis, gain, device, dtype, grad, transformed)
    if basis == "untied":
        return Choice("fft", "an untied basis needs a matrix per frequency")
    if transformed:
        return Choice("reference", "torch.func, forward mode and torch.export follow plain torch operations only")
    if device.type == "cpu":
        return Choice("fft", "on a CPU the FFT beats matrix products")
    if dtype.itemsize >= 4:
        return Choice("fft", "in float32 the FFT beats matrix products on this device")
    if why := triton_obstacle(shape, dims, device, dtype):
        return Choice("fft", f"not 'triton': {why}")
    if any(
        shape[d] > MAX_KEPT_CIRCULANT and shape[d] ** 2 * shape[1] > MAX_CIRCULANT_RATIO * shape.numel() for d in dims
    ):
        return Choice("fft", "circulants of a long axis would take far more memory than these features")
    has_long_rows = channels_last or (3 in dims and shape[3] >= MIN_FAST_FUSED_WIDTH)
    is_fused_faster = has_long_rows and shape[1] >= MIN_FAST_FUSED_CHANNELS
    can_fuse = gain != "complex" and not grad
    if is_fused_faster and can_fuse and fused_obstacle(shape, dims, device, dtype) is None:
        return Choice("fused", "no gradient is wanted, and channels and axes fit kernels that make a whole pass")
    return Choice("triton", f"half-precision matrix products beat the FFT up to length {MAX_TRITON_AXIS}")


def _forced(
    form: str,
    shape: torch.Size,
    dims: Sequence[int],
    basis: str,
    gain: str,
    device: torch.device,
    dtype: torch.dtype,
    grad: bool,
    transformed: bool,
) -> Choice:
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}: {suggest(form, ['auto', *FORMS])}")
    if basis == "untied" and form not in ("reference", "fft"):
        raise ValueError(f"form {form!r} needs one basis for all frequencies, got an untied one: use 'fft'")
    if gain == "complex" and form == "fused":
        raise ValueError("form 'fused' needs real gains, got complex ones: use 'triton' or 'fft'")
    why = None
    if transformed and form != "reference" and basis != "untied":
        why = "torch.func, forward mode and torch.export follow plain torch operations only"
    elif form == "fused":
        why = "it has no gradient" if grad else fused_obstacle(shape, dims, device, dtype)
    elif form == "triton":
        why = triton_obstacle(shape, dims, device, dtype)
    if why:
        raise ValueError(f"form {form!r} cannot run: {why}; use 'auto'")
    return Choice(form, "forced by the user")


def can_be_kept(form: str, shape: torch.Size) -> bool:
    """Return True if the constants of a form are small enough to be kept from call to call."""
    return form != "triton" or max(shape[2:]) <= MAX_KEPT_CIRCULANT


def triton_obstacle(shape: torch.Size, dims: Sequence[int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why form "triton" cannot run, or None if it can.

    Args:
        shape: `(B, C, *spatial)` of the features.
        dims: the axes that passes run along.
        device: of the features.
        dtype: of the features.
    """
    if len(shape) != 4:
        return f"it needs 2-D features (B, C, H, W), got {len(shape) - 2} spatial axes"
    if max(shape[d] for d in dims) > MAX_TRITON_AXIS:
        return f"it takes axes up to {MAX_TRITON_AXIS}, got {tuple(shape[2:])}"
    if shape[1] * shape[2] * shape[3] >= 2**31:
        return f"offsets in an image are 32 bits wide, got {tuple(shape[1:])}"
    if not IS_INTERPRETED and (device.type != "cuda" or dtype.itemsize != 2):
        return f"it needs bfloat16 or float16 on a CUDA device, got {dtype} on {device.type}"
    return None if has_triton() else "triton cannot be imported"


def fused_obstacle(shape: torch.Size, dims: Sequence[int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why form "fused" cannot run, or None if it can.

    Args:
        shape: `(B, C, *spatial)` of the features.
        dims: the axes that passes run along.
        device: of the features.
        dtype: of the features.
    """
    fits = all(shape[d] % 2 == 0 and shape[d] <= MAX_FUSED_AXIS for d in dims)
    if not fits or not MIN_FUSED_CHANNELS <= shape[1] <= MAX_FUSED_CHANNELS:
        return (
            f"it takes {MIN_FUSED_CHANNELS} to {MAX_FUSED_CHANNELS} channels and even axes up to {MAX_FUSED_AXIS},"
            f" got {tuple(shape[1:])}"
        )
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"it needs bfloat16 (the mean of a map could overflow in float16), got {dtype}"
    why = triton_obstacle(shape, dims, device, dtype)
    if why is None and device.type == "cuda" and not has_large_blocks(device):
        return "its blocks need more shared memory than this card has"
    if why is None and is_blackwell(device):
        return "its running sums need more tensor memory than this card has"
    return why
