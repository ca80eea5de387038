"""What an operator tells `chasm.count` about itself; nothing happens when nobody counts.

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
        if self._muted or macs == 0:
            return
        kind = self._label or kind
        self.macs[kind] += macs
        if kind in PAPER_KINDS:
            self.paper += macs if paper is None else paper

    @contextmanager
    def section(self, kind: str, macs: int | None) -> Iterator[None]:
        before = self._label, self._muted
        if macs is not None:
            self.add(kind, macs)
            self._muted = True
        self._label = self._label or kind
        try:
            yield
        finally:
            self._label, self._muted = before


_tally: Tally | None = None


@contextmanager
def measuring(tally: Tally) -> Iterator[None]:
    """Operators report to this tally inside the block. One count at a time in a process."""
    global _tally
    before, _tally = _tally, tally
    try:
        yield
    finally:
        _tally = before


def is_counting() -> bool:
    """True inside `measuring`."""
    return _tally is not None


def counted_as(kind: str, macs: int | None = None) -> AbstractContextManager[None]:
    """Name the arithmetic of a block; with ``macs``, also replace its count."""
    return nullcontext() if _tally is None else _tally.section(kind, macs)
