"""CHASM under torch.func and forward mode, against plain loops over autograd."""

from typing import Any

import pytest
import torch
from registry_cases import C, make, maps
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "bare core": {"local": False},
    "complex": {"gain": "complex", "axes": "ch+cw"},
    "untied": {"basis": "untied"},
}
each_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def mixer(options: dict[str, Any], seed: int = 0) -> torch.nn.Module:
    return make("chasm", seed, dtype=torch.float64, **options)


def features() -> Tensor:
    return maps(5, 4, dtype=torch.float64)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def corner(y: Tensor) -> Tensor:
    return y[1, 0, 2]  # (W,)


@each_variant
@pytest.mark.parametrize("training", [True, False])
def test_derivative_along_a_direction(options: dict[str, Any], training: bool) -> None:
    m, x = mixer(options).train(training), features()
    v = torch.randn_like(x)
    h = 1e-5
    want = (m(x + h * v) - m(x - h * v)) / (2 * h)
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            y, got = jvp(m, (x,), (v,))
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual(m(forward_ad.make_dual(x, v))).tangent
        close(y, m(x))
        assert tangent is not None
        for d in (got, tangent):
            torch.testing.assert_close(d, want, rtol=0, atol=1e-7)


@each_variant
def test_jacobians(options: dict[str, Any]) -> None:
    m, x = mixer(options), features().requires_grad_()
    want = torch.stack([torch.autograd.grad(value, x, retain_graph=True)[0] for value in corner(m(x))])
    for jacobian in (jacrev, jacfwd):
        close(jacobian(lambda x: corner(m(x)))(x.detach()), want)


@each_variant
def test_a_hessian(options: dict[str, Any]) -> None:
    m, x = mixer(options), features()
    h = 1e-5

    def loss(scale: Tensor) -> Tensor:
        return m(x * scale).pow(3).sum() / 100

    slopes = [grad(loss)(torch.tensor(1 + s, dtype=torch.float64)) for s in (h, -h)]
    got = hessian(loss)(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(got, (slopes[0] - slopes[1]) / (2 * h), rtol=1e-6, atol=0)


@each_variant
def test_vmap_over_features(options: dict[str, Any]) -> None:
    m, x = mixer(options), features()
    with torch.no_grad():
        close(vmap(m)(x[:, None])[:, 0], m(x))


@each_variant
def test_gradients_of_each_image(options: dict[str, Any]) -> None:
    m, x = mixer(options), features()
    got = vmap(grad(lambda image: m(image[None]).pow(3).sum()))(x)
    x.requires_grad_()
    close(got, torch.autograd.grad(m(x).pow(3).sum(), x)[0])


@each_variant
def test_an_ensemble(options: dict[str, Any]) -> None:
    members, x = [mixer(options, seed) for seed in range(3)], features()
    params, buffers = stack_module_state(members)
    with torch.no_grad():
        got = vmap(lambda p, b: functional_call(members[0], (p, b), (x,)))(params, buffers)
        close(got, torch.stack([m(x) for m in members]))


def test_axes_of_unequal_lengths() -> None:
    x = torch.randn(2, C, 3, 130, dtype=torch.float64, requires_grad=True)
    m = mixer({})
    want = torch.stack([torch.autograd.grad(value, x, retain_graph=True)[0] for value in corner(m(x))[:2]])
    close(jacrev(lambda x: corner(m(x))[:2])(x.detach()), want)


@each_variant
def test_gradients_of_the_parameters_for_each_image(options: dict[str, Any]) -> None:
    m, x = mixer(options), features()
    params = dict(m.named_parameters())

    def loss(p: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(m, p, (image[None],)).pow(3).sum()

    got = vmap(grad(loss), (None, 0))({k: p.detach() for k, p in params.items()}, x)
    for i, image in enumerate(x):
        want = torch.autograd.grad(m(image[None]).pow(3).sum(), list(params.values()))
        for name, d in zip(params, want, strict=True):
            close(got[name][i], d)
