"""CHASM: cross-frequency harmonized axis-separable mixing.

    M(k) = U diag(lambda_k) U^T                    one operator per frequency of an axis, U shared by all of them
    U = exp(A),  A = s theta, skew-symmetric       C(C-1)/2 scalars, zero at init: U = I
    lambda_k = softplus(Interp(Gamma))_k           Gamma = Gamma_0 + s gamma, B bins, zero at init: gain 1
    Phi = Phi_CW o Phi_CH,   Phi_a = irfft M rfft  along height, then along width
    Y = X + P_fuse(L(Phi(X)))                      L: depthwise 3x3 and GELU, P_fuse: 1x1

Intrinsic: the residual, L and P_fuse. The variants are those of the paper's ablations. Readings: "CH+CW" is the mean
of the two passes; "untied" is one theta per frequency bin through the same exponential; "complex" gains are
softplus(Gamma) e^{i phi} with phi = 0 at init, at DC and at Nyquist.

The step scale s is ours. Adam moves a parameter by about the learning rate per step, whatever its gradient, and at
5e-4 a gain that should go from 1 to 3 does not get there. So the parameters are stored divided by s, and get the
gradients of A and Gamma (see `stepped`). `step_scale=1` is the paper's parameterisation.
"""

import math
import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from chasm import ops
from chasm.common.precision import autocast_dtype
from chasm.common.registry import suggest
from chasm.mixers._cache import Cache, MadeFrom, watch
from chasm.mixers._wrapper import POINTWISE, kernels_fit, ordinary, parameters
from chasm.mixers.base import Facts, Mixer, register_mixer
from chasm.ops import AxisOperator, Choice, Prepared, local_cpu
from chasm.ops._cost import counted_as
from chasm.ops.axis import LONG
from chasm.ops.kernels import traced
from chasm.ops.kernels.layout import channels_last, like
from chasm.ops.kernels.local import local_block
from chasm.ops.replay import Replays

AXES = {1: ("cl",), 2: ("ch", "cw"), 3: ("cd", "ch", "cw")}  # names of the spatial axes, in order
STEP_SCALE = 30.0
Basis = Literal["shared", "identity", "untied"]
Gain = Literal["positive", "signed", "complex"]


class AxisParameters(NamedTuple):
    """What the equations of one axis are made from: theta (entries,) or (B, entries); Gamma and phi (B, C)."""

    theta: Tensor | None
    gain_table: Tensor
    phase_table: Tensor | None


