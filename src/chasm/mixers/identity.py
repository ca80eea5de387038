"""The Baseline: a slot that holds nothing."""

from typing import Any

import torch
from torch import Tensor

from chasm.mixers.base import Facts, Mixer, register_mixer


@register_mixer("identity")
class Identity(Mixer):
    """An empty slot.

    Args:
        channels: not used.
        size: not used.
        residual: whether to return the input; if not, zeros.
        device: not used; there are no parameters.
        dtype: not used.
    """

    owns_residual = True
    facts = Facts("none", "none", "any size", paper_params="0.00M")

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        residual: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        # Without its identity path nothing is left, so a host that adds its own gets zero.
        return x if self.residual else torch.zeros_like(x)
