"""How far a reader walks: the functions of chasm that one training forward enters, and the files they are in."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import chasm

ROOT = f"{Path(chasm.__file__).parent}/"


class Walk(NamedTuple):
    functions: int
    files: int
    changes: int  # of file, from one function entered to the next


def walk(call: Callable[[], Any]) -> Walk:
    """The walk of a call, without what only the first call of a process does."""
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = not code.co_name.startswith("<")  # a comprehension is read where it stands
        if event == "call" and is_function and code.co_filename.startswith(ROOT):
            entered.append((code.co_filename, code.co_qualname))

    call()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    files = [file for file, _ in entered]
    changes = sum(a != b for a, b in pairwise(files))
    return Walk(len(set(entered)), len(set(files)), changes)


def test_a_training_forward_on_a_cpu_stays_a_short_walk() -> None:
    """`pytest -s` prints the walks. Bounds, not targets: a change that makes them longer wants a reason."""
    x = torch.randn(1, 16, 8, 8, requires_grad=True)
    mixers = {name: chasm.create_mixer(name, 16, size=8) for name in ("chasm", "gfnet")}
    found = {name: walk(partial(mixer, x)) for name, mixer in mixers.items()}
    print(found)
    assert found["gfnet"].functions >= 10  # the walk sees what runs
    assert found["chasm"].functions <= 59
    assert found["chasm"].files <= 14
    assert found["chasm"].changes <= 47
