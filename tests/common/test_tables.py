"""Tables in Markdown and on the terminal."""

import pytest

from chasm.common.tables import markdown_table, print_table


def test_markdown() -> None:
    text = markdown_table(["a", "b"], [["1|2", "3"], ["4", "5"]], right=["b"])
    assert text.splitlines() == ["| a | b |", "| --- | --: |", r"| 1\|2 | 3 |", "| 4 | 5 |"]


def test_on_a_terminal_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "ms"], [["first", "1.0"], ["second", "10.25"]], title="Times", right=["ms"], marked=[1])
    title, head, _, *rows = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert title == "Times"
    assert head.split() == ["name", "ms"]
    assert [row.split() for row in rows] == [["first", "1.0"], ["second", "10.25"]]
    assert len({len(row) for row in (head, *rows)}) == 1
