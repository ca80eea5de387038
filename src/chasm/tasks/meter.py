"""Scores of cases and their statistics, under the name of the protocol that measured them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.tasks.metrics import Rows
from chasm.tasks.protocols import BLANK, Protocol


@dataclass(frozen=True, slots=True)
class Stat:
    """Mean and population standard deviation over cases. Prints with the protocol it was measured by.

    >>> print(Stat(mean=31.25, std=1.5, cases=4, protocol="hifi"))
    31.25 ± 1.5 (hifi, 4 cases)
    """

    mean: float
    std: float
    cases: int
    protocol: str

    def __str__(self) -> str:
        return f"{self.mean:#.4g} ± {self.std:#.2g} ({self.protocol}, {counted(self.cases, 'case')})"


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of an evaluation: ``summary["psnr"]`` is the `Stat` of a score.

    Attributes:
        protocol: name of the protocol.
        meaning: one line that says what the protocol measures.
        per_case: scores of each case, by name.
        blank: number of blank slices that were left out.
    """

    protocol: str
    meaning: str
    per_case: dict[str, dict[str, float]]
    blank: int = 0

    @property
    def stats(self) -> dict[str, Stat]:
        """The `Stat` of every score, by name."""
        return {k: self[k] for k in next(iter(self.per_case.values()))}

    def __getitem__(self, metric: str) -> Stat:
        first = next(iter(self.per_case.values()))
        if metric not in first:
            raise ValueError(f"no score {metric!r} under protocol {self.protocol}: {suggest(metric, first)}")
        values = [scores[metric] for scores in self.per_case.values()]
        n = len(values)
        mean = sum(values) / n
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / n)
        return Stat(mean, std, n, self.protocol)

    def __str__(self) -> str:
        return "\n".join(f"{name} {stat}" for name, stat in self.stats.items())


def aggregate(per_case: Mapping[str, dict[str, float]], protocol: Protocol, blank: int = 0) -> Summary:
    """Return the scores of cases with their statistics.

    Args:
        per_case: scores of each case, by name.
        protocol: protocol that measured them.
        blank: number of blank slices that were left out.
    """
    if not per_case:
        raise ValueError(f"no case to summarise: {'every slice is blank' if blank else 'the split is empty'}")
    return Summary(protocol.name, protocol.meaning, dict(per_case), blank)


class Meter:
    """Collects rows slice by slice and scores a case when the next one begins.

    The slices of a case must come one after another, in the order of an unshuffled dataset, so that the meter holds
    only one volume at a time.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.blank = 0  # slices that were not scored
        self._scores: dict[str, dict[str, float]] = {}
        self._case: str | None = None
        self._rows: list[Rows] = []

    def add(self, rows: Rows, cases: Sequence[str]) -> None:
        """Add the rows of a batch, from `Protocol.rows`, with the name of the case of each row."""
        blank = rows[BLANK].tolist() if BLANK in rows else [False] * len(cases)
        for i, case in enumerate(cases):
            if case != self._case:
                self._close()
                if case in self._scores:
                    raise ValueError(f"slices of case {case!r} came in two places: evaluate in dataset order")
                self._case = case
            if blank[i]:
                self.blank += 1
            else:
                self._rows.append({k: v[i] for k, v in rows.items() if k != BLANK})

    def _close(self) -> None:
        if self._case is not None:
            stacked = {k: torch.stack([row[k] for row in self._rows]) for k in self._rows[0]} if self._rows else {}
            self._scores[self._case] = self.protocol.case(stacked) if stacked else {}
            self.blank += 0 if self._scores[self._case] else len(self._rows)
        self._case, self._rows = None, []

    def per_case(self) -> dict[str, dict[str, float]]:
        """Return the scores of every case so far that is not blank."""
        self._close()
        return {case: scores for case, scores in self._scores.items() if scores}

    def summary(self) -> Summary:
        """Return the scores of all cases and their statistics."""
        return aggregate(self.per_case(), self.protocol, self.blank)
