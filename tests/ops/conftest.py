"""What the tests of kernels share."""

import os
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN: what a kernel does not write shows."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))


@pytest.fixture
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies the bits of bfloat16, and patches triton.language again at each call of a helper function."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original, done, dot = interpreter._patch_lang, set(), interpreter.InterpreterBuilder.create_dot

    def patch(function):
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            original(function)
        return SimpleNamespace(restore=lambda: None)

    def widened(t):
        if t.dtype.scalar != tl.bfloat16:
            return t
        return interpreter.TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_patch_lang", patch)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    )
