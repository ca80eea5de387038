"""The form that runs by kernels against the oracle, and what a mixer may expect of it: caches, folding, compilation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import chasm
from chasm.ops import block
from helpers import DEVICE, HALF, INTERPRETED, KERNEL_TOLERANCE, assert_close, gpu_test, kernel_test, normal

pytestmark = pytest.mark.usefixtures("poisoned")


def mixer(form: str, dtype: torch.dtype, shape: tuple[int, ...], spread: float = 0.3, **options: Any) -> chasm.CHASM:
    options = {"local": False, "step_scale": 1, **options}  # parameters are set by hand here
    torch.manual_seed(0)  # layers start at random
    module = chasm.CHASM(shape[1], size=shape[2:], form=form, **options).to(DEVICE, dtype)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(spread * normal(*p.shape, seed=i).to(p))
    return module


def results(module: chasm.CHASM, x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        y = module(x)
    y.backward(g.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


VARIANTS = [
    {},
    {"axes": "cw>ch"},
    {"axes": "ch+cw"},
    {"axes": "cw"},
    {"basis": "identity"},
    {"gain": "signed"},
    {"gain": "complex"},
    {"local": True},  # with the residual, whose gradient goes through the core's backward
    {"local": True, "residual": False},
    {"local": True, "basis": "identity"},
]


@kernel_test
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_form_matches_the_oracle(options):
    # on a card in bfloat16, and with enough numbers that their rounding is no accident
    compare((2, 6, 7, 10) if INTERPRETED else (2, 24, 23, 30), options)


@gpu_test
@pytest.mark.parametrize(
    "shape", [(8, 96, 256, 256), (4, 96, 218, 170), (2, 96, 63, 90), (8, 384, 32, 32), (1, 24, 1000, 700)], ids=str
)
def test_form_at_real_sizes(shape):
    compare(shape, {})


@kernel_test
@pytest.mark.parametrize("spread", [0.3, 0.05])
def test_theta_in_bfloat16(spread, mended_interpreter):
    """Its gradient is as good as the others', also while gains hardly differ: the mean gain has no part in it."""
    compare((2, 16, 12, 10), {}, torch.bfloat16, spread)


def compare(shape, options, dtype=HALF, spread=0.3):
    x, g = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype)
    oracle = mixer("reference", torch.float64, shape, spread, **options)
    module = mixer("triton", torch.float32, shape, spread, **options)
    module.load_state_dict(oracle.state_dict())
    oracle.load_state_dict(module.state_dict())  # the same float32 numbers
    names = ["y", "x", *(name for name, _ in module.named_parameters())]
    errors = {}
    for name, found, expected in zip(
        names, results(module, x, g), results(oracle, x.double(), g.double()), strict=True
    ):
        errors[name] = float((found.double() - expected).norm() / expected.norm())
    assert all(error <= KERNEL_TOLERANCE[dtype] for error in errors.values()), errors  # NaN fails


@kernel_test
@pytest.mark.parametrize("shape", [(2, 6, 7, 10), (2, 20, 1, 4), (2, 6, 9), (1, 5, 4, 3, 6)], ids=str)
def test_fft_form_with_the_float32_products(shape, mended_interpreter, monkeypatch):
    from chasm.ops.kernels import products

    grams = []
    monkeypatch.setitem(block._FORMS, "fft", block._FFT_KERNELS)
    monkeypatch.setattr(products, "gram", lambda *maps, gram=products.gram: grams.append(1) or gram(*maps))
    x, g = normal(*shape).float(), normal(*shape, seed=1).float()
    options = {"ndim": len(shape) - 2}
    oracle = mixer("reference", torch.float64, shape, **options)
    module = mixer("fft", torch.float32, shape, **options)
    oracle.load_state_dict(module.state_dict())
    for found, expected in zip(results(module, x, g), results(oracle, x.double(), g.double()), strict=True):
        assert_close(found, expected, 1e-5)
    assert len(grams) == options["ndim"] + 1  # one for each matrix


@kernel_test
def test_eval_caches_and_gives_the_same():
    module = mixer("triton", torch.float32, (2, 6, 7, 10))
    x = normal(2, 6, 7, 10).to(HALF)
    with torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
        trained = module(x).detach()
        with torch.no_grad():
            kept = module.eval()(x)
            assert_close(kept, trained, 1e-6 if INTERPRETED else 1e-2)  # in training the mean gain is apart
            torch.testing.assert_close(module(x), kept, rtol=0, atol=0)


@kernel_test
def test_checkpointing():
    shape = (2, 6, 7, 10)
    module, x = mixer("triton", torch.float32, shape), normal(*shape).to(HALF)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_(), *module.parameters()]
        with torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
            return list(torch.autograd.grad(run(inputs[0]).square().sum(), inputs))

    again = gradients(lambda x: checkpoint(module, x, use_reentrant=False))
    torch.testing.assert_close(again, gradients(module), rtol=0, atol=0)


