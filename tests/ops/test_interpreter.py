"""Without a GPU the tests of kernels run in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import CUDA, INTERPRETED

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels are tested directly")
def test_kernels_in_the_interpreter() -> None:
    """In one process for all files: triton reads the variable that chooses its interpreter when it is imported."""
    pytest.importorskip("triton")
    marks = re.compile(r"^@kernel_test|^pytestmark = .*mark\.kernel", re.M)
    files = [str(f) for f in sorted(TESTS.rglob("test_*.py")) if marks.search(f.read_text())]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "kernel", *files]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    summary = done.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed, done.stdout
    assert int(passed[1]) >= 250
    assert "skipped" not in summary  # a mark that keeps kernels from the interpreter would hide here
