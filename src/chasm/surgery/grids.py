"""Find the grid of a sequence of tokens (B, N, C), from the caller, from the call or from the host.

A sequence does not show its grid: 16 tokens are 4 x 4 or 2 x 8. So the grid is never guessed: `chasm.swap` says where
it is looked for.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

Grid = tuple[int, ...]
MAX_PREFIX_TOKENS = 16  # class token and registers; a map that leaves more over is not the map of these tokens


class FixedGrid:
    """Gives the same grid at every call: (H, W), or as many numbers as there are axes."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def find(self, named: dict[str, Any], N: int, prefix: int | None) -> Grid:
        """Return the grid.

        Args:
            named: the arguments of the call.
            N: the number of tokens.
            prefix: number of tokens before the grid, if it is known.
        """
        return self.grid


class SequenceGrid(FixedGrid):
    """Gives one axis with as many positions as there are tokens."""

    def __init__(self) -> None:
        super().__init__(())

    def find(self, named: dict[str, Any], N: int, prefix: int | None) -> Grid:
        return (N - (prefix or 0),)


class CallGrid(FixedGrid):
    """Takes the grid of `ndim` axes from numbers in the call."""

    def __init__(self, ndim: int) -> None:
        super().__init__(())
        self.ndim = ndim

    def find(self, named: dict[str, Any], N: int, prefix: int | None) -> Grid:
        grid = grid_in_call(named, N, prefix, (self.ndim,))
        if grid is None:
            raise ValueError(f"expected a call that names the grid of its {N} tokens, as the example did")
        return grid


class MapGrid(FixedGrid):
    """Takes the size of the map that a convolution returned last. Attach it to the convolution and the network."""

    def __init__(self) -> None:
        super().__init__(())

    def attach(self, convolution: nn.Module, network: nn.Module) -> None:
        """Take the grid from this convolution, and forget it when a new call of the network begins."""
        convolution.register_forward_hook(self)
        network.register_forward_pre_hook(self.forget)

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> None:
        """Note the size of a map (B, C, H, W)."""
        self.grid = tuple(out.shape[2:])

    def forget(self, network: nn.Module, args: Any) -> None:
        """Forget the size, so that no old size stays if the convolution is replaced by another module."""
        self.grid = ()

    def find(self, named: dict[str, Any], N: int, prefix: int | None) -> Grid:
        if not self.grid:
            problem = "the convolution that makes the tokens did not run in this call, so their grid is not known"
            raise ValueError(f"{problem}: pass swap() size=(H, W)")
        return self.grid


def split_tokens(N: int, prefix: int | None, grid: Grid) -> int:
    """Return how many of N tokens come before the grid; a ValueError if they do not fit.

    Args:
        N: the number of tokens.
        prefix: number of tokens before the grid, if it is known.
        grid: grid of the other tokens.

    Example:
        >>> split_tokens(65, None, (8, 8)), split_tokens(12, 0, (3, 4))
        (1, 0)
    """
    rest = N - math.prod(grid)
    if _can_precede(rest, prefix):
        return rest
    before = "" if prefix is None else f" after {prefix} prefix tokens"
    text = " x ".join(map(str, grid))
    raise ValueError(f"expected a {text} grid{before}, got {N} tokens: check size= and prefix_tokens=")


def _can_precede(rest: int, prefix: int | None) -> bool:
    return 0 <= rest <= MAX_PREFIX_TOKENS if prefix is None else rest == prefix


def grid_in_call(
    named: dict[str, Any], N: int, prefix: int | None, dimensions: tuple[int, ...] = (2, 3)
) -> Grid | None:
    """Return the grid of N tokens that the arguments of a call name, if they do.

    Args:
        named: the arguments.
        N: the number of tokens.
        prefix: number of tokens before the grid; 0 if it is not known.
        dimensions: the numbers of axes that the grid may have, first choice first.

    Example:
        >>> grid_in_call({"height": 2, "width": 8}, 16, None), grid_in_call({"size": (4, 4)}, 16, None)
        ((2, 8), (4, 4))
    """
    for ndim in dimensions:
        for grid in _numbers(named, ndim):
            if math.prod(grid) + (prefix or 0) == N:
                return grid
    return None


def _numbers(named: dict[str, Any], ndim: int) -> Iterator[Grid]:
    """Yield numbers that may be a grid: those in one argument, and those in successive arguments."""
    values = list(named.values())
    for value in values:
        if isinstance(value, Sequence) and len(value) == ndim and all(map(_is_number, value)):
            yield tuple(value)
    for i in range(len(values) - ndim + 1):
        if all(map(_is_number, values[i : i + ndim])):
            yield tuple(values[i : i + ndim])


def _is_number(value: Any) -> bool:
    """True for whole numbers, also for those that are not known while a network is traced."""
    return type(value) is int or type(value).__name__ == "SymInt"


def grid_from_maps(maps: Sequence[tuple[_ConvNd, Grid]], N: int, prefix: int | None) -> tuple[_ConvNd, Grid] | None:
    """Return the convolution whose map N tokens were made from, and the size of that map.

    Args:
        maps: the convolutions that ran before, in order, each with the spatial size of its result.
        N: the number of tokens.
        prefix: number of tokens before the grid, if it is known. Otherwise the map that leaves the fewest tokens is
            taken, and of equal maps the last.
    """
    left = [(N - math.prod(grid), -i) for i, (_, grid) in enumerate(maps)]
    fits = [(rest, i) for rest, i in left if _can_precede(rest, prefix)]
    return maps[-min(fits)[1]] if fits else None
