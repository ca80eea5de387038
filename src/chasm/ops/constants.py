"""Small tensors that depend on sizes alone: made once, so that a step launches nothing for them and copies nothing."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def constant(make: Callable[..., Tensor], like: Tensor, *args: Any) -> Tensor:
    """make(device of `like`, *args), kept for next time; not while tracing: fake and real tensors never meet."""
    if torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter):
        return make(like.device, *args)
    return _kept(make, like.device, *args)


@cache  # a captured CUDA graph reads them by address: none may go
def _kept(make: Callable[..., Tensor], device: torch.device, *args: Any) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # usable later in any mode
        return make(device, *args)
