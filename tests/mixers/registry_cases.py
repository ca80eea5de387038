"""Small mixers and maps for the tests that run over the registry."""

import pytest
import torch

from chasm.mixers import MIXERS, create_mixer

NAMES = MIXERS.list()
RIVALS = ["gfnet", "afno", "ffc", "fno-d", "difffno", "fsel", "spectformer"]
C = 16

each_mixer = pytest.mark.parametrize("name", NAMES)
each_rival = pytest.mark.parametrize("name", RIVALS)


def make(name, seed=0, **options):
    """A mixer whose parameters have moved a little, so that nothing is zero only because of its init."""
    torch.manual_seed(seed)
    m = create_mixer(name, channels=C, size=(8, 8), **options)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return m


def maps(*size, batch=2, **like):
    torch.manual_seed(1)
    return torch.randn(batch, C, *size, **like)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item()
