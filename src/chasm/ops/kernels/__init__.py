"""Triton kernels; each module here is imported only where it runs. What decides whether one may run is here."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

SHARED_MEMORY = 227 * 1024  # bytes a block may have: Hopper's, for which block sizes were chosen


@cache
def triton_runs() -> bool:
    if find_spec("triton") is None:
        return False
    try:  # a build that does not fit this machine is as good as none
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def too_small(device: torch.device) -> str | None:
    """Why the larger blocks do not fit this card; None if they do."""
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    found = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    if found >= SHARED_MEMORY:
        return None
    return f"its blocks need {SHARED_MEMORY // 1024} KB of shared memory, this card has {found // 1024}"


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes microseconds, of which a step has few."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least that is n or more; as above."""
    return 1 << (n - 1).bit_length()


def roomy(x: Tensor) -> bool:
    """Whether the larger blocks fit where x is."""
    return not x.is_cuda or too_small(x.device) is None


def transformed() -> bool:
    """Whether someone records what happens or does more with it (compile, export, jit, torch.func, forward mode)."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def traced(x: Tensor) -> bool:
    """Whether that, or what x is (a fake tensor), leaves no place for kernels of ours."""
    return transformed() or type(x) not in (Tensor, nn.Parameter)


def observed(module: nn.Module) -> bool:
    """Whether a hook would miss what happens when kernels of ours go past the module."""
    return any(vars(module)[hooks] for hooks in _HOOKS)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
