"""CHASM mixers away from their initial values, and the paper's equations to compare them with."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from chasm import CHASM
from chasm.ops import reference

AXES_2D = ["ch>cw", "cw>ch", "ch+cw", "ch", "cw"]
BASES = ["shared", "identity", "untied"]
GAINS = ["positive", "signed", "complex"]
VARIANTS = list(itertools.product(BASES, GAINS))
SPATIAL = {1: ("cl",), 2: ("ch", "cw"), 3: ("cd", "ch", "cw")}


def moved(mixer: CHASM, scale: float = 0.5) -> CHASM:
    """Parameters away from their initial values; theta clear of zero, where torch's matrix_exp is less exact."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            spectral = name.split(".")[0] in mixer.spectral_parameters
            step = torch.rand_like(p) + 0.5 if "theta" in name else torch.randn_like(p)
            p.add_(scale / (mixer.step_scale if spectral else 1) * step)
    return mixer


def features(*shape: int, **like: Any) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, **like)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def oracle_core(mixer: CHASM, x: Tensor) -> Tensor:
    """Phi(x) from the mixer's parameters by chasm.ops.reference alone."""

    def one_axis(z: Tensor, axis: str) -> Tensor:
        dim = 2 + SPATIAL[mixer.ndim].index(axis)
        n = z.shape[dim]
        theta, table, phase = mixer.axis_parameters(axis)
        U = torch.eye(mixer.channels, dtype=z.dtype)
        if mixer.basis != "identity":
            U = reference.basis(reference.interpolate(theta, n // 2 + 1) if mixer.basis == "untied" else theta)
        return reference.axis_pass(z, U, reference.gains(table, n, mixer.gain, phase), dim)

    if "+" in mixer.axes:
        passes = mixer.axes.split("+")
        return torch.stack([one_axis(x, axis) for axis in passes]).mean(0)
    for axis in mixer.axes.split(">"):
        x = one_axis(x, axis)
    return x


def oracle(mixer: CHASM, x: Tensor) -> Tensor:
    y = x if mixer.basis is None else oracle_core(mixer, x)
    if mixer.refine is not None:
        assert mixer.fuse is not None
        conv = (F.conv1d, F.conv2d, F.conv3d)[mixer.ndim - 1]
        y = conv(y, mixer.refine.weight, mixer.refine.bias, padding=1, groups=mixer.channels)
        y = conv(F.gelu(y), mixer.fuse.weight, mixer.fuse.bias)
    return x + y if mixer.residual else y
