"""Triton kernels. A module that holds one is imported only where it runs: triton is not installed everywhere."""

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from chasm.ops.kernels.launch import cdiv as cdiv
from chasm.ops.kernels.launch import power_of_2 as power_of_2


def has_triton() -> bool:
    """True if triton can be imported; a build that does not fit this machine cannot."""
    return _can_import("triton")


has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]  # to the compiler it is a constant


@cache
def _can_import(package: str) -> bool:
    if find_spec(package) is None:
        return False
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def is_interpreted() -> bool:
    """True in Triton's interpreter, where kernels run on CPU tensors of any dtype: in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_transformed(x: Tensor) -> bool:
    """True if only plain torch operations can follow what happens to x.

    That is so in torch.func, forward mode, torch.jit.trace and torch.export, and for subclasses of Tensor, fake tensors
    among them. torch.compile takes registered operators as they are.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return type(x) not in (Tensor, nn.Parameter) or torch.jit.is_tracing()


def transformed() -> bool:
    """True while code is traced (compile, export, jit) or transformed (torch.func, forward mode)."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def traced(x: Tensor) -> bool:
    """True if x is being traced or is not a plain tensor, so that kernels outside of operators must not run on it."""
    return transformed() or type(x) not in (Tensor, nn.Parameter)


def observed(module: nn.Module) -> bool:
    """True if a module has hooks, which would miss what happens when a kernel stands for the module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def applied(function: Any, *args: Any) -> Any:
    """function.apply(*args) of an autograd function, without its cost on the host where no gradient is wanted."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return function.apply(*args)
    return function.forward(*args)


def gradients(y: Tensor, g: Tensor, inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients by torch of those inputs that need one, differentiable again as the kernels' are not."""
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, wanted, g.to(y.dtype), create_graph=True) if wanted else ())
    return [next(found) if need else None for need in needs]
