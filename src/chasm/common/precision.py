"""The precision policy in one place: what autocast must not touch runs inside `full_precision`."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off on the device of x (tensors without storage have no autocast)."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast would run x's products in; None where it is off or leaves x alone (float64)."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """For programs, never for modules: may float32 products and convolutions round their inputs to TF32 (10 bits)?

    torch's defaults are a silent mixture: no for matrix products, yes for cuDNN's convolutions. The settings of
    before come back at the end. They are torch's older ones, because compiled code still reads those, and fails
    where the newer ones were written.
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
