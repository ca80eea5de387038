"""PyTorch operators in the namespace `chasm`, for functions that have their own backward, and what these share.

A registered operator is one node to torch.compile and to autocast, so the same kernels run in eager and in compiled
code. `torch.library.custom_op` does the same, but its autograd wrapper costs 60 microseconds of host time for each
forward and backward, which is as long as the operator itself takes on a small map. Hence these few lines.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from chasm.common import cost
from chasm.common.tracing import is_traced

PLAIN_TYPES = (Tensor, nn.Parameter)
_LIBRARY = torch.library.Library("chasm", "FRAGMENT")


class TorchOperator:
    """A function of tensors that PyTorch knows as `torch.ops.chasm.<name>`.

    Args:
        schema: name, arguments and results, as `torch.library.Library.define` wants them.
        function: computes the results without autograd. It allocates them and returns none of its arguments. It also
            runs on fake tensors, which tells the compiler the shapes of the results; what launches kernels returns
            early there (`is_fake`).
        autograd: called instead wherever autograd is active; it ends in `without_autograd`.
    """

    def __init__(self, schema: str, function: Callable[..., Any], autograd: Callable[..., Any]) -> None:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, autograd, "Autograd")
        torch.library.register_fake(f"chasm::{name}", function, lib=_LIBRARY)
        self.function, self.autograd = function, autograd
        self.op = getattr(torch.ops.chasm, name).default

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """Run the operator, with autograd."""
        return self.autograd(x, *args) if _is_eager(x) else self.op(x, *args)

    def without_autograd(self, x: Tensor, *args: Any) -> Any:
        """Run the operator below autograd."""
        with torch._C._AutoDispatchBelowADInplaceOrView():  # nor are results taken for views of something else
            return self.function(x, *args) if _is_eager(x) else self.op(x, *args)


def _is_eager(x: Tensor) -> bool:
    """Return True if nothing needs to see an operator as one node. It then skips the dispatcher.

    On its way to a function in Python the dispatcher unpacks and packs every argument four times a step, which takes as
    long as the functions themselves on a small map. `chasm.count` wants to see the arithmetic inside.
    """
    if torch.compiler.is_compiling() or type(x) not in PLAIN_TYPES:
        return False
    return torch._C._len_torch_dispatch_stack() == 0 or cost.TALLY is not None


def is_fake(x: Tensor) -> bool:
    """Return True if x has a shape but no values, so that no kernel can run on it."""
    return x.is_meta or isinstance(x, FakeTensor)


def wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Return True if autograd is recording and one of the tensors requires a gradient."""
    if torch.is_grad_enabled():
        for t in tensors:  # a loop: this runs several times in every forward
            if t is not None and t.requires_grad:
                return True
    return False


class FirstOrderOnly(torch.autograd.Function):
    """Gradients that cannot be differentiated again: trying to is an error, never a silent zero."""

    @staticmethod
    def forward(
        ctx: Any, operator: TorchOperator, args: tuple[Any, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        return tuple(operator.without_autograd(*args))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("this form has no second derivative: use form='reference'")


_CONSTANTS: dict[Any, Tensor] = {}  # a captured CUDA graph reads them by address: none is ever dropped


def constant(make: Callable[..., Tensor], like: Tensor, *args: Any) -> Tensor:
    """Return make(device of `like`, *args), and keep it for the next call: a step then launches nothing for it.

    For small tensors that depend on sizes alone. Fake tensors, and those of a CUDA-graph capture, are not kept.
    """
    device = like.device
    if torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter):
        return make(device, *args)
    key = make, device, args
    value = _CONSTANTS.get(key)
    if value is None:
        # Usable later in any mode, and no part of what a step costs.
        with torch.inference_mode(False), torch.no_grad(), cost.counted_as("constant", macs=0):
            value = make(device, *args)
        if not is_traced() and not (value.is_cuda and torch.cuda.is_current_stream_capturing()):
            _CONSTANTS[key] = value
    return value
