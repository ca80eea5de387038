"""A model whose CHASM mixers are constants.

At inference everything but x is constant. A folded mixer is 1x1 convolutions and matrix products: no FFT, no complex
number, no matrix exponential, so any runtime can execute it. The price is one fixed spatial size.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from chasm.common.precision import autocast_dtype
from chasm.mixers._wrapper import kernels_fit, parameters
from chasm.mixers.chasm import AXES, CHASM
from chasm.ops import AxisOperator, Prepared, fused, run
from chasm.ops.axis import (
    channel_operators,
    channel_product,
    circulant,
    circulant_product,
    merged_matrices,
    prepare_for_kernels,
)
from chasm.ops.circulants import obstacle
from chasm.ops.kernels import traced
from chasm.ops.kernels.layout import channels_last, contiguous, like
from chasm.ops.kernels.local import local_block
from chasm.ops.transforms import dense_basis
from chasm.surgery.probe import watch


class _ChannelProduct(nn.Module):
    """A constant C x C matrix; in a file a 1x1 convolution, which torch would let round to TF32 on a GPU."""

    weight: Tensor

    def __init__(self, A: Tensor, ndim: int) -> None:
        super().__init__()
        self.register_buffer("weight", A.reshape(*A.shape, *[1] * ndim).contiguous())
        self.conv = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[ndim - 1]

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() or torch.jit.is_tracing() or autocast_dtype(x) is not None:
            return self.conv(x, self.weight)
        return channel_product(self.weight.flatten(1), contiguous(x))


class _CirculantProduct(nn.Module):
    """The gains of one axis as a constant circulant matrix per channel."""

    T: Tensor

    def __init__(self, T: Tensor, dim: int) -> None:
        super().__init__()
        self.register_buffer("T", T.contiguous())
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return circulant_product(self.T.to(x.dtype), x, self.dim)  # under autocast x is what came before in bfloat16


class _FrequencyProduct(nn.Module):
    """An untied axis: cosine and sine coefficients, a constant C x C matrix for each, and back."""

    M: Tensor
    Q: Tensor

    def __init__(self, op: AxisOperator, n: int) -> None:
        super().__init__()
        M = channel_operators(op)  # (K, C, C)
        self.register_buffer("M", torch.cat([M, M[1 : n - n // 2]]))  # rows of Q: cosines, then sines
        self.register_buffer("Q", dense_basis(M.device, n, M.dtype))
        self.dim = op.dim

    def forward(self, x: Tensor) -> Tensor:
        z = x.movedim(self.dim, -1).movedim(1, -1)  # (B, .., n, C)
        z = torch.matmul(self.Q, z)
        z = torch.matmul(self.M, z.unsqueeze(-1)).squeeze(-1)
        z = torch.matmul(self.Q.mT, z)
        return z.movedim(-1, 1).movedim(-1, self.dim)


class _Kept(NamedTuple):
    """What kernels need of these buffers, as long as they are the same ones, unchanged."""

    buffers: list[Tensor]
    versions: list[int]
    entries: dict[Any, list[Prepared]]

    def made_from(self, buffers: list[Tensor], versions: list[int]) -> bool:
        return versions == self.versions and all(a is b for a, b in zip(buffers, self.buffers, strict=True))


class FoldedCHASM(nn.Module):
    """A CHASM mixer with everything but x made constant, for one spatial size."""

    def __init__(self, mixer: CHASM, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size = size
        operators = mixer.operators(*size) if mixer.basis is not None else {}
        self.branches = nn.ModuleList()
        for chain in mixer.chains if operators else []:
            ops = [operators[axis] for axis in chain]
            steps: list[nn.Module] = []
            if mixer.basis == "untied":
                steps = [_FrequencyProduct(op, size[op.dim - 2]) for op in ops]
            else:
                mats = merged_matrices(ops)
                for A, op in zip(mats, [*ops, None], strict=True):
                    steps += [] if A is None else [_ChannelProduct(A, mixer.ndim)]
                    steps += [] if op is None else [_CirculantProduct(circulant(op.gains, size[op.dim - 2]), op.dim)]
            self.branches.append(nn.Sequential(*steps))
        self.refine, self.fuse = copy.deepcopy(mixer.refine), copy.deepcopy(mixer.fuse)
        self.residual = mixer.residual
        self.symmetric = mixer.gain != "complex"
        self._kernel_constants = _Kept([], [], {})
        self._captured: list[list[Prepared]] = []  # stay: CUDA graphs read these by address

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.size:
            raise ValueError(f"folded for spatial size {self.size}, got {tuple(x.shape[2:])}: fold again for that size")
        y = x
        if len(self.branches):
            y = x.to(autocast_dtype(x) or x.dtype)
            form = self._kernel_form(y)
            if form is not None:
                wrapped = self.refine is not None
                outputs = [run(y, prepared, wrapped=wrapped) for prepared in self._prepared(y, form)]
            else:
                z = x.to(next(self.branches.buffers()).dtype)  # half-precision models: their core ran in float32 too
                outputs = [branch(z).to(x.dtype) for branch in self.branches]
            y = torch.stack(outputs).mean(0) if len(outputs) > 1 else outputs[0]
        if self.refine is not None and self.fuse is not None:
            y = y.to(autocast_dtype(y) or y.dtype)
            if kernels_fit(y, self.refine, self.fuse):
                residual = x if self.residual else None
                return like(local_block(y, residual, *parameters(self.refine, self.fuse)).to(x.dtype), x)
            y = self.fuse(gelu(self.refine(y)))
        return x + y if self.residual else like(y.to(x.dtype), x)

    def _kernel_form(self, x: Tensor) -> str | None:
        """On a GPU in half precision the products have kernels. Never while traced: a file gets plain products."""
        dims = [step.dim for step in self._steps() if isinstance(step, _CirculantProduct)]
        if traced(x) or not dims or obstacle(x.shape, dims, x.device, x.dtype):
            return None
        wanted = torch.is_grad_enabled() and x.requires_grad
        fits = self.symmetric and not wanted and fused.pays(x.shape, dims, x.device, x.dtype, channels_last(x))
        return "fused" if fits else "triton"

    def _steps(self) -> Iterator[nn.Module]:
        return (step for branch in self.branches for step in branch)  # type: ignore[attr-defined]

    def _prepared(self, x: Tensor, form: str) -> list[Prepared]:
        buffers = [b for step in self._steps() for b in step._buffers.values() if b is not None]
        versions = [0 if b.is_inference() else b._version for b in buffers]
        kept = self._kernel_constants
        if not kept.made_from(buffers, versions):
            kept = self._kernel_constants = _Kept(buffers, versions, {})
        key = (form, x.dtype, x.device)
        found = kept.entries.get(key)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            if found is None:
                return [self._chain(branch, form, x.dtype) for branch in self.branches]  # part of the graph
            self._captured.append(found)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():  # usable later in any mode
                found = kept.entries[key] = [self._chain(branch, form, x.dtype) for branch in self.branches]
        return found

    def _apply(self, fn: Any, recurse: bool = True) -> "FoldedCHASM":
        self._kernel_constants = _Kept([], [], {})  # of no use elsewhere, and as large as the buffers
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel_constants": _Kept([], [], {}), "_captured": []}

    def _chain(self, branch: nn.Module, form: str, dtype: torch.dtype) -> Prepared:
        mats: list[Tensor | None] = [None]
        dims: list[int] = []
        columns: list[Tensor] = []
        for step in branch.children():
            if isinstance(step, _CirculantProduct):
                columns.append(step.T[:, :, 0].float())
                dims.append(step.dim)
                mats.append(None)
            elif isinstance(step, _ChannelProduct):
                mats[-1] = step.weight.flatten(1)
        return prepare_for_kernels(form, dtype, tuple(dims), mats, columns, self.symmetric)


@torch.no_grad()
def fold(model: nn.Module, *, size: int | tuple[int, ...] | None = None, example: Any = None) -> nn.Module:
    """Return a copy of a model, in eval mode, whose CHASM mixers are constants. It equals the original to rounding.

    A folded mixer takes one spatial size. Give either `size` or `example`.

    Args:
        model: a CHASM mixer, or any module that contains some.
        size: the spatial size of the features at the mixers, if it is one size for all of them.
        example: an input (or tuple of inputs) of the model; one forward pass finds each mixer's size.

    Raises:
        ValueError: when there is no CHASM mixer, one is called with two sizes, or one has hooks or a changed forward,
            which folding would drop.

    Example:
        >>> import chasm
        >>> mixer, x = chasm.CHASM(4, size=(8, 8)), torch.randn(1, 4, 8, 8)
        >>> torch.allclose(fold(mixer, example=x)(x), mixer.eval()(x), atol=1e-5)
        True
    """
    names = [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, CHASM)]
    if not names:
        raise ValueError("nothing to fold: the model contains no chasm.CHASM")
    if (size is None) == (example is None):
        raise ValueError("fold needs either size= (of the features at the mixers) or example= (an input of the model)")
    folded = copy.deepcopy(model).eval()
    mixers: dict[str, CHASM] = {name: folded.get_submodule(name) for name in names}  # type: ignore[misc]
    for name, mixer in mixers.items():
        _check_plain(name, mixer)
    if example is not None:
        sizes = _observe(folded, mixers, example)
    else:
        sizes = {name: _as_size(size, m.ndim) for name, m in mixers.items()}
    made: dict[CHASM, FoldedCHASM] = {}  # a mixer under two names stays one
    for name, mixer in reversed(mixers.items()):  # one inside another's layers comes first
        if mixer not in made:
            made[mixer] = FoldedCHASM(mixer, sizes[name]).eval().requires_grad_(False)
        if name == "":
            return made[mixer]
        parent, _, own = name.rpartition(".")
        setattr(folded.get_submodule(parent), own, made[mixer])
    return folded


def _check_plain(name: str, mixer: CHASM) -> None:
    """Refuse a mixer whose subclass or hooks do more than CHASM: constants would leave that out."""
    where, kind = f"mixer {name!r}" if name else "the mixer", type(mixer)
    for method in ("__call__", "forward", "_block", "_core", "operators"):
        if getattr(kind, method) is not getattr(CHASM, method) or method in vars(mixer):
            raise ValueError(
                f"{where} ({kind.__name__}) has a {method} of its own, which folding would drop: put a plain CHASM"
                " inside a module that does the rest"
            )
    if mixer._forward_hooks or mixer._forward_pre_hooks:
        raise ValueError(
            f"{where} has forward hooks, which folding would drop: remove them, or hook a module around it"
        )


def _as_size(size: Any, ndim: int) -> tuple[int, ...]:
    values = tuple(size) if isinstance(size, Iterable) else (size,) * ndim
    if len(values) != ndim or any(type(v) is not int or v < 1 for v in values):
        raise ValueError(
            f"size={size!r}: expected {ndim} positive whole numbers, one per axis of {', '.join(AXES[ndim])}"
        )
    return values


def _observe(model: nn.Module, mixers: dict[str, CHASM], example: Any) -> dict[str, tuple[int, ...]]:
    """Run the copy once on the example; return the spatial size that each mixer saw."""
    sizes: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
            seen = tuple((args[0] if args else kwargs["x"]).shape[2:])
            if sizes.setdefault(name, seen) != seen:
                raise ValueError(f"mixer {name!r} is called with sizes {sizes[name]} and {seen}: it cannot be folded")

        return hook

    watch(model, [(m, note(name)) for name, m in mixers.items()], example)
    unseen = sorted(set(mixers) - set(sizes))
    if unseen:
        raise ValueError(f"the example never reached mixer {unseen[0]!r}: give an example that runs all of them")
    return sizes
