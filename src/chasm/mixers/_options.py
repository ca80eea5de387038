"""Check the options of a mixer."""

import re
from collections.abc import Iterable
from typing import Any

from chasm.common.registry import is_count, suggest

AXES = {1: ("cl",), 2: ("ch", "cw"), 3: ("cd", "ch", "cw")}  # names of the spatial axes, in order


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError unless an option has one of its values.

    Args:
        name: name of the option.
        value: the given value.
        allowed: the values it may have.
    """
    if value in allowed:
        return
    if value == "None" and None in allowed:
        raise ValueError(f"{name}='None' is text: write None in Python, null in YAML")
    raise ValueError(f"unknown {name}={value!r}: {suggest(str(value), [str(a) for a in allowed])}")


def spatial_size(size: tuple[Any, ...], ndim: int) -> tuple[int, ...]:
    """Return (64, 48) for operators(64, 48) and for operators((64, 48))."""
    values = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Iterable) else size
    if len(values) != ndim or not all(map(is_count, values)):
        raise ValueError(f"expected {ndim} positive whole numbers, one per spatial axis, got {size!r}")
    return tuple(map(int, values))


def parse_axes(axes: str, ndim: int) -> list[list[str]]:
    """Return the chains of passes: "ch>cw" is one chain of two passes, "ch+cw" two chains, to be averaged."""
    names = re.split(r"[>+]", str(axes))
    if any(n not in AXES[ndim] for n in names) or len(set(names)) != len(names) or (">" in axes and "+" in axes):
        example = ">".join(AXES[ndim])
        raise ValueError(
            f"axes={axes!r} is not a composition of {', '.join(AXES[ndim])}: write for example {example!r} (in order)"
            f" or {example.replace('>', '+')!r} (mean), each axis at most once"
        )
    return [[n] for n in names] if "+" in axes else [names]


def bins_per_axis(size: Any, bins: Any, ndim: int) -> tuple[int, ...]:
    """Return the bins of every axis.

    Args:
        size: spatial size of the features, as one number or one per axis.
        bins: replaces the bins of that size, as one number or one per axis.
        ndim: number of spatial axes.
    """

    def per_axis(name: str, value: Any) -> tuple[int, ...]:
        values = tuple(value) if isinstance(value, Iterable) else (value,) * ndim
        if len(values) != ndim or not all(map(is_count, values)):
            raise ValueError(f"{name}={value!r}: expected a positive whole number, or {ndim} of them, one per axis")
        return tuple(map(int, values))

    if bins is not None:
        return per_axis("bins", bins)
    return (64,) * ndim if size is None else tuple(n // 2 + 1 for n in per_axis("size", size))
