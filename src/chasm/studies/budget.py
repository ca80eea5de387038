"""Rivals of about CHASM's size: the options that bring their parameters in the slots of a host nearest to CHASM's."""

import json
from functools import lru_cache
from typing import Any

import torch

from chasm.backbones import create_backbone
from chasm.mixers import create_mixer
from chasm.surgery.count import count_parameters
from chasm.train.config import Part

# Options of each rival, from small to large, by which it can come near a number of parameters.
_LADDERS: dict[str, list[dict[str, Any]]] = {
    "afno": [{"blocks": b, "hidden_factor": f} for b in (4, 2, 1) for f in (1, 2, 3)],
    "ffc": [{"ratio": r, "lfu": lfu} for r in (0.75, 0.5, 0.25) for lfu in (False, True)],
    "fno-d": [{"modes": [m, m]} for m in (1, 2, 3, 4)],
    "difffno": [{"modes": [m, m]} for m in (1, 2, 3, 4)],
    "fsel": [{"part": part} for part in ("f+s", "f+effn")],
    "spectformer": [{"grid": [n, n]} for n in range(4, 65, 2)],
}


@lru_cache(maxsize=64)
def near_budget(mixer: str, backbone: str, options: str, size: int) -> Part:
    """Return the rival whose real numbers in the slots of a host come nearest to CHASM's.

    FFC, FNO-D, DiffFNO and FSEL cannot go as low: they get their smallest form, and the results show the counts. The
    options of the host are JSON with sorted keys, so that the answer can be cached.
    """
    target, widths = _slots(backbone, options, size)

    def numbers(rival_options: dict[str, Any]) -> int | None:
        try:
            return sum(count_parameters(create_mixer(mixer, c, device="meta", **rival_options))[1] for c in widths)
        except ValueError:
            return None  # these widths do not take these options

    sized = [
        (abs(n - target), i)
        for i, rival_options in enumerate(_LADDERS[mixer])
        if (n := numbers(rival_options)) is not None
    ]
    if not sized:
        raise ValueError(f"no options of {mixer} fit the slots of this {backbone}: choose another width")
    return Part(name=mixer, options=_LADDERS[mixer][min(sized)[1]])


@lru_cache(maxsize=16)
def _slots(backbone: str, options: str, size: int) -> tuple[int, tuple[int, ...]]:
    """Return the real numbers of CHASM in the slots of a host, and the channels of each slot."""
    with torch.device("meta"):
        slots = create_backbone(backbone, "chasm", size=(size, size), **json.loads(options)).slots
    return count_parameters(slots)[1], tuple(int(slot.channels) for slot in slots.values())  # type: ignore[arg-type]
