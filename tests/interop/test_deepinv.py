"""Hosts and operators in deepinv: the same numbers on both sides, and training through their models."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import chasm
from chasm.mri import Operator, create_mask
from chasm.mri.fft import to_channels, to_complex
from libraries import library

H, W, COILS = 12, 10, 3


@pytest.fixture(scope="module")
def both() -> SimpleNamespace:
    deepinv = library("deepinv")
    return SimpleNamespace(theirs=deepinv, ours=chasm.interop.deepinv)


def mask(batch: int = 1) -> Tensor:
    kept = [create_mask("random", W, acceleration=2, seed=i).tensor() for i in range(batch)]
    return torch.cat(kept).expand(batch, 1, 1, W)


def maps(batch: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(batch, COILS, H, W, dtype=dtype)


def image(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 2, H, W, dtype=dtype)


def host(**options: object) -> torch.nn.Module:
    return chasm.create_backbone("unet", mixer="chasm", size=(H, W), width=4, depth=1, levels=(0,), **options)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("coils", [False, True])
def test_forward_and_adjoint_agree_exactly_both_ways(both: SimpleNamespace, coils: bool, batch: int) -> None:
    operator = Operator(mask(batch), maps(batch) if coils else None)
    physics = both.ours.to_physics(operator, (H, W))
    assert type(physics).__name__ == ("MultiCoilMRI" if coils else "MRI")
    back = both.ours.to_operator(physics)
    x = image()
    y = physics.A(x)
    for ours in (operator, back):
        k = ours.forward(to_complex(x))
        assert torch.equal(both.ours.to_kspace(y), k)
        assert torch.equal(both.ours.from_kspace(k, physics), y)
        assert torch.equal(physics.A_adjoint(y), to_channels(ours.adjoint(k)))


def test_double_precision_is_kept(both: SimpleNamespace) -> None:
    operator = Operator(mask(), maps(1, torch.complex128))
    physics, x = both.ours.to_physics(operator), image(dtype=torch.float64)
    assert torch.equal(both.ours.to_kspace(physics.A(x)), operator.forward(to_complex(x)))
    assert physics.A(x).dtype == torch.float64


def test_what_cannot_be_translated_is_one_line(both: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"does not tell the size: pass size=\(H, W\)"):
        both.ours.to_physics(Operator(mask()))
    with pytest.raises(ValueError, match="one mask for all coils"):
        both.ours.to_physics(Operator(torch.ones(1, COILS, H, W), maps(1)))
    with pytest.raises(ValueError, match="expected slices, got three_d=True"):
        both.ours.to_operator(both.theirs.physics.MRI(mask=torch.ones(4, H, W), three_d=True))
    with pytest.raises(ValueError, match="got Denoising"):
        both.ours.to_operator(both.theirs.physics.Denoising())
    with pytest.raises(ValueError, match="got a host with 1 in and 1 out"):
        both.ours.HostReconstructor(host(in_channels=1, out_channels=1))
    with pytest.raises(ValueError, match="a denoiser keeps its channels"):
        both.ours.HostDenoiser(host(in_channels=2, out_channels=1))


@pytest.mark.parametrize("coils", [False, True])
def test_a_host_reconstructs_with_their_physics(both: SimpleNamespace, coils: bool) -> None:
    operator = Operator(mask(), maps(1) if coils else None)
    physics = both.ours.to_physics(operator, (H, W))
    network = host(data_consistency=True)
    model = both.ours.HostReconstructor(network)
    assert isinstance(model, both.theirs.models.Reconstructor)
    y = physics.A(image())
    kspace = both.ours.to_kspace(y)
    given = {"mask": operator.mask, "measured": kspace}
    if operator.maps is not None:
        given["maps"] = operator.maps.expand(2, -1, -1, -1)
    assert torch.equal(model(y, physics), network(to_channels(operator.adjoint(kspace)), **given))
    both.theirs.loss.SupLoss()(x_net=model(y, physics), x=image()).mean().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("name", ["VarNet", "MoDL"])
def test_a_host_is_the_denoiser_of_their_networks(both: SimpleNamespace, name: str) -> None:
    network = host()
    denoiser = both.ours.HostDenoiser(network)
    assert isinstance(denoiser, both.theirs.models.Denoiser)
    length = {"VarNet": {"num_cascades": 2}, "MoDL": {"num_iter": 2}}[name]
    model = getattr(both.theirs.models, name)(denoiser=denoiser, **length)
    physics = both.ours.to_physics(Operator(mask()), (H, W))
    x = image()
    y = model(physics(x), physics)
    assert y.shape == x.shape
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
