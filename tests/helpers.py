"""What tests of several folders share."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[..., bool] = lambda **_: True) -> list[Any]:
    """Cases in which every possible pair of values of any two factors occurs: far fewer than the full product.

    Args:
        factors: the values of each factor, by name.
        possible: called with a value for every factor, says whether they go together.

    Returns:
        Tuples of values in the order of the factors, the same ones in every run.

    >>> cases = pairwise({"a": [0, 1, 2], "b": "xy", "c": [True, False]})
    >>> len(cases), {(a, b) for a, b, _ in cases} == {(a, b) for a in (0, 1, 2) for b in "xy"}
    (6, True)
    """
    names = list(factors)
    rows = [row for row in product(*(range(len(factors[n])) for n in names)) if possible(**_values(factors, row))]
    pairs = {row: {(i, j, row[i], row[j]) for i, j in combinations(range(len(names)), 2)} for row in rows}
    missing, found = set().union(*pairs.values()), []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))  # the first of the best
        missing -= pairs[best]
        found.append(tuple(_values(factors, best).values()))
    return found


def _values(factors: Mapping[str, Sequence[Any]], row: Sequence[int]) -> dict[str, Any]:
    return {name: factors[name][i] for name, i in zip(factors, row, strict=True)}
