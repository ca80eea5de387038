"""The interface of a form."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Passes(NamedTuple):
    """Axis passes, one after the other."""

    dims: Sequence[int]  # the axis of (B, C, *spatial) each runs along
    gains: Sequence[Tensor]  # (K, C) of each
    bases: Sequence[Tensor]  # (C, C) of each, or none at all for the identity


class Form(ABC):
    """One way to compute axis passes and their gradients. Nothing here records a gradient: `ops.block` calls it."""

    @abstractmethod
    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        """Return the constants that the form computes with at one input size.

        Args:
            shape: (B, C, *spatial); the batch does not matter.
            passes: what to compute.
            dtype: of the features.
            trains: whether gradients of gains and bases will be wanted.
        """

    @abstractmethod
    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], save: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the result y, and what the backward needs besides.

        Args:
            x: contiguous (B, C, *spatial), of the dtype the constants were prepared for.
            dims: of the passes.
            constants: from `prepare`.
            save: whether gradients of gains and bases will be wanted; if not, nothing needs to be saved.
            before_local: whether the depthwise convolution follows; y may then have the memory format that it wants.
        """

    def backward(
        self,
        g: Tensor,
        saved: Sequence[Tensor],
        passes: Passes,
        constants: Sequence[Tensor],
        needs_x: bool,
        add: Tensor | None,
        symmetric: bool,
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """Return the gradients of x, of the gains and of the bases.

        Args:
            g: gradient of y, contiguous or channels last.
            saved: from `forward`.
            passes: what was computed; without gains and bases where no gradients of them are wanted.
            constants: from `prepare`.
            needs_x: whether the gradient of x is wanted.
            add: a map to add to the gradient of x, or None.
            symmetric: whether all gains are real, so that the operators are symmetric.
        """
        raise NotImplementedError(f"form {type(self).__name__} has no gradient")
