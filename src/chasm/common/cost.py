"""Operators report their cost to `chasm.count` through this module. Nothing happens unless a count is running.

with counted_as("scan", macs=L * (9 * D * N + D)):   # this number, whatever runs inside
    y = ...
with counted_as("matrix exponential"):               # counts what runs inside under this name
    U = ...
with paper_products(lambda: 2 * C * C * K):                  # counts this for the products inside by the paper's rule
    y = ...
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

PAPER_KINDS = ("conv", "matmul", "scan")  # kinds that the paper's FLOPs column adds up
# Work on weights alone: once per forward call whatever the batch, and kept between the calls of an evaluation.
WEIGHT_KINDS = ("matrix exponential", "interpolation", "merged bases", "gain transform")


class Tally:
    """Multiply-adds by kind, and the total by the paper's convention."""

    def __init__(self) -> None:
        self.macs: Counter[str] = Counter()
        self.paper = 0
        self._label: str | None = None
        self._muted = False
        self._products_in_paper = True

    def add(self, kind: str, macs: int, paper: int | None = None) -> None:
        """Count multiply-adds.

        Args:
            kind: kind of the operator, unless a section has another name for it.
            macs: number of multiply-adds.
            paper: number by the paper's convention; `macs` by default.
        """
        if self._muted or macs == 0:
            return
        kind = self._label or kind
        self.macs[kind] += macs
        if kind in PAPER_KINDS and (self._products_in_paper or kind != "matmul"):
            self.paper += macs if paper is None else paper

    @contextmanager
    def section(self, kind: str, macs: int | None) -> Iterator[None]:
        """Count what runs in this context under a name; with `macs`, count that number in its place."""
        before = self._label, self._muted
        if macs is not None:
            self.add(kind, macs)
            self._muted = True
        self._label = self._label or kind
        try:
            yield
        finally:
            self._label, self._muted = before

    @contextmanager
    def paper_products(self, macs: int) -> Iterator[None]:
        """Count `macs` by the paper's convention, in place of the matrix products that run inside."""
        before = self._products_in_paper
        self.paper += macs if before and not self._muted else 0
        self._products_in_paper = False
        try:
            yield
        finally:
            self._products_in_paper = before


TALLY: Tally | None = None  # where operators report to; None unless a count is running


@contextmanager
def measuring(tally: Tally) -> Iterator[None]:
    """Make operators report to this tally inside the block. A process can run one count at a time."""
    global TALLY
    before, TALLY = TALLY, tally
    try:
        yield
    finally:
        TALLY = before


def counted_as(kind: str, macs: int | None = None) -> AbstractContextManager[None]:
    """Name the arithmetic of a block; with ``macs``, also replace its count."""
    return nullcontext() if TALLY is None else TALLY.section(kind, macs)


def paper_products(macs: Callable[..., int], *args: Any) -> AbstractContextManager[None]:
    """Say what the paper's rule counts for the matrix products of a block, whatever form they take.

    `macs` returns the multiply-adds of the products in the published equations, a complex one counted once. It is
    called with the arguments, and only while a count is running.
    """
    return nullcontext() if TALLY is None else TALLY.paper_products(macs(*args))
