"""The page that checks the paper against itself: its arithmetic runs as printed."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "paper_checked.md"


def test_the_arithmetic_of_the_page_holds() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0
