"""A model whose CHASM mixers are constants for every spatial size, made of real products only.

`fold` makes matrices for one size. Here only bases and gain tables are constant, which do not depend on the size. The
gains and the transform of an axis of n samples are computed when n is known:

    y = 1/n H (g * (H x)),   H[k, i] = cos(2 pi k i / n) + sin(2 pi k i / n),   g_k = lambda at frequency min(k, n - k)

H is the Hartley transform, H H = n I. Real gains multiply it as they multiply the Fourier transform.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, softplus

from chasm.mixers._wrapper import after_core
from chasm.mixers.chasm import CHASM
from chasm.ops.operators import merge
from chasm.surgery.fold import _check_plain


class _AxisGains(nn.Module):
    """The gains of one axis, interpolated to the frequencies that x has along it."""

    table: Tensor

    def __init__(self, table: Tensor, dim: int, is_positive: bool) -> None:
        super().__init__()
        self.register_buffer("table", table.detach().clone())
        self.dim, self.is_positive = dim, is_positive

    def forward(self, x: Tensor) -> Tensor:
        k = torch.arange(x.shape[self.dim], device=x.device)
        n = torch.ones_like(k).sum()  # the length as a tensor: an exported program may be run at another one
        length = n.to(x.dtype)
        angle = (k[:, None] * k % n).to(x.dtype) * (2 * math.pi / length)  # reduced in integers, so that it is exact
        hartley = (angle.cos() + angle.sin()) * length.rsqrt()
        gains = self._at(torch.minimum(k, n - k), n // 2).mT  # (C, n)
        if self.dim == 3:
            return (x @ hartley * gains[:, None]) @ hartley
        return hartley @ (hartley @ x * gains[..., None])

    def _at(self, frequency: Tensor, highest: Tensor) -> Tensor:
        """Return gains (len(frequency), C), linear between the bins with aligned end points."""
        bins = torch.arange(self.table.shape[0], device=frequency.device)
        steps = highest.clamp(min=1)
        distance = (frequency[:, None] * (len(self.table) - 1) - bins * steps).abs().to(self.table.dtype) / steps
        gains = (1 - distance).clamp(min=0) @ self.table
        return softplus(gains) if self.is_positive else gains


class FreeSizeCHASM(nn.Module):
    """A CHASM mixer with constant bases and gain tables, for maps (B, C, H, W) of any size."""

    def __init__(self, mixer: CHASM) -> None:
        super().__init__()
        self.chains = nn.ModuleList()
        operators = mixer.operators(2, 2) if mixer.basis is not None else {}  # bases do not depend on the size
        for chain in mixer.chains if operators else []:
            passes = nn.ModuleList()
            for axis in chain:
                table = mixer.axis_parameters(axis).gain_table
                passes.append(_AxisGains(table, operators[axis].dim, mixer.gain == "positive"))
            bases = [U for axis in chain if (U := operators[axis].U) is not None]
            between = [nn.Parameter(A.detach().clone(), False) for A in merge(bases).unbind()] if bases else []
            self.chains.append(nn.ModuleDict({"passes": passes, "between": nn.ParameterList(between)}))
        self.refine, self.fuse = copy.deepcopy(mixer.refine), copy.deepcopy(mixer.fuse)
        self.residual = mixer.residual

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for chain in self.chains:
            y, products = x, list(chain["between"])  # type: ignore[index]
            for i, gains in enumerate(chain["passes"]):  # type: ignore[index]
                y = gains(_channels(products[i], y) if products else y)
            outputs.append(_channels(products[-1], y) if products else y)
        y = torch.stack(outputs).mean(0) if outputs else x
        return after_core(y, x, self.refine, self.fuse, self.residual)


def _channels(A: Tensor, x: Tensor) -> Tensor:
    return conv2d(x, A[:, :, None, None])


@torch.no_grad()
def free_size(model: nn.Module) -> nn.Module:
    """Return a copy of a model, in eval mode, whose CHASM mixers are real products with constants at any size.

    It equals the original to rounding, and is meant for runtimes without FFTs and complex numbers; `fold` makes a
    faster one for a single size.

    Args:
        model: any module. Without CHASM mixers the copy is as it was.

    Raises:
        ValueError: when a mixer has a basis per frequency, complex gains, other than two axes, hooks, or a forward of
            its own.

    Example:
        >>> import chasm
        >>> mixer, x = chasm.CHASM(4, size=(8, 8)), torch.randn(1, 4, 5, 12)
        >>> torch.allclose(free_size(mixer)(x), mixer.eval()(x), atol=1e-5)
        True
    """
    copied = copy.deepcopy(model).eval()
    constants: dict[CHASM, FreeSizeCHASM] = {}
    names = [name for name, m in copied.named_modules(remove_duplicate=False) if isinstance(m, CHASM)]
    for name in reversed(names):  # one inside another's layers comes first
        mixer = copied.get_submodule(name)
        assert isinstance(mixer, CHASM)
        _check_plain(name, mixer)
        if mixer.ndim != 2 or mixer.basis == "untied" or mixer.gain == "complex":
            what = f"basis={mixer.basis!r}, gain={mixer.gain!r}, ndim={mixer.ndim}"
            raise ValueError(f"mixer {name!r} ({what}) needs one fixed size: use chasm.fold, or export with a size")
        if mixer not in constants:
            constants[mixer] = FreeSizeCHASM(mixer).eval()
        if name == "":
            return constants[mixer]
        copied.set_submodule(name, constants[mixer])
    return copied
