"""What an operator tells `chasm.count` about itself. Nothing happens unless a count is running.

with counted_as("scan", macs=L * (9 * D * N + D)):   # this number, whatever runs inside
    y = ...
with counted_as("matrix exponential"):               # what runs inside is counted, under this name
    U = ...
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

PAPER_KINDS = ("conv", "matmul", "scan")  # what the paper's FLOPs column adds up


class Tally:
    """Multiply-adds by kind, and the total by the paper's convention."""

    def __init__(self) -> None:
        self.macs: Counter[str] = Counter()
        self.paper = 0
        self._label: str | None = None
        self._muted = False

    def add(self, kind: str, macs: int, paper: int | None = None) -> None:
        """Count multiply-adds.

        Args:
            kind: what they belong to, unless a section has another name for it.
            macs: how many.
            paper: how many of them by the paper's convention; all by default.
        """
        if self._muted or macs == 0:
            return
        kind = self._label or kind
        self.macs[kind] += macs
        if kind in PAPER_KINDS:
            self.paper += macs if paper is None else paper

    @contextmanager
    def section(self, kind: str, macs: int | None) -> Iterator[None]:
        """Count what runs in this context under a name, or as so many multiply-adds."""
        before = self._label, self._muted
        if macs is not None:
            self.add(kind, macs)
            self._muted = True
        self._label = self._label or kind
        try:
            yield
        finally:
            self._label, self._muted = before


TALLY: Tally | None = None  # where operators report to; None unless a count is running


@contextmanager
def measuring(tally: Tally) -> Iterator[None]:
    """Operators report to this tally inside the block. One count at a time in a process."""
    global TALLY
    before, TALLY = TALLY, tally
    try:
        yield
    finally:
        TALLY = before


def counted_as(kind: str, macs: int | None = None) -> AbstractContextManager[None]:
    """Name the arithmetic of a block; with ``macs``, also replace its count."""
    return nullcontext() if TALLY is None else TALLY.section(kind, macs)
