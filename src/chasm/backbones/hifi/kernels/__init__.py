"""Triton kernels that only this host uses, each beside the plain form it must match."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from chasm.common.tracing import is_transformed

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAS_TRITON = find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Return True if the kernels can run on x: on a GPU, or in Triton's interpreter.

    They have no forward-mode derivatives, which torch.func would take for zero, so they leave transformed x to torch.
    """
    on_gpu = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return HAS_TRITON and on_gpu and x.dtype in DTYPES and x.numel() > 0 and not is_transformed(x)
