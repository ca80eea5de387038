"""Channels first and channels last. Copies from one to the other, which take torch several times as long as memory."""

import os
from typing import Any

import torch
from torch import Tensor

from chasm.ops.kernels import applied, traced, triton_runs


def channels_last(x: Tensor) -> bool:
    """Whether that is how x lies, and NCHW is not. What is traced lies nowhere yet."""
    if x.ndim != 4 or torch.compiler.is_compiling() or x.is_contiguous():  # the usual answer, within a microsecond
        return False
    return not traced(x) and x.is_contiguous(memory_format=torch.channels_last)


def contiguous(x: Tensor) -> Tensor:
    """x as NCHW; itself if it is."""
    return applied(_Turned, x, False) if channels_last(x) and _fits(x) else x.contiguous()


def like(y: Tensor, x: Tensor) -> Tensor:
    """y (B, C, H, W), channels last if x is."""
    if not channels_last(x) or channels_last(y):
        return y
    if y.is_contiguous() and _fits(y):
        return applied(_Turned, y, True)
    return y.contiguous(memory_format=torch.channels_last)


def _fits(x: Tensor) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (x.is_cuda or interpreted) and 0 < x.numel() < 2**31 * len(x) and triton_runs()


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, to_last: bool) -> Tensor:
        from chasm.ops.kernels import layout_triton

        return layout_triton.turned(x, to_last)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.to_last = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """A layer that lies so expects gradients that do."""
        if ctx.to_last:
            return contiguous(g), None
        return applied(_Turned, g, True) if g.is_contiguous() and _fits(g) else g, None
