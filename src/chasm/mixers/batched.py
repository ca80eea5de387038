"""Build all shared bases of a model in one batched call."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from chasm import ops
from chasm.mixers.chasm import CHASM


@contextmanager
def batched_bases(model: nn.Module) -> Iterator[None]:
    """Build every shared basis of `model` once inside this context, all those of equal C in one batched call.

    A mixer builds its own bases if its theta is replaced, moved or written to inside the context, if theta is sharded,
    and in compiled code. Writes of fused optimisers are not seen, so leave the context before they step. The batched
    call has one backward pass: open a context for each, around forward and backward. Checkpointing finds the same bases
    when it computes again.

    Args:
        model: any module; those without CHASM mixers are left alone.

    >>> import torch
    >>> model = nn.Sequential(CHASM(8, size=16), CHASM(8, size=16))
    >>> with batched_bases(model):
    ...     model(torch.randn(1, 8, 16, 16)).square().mean().backward()
    """
    groups: dict[Any, list[tuple[CHASM, str, Tensor]]] = defaultdict(list)
    mixers = [m for m in model.modules() if isinstance(m, CHASM) and m.basis == "shared"]
    mixers = [m for m in mixers if all(_is_versioned(t) for t in m.theta.values())]
    for mixer in mixers:
        for axis in mixer.theta:
            theta = mixer.axis_parameters(axis).theta
            assert theta is not None
            groups[theta.shape, theta.dtype, theta.device].append((mixer, axis, theta))
    bases: dict[CHASM, dict[str, Tensor]] = defaultdict(dict)
    for members in groups.values():
        batch = _OneBackward.apply(ops.orthogonal_basis(torch.stack([theta for *_, theta in members])))
        for (mixer, axis, _), U in zip(members, batch, strict=True):
            bases[mixer][axis] = U
    try:
        for mixer in mixers:
            mixer._cache.set_batched_bases({axis: bases[mixer][axis] for axis in mixer.theta}, dict(mixer.theta))
        yield
    finally:
        for mixer in mixers:
            mixer._cache.set_batched_bases(None, {})


class _OneBackward(torch.autograd.Function):
    """The identity. A second backward pass through it raises an error that explains the context."""

    @staticmethod
    def forward(ctx: Any, bases: Tensor) -> Tensor:
        ctx.save_for_backward(bases.new_empty(0))
        return bases.view_as(bases)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        try:
            _ = ctx.saved_tensors  # freed by the first backward pass, unless it had retain_graph=True
        except RuntimeError:
            raise RuntimeError(
                "a second backward pass within one chasm.batched_bases: the bases are built once and their graph is "
                "freed by the first backward pass: open a context for each, or add the losses and go back once"
            ) from None
        return gradient


def _is_versioned(theta: Tensor) -> bool:
    """Return True if a change of theta can be seen: it is not sharded (a DTensor), and not computed on access."""
    return type(theta) is nn.Parameter and not theta.is_inference()
