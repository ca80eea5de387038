"""Tells whether a compiler, an exporter or torch.func follows what a module computes."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_PLAIN = torch.empty(0)


def is_traced() -> bool:
    """Return True while code is traced (torch.compile, export, jit) or transformed (torch.func, forward mode).

    >>> is_traced(), torch.func.grad(lambda x: x * is_traced())(torch.tensor(2.0))
    (False, tensor(1.))
    """
    return torch.compiler.is_compiling() or is_transformed(_PLAIN)


def is_transformed(x: Tensor) -> bool:
    """Return True if only plain torch operations can follow what happens to x.

    That is so in torch.func, forward mode, torch.jit.trace and torch.export, and for subclasses of Tensor, fake tensors
    among them. torch.compile takes registered operators as they are.
    """
    if torch.compiler.is_compiling():
        return is_exporting()
    if type(x) not in (Tensor, nn.Parameter) or torch.jit.is_tracing():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Return True in torch.export.

    `torch.compiler.is_exporting()` answers True in all compiled code before torch 2.13. The flag behind it does not.
    """
    return torch.compiler._is_exporting_flag


def has_hooks(*modules: nn.Module) -> bool:
    """Return True if a module has hooks, which would miss what an operator does in place of the module."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def is_unchanged(kind: type[nn.Module], *modules: nn.Module) -> bool:
    """Return True if modules compute what their weights say: they are of this very class and unchanged.

    Only then may code read the weights instead of calling the module. False for hooks, pruning, weight norms,
    parametrisations, a forward of an instance, and a layer that was put in the place of another (LoRA, quantisation).

    Args:
        kind: class that the modules were built as.
        *modules: the modules.
    """
    return all(type(m) is kind and "forward" not in vars(m) for m in modules) and not has_hooks(*modules)
