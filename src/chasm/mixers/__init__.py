"""The mixers: one file per paper. Importing a file registers its mixer."""

from chasm.mixers.afno import AFNO
from chasm.mixers.base import (
    MIXERS,
    Facts,
    Mixer,
    Residual,
    create_mixer,
    create_slot,
    list_mixers,
    register_mixer,
)
from chasm.mixers.batched import batched_bases
from chasm.mixers.chasm import CHASM
from chasm.mixers.contract import check_mixer
from chasm.mixers.difffno import DiffFNO
from chasm.mixers.ffc import FFC
from chasm.mixers.fno_d import FNOD
from chasm.mixers.free_operator import FreeOperator
from chasm.mixers.fsel import FSEL
from chasm.mixers.gfnet import GFNet
from chasm.mixers.identity import Identity
from chasm.mixers.spectformer import SpectFormer

__all__ = [
    "AFNO",
    "CHASM",
    "FFC",
    "FNOD",
    "FSEL",
    "MIXERS",
    "DiffFNO",
    "Facts",
    "FreeOperator",
    "GFNet",
    "Identity",
    "Mixer",
    "Residual",
    "SpectFormer",
    "batched_bases",
    "check_mixer",
    "create_mixer",
    "create_slot",
    "list_mixers",
    "register_mixer",
]
