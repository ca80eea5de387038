"""What all tests share. Two test processes share the machine: one thread each, for them and for what they start."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from chasm.common import extensions

pytest_plugins = ["kernel_fixtures"]
TESTS = Path(__file__).parent

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # where there is a GPU, what is compared with is float32

# 20 to 60 seconds each, more with empty caches. pytest-xdist hands files out in the order of their tests: a long file
# at the end would leave the other process without work.
LONGEST = (
    "ops/test_interpreter.py",
    "studies/test_running.py",
    "train/test_export.py",
    "train/test_resume.py",
    "mixers/test_compile_export.py",
    "ops/test_cards.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others keep their order."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


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
