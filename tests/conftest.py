"""What all tests share. Two test processes share the machine: one thread each, for them and for what they start."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

pytest_plugins = ["kernel_fixtures"]

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # where there is a GPU, what is compared with is float32


@pytest.fixture
def passed_in_the_interpreter() -> Callable[..., int]:
    """How many tests of a file pass in Triton's interpreter, which wants its variable set before triton is imported."""

    def run(file: str, *options: str) -> int:
        pytest.importorskip("triton")
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", *options, file]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        found = re.search(r"(\d+) passed", done.stdout)
        assert found, done.stdout
        return int(found[1])

    return run
