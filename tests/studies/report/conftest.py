"""What the tests of reports share."""

import pytest

from chasm.studies.report import figures


@pytest.fixture
def numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the drawing of figures, which takes longer than the rest of a report."""
    monkeypatch.setattr(figures, "encoded", lambda figure, kind: b"")
