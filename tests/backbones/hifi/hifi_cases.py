"""Small HiFi-Mamba hosts for the tests."""

import torch
from torch import nn

from chasm.backbones import create_backbone
from chasm.mri.fft import fft2c, ifft2c, to_channels, to_complex

VERSIONS = ["hifi-mamba", "hifi-mamba-v1", "hifi-mamba-v2"]
SMALL = {"width": 16, "groups": 2, "blocks": 2, "size": (16, 24)}


def build(name="hifi-mamba", seed=0, **options):
    torch.manual_seed(seed)
    return create_backbone(name, **(SMALL | options))


def randomised(module):
    """Every parameter at random, so that a test sees each of them."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double().eval()


def centred_columns(width, kept, seed=0):
    """(1, 1, 1, W): the middle tenth and a random choice of the rest."""
    mask = torch.rand(1, 1, 1, width, generator=torch.Generator().manual_seed(seed)) < kept
    mask[..., width // 2 - width // 20 : width // 2 + width // 20 + 1] = True
    return mask


def zero_filled(image, mask):
    return to_channels(ifft2c(fft2c(to_complex(image)) * mask))