@register_mixer("chasm")
class CHASM(Mixer):
    """Shared-basis spectral mixer for real features (B, C, H, W); any H and W, also (B, C, L) and (B, C, D, H, W).

    Args:
        channels: C.
        size: spatial size the gain tables are made for (B = K bins each); other sizes interpolate the tables.
        bins: bins B per axis (one number, or one per spatial axis); overrides `size`. With neither: 64.
        axes: "ch>cw" (first height, then width), "cw>ch", "ch+cw" (their mean), "ch" or "cw".
            1-D: "cl"; 3-D: "cd>ch>cw" and so on.
        basis: "shared", "identity" (U = I), "untied" (a basis per frequency), or None for no spectral core at all.
        gain: "positive", "signed", or "complex".
        residual: add X. Default: yes, except without `local`.
        local: the depthwise 3x3, GELU and 1x1 around the core; False leaves the bare spectral core.
        ndim: number of spatial axes: 1, 2 or 3.
        step_scale: how far an optimiser's step moves basis and gains, as a multiple of what it moves a parameter.
            1 is the paper's parameterisation. State dicts carry their scale, and load into a mixer of another one
            as the same operator.
        form: how the core is computed; "auto" chooses, `explain` says what and why. All forms are equal.
    """

    owns_residual = True
    spectral_parameters = ("theta", "gain_table", "phase_table")
    default_step_scale = STEP_SCALE
    facts = Facts(
        response="shared-basis gains",
        channel_mixing="symmetric channel",
        resolution="gain tables interpolated to the bins of the input",
        shared_basis="yes",
        positive_gains="yes",
        paper_params="0.07M",
        note="direct tables (B = K); 0.07M needs B = 256 per axis with the wrapper, more than the bins of any map used",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        bins: int | tuple[int, ...] | None = None,
        axes: str | None = None,
        basis: Basis | None = "shared",
        gain: Gain = "positive",
        residual: bool | None = None,
        local: bool = True,
        ndim: int = 2,
        step_scale: float = STEP_SCALE,
        form: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        _one_of("ndim", ndim, AXES)
        _one_of("basis", basis, ("shared", "identity", "untied", None))
        _one_of("gain", gain, ("positive", "signed", "complex"))
        _one_of("form", form, ("auto", *ops.FORMS))
        if not isinstance(channels, int) or channels < 1:
            raise ValueError(f"expected a whole number of channels, 1 or more, got channels={channels!r}")
        if not (isinstance(step_scale, int | float) and 0 < step_scale < math.inf):
            raise ValueError(f"expected a positive step_scale, got {step_scale!r}: 1 is the paper's parameterisation")
        if basis == "untied" and gain == "complex":
            raise ValueError("basis='untied' takes gain='positive' or 'signed', got 'complex': choose one variant")
        self.channels, self.ndim, self.basis, self.gain, self.form = channels, ndim, basis, gain, form
        self.step_scale = float(step_scale)
        self.axes = ">".join(AXES[ndim]) if axes is None else axes
        self.residual = local if residual is None else residual
        self.chains = _parse_axes(self.axes, ndim)
        used = [axis for chain in self.chains for axis in chain] if basis is not None else []
        n_bins = dict(zip(AXES[ndim], _bins_per_axis(size, bins, ndim), strict=True))

        entries = channels * (channels - 1) // 2
        self.theta = nn.ParameterDict()
        self.gain_table = nn.ParameterDict()
        self.phase_table = nn.ParameterDict()
        for axis in used:
            if basis == "shared":
                self.theta[axis] = nn.Parameter(torch.zeros(entries, **factory))
            elif basis == "untied":
                self.theta[axis] = nn.Parameter(torch.zeros(n_bins[axis], entries, **factory))
            self.gain_table[axis] = nn.Parameter(torch.zeros(n_bins[axis], channels, **factory))
            if gain == "complex":
                self.phase_table[axis] = nn.Parameter(torch.zeros(n_bins[axis], channels, **factory))

        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1]
        self.refine = conv(channels, channels, 3, padding=1, groups=channels, **factory) if local else None
        self.fuse = POINTWISE[ndim](channels, channels, 1, **factory) if local else None
        # In the state dict, so that weights written with another scale are never taken for the same numbers.
        self.register_buffer("stored_step_scale", torch.tensor(self.step_scale, **factory))
        self._cache = Cache()
        self._replays = Replays()

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return like(self._block(x), x)

    def _block(self, x: Tensor) -> Tensor:
        y, x = self._core(x)
        if self.refine is not None and self.fuse is not None:
            y = y.to(autocast_dtype(y) or y.dtype)
            if kernels_fit(y, self.refine, self.fuse):
                with counted_as("conv", macs=y.numel() * (9 + self.channels)):
                    y = local_block(y, x if self.residual else None, *parameters(self.refine, self.fuse))
                return y if self.residual else y.to(x.dtype)
            if self.residual and local_cpu.fits(y, x) and ordinary(y, self.refine, self.fuse):
                with counted_as("conv", macs=y.numel() * (9 + self.channels)):
                    return local_cpu.local_block(y, x, *parameters(self.refine, self.fuse))
            y = self.fuse(gelu(self.refine(y)))
        return x + y if self.residual else y.to(x.dtype)

    def core(self, x: Tensor) -> Tensor:
        """Phi(x), in x's dtype or the one autocast asks for."""
        return self._core(x)[0]

    def _core(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Phi(x), and x for the residual."""
        if self.basis is None:
            return x, x
        z = x.to(autocast_dtype(x) or x.dtype)
        if z.shape[0] == 0:  # no values, but gradients of zero for all parameters: other processes wait for them
            return z + sum(p.sum() for p in self._spectral()), x
        wrapped = self.ndim == 2 and self.refine is not None
        found = [ops.run_beside(z, prepared, wrapped=wrapped) for prepared in self._prepared(z)]
        if len(found) > 1:
            return torch.stack([y for y, _ in found]).mean(0), x
        y, again = found[0]
        return y, again if z is x else x

    def axis_parameters(self, axis: str) -> AxisParameters:
        """theta, Gamma and phi of the paper's equations for one axis, from the parameters as they are stored."""
        return self._unscaled(self.theta.get(axis), self.gain_table[axis], self.phase_table.get(axis))

    def _unscaled(self, theta: Tensor | None, table: Tensor, phase: Tensor | None) -> AxisParameters:
        start = 1.0 if self.gain == "signed" else ops.UNIT_GAIN
        theta, offset, phase = (stepped(p, self.step_scale) for p in (theta, table, phase))
        assert offset is not None
        return AxisParameters(theta, start + offset, phase)

    def operators(self, *spatial: int) -> dict[str, AxisOperator]:
        """Basis and gains of every axis in use, for features of this spatial size. Differentiable."""
        return self._operators(spatial, self._spectral())

    def _operators(self, spatial: tuple[int, ...], params: Sequence[Tensor]) -> dict[str, AxisOperator]:
        """The same, of tensors in place of the parameters, in the order of `_spectral`."""
        each = iter(params)
        theta, tables, phases = ({a: next(each) for a in d} for d in (self.theta, self.gain_table, self.phase_table))
        values = {axis: self._unscaled(theta.get(axis), t, phases.get(axis)) for axis, t in tables.items()}
        bases = self._given(theta) or self._bases(spatial, {axis: values[axis].theta for axis in theta})
        found = {}
        for axis, (_, table, phase) in values.items():
            i = AXES[self.ndim].index(axis)
            if phase is not None:
                gains = ops.complex_gains(table, phase, spatial[i])
            else:
                gains = (ops.positive_gains if self.gain == "positive" else ops.signed_gains)(table, spatial[i])
            found[axis] = AxisOperator(2 + i, bases.get(axis), gains)
        return found

    def explain(self, x: Tensor) -> Choice:
        """The form that runs on x, and why."""
        self._check(x)
        if self.basis is None:
            return Choice("none", "basis=None has no spectral core")
        z = x.to(autocast_dtype(x) or x.dtype)
        chains = self._chains_of_operators(z, self._spectral())
        return self._choose(z, chains, self._wants_backward(z), channels_last(z))

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, axes={self.axes!r}, basis={self.basis!r}, gain={self.gain!r}, residual={self.residual}, "
            f"step_scale={self.step_scale:g}"
        )

    # --- plumbing ---------------------------------------------------------------------------------

    def _check(self, x: Tensor) -> None:
        expected = f"(B, {self.channels}, {', '.join(a[1].upper() for a in AXES[self.ndim])})"
        if x.ndim != self.ndim + 2 or x.shape[1] != self.channels:
            hint = "pass ndim= for 1-D or 3-D features" if x.ndim != self.ndim + 2 else "set channels to match"
            raise ValueError(f"CHASM expected features {expected}, got {tuple(x.shape)}: {hint}")
        if not x.is_floating_point():
            raise ValueError(f"CHASM expected real floating-point features, got {x.dtype}: convert x (stack re and im)")
        if 0 in x.shape[2:]:
            raise ValueError(
                f"CHASM expected spatial axes of length 1 or more, got {tuple(x.shape)}: drop empty inputs"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Rescales what was written with another step scale, so that it loads as the same operator."""
        written = state_dict.get(f"{prefix}stored_step_scale")
        if written is not None and written != torch.tensor(self.step_scale).to(written):
            factor = float(written) / self.step_scale
            spectral = tuple(f"{prefix}{name}." for name in self.spectral_parameters)
            for key in [key for key in state_dict if key.startswith(spectral)]:
                state_dict[key] = factor * state_dict[key]
            state_dict[f"{prefix}stored_step_scale"] = torch.full_like(written, self.step_scale)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _bases(self, spatial: tuple[int, ...], theta: dict[str, Any]) -> dict[str, Tensor]:
        if self.basis == "shared":
            return dict(zip(theta, ops.orthogonal_basis(torch.stack(list(theta.values()))), strict=True))
        at = dict(zip(AXES[self.ndim], spatial, strict=True))
        return {a: ops.orthogonal_basis(ops.table_at(t, at[a])) for a, t in theta.items()}

    def _given(self, theta: dict[str, Tensor]) -> dict[str, Tensor]:
        """The bases of `batched_bases`, if made from these very theta as they are, with the gradient that is wanted."""
        given = None if torch.compiler.is_compiling() else self._cache.given  # a compiler sees no version counters
        if given is None or not given.holds_for(list(theta.values())):
            return {}
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in theta.values())
        return given if not wanted or all(U.requires_grad for U in given.values()) else {}

    def _chains_of_operators(self, x: Tensor, params: Sequence[Tensor]) -> list[list[AxisOperator]]:
        operators = self._operators(tuple(x.shape[2:]), params)
        return [[operators[axis] for axis in chain] for chain in self.chains]

    def _wants_backward(self, x: Tensor) -> bool:
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self._spectral()))

    def _choose(self, x: Tensor, chains: list[list[AxisOperator]], grad: bool, last: bool) -> Choice:
        return ops.choose_form(
            x.shape,
            [op for chain in chains for op in chain],
            device=x.device,
            dtype=x.dtype,
            grad=grad,
            form=self.form,
            channels_last=last,
        )

    def _build(self, x: Tensor, grad: bool, last: bool, params: Sequence[Tensor]) -> list[Prepared]:
        chains = self._chains_of_operators(x, params)
        form = self._choose(x, chains, grad, last).form
        return [ops.prepare(x.shape, chain, form, x.dtype) for chain in chains]

    def _prepared(self, x: Tensor) -> list[Prepared]:
        """What `ops.run` needs. Cached in eval, unless a gradient of the spectral parameters is wanted."""
        params, grad, last = self._spectral(), self._wants_backward(x), channels_last(x)
        wants_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in params)
        if traced(x) or self._cache.given is not None or self._large(x):
            # Fake tensors keep out of the cache, and what is large.
            return self._build(x, grad, last, params)
        key = (x.shape[2:], x.dtype, x.device, self.form, grad, last)
        if self.training or wants_gradient:
            watch(params)  # replays tell by version counters that values of before are gone
            # Kept for as long as the result, so neither x nor a strong reference, which would be a cycle of autograd's.
            empty, mixer = x.new_empty(0, *x.shape[1:]), weakref.proxy(self)
            found: list[Prepared] = self._replays(key, params, lambda tensors: mixer._build(empty, grad, last, tensors))
            return found
        entries = self._cache.of(params)
        kept: list[Prepared] | None = entries.get(key)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            if kept is None:
                return self._build(x, grad, last, params)  # part of the graph; it has not run yet
            self._cache.captured.append(kept)
        if kept is None:
            with torch.inference_mode(False), torch.no_grad():  # usable later in any mode
                kept = self._build(x, grad, last, params)
            self._cache.put(entries, key, kept)
        return kept

    def _large(self, x: Tensor) -> bool:
        """Whether circulants are made for x that are too large to keep; in float32 a GPU takes the FFT."""
        circulants = x.device.type != "cpu" and x.dtype.itemsize == 2 and self.basis != "untied"
        return circulants and max(x.shape[2:]) > LONG

    def _spectral(self) -> list[nn.Parameter]:
        return [*self.theta.values(), *self.gain_table.values(), *self.phase_table.values()]

    # `.to()` and friends move or round parameters without a trace in their version counters; `.train()` and
    # `.eval()` mark the places where people write through `.data` (averaged weights swapped in and out).
    def _apply(self, fn: Any, recurse: bool = True) -> "CHASM":
        self._cache.clear()
        self._replays.clear()
        super()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> "CHASM":
        self._cache.clear()
        super().train(mode)
        return self


@contextmanager
def batched_bases(model: nn.Module, *, graph: bool = False) -> Iterator[None]:
    """Within this context every shared basis of `model` is built once, all those of equal C in one batched call.

    On a GPU only where the step becomes a CUDA graph of one's own (`graph`): else every mixer replays its own basis
    (`ops.replay`), which takes fewer launches. Parameters that are changed (but for writes through `.data`), exchanged
    or sharded, and compiled code, get bases of their own. The batched call has one backward pass: open a context for
    each, around forward and backward (checkpointing looks for the same bases when it computes again).

    >>> import torch
    >>> model = nn.Sequential(CHASM(8, size=16), CHASM(8, size=16))
    >>> with batched_bases(model):
    ...     model(torch.randn(1, 8, 16, 16)).square().mean().backward()
    """
    mixers: dict[CHASM, MadeFrom] = {}
    groups: dict[Any, list[tuple[MadeFrom, str, Tensor]]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, CHASM) and module.basis == "shared":
            thetas = dict(module.theta.items())
            if all(_versioned(t) and (graph or not t.is_cuda) for t in thetas.values()):
                mixers[module] = MadeFrom(thetas.values())
                for axis, theta in thetas.items():
                    scaled = stepped(theta, module.step_scale)
                    groups[theta.shape, theta.dtype, theta.device].append((mixers[module], axis, scaled))
    for members in groups.values():
        bases = ops.orthogonal_basis(torch.stack([theta for *_, theta in members]))
        for (given, axis, _), U in zip(members, bases, strict=True):
            given[axis] = U
    try:
        for module, given in mixers.items():
            module._cache.given = given
        yield
    finally:
        for module in mixers:
            module._cache.given = None


def stepped(parameter: Tensor | None, scale: float) -> Any:
    """scale * parameter, with the gradient of the product handed to the parameter as it is.

    A step of any first-order optimiser then moves the product `scale` times as far as it would move the product
    itself: Adam and Lion step by the learning rate whatever the gradient, SGD in proportion to it.
    """
    if parameter is None or scale == 1:
        return parameter
    return parameter + (scale - 1) * parameter.detach()


def _versioned(theta: Tensor) -> bool:
    """Whether theta has a version to tell by: not sharded (a DTensor), nor made anew whenever it is asked for."""
    return type(theta) is nn.Parameter and not theta.is_inference()


def _one_of(name: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        known = [str(a) for a in allowed]
        raise ValueError(f"unknown {name}={value!r}: {suggest(str(value), known)}")


def _parse_axes(axes: str, ndim: int) -> list[list[str]]:
    """ "ch>cw" -> one chain of two passes; "ch+cw" -> two chains, averaged."""
    names = re.split(r"[>+]", str(axes))
    if any(n not in AXES[ndim] for n in names) or len(set(names)) != len(names) or (">" in axes and "+" in axes):
        example = ">".join(AXES[ndim])
        raise ValueError(
            f"axes={axes!r} is not a composition of {', '.join(AXES[ndim])}: write for example {example!r} (in order)"
            f" or {example.replace('>', '+')!r} (mean), each axis at most once"
        )
    return [[n] for n in names] if "+" in axes else [names]


def _bins_per_axis(size: Any, bins: Any, ndim: int) -> tuple[int, ...]:
    def per_axis(name: str, value: Any) -> tuple[int, ...]:
        values = tuple(value) if isinstance(value, Iterable) else (value,) * ndim
        if len(values) != ndim or any(type(v) is not int or v < 1 for v in values):
            raise ValueError(f"{name}={value!r}: expected a positive whole number, or {ndim} of them, one per axis")
        return values

    if bins is not None:
        return per_axis("bins", bins)
    return (64,) * ndim if size is None else tuple(n // 2 + 1 for n in per_axis("size", size))
