"""What the tests of kernels share."""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN: what a kernel does not write shows."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            t = make(*args, **options)
            return t.fill_(torch.nan) if t.is_floating_point() and not t.requires_grad else t

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Leave out work that the interpreter repeats without need: twice as fast.

    It patches triton.language at each launch and at each call of a helper function, makes a table of dtypes for each
    tensor, and computes whether integers overflow, for an assertion that it then leaves out.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    original, patched = interpreter._patch_lang, set()
    make_dtype, dtypes = interpreter._get_np_dtype, {}

    def patch(function):
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            original(function)
        return SimpleNamespace(restore=lambda: None)

    def numpy_dtype(of):
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = make_dtype(of)
        return dtypes[name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch)
        monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        yield


@pytest.fixture
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as a card does: the interpreter multiplies the bits of bfloat16, multiplies TF32 as float32, and rounds
    to bfloat16 towards zero.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def read(t, precision):
        """The numbers that a matrix unit would find in t."""
        if t.dtype.scalar == tl.bfloat16:
            bits = t.data.astype(np.uint32) << 16
        elif t.dtype.scalar == tl.float32 and precision.name == "TF32":
            bits = np.ascontiguousarray(t.data).view(np.uint32) & 0xFFFFE000
        else:
            return t
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def cast_to(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)

    cast = interpreter.InterpreterBuilder.cast_impl
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_to)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, d, precision, *rest: dot(self, read(a, precision), read(b, precision), d, precision, *rest),
    )


@pytest.fixture
def assert_same_in_a_cuda_graph() -> Callable[[Callable[..., Tensor], Callable[[], list[Tensor]]], None]:
    """Results and gradients of function(*make()) from a graph's replay are those of an ordinary call, bit for bit."""

    def check(function: Callable[..., Tensor], make: Callable[[], list[Tensor]]) -> None:
        def step() -> list[Tensor]:
            y = function(*leaves)
            return [y, *torch.autograd.grad(y, leaves, grad)]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # a capture must not meet leaves whose gradients belong to the default stream
            leaves = [t.detach().requires_grad_() for t in make()]
            grad = torch.randn_like(leaves[0])
            expected = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = step()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))

    return check
