"""What the tests of `chasm reconstruct` share."""

import pytest


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file in its place: drawing takes longer than all the rest."""
    monkeypatch.setattr("chasm.reconstruct.cases.side_by_side", lambda path, *_: path.touch())
