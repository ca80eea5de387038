"""The precision policy in one place: FFTs, bases and gains run inside `full_precision`, whatever autocast says."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast is off on the device of x.

    >>> with torch.autocast("cpu"), full_precision(torch.zeros(1)):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def upcast(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it has that dtype.

    >>> upcast(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast would run products of x; None if it is off or ignores x (float64, meta).

    >>> with torch.autocast("cpu"):
    ...     autocast_dtype(torch.zeros(1)), autocast_dtype(torch.zeros(1, dtype=torch.float64))
    (torch.bfloat16, None)
    """
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def float64_device(device: torch.device) -> torch.device:
    """Return the device on which float64 tables for a device are computed: itself, or the CPU for Apple GPUs.

    Apple GPUs have no float64.

    >>> float64_device(torch.device("mps")), float64_device(torch.device("cuda", 1))
    (device(type='cpu'), device(type='cuda', index=1))
    """
    return torch.device("cpu") if device.type == "mps" else device


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Set whether float32 products and convolutions may round their inputs to TF32 (10 bits) on a GPU.

    This is for programs, never for modules. torch allows it by default for the convolutions of cuDNN and not for matrix
    products. The earlier settings come back at the end. torch's older settings are used, because compiled code still
    reads those, and fails if the newer ones were written.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
