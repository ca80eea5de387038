"""A separate matrix for every frequency: the literal alternative to CHASM's untied basis.

    M(k) = (I + S_k / 2)^2, S_k symmetric    "symmetric": every symmetric positive matrix is one of these squares
    M(k) = I + F_k                           "any": any real matrix
    Phi = Phi_CW o Phi_CH,   Phi_a = irfft M rfft,   Y = X + P_fuse(L(Phi(X)))        as in CHASM

Reading: the paper's untied variant learns "frequency-indexed channel operators without a common basis" and does not say
of which form. `CHASM(basis="untied")` keeps the exponential map and positive gains; this mixer keeps the wrapper only.
Both start at the identity and have CHASM's step scale. The square replaces an exponential, which overflows in half
precision after a few large steps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from chasm.common.registry import suggest
from chasm.mixers._options import bins_per_axis
from chasm.mixers._spectral import full_precision, is_empty, upcast
from chasm.mixers._wrapper import Pointwise2d
from chasm.mixers.base import Facts, Mixer, register_mixer
from chasm.mixers.chasm import STEP_SCALE
from chasm.ops import table_at
from chasm.ops.forms.fft import matrix_per_frequency
from chasm.ops.gains import stepped

OPERATORS = ("symmetric", "any")


@register_mixer("free-operator")
class FreeOperator(Mixer):
    """CHASM's block around one free C x C matrix per frequency and axis.

    Args:
        channels: the number of channels, C.
        size: spatial size the tables are made for (B = K bins each); other sizes interpolate the tables.
        bins: bins B per axis (one number, or one per spatial axis); overrides `size`. With neither: 64.
        operator: "symmetric" (and positive) or "any".
        residual: whether to add X; a host that adds its own switches it off.
        step_scale: see `chasm.CHASM`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    >>> mixer = FreeOperator(4, size=8)
    >>> mixer.matrices(8, 8)[0].shape
    torch.Size([5, 4, 4])
    """

    owns_residual = True
    spectral_parameters = ("table",)
    default_step_scale = STEP_SCALE
    facts = Facts(
        "a matrix per frequency",
        "dense",
        "tables interpolated to the bins of the input",
        shared_basis="no",
        note="the literal untied variant, a reading; B C (C + 1) / 2 or B C^2 numbers per axis",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        bins: int | tuple[int, ...] | None = None,
        operator: str = "symmetric",
        residual: bool = True,
        step_scale: float = STEP_SCALE,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if operator not in OPERATORS:
            raise ValueError(f"unknown operator {operator!r}: {suggest(operator, OPERATORS)}")
        self.channels, self.operator, self.residual, self.step_scale = channels, operator, residual, float(step_scale)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        entries = channels**2 if operator == "any" else channels * (channels + 1) // 2
        tables = (nn.Parameter(torch.zeros(B, entries, **like)) for B in bins_per_axis(size, bins, 2))
        self.table = nn.ParameterList(tables)  # of height and width
        self.refine = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, **like)
        self.fuse = Pointwise2d(channels, channels, 1, **like)

    def forward(self, x: Tensor) -> Tensor:
        """Return Y = X + P_fuse(L(Phi(X)))."""
        if is_empty(x, self.channels):
            return x
        with full_precision(x):
            z = upcast(x)
            for dim, M in enumerate(self.matrices(*x.shape[2:]), 2):
                z = matrix_per_frequency(z, M, dim)
        y = self.fuse(gelu(self.refine(z.to(x.dtype))))
        return x + y if self.residual else y

    def matrices(self, *spatial: int) -> list[Tensor]:
        """Return M (K, C, C) of height and of width.

        Args:
            *spatial: H and W of the features.
        """
        per_axis = []
        for table, n in zip(self.table, spatial, strict=True):
            values = table_at(stepped(table, self.step_scale), n)
            eye = torch.eye(self.channels, device=values.device, dtype=values.dtype)
            if self.operator == "any":
                per_axis.append(eye + values.unflatten(1, (self.channels, self.channels)))
            else:
                root = eye + _symmetric(values, self.channels) / 2
                per_axis.append(root @ root)
        return per_axis


def _symmetric(entries: Tensor, channels: int) -> Tensor:
    """Return symmetric matrices (K, C, C) from (K, C(C+1)/2) entries, row by row over the lower triangle."""
    rows, cols = torch.tril_indices(channels, channels, device=entries.device)
    S = entries.new_zeros(len(entries), channels, channels)
    S[:, rows, cols] = entries
    return S + S.tril(-1).mT
