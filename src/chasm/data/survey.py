"""Collect facts about the slices of a case for `chasm data check`: their range, blank ones, and a hash of each."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chasm.data.records import CaseFacts


@dataclass
class SliceSurvey:
    """Facts about slices, taken one after another.

    Example:
        >>> survey = SliceSurvey()
        >>> survey.add(np.eye(4))
        >>> survey.add(np.zeros((4, 4)))
        >>> survey.low, survey.high, [bool(d) for d in survey.digests]
        (0.0, 1.0, [True, False])
    """

    low: float = np.inf  # the smallest value, or magnitude of complex values
    high: float = -np.inf  # the largest
    # a hash of the values of each slice; empty for a blank slice, whose values are all equal
    digests: list[bytes] = field(default_factory=list)

    def facts(self, shape: tuple[int, ...], dtype: str, **others: Any) -> CaseFacts:
        """Return the facts about a case of these slices; `others` are further fields of `CaseFacts`."""
        slices, digests = len(self.digests), tuple(self.digests)
        return CaseFacts(shape, slices, dtype, self.low, self.high, digests=digests, **others)

    def add(self, values: np.ndarray) -> None:
        """Take a slice (..., H, W) of finite numbers. Equal values in another number format have the same hash."""
        size = np.abs(values) if values.dtype.kind == "c" else values
        low, high = float(size.min()), float(size.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        if low == high:
            self.digests.append(b"")
            return
        single = np.ascontiguousarray(values, dtype=np.complex64 if values.dtype.kind == "c" else np.float32)
        content = str(single.shape).encode() + (single + 0).tobytes()  # + 0 turns -0.0 into 0.0
        self.digests.append(hashlib.blake2b(content, digest_size=16).digest())
