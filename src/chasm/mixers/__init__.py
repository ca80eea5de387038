"""The mixers: one file per paper. Importing a file registers its mixer."""

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
from chasm.mixers.chasm import CHASM, batched_bases
from chasm.mixers.identity import Identity

__all__ = [
    "CHASM",
    "MIXERS",
    "Facts",
    "Identity",
    "Mixer",
    "Residual",
    "batched_bases",
    "create_mixer",
    "create_slot",
    "list_mixers",
    "register_mixer",
]
