"""CHASM: cross-frequency harmonized axis-separable mixing, and the software around it.

>>> import torch, chasm
>>> mixer = chasm.CHASM(16, size=(32, 32))
>>> mixer(torch.randn(2, 16, 32, 32)).shape
torch.Size([2, 16, 32, 32])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module it lives in. Loaded on first use, so that `import chasm` stays cheap.
_PUBLIC = {
    "CHASM": "chasm.mixers.chasm",
    "batched_bases": "chasm.mixers.batched",
    "create_mixer": "chasm.mixers",
    "create_slot": "chasm.mixers",
    "list_mixers": "chasm.mixers",
    "register_mixer": "chasm.mixers",
    "Mixer": "chasm.mixers",
    "param_groups": "chasm.surgery.param_groups",
    "count": "chasm.surgery.count",
    "swap": "chasm.surgery.swap",
    "create_backbone": "chasm.backbones",
    "list_backbones": "chasm.backbones",
    "fold": "chasm.surgery.fold",
    "harmonise": "chasm.surgery.harmonise",
    "resize_tables": "chasm.surgery.resize",
    "export_onnx": "chasm.surgery.onnx",
    "list_models": "chasm.models",
    "load_model": "chasm.train.run",
}

# Packages that are there as `chasm.data` and so on without an import of their own: all but the command line.
_PACKAGES = {
    *("app", "backbones", "bench", "common", "data", "interop", "mixers", "models", "mri", "ops", "publish"),
    *("reconstruct", "studies", "surgery", "tasks", "train"),
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from chasm.backbones import create_backbone as create_backbone
    from chasm.backbones import list_backbones as list_backbones
    from chasm.mixers import CHASM as CHASM
    from chasm.mixers import Mixer as Mixer
    from chasm.mixers import batched_bases as batched_bases
    from chasm.mixers import create_mixer as create_mixer
    from chasm.mixers import create_slot as create_slot
    from chasm.mixers import list_mixers as list_mixers
    from chasm.mixers import register_mixer as register_mixer
    from chasm.models import list_models as list_models
    from chasm.surgery.count import count as count
    from chasm.surgery.fold import fold as fold
    from chasm.surgery.harmonise import harmonise as harmonise
    from chasm.surgery.onnx import export_onnx as export_onnx
    from chasm.surgery.param_groups import param_groups as param_groups
    from chasm.surgery.resize import resize_tables as resize_tables
    from chasm.surgery.swap import swap as swap
    from chasm.train.run import load_model as load_model


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC and name not in _PACKAGES:
        raise AttributeError(f"module 'chasm' has no attribute {name!r}")
    try:
        return import_module(f"chasm.{name}") if name in _PACKAGES else getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] == "chasm":
            raise
        from chasm.common.extras import how_to_install

        needs = f"chasm.{name} needs {missing.name.split('.')[0]}: {how_to_install(missing.name)}"
        raise ModuleNotFoundError(needs, name=missing.name) from None


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
