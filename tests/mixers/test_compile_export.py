"""Every mixer is one graph to the compiler, and one exported program for maps of many sizes."""

import pytest
import torch
from registry_cases import each_mixer, make, maps, relative


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
