"""Weights made for another size: the operator stays the same."""

from typing import Any

import pytest
import torch
from torch import nn

import chasm
from chasm import CHASM
from chasm.backbones import create_backbone


@pytest.mark.parametrize("options", [{}, {"gain": "complex"}, {"basis": "untied"}, {"axes": "cw", "step_scale": 3.0}])
def test_a_mixer_with_more_bins_is_the_same_operator_on_larger_maps(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    small = CHASM(4, size=(8, 9), dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    large = CHASM(4, size=(16, 21), dtype=torch.float64, **{**options, "step_scale": 10.0})
    network = nn.Sequential(nn.Identity(), large)
    weights = {f"1.{name}": value for name, value in small.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        network.load_state_dict(weights)
    network.load_state_dict(chasm.resize_tables(weights, network))
    x = torch.randn(2, 4, 16, 21, dtype=torch.float64)
    torch.testing.assert_close(network(x), small(x))


@pytest.mark.parametrize("mixer", chasm.list_mixers())
def test_weights_of_every_mixer_load_into_a_host_of_another_size(mixer: str) -> None:
    torch.manual_seed(0)
    small, large = (
        create_backbone("unet", mixer, size=size, width=16, depth=1, levels=(0, 1)).eval() for size in (16, 24)
    )
    with torch.no_grad():
        for parameter in small.slots.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    large.load_state_dict(chasm.resize_tables(small.state_dict(), large))
    x = torch.randn(1, 2, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(large(x), small(x), atol=1e-4, rtol=1e-4)


def test_weights_that_fit_are_passed_on() -> None:
    mixer = CHASM(4, size=8)
    weights = mixer.state_dict()
    resized = chasm.resize_tables(weights, mixer)
    assert all(resized[name] is value for name, value in weights.items())