@kernel_test
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_folded_models_use_them(options):
    shape = (2, 6, 7, 10)
    oracle = mixer("reference", torch.float64, shape, **options)
    module = mixer("triton", torch.float32, shape, **options)
    oracle.load_state_dict(module.state_dict())
    folded = chasm.fold(module, size=shape[2:])
    x = normal(*shape).to(HALF)
    with torch.no_grad(), torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
        found = folded(x)
        assert {chain.form for chain in folded._chains(x, HALF)} == {"triton"}
    assert_close(found, oracle(x.double()), KERNEL_TOLERANCE[HALF])
    assert not copy.deepcopy(folded)._cache.entries


@kernel_test
def test_a_result_may_be_written_in_place():
    shape = (2, 6, 4, 10)
    module, x = mixer("triton", torch.float32, shape, local=False), normal(*shape).to(HALF)
    results = []
    for write in (Tensor.mul_, Tensor.mul):
        z = x.clone().requires_grad_()
        with torch.autocast(DEVICE, HALF, enabled=torch.float32 != HALF):
            y = write(module(z), 2)
        results.append(torch.autograd.grad(y.square().sum(), [z, *module.parameters()]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@kernel_test
def test_folded_models_forget_buffers_of_before():
    """Python gives the id of a tensor that is gone to the next one."""
    shape = (1, 6, 7, 10)
    module = mixer("triton", torch.float32, shape, basis="identity", axes="ch", local=False)
    folded = chasm.fold(module, size=shape[2:])
    x, (step,) = normal(*shape).to(HALF), folded.branches[0]
    for i in range(1, 30):
        step.T = i * torch.eye(7, dtype=torch.float64, device=DEVICE).repeat(6, 1, 1)
        with torch.no_grad():
            assert_close(folded(x), i * x.double(), KERNEL_TOLERANCE[HALF])
    assert len(folded._cache.entries) == 1
    assert not folded.to(torch.float32)._cache.entries


@kernel_test
def test_folded_in_inference_mode_and_used_outside_it():
    with torch.inference_mode():
        folded = chasm.fold(mixer("triton", torch.float32, (2, 6, 7, 10)), size=(7, 10))
        inside = folded(normal(2, 6, 7, 10).to(HALF))
    x = normal(2, 6, 7, 10).to(HALF)
    torch.testing.assert_close(folded(x), inside.clone())


@kernel_test
def test_theta_rests_at_the_start():
    """While all gains are one no basis matters, and the sums cancel to the last bit."""
    module = chasm.CHASM(6, size=(7, 10), form="triton").to(DEVICE)
    with torch.autocast(DEVICE, HALF, enabled=not INTERPRETED):
        y = module(normal(2, 6, 7, 10).to(HALF))
    y.float().square().mean().backward()
    assert not any(theta.grad.any() for theta in module.theta.values())


@kernel_test
def test_a_second_derivative_is_an_error():
    module = mixer("triton", torch.float32, (2, 6, 7, 10))
    x = normal(2, 6, 7, 10).float().requires_grad_()
    if not INTERPRETED:
        module, x = module.to(HALF), x.detach().to(HALF).requires_grad_()
    for power in (2, 1):  # of a linear loss too, whose gradient needs none itself
        (dx,) = torch.autograd.grad(module(x).pow(power).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.square().sum() + module(x).sum(), module.theta["ch"])


@kernel_test
def test_maps_are_kept_for_gradients_of_parameters_alone():
    shape = (2, 6, 7, 10)
    oracle, module = mixer("reference", torch.float64, shape), mixer("triton", torch.float32, shape)
    module.requires_grad_(False)
    x, g = normal(*shape).to(HALF).requires_grad_(), normal(*shape, seed=1)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=torch.bfloat16 == HALF):
        y = module(x)
    assert not any(t.ndim == 4 and t.shape == x.shape for t in y.grad_fn.saved_tensors)
    (dx,) = torch.autograd.grad(y, x, g.to(y.dtype))
    exact = x.detach().double().requires_grad_()
    assert_close(dx, torch.autograd.grad(oracle(exact), exact, g)[0], KERNEL_TOLERANCE[HALF])


@kernel_test
@pytest.mark.parametrize(
    ("options", "dynamic"),
    [({}, False), ({"gain": "complex", "axes": "ch+cw"}, True)],
    ids=str,
)
def test_compiled_code_runs_the_same_kernels(options, dynamic, monkeypatch):
    """As one graph, forward and backward; with dynamic=True for sizes that are not known."""
    from chasm.ops.kernels import circulant

    passes = []
    original = circulant.circulant_pass
    monkeypatch.setattr(circulant, "circulant_pass", lambda *a: passes.append(type(a[3])) or original(*a))
    torch.compiler.reset()
    module = mixer("triton", torch.float32, (2, 3, 5, 6), **options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 3, 5, 6), (3, 3, 7, 8)):
        x, g = normal(*shape).to(HALF), normal(*shape, seed=1).to(HALF)
        wanted = results(module, x, g)
        module.zero_grad()
        passes.clear()
        found = results(compiled, x, g)
        assert passes.count(Tensor) == 4  # each axis there and back
        module.zero_grad()
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.compiler.reset()
