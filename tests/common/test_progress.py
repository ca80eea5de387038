"""The progress bar: on a terminal only, and out of the way of what is printed."""

import io
import sys

import pytest

from chasm.common.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error one. No fixture: pytest exchanges the streams between setup and call."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return stream


def test_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(3) as bar:
        bar.advance("one")
        bar.update(2, 3, "two")
        with bar.hidden():
            print("result")
        assert bar.speed is None
        bar.say("a note")
    assert capsys.readouterr() == ("result\n", "a note\n")


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with ProgressBar() as bar:
        bar.update(2, 3, "two of them")
        bar.say("a [note]")
        with bar.hidden():
            before = stream.getvalue()
            bar.update(2, 3, "unseen")
            assert stream.getvalue() == before
        bar.advance("the last")
    shown = stream.getvalue()
    for text in ("2/3", "two of them", "a [note]", "3/3", "the last"):
        assert text in shown


def test_none_is_shown_when_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with ProgressBar(3, enabled=False) as bar:
        bar.advance("one")
    assert stream.getvalue() == ""
