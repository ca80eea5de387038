"""Small mixers for the tests of cached and batched bases."""

import functools

import torch
from torch import Tensor

import chasm

CHASM = functools.partial(chasm.CHASM, step_scale=1)  # parameters are set by hand here
C = 3
SIZE = (6, 5)


def moved(mixer: CHASM, seed: int = 0) -> CHASM:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    return mixer


def features(*size: int, C: int = C) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, C, *(size or SIZE))


def fresh(mixer: CHASM) -> CHASM:
    """A mixer that has never computed anything, with the same parameters."""
    new = CHASM(C, size=SIZE, axes=mixer.axes, basis=mixer.basis, gain=mixer.gain)
    new.to(next(mixer.parameters()).dtype)
    new.load_state_dict({k: v.detach().clone() for k, v in mixer.state_dict().items()})
    return new.train(mixer.training)


def edit_in_place(m: CHASM) -> None:
    with torch.no_grad():
        m.theta["ch"].add_(0.3)
