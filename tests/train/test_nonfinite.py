"""The guard of a run against numbers that are not finite."""

import math
from pathlib import Path

import pytest

from chasm.train import NonFiniteError
from chasm.train.nonfinite import MAX_SKIPPED_STEPS, NonFiniteGuard


def test_only_skipped_steps_in_a_row_end_a_run(tmp_path: Path) -> None:
    said: list[str] = []
    guard = NonFiniteGuard(tmp_path, "skip", writes=False, say=said.append)
    for step in range(3 * MAX_SKIPPED_STEPS):
        loss, norm = [(1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)][step % 3]
        assert guard.allows(step, loss, norm, list) == (step % 3 == 0)
    assert len(said) == 2 * MAX_SKIPPED_STEPS
    assert guard.allows(0, 1.0, 1.0, list)
    for step in range(1, MAX_SKIPPED_STEPS):
        assert not guard.allows(step, math.nan, 1.0, list)
    with pytest.raises(NonFiniteError, match=f"{MAX_SKIPPED_STEPS} such steps in a row"):
        guard.allows(MAX_SKIPPED_STEPS, math.nan, 1.0, list)
    assert not list(tmp_path.iterdir())  # another process writes
