"""A model whose CHASM, GFNet and SpectFormer mixers are constants.

At inference everything but x is constant. In an ONNX file a folded mixer is 1x1 convolutions and matrix products: no
FFT, no complex number, no matrix exponential, so any runtime can execute it. The price is one fixed spatial size.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from chasm import ops
from chasm.common.precision import autocast_dtype, upcast
from chasm.common.tracing import is_exporting, is_transformed
from chasm.mixers import GFNet, SpectFormer
from chasm.mixers._cache import Cache
from chasm.mixers._options import AXES
from chasm.mixers._wrapper import after_core, with_layers
from chasm.mixers.chasm import CHASM
from chasm.ops import AxisOperator, Chain
from chasm.ops.gains import impulse_response
from chasm.ops.kernels.layout import is_channels_last
from chasm.ops.library import wants_gradient
from chasm.ops.operators import channel_operators, exact_product, merge
from chasm.surgery.fold_filter import FoldedFilter, _cosines_and_sines
from chasm.surgery.probe import watch

Foldable: TypeAlias = CHASM | GFNet | SpectFormer


class _ChannelProduct(nn.Module):
    """A constant C x C matrix: a 1x1 convolution in an ONNX file. On a GPU torch would let that round to TF32."""

    weight: Tensor

    def __init__(self, A: Tensor, ndim: int) -> None:
        super().__init__()
        self.register_buffer("weight", A.reshape(*A.shape, *[1] * ndim).contiguous())
        self.conv = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[ndim - 1]

    def forward(self, x: Tensor) -> Tensor:
        if is_exporting() or torch.jit.is_tracing() or autocast_dtype(x) is not None:
            return self.conv(x, self.weight)
        return torch.bmm(self.weight.flatten(1).expand(len(x), -1, -1), x.flatten(2)).view(x.shape)


class _CirculantProduct(nn.Module):
    """The gains of one axis as a constant circulant matrix per channel."""

    T: Tensor

    def __init__(self, T: Tensor, dim: int) -> None:
        super().__init__()
        self.register_buffer("T", T.contiguous())
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        T = self.T.to(x.dtype)  # under autocast x is what came before in bfloat16
        if self.dim == x.ndim - 1:
            return torch.matmul(x.reshape(*x.shape[:2], -1, x.shape[-1]), T.mT).view(x.shape)
        before, after = math.prod(x.shape[2 : self.dim]), math.prod(x.shape[self.dim + 1 :])
        return torch.matmul(T[:, None], x.reshape(*x.shape[:2], before, x.shape[self.dim], after)).view(x.shape)


class _FrequencyProduct(nn.Module):
    """An untied axis: cosine and sine coefficients, a constant C x C matrix for each, and back."""

    M: Tensor
    Q: Tensor

    def __init__(self, op: AxisOperator, n: int) -> None:
        super().__init__()
        if op.gains.is_complex():
            raise ValueError("fold takes an untied basis with real gains, got complex ones: leave the mixer as it is")
        M = channel_operators(op)  # (K, C, C)
        self.register_buffer("M", torch.cat([M, M[1 : n - n // 2]]))  # rows of Q: cosines, then sines
        self.register_buffer("Q", _real_dft(n, M.device, M.dtype))
        self.dim = op.dim

    def forward(self, x: Tensor) -> Tensor:
        z = x.movedim(self.dim, -1).movedim(1, -1)  # (B, .., n, C)
        z = torch.matmul(self.Q, z)
        z = torch.matmul(self.M, z.unsqueeze(-1)).squeeze(-1)
        z = torch.matmul(self.Q.mT, z)
        return z.movedim(-1, 1).movedim(-1, self.dim)


class FoldedCHASM(nn.Module):
    """A CHASM mixer with everything but x made constant, for one spatial size.

    An ONNX file gets the products of `branches` one by one. Elsewhere the mixer runs in the form that is fastest for x,
    as an ordinary mixer in eval mode does.
    """

    def __init__(self, mixer: CHASM, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size, self.basis, self.gain, self.form = size, mixer.basis, mixer.gain, mixer.form
        operators = mixer.operators(*size) if mixer.basis is not None else {}
        self.branches = nn.ModuleList()
        for chain in mixer.chains if operators else []:
            self.branches.append(nn.Sequential(*_products([operators[axis] for axis in chain], size)))
        self.refine, self.fuse = copy.deepcopy(mixer.refine), copy.deepcopy(mixer.fuse)
        self.residual = mixer.residual
        self._cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.size:
            raise ValueError(f"folded for spatial size {self.size}, got {tuple(x.shape[2:])}: fold again for that size")
        if x.shape[0] == 0:
            return x.clone()
        dtype = autocast_dtype(x) or x.dtype
        if is_transformed(x) or self.basis == "untied":
            z = x.to(next(self.branches.buffers(), x).dtype)  # half-precision models: their core ran in float32 too
            outputs = [branch(z).to(dtype) for branch in self.branches] or [x]
            y = torch.stack(outputs).mean(0) if len(outputs) > 1 else outputs[0]
            return after_core(y, x, self.refine, self.fuse, self.residual)
        return with_layers(x, self._chains(x, dtype), self.refine, self.fuse, self.residual)

    def _chains(self, x: Tensor, dtype: torch.dtype) -> list[Chain]:
        if self.basis is None:
            return [Chain("none", dtype, [])]
        form = ops.choose_form(
            x.shape,
            [step.dim for step in self.modules() if isinstance(step, _CirculantProduct)],
            basis=self.basis,
            gain=self.gain,
            device=x.device,
            dtype=dtype,
            grad=wants_gradient([x]),
            channels_last=is_channels_last(x),
            form=self.form,
        ).form

        def make() -> list[Chain]:
            chains = [Chain(form, dtype, _operators(branch, self.gain)) for branch in self.branches]
            return [ops.prepare(chain, x.shape) for chain in chains]

        key = (form, dtype, x.device)
        if torch.compiler.is_compiling():  # an eager call may have filled the cache; buffers here are constants
            cached = self._cache.entries.get(key)
            return cached or [Chain(form, dtype, _operators(branch, self.gain)) for branch in self.branches]
        chains: list[Chain] = self._cache.get(key, list(self.branches.buffers()), make)
        return chains

    def _apply(self, fn: Any, recurse: bool = True) -> "FoldedCHASM":
        self._cache.clear()
        super()._apply(fn, recurse)
        return self


def _products(operators: list[AxisOperator], size: tuple[int, ...]) -> list[nn.Module]:
    """Return a chain of axis passes as products with constant matrices."""
    lengths = [size[op.dim - 2] for op in operators]
    if any(op.U is not None and op.U.ndim == 3 for op in operators):
        return [_FrequencyProduct(op, n) for op, n in zip(operators, lengths, strict=True)]
    steps: list[nn.Module] = [
        _CirculantProduct(_circulant(op.gains, n), op.dim) for op, n in zip(operators, lengths, strict=True)
    ]
    bases = [op.U for op in operators if op.U is not None]
    for j, A in reversed(list(enumerate(merge(bases).unbind() if bases else ()))):
        steps.insert(j, _ChannelProduct(A, len(size)))
    return steps


def _operators(branch: Any, gain: str) -> list[AxisOperator]:
    """Return the operators behind `_products`, in float32 or wider."""
    operators: list[AxisOperator] = []
    mats = [upcast(step.weight).flatten(1) for step in branch if isinstance(step, _ChannelProduct)]
    U = mats[0].mT if mats else None
    for j, step in enumerate(s for s in branch if isinstance(s, _CirculantProduct)):
        if U is not None and j > 0:
            U = exact_product(U, mats[j].mT)  # A_j = U_{j+1}^T U_j; autocast would round a plain product
        gains = torch.fft.rfft(upcast(step.T[:, :, 0])).mT
        operators.append(AxisOperator(step.dim, U, gains if gain == "complex" else gains.real))
    return operators


def _circulant(gains: Tensor, n: int) -> Tensor:
    """Return the matrices T (C, n, n) of gains (K, C), with T[c] v = irfft(gains[:, c] * rfft(v))."""
    i = torch.arange(n, device=gains.device)
    return impulse_response(gains, n)[:, (i[:, None] - i) % n]


def _real_dft(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the real DFT basis Q (n, n): rows are cosines k = 0..n//2, then sines k = 1..(n-1)//2; Q Q^T = I."""
    cosines, sines = _cosines_and_sines(n, n // 2 + 1, device)
    k = torch.arange(n // 2 + 1, device=cosines.device)
    scale = (2 - ((k == 0) | (2 * k == n)).to(torch.float64)).div(n).sqrt()
    return torch.cat([cosines * scale, (sines * scale)[:, 1 : n - n // 2]], 1).mT.to(device, dtype).contiguous()


@torch.no_grad()
def fold(model: nn.Module, *, size: int | tuple[int, ...] | None = None, example: Any = None) -> nn.Module:
    """Return a copy of a model, in eval mode, whose mixers are constants. It equals the original to rounding.

    CHASM, GFNet and SpectFormer are folded; other mixers stay as they are. A folded mixer takes one spatial size. Give
    either `size` or `example`.

    Args:
        model: a mixer, or any module that contains some.
        size: the spatial size of the features at the mixers, if it is one size for all of them.
        example: an input of the model, a tuple of arguments, or a dictionary of keyword arguments; one forward pass
            finds each mixer's size.

    Raises:
        ValueError: when there is no mixer to fold, one is called with two sizes, or one has hooks or a changed forward,
            which folding would drop.

    Example:
        >>> import chasm
        >>> mixer, x = chasm.CHASM(4, size=(8, 8)), torch.randn(1, 4, 8, 8)
        >>> torch.allclose(fold(mixer, example=x)(x), mixer.eval()(x), atol=1e-5)
        True
    """
    names = [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, Foldable)]
    if not names:
        raise ValueError("nothing to fold: the model contains no CHASM, GFNet or SpectFormer")
    if (size is None) == (example is None):
        raise ValueError("fold needs either size= (of the features at the mixers) or example= (an input of the model)")
    folded = copy.deepcopy(model).eval()
    mixers: dict[str, Foldable] = {name: folded.get_submodule(name) for name in names}  # type: ignore[misc]
    for name, mixer in mixers.items():
        _check_plain(name, mixer)
    if example is not None:
        sizes = _observe(folded, mixers, example)
    else:
        sizes = {name: _as_size(size, m.ndim if isinstance(m, CHASM) else 2) for name, m in mixers.items()}
    constants: dict[Foldable, nn.Module] = {}  # a mixer under two names stays one
    for name, mixer in reversed(mixers.items()):  # one inside another's layers comes first
        if mixer not in constants:
            kind = FoldedCHASM if isinstance(mixer, CHASM) else FoldedFilter
            constants[mixer] = kind(mixer, sizes[name]).eval().requires_grad_(False)  # type: ignore[arg-type]
        if name == "":
            return constants[mixer]
        folded.set_submodule(name, constants[mixer])
    return folded


def _check_plain(name: str, mixer: Foldable) -> None:
    """Refuse a mixer whose subclass or hooks do more than the mixer itself: constants would leave that out."""
    where, kind = f"mixer {name!r}" if name else "the mixer", type(mixer)
    plain = next(k for k in (CHASM, GFNet, SpectFormer) if isinstance(mixer, k))
    methods = ("__call__", "forward", *(("core", "operators", "axis_parameters") if plain is CHASM else ()))
    for method in methods:
        if getattr(kind, method) is not getattr(plain, method) or method in vars(mixer):
            problem = f"{where} ({kind.__name__}) has a {method} of its own, which folding would drop"
            raise ValueError(f"{problem}: put a plain {plain.__name__} inside a module that does the rest")
    if mixer._forward_hooks or mixer._forward_pre_hooks:
        problem = f"{where} has forward hooks, which folding would drop"
        raise ValueError(f"{problem}: remove them, or hook a module around it")


def _as_size(size: Any, ndim: int) -> tuple[int, ...]:
    values = tuple(size) if isinstance(size, Iterable) else (size,) * ndim
    if len(values) != ndim or any(type(v) is not int or v < 1 for v in values):
        wanted = f"{ndim} positive whole numbers, one per axis of {', '.join(AXES[ndim])}"
        raise ValueError(f"size={size!r}: expected {wanted}")
    return values


def _observe(model: nn.Module, mixers: dict[str, Foldable], example: Any) -> dict[str, tuple[int, ...]]:
    """Run the copy once on the example; return the spatial size that each mixer saw."""
    sizes: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
            size = tuple((args[0] if args else kwargs["x"]).shape[2:])
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"mixer {name!r} is called with sizes {sizes[name]} and {size}: it cannot be folded")

        return hook

    watch(model, [(m, note(name)) for name, m in mixers.items()], example)
    unseen = sorted(set(mixers) - set(sizes))
    if unseen:
        raise ValueError(f"the example never reached mixer {unseen[0]!r}: give an example that runs all of them")
    return sizes
