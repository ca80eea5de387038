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
gradients of A and Gamma (see `ops.gains.stepped`). `step_scale=1` is the paper's parameterisation.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from chasm import ops
from chasm.common.cost import paper_products
from chasm.common.precision import autocast_dtype
from chasm.common.registry import is_count
from chasm.common.tracing import is_transformed
from chasm.mixers._cache import Cache
from chasm.mixers._options import AXES, bins_per_axis, one_of, parse_axes, spatial_size
from chasm.mixers._wrapper import POINTWISE, with_layers
from chasm.mixers.base import Facts, Mixer, register_mixer
from chasm.ops import AxisOperator, AxisSource, Chain, Choice
from chasm.ops.gains import gains_of, stepped
from chasm.ops.kernels.layout import is_channels_last
from chasm.ops.library import wants_gradient

STEP_SCALE = 30.0
Basis = Literal["shared", "identity", "untied"]
Gain = Literal["positive", "signed", "complex"]


class AxisParameters(NamedTuple):
    """The parameters in the equations of one axis."""

    theta: Tensor | None  # (C(C-1)/2,), untied: (B, C(C-1)/2); None for the identity basis
    gain_table: Tensor  # Gamma (B, C)
    phase_table: Tensor | None  # phi (B, C) of complex gains


@register_mixer("chasm")
class CHASM(Mixer):
    """Shared-basis spectral mixer for real features (B, C, H, W); any H and W, also (B, C, L) and (B, C, D, H, W).

    Args:
        channels: the number of channels, C.
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
        device: where the parameters are made.
        dtype: of the parameters.

    >>> mixer = CHASM(8, size=16)
    >>> mixer(torch.randn(2, 8, 16, 16)).shape, mixer.explain(torch.randn(2, 8, 16, 16)).form
    (torch.Size([2, 8, 16, 16]), 'fft')
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
        one_of("ndim", ndim, AXES)
        one_of("basis", basis, ("shared", "identity", "untied", None))
        one_of("gain", gain, ("positive", "signed", "complex"))
        one_of("form", form, ("auto", *ops.FORMS))
        if not is_count(channels):
            raise ValueError(f"expected a whole number of channels, 1 or more, got channels={channels!r}")
        channels = int(channels)
        if not (isinstance(step_scale, int | float) and 0 < step_scale < math.inf):
            raise ValueError(f"expected a positive step_scale, got {step_scale!r}: 1 is the paper's parameterisation")
        self.channels, self.ndim, self.basis, self.gain, self.form = channels, ndim, basis, gain, form
        self.step_scale = float(step_scale)
        self.axes = ">".join(AXES[ndim]) if axes is None else axes
        self.residual = local if residual is None else residual
        self.chains = parse_axes(self.axes, ndim)
        used = [axis for chain in self.chains for axis in chain] if basis is not None else []
        self._dims = [2 + AXES[ndim].index(axis) for axis in used]
        n_bins = dict(zip(AXES[ndim], bins_per_axis(size, bins, ndim), strict=True))

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

    def forward(self, x: Tensor) -> Tensor:
        """Return Y = X + P_fuse(L(Phi(X))), in the dtype and memory format of X."""
        if x.ndim != self.ndim + 2 or x.shape[1] != self.channels or 0 in x.shape or not x.is_floating_point():
            self._check(x)
            # An empty batch has no values, but gradients of zero for all parameters: other processes wait for them.
            return x + sum(p.sum() for p in self.parameters())
        dtype = autocast_dtype(x) or x.dtype
        with paper_products(self._paper_macs, x):
            return with_layers(x, self._chains(x, dtype), self.refine, self.fuse, self.residual)

    def core(self, x: Tensor) -> Tensor:
        """Return Phi(x), in x's dtype or the one autocast asks for."""
        z = x.to(autocast_dtype(x) or x.dtype)
        if z.shape[0] == 0:
            return z + sum(p.sum() for p in self._spectral())
        with paper_products(self._paper_macs, z):
            return ops.run(z, self._chains(z, z.dtype))

    def axis_parameters(self, axis: str) -> AxisParameters:
        """Return theta, Gamma and phi of the paper's equations for one axis, from the parameters as they are stored."""
        scale, start = self.step_scale, 1.0 if self.gain == "signed" else ops.UNIT_GAIN
        theta, phase = self.theta.get(axis), self.phase_table.get(axis)
        return AxisParameters(
            None if theta is None else stepped(theta, scale),
            stepped(self.gain_table[axis], scale, start),
            None if phase is None else stepped(phase, scale),
        )

    def operators(self, *spatial: int | tuple[int, ...]) -> dict[str, AxisOperator]:
        """Return basis and gains of every axis in use, for features of one spatial size. Differentiable.

        Args:
            *spatial: the spatial size, as numbers or as one tuple: `operators(64, 48)` or `operators(x.shape[2:])`.

        Returns:
            Axis name ("ch", "cw") -> its dimension in x, U (C, C), or None for the identity, and the gains (K, C).

        Example:
            >>> operators = CHASM(8, size=16).operators(16, 16)
            >>> operators["ch"].U.shape, operators["ch"].gains.shape
            (torch.Size([8, 8]), torch.Size([9, 8]))
        """
        return self._operators(spatial_size(spatial, self.ndim))

    def _operators(self, spatial: tuple[int, ...]) -> dict[str, AxisOperator]:
        bases = self._bases(spatial)
        operators = {}
        for axis in self.gain_table:
            i = AXES[self.ndim].index(axis)
            table, phase = self.gain_table[axis], self.phase_table.get(axis)
            gains = gains_of(table, phase, self.gain, self.step_scale, spatial[i])
            operators[axis] = AxisOperator(2 + i, bases.get(axis), gains)
        return operators

    def explain(self, x: Tensor) -> Choice:
        """Return the form that runs on x, and why. Computes nothing."""
        self._check(x)
        if self.basis is None:
            return Choice("none", "basis=None has no spectral core")
        return self._choose(x, autocast_dtype(x) or x.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, axes={self.axes!r}, basis={self.basis!r}, gain={self.gain!r}, residual={self.residual}, "
            f"step_scale={self.step_scale:g}"
        )

    # --- plumbing ---------------------------------------------------------------------------------

    def _paper_macs(self, x: Tensor) -> int:
        """Return the multiply-adds of U^T v and U v for all coefficients v of the passes, complex ones counted once."""
        if self.basis in (None, "identity"):
            return 0
        return sum(2 * self.channels * (x.numel() // x.shape[d]) * (x.shape[d] // 2 + 1) for d in self._dims)

    def _check(self, x: Tensor) -> None:
        if x.ndim != self.ndim + 2 or x.shape[1] != self.channels:
            expected = f"(B, {self.channels}, {', '.join(a[1].upper() for a in AXES[self.ndim])})"
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

    def _spectral(self) -> list[nn.Parameter]:
        return [*self.theta.values(), *self.gain_table.values(), *self.phase_table.values()]

    def _choose(self, x: Tensor, dtype: torch.dtype) -> Choice:
        assert self.basis is not None
        transformed = is_transformed(x)
        return ops.choose_form(
            x.shape,
            self._dims,
            basis=self.basis,
            gain=self.gain,
            device=x.device,
            dtype=dtype,
            grad=wants_gradient((x,)) or wants_gradient(self._spectral()),
            channels_last=x.is_cuda and not transformed and is_channels_last(x),
            transformed=transformed,
            form=self.form,
        )

    def _chains(self, x: Tensor, dtype: torch.dtype) -> list[Chain]:
        """Return the passes that run on x. In eval they are prepared and kept, unless parameters need a gradient."""
        if self.basis is None:
            return [Chain("reference" if is_transformed(x) else "none", dtype, [])]
        form = self._choose(x, dtype).form
        if self.training:
            return self._unprepared(x.shape, form, dtype)
        params = self._spectral()
        if wants_gradient(params):  # a step may follow that no version counter sees
            self._cache.clear()
            return self._unprepared(x.shape, form, dtype)
        if torch.compiler.is_compiling() or is_transformed(x) or not ops.can_be_kept(form, x.shape):
            return self._unprepared(x.shape, form, dtype)

        def make() -> list[Chain]:
            operators = self._operators(x.shape[2:])
            chains = [Chain(form, dtype, [operators[axis] for axis in chain]) for chain in self.chains]
            return [ops.prepare(chain, x.shape) for chain in chains]

        chains: list[Chain] = self._cache.get((x.shape[2:], dtype, x.device, form), params, make)
        return chains

    def _unprepared(self, shape: torch.Size, form: str, dtype: torch.dtype) -> list[Chain]:
        """Return the passes with the parameters as they are stored, or with operators for plain torch operations."""
        axes: dict[str, Any] = {}
        if form == "reference" or self.basis == "untied":
            axes = dict(self._operators(shape[2:]))
        else:
            thetas = dict(self.theta.items())
            bases = (self._cache.batched and self._cache.batched_bases(thetas)) or thetas
            for dim, (axis, table) in zip(self._dims, self.gain_table.items(), strict=True):
                phase = self.phase_table.get(axis)
                axes[axis] = AxisSource(dim, bases.get(axis), table, phase, self.gain, self.step_scale)
        return [Chain(form, dtype, list(map(axes.__getitem__, chain))) for chain in self.chains]

    def _bases(self, spatial: tuple[int, ...]) -> dict[str, Tensor]:
        """Return U of every axis; all shared ones come from one call."""
        thetas = dict(self.theta.items())
        if not thetas:
            return {}
        if self.basis == "untied":
            lengths = dict(zip(AXES[self.ndim], spatial, strict=True))
            scaled = {axis: stepped(theta, self.step_scale) for axis, theta in thetas.items()}
            return {axis: ops.orthogonal_basis(ops.table_at(t, lengths[axis])) for axis, t in scaled.items()}
        bases = self._cache.batched_bases(thetas)
        if not bases:
            stacked = stepped(torch.stack(list(thetas.values())), self.step_scale)
            bases = dict(zip(thetas, ops.orthogonal_basis(stacked).unbind(), strict=True))
        return bases

    # `.to()` moves parameters without a trace in their version counters; `.train()` and `.eval()` are called where
    # people write through `.data`, as averaged weights are swapped in and out, and around the steps of an optimiser.
    def _apply(self, fn: Any, recurse: bool = True) -> "CHASM":
        self._cache.clear()
        super()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> "CHASM":
        self._cache.clear()
        super().train(mode)
        return self
