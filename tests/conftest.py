"""What all tests share. Two test processes share the machine: one thread each, for them and for what they start."""

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from chasm.common import extensions

pytest_plugins = ["kernel_fixtures"]

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # where there is a GPU, what is compared with is float32


@pytest.fixture
def no_loaded_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file was loaded with --with; those that the test loads are forgotten, or later runs would record them."""
    monkeypatch.setattr(extensions, "_loaded", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    folders = {os.path.dirname(file) for file in extensions.loaded()}
    for name in set(sys.modules) - modules:
        if os.path.dirname(getattr(sys.modules[name], "__file__", None) or "") in folders:
            del sys.modules[name]
