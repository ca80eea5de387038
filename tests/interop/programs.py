"""Other people's programs that the tests here compare with."""

import shutil

import pytest


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests where a program is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
