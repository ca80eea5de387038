"""Small tensors that depend on sizes alone: made once, so that a step launches nothing for them and copies nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from chasm.ops._cost import counted_as
from chasm.ops.kernels import traced

_kept: dict[Any, Tensor] = {}  # a captured CUDA graph reads them by address: none ever goes


def constant(make: Callable[..., Tensor], like: Tensor, *args: Any) -> Tensor:
    """make(device of `like`, *args), kept for the next time; fake tensors, and those of a capture, are not kept."""
    device = like.device
    if traced(like):
        return make(device, *args)
    key = (make, device, args)
    if key not in _kept:
        # Usable later in any mode, and no part of what a step costs.
        with torch.inference_mode(False), torch.no_grad(), counted_as("constant", macs=0):
            found = make(device, *args)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return found
        _kept[key] = found
    return _kept[key]
