"""An Apple GPU for machines without one: CPU tensors that say they are on "mps", and refuse float64 as it does.

Results are computed on the CPU. What is shown is which tensors a program makes there, and of which types.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, MPS = torch.device("cpu"), torch.device("mps")
WIDE = (torch.float64, torch.complex128)


class AppleTensor(Tensor):
    """A tensor that says it is on an Apple GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS


class AppleGPU(TorchFunctionMode):
    """Inside of it, "mps" is a device: what is computed from its tensors stays there, until it is moved to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        is_here = any(isinstance(x, AppleTensor) for x in leaves)
        if name == "__deepcopy__" and is_here:
            return args[1].setdefault(id(args[0]), _on_apple(args[0]))
        devices = [torch.device(x) for x in leaves if _is_device(x)]
        if devices or name == "cpu":
            is_here = MPS in devices
        args, kwargs = tree_map(lambda x: CPU if _is_device(x) and torch.device(x) == MPS else x, (args, kwargs))
        out = func(*args, **kwargs)
        if name.endswith("_") and not name.startswith("__"):  # in place
            return out
        return tree_map(lambda x: _placed(x, is_here, name) if isinstance(x, Tensor) else x, out)


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x in ("cpu", "mps"))


def _placed(x: Tensor, is_here: bool, name: str) -> Tensor:
    if not is_here:
        return x.as_subclass(Tensor) if isinstance(x, AppleTensor) else x
    if x.dtype in WIDE:
        raise TypeError(f"{name}: the MPS framework doesn't support float64")
    return x if isinstance(x, AppleTensor) else x.as_subclass(AppleTensor)


def _on_apple(x: Tensor) -> Tensor:
    moved = x.detach().clone().as_subclass(AppleTensor).requires_grad_(x.requires_grad)
    if isinstance(x, nn.Parameter):
        moved._is_param = True  # type: ignore[attr-defined]
    return moved


def to_apple(model: nn.Module) -> nn.Module:
    """Move a model, whose `.to` would ask torch itself for the device."""
    for module in model.modules():
        for stored in (module._parameters, module._buffers):
            stored.update({name: _on_apple(x) for name, x in stored.items() if x is not None})
    return model
