"""Every mixer is one graph to the compiler, and one exported program for maps of many sizes."""

from typing import Any

import pytest
import torch
from registry_cases import each_mixer, make, maps, relative
from torch import nn


@each_mixer
def test_compiles_as_one_graph(name):
    torch.compiler.reset()
    m, x = make(name).eval(), maps(8, 6)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = m(a), torch.compile(m, fullgraph=True, backend="aot_eager")(b)
    assert relative(z, y) < 1e-6
    y.square().sum().backward()
    z.square().sum().backward()
    assert relative(b.grad, a.grad) < 1e-5


@pytest.mark.parametrize("name", ["gfnet", "afno", "ffc", "fno-d", "fsel"])  # the other two are made of these
def test_exports_with_free_size(name):
    """One graph for maps of any size on the same side of the modes, and for FFC of the same parity (its local
    unit pads odd maps). GFNet's graph resizes, so it takes every size but the one its filter was made for.
    """
    options = {"modes": (2, 3)} if name == "fno-d" else {}
    m = make(name, **options).eval()
    step = 2 if name == "ffc" else 1
    h, w = (torch.export.Dim(axis, min=5, max=64) for axis in ("h", "w"))
    program = torch.export.export(
        m,
        (maps(16, 14),),
        dynamic_shapes=({2: step * h, 3: step * w},),
        prefer_deferred_runtime_asserts_over_guards=True,  # reshapes of rFFT columns: true, but not proved
    )
    run = program.module()
    for size in ((16, 14), (10, 26), (18, 12)) if name == "ffc" else ((16, 14), (9, 11), (13, 30)):
        assert relative(run(maps(*size)), m(maps(*size))) < 1e-6


def test_inductor_on_one_filter():
    torch.compiler.reset()
    m, x = make("gfnet").eval(), maps(8, 8)
    assert relative(torch.compile(m, fullgraph=True)(x), m(x)) < 1e-5


def check_training(model: nn.Module, *sizes: tuple[int, int], **how: Any) -> None:
    """Outputs and gradients at every size, compiled as one graph, against those without a compiler."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, **how)
    for size in sizes:
        found = []
        for run in (model, compiled):
            model.zero_grad()
            x = maps(*size).requires_grad_()
            y = run(x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *[p.grad for p in model.parameters()]])
        for want, got in zip(*found, strict=True):
            assert relative(got, want) < 1e-4


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_trains_chasm_with_free_size(backend):
    """Two mixers: the second meets what the first left in the compiler. Without bases, which take long to compile."""
    mixers = [make("chasm", basis="identity") for _ in range(2 if backend == "aot_eager" else 1)]
    check_training(nn.Sequential(*mixers), (8, 6), (10, 13), backend=backend, dynamic=True)
