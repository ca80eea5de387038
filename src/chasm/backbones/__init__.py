"""The hosts: one file per architecture. Importing a file registers its backbones."""

from chasm.backbones.base import (
    BACKBONES,
    Backbone,
    ImageBackbone,
    create_backbone,
    list_backbones,
    register_backbone,
)
from chasm.backbones.hifi.model import HiFiMamba, HiFiMambaV1, HiFiMambaV2
from chasm.backbones.unet import UNet
from chasm.backbones.unet3d import UNet3D
from chasm.backbones.varnet import VarNet
from chasm.backbones.vit import ViT

__all__ = [
    "BACKBONES",
    "Backbone",
    "HiFiMamba",
    "HiFiMambaV1",
    "HiFiMambaV2",
    "ImageBackbone",
    "UNet",
    "UNet3D",
    "VarNet",
    "ViT",
    "create_backbone",
    "list_backbones",
    "register_backbone",
]
