"""Mamba's selective scan without a compiled extension.

For every sample, channel d and state n, with h_0 = 0 and delta > 0 (Gu and Dao, "Mamba", 2023):

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t          y_t = sum_n C_t h_t + D u_t

Four forms give the same result. `choose_form` chooses one of them:

    mamba_ssm    the CUDA kernel of the package mamba_ssm, if it is installed
    triton       kernels.py: forward and backward over chunks in parallel, on CUDA
    chunked      chunked.py: plain PyTorch on any device, the default on a CPU
    sequential   reference.py: the definition step by step; slow, the oracle of the tests
"""

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from chasm.common.cost import counted_as
from chasm.common.registry import suggest
from chasm.ops.selective_scan.op import scan
from chasm.ops.selective_scan.reference import sequential_scan

__all__ = ["FORMS", "choose_form", "selective_scan", "sequential_scan"]

FORMS = ("mamba_ssm", "triton", "chunked", "sequential")
MAMBA_SSM = "mamba_ssm.ops.selective_scan_interface"
ASKED = "asked for"
MIN_WARNED_ELEMENTS = 2**24  # B * D * N * L from which the slow form on a GPU gives a warning


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    form: str = "auto",
) -> Tensor:
    """Run the scan. All arithmetic is in float32, or in float64 if u is float64, also under autocast.

    Args:
        u: input, (B, D, L).
        delta: step sizes before bias and softplus, (B, D, L).
        A: negative, (D, N).
        B: (B, N, L).
        C: (B, N, L).
        D: weights of u in the output, (D,), or None.
        delta_bias: added to delta, (D,), or None.
        delta_softplus: apply softplus to the step sizes.
        form: "auto", or one of `FORMS`.

    Returns:
        y, (B, D, L) in the dtype of u. It may be a transposed view, with contiguous channels.

    Raises:
        ValueError: if shapes or dtypes do not fit, or the form is unknown or cannot run.

    >>> u, A, B = torch.ones(1, 2, 3), -torch.ones(2, 4), torch.ones(1, 4, 3)
    >>> selective_scan(u, u, A, B, B).shape
    torch.Size([1, 2, 3])
    """
    _check(u, delta, A, B, C, D, delta_bias)
    form, reason = choose_form(u, form)
    batch, channels, length = u.shape
    states = A.shape[1]
    if (
        form == "chunked"
        and u.device.type not in ("cpu", "meta")
        and reason != ASKED
        and u.numel() * states >= MIN_WARNED_ELEMENTS
    ):
        _warn_once(f"selective scan in the chunked form, many times slower than a kernel ({reason})")
    with counted_as("scan", macs=batch * length * (9 * channels * states + channels)):
        if form in ("triton", "chunked"):
            return scan(u, delta, A, B, C, D, delta_bias, delta_softplus, form)[0].transpose(1, 2)
        dtype = torch.float64 if u.dtype == torch.float64 else torch.float32  # other forms use the inputs' dtype
        u_, delta, A, B, C = (x.to(dtype) for x in (u, delta, A, B, C))
        D, delta_bias = (x if x is None else x.to(dtype) for x in (D, delta_bias))
        with torch.autocast(u.device.type, enabled=False):
            if form == "sequential":
                y = sequential_scan(u_, delta, A, B, C, D, delta_bias, delta_softplus)
            else:
                kernel = import_module(MAMBA_SSM).selective_scan_fn
                y = kernel(u_, delta, A, B, C, D, delta_bias=delta_bias, delta_softplus=delta_softplus)
            return y.to(u.dtype)


def choose_form(u: Tensor, form: str = "auto") -> tuple[str, str]:
    """Choose the form of a scan.

    Args:
        u: input of the scan.
        form: "auto", or one of `FORMS`.

    Returns:
        The form and the reason.

    Raises:
        ValueError: if the form is unknown or cannot run.
    """
    if form == "auto":
        if u.device.type == "cpu":
            return "chunked", "a CPU tensor"
        obstacles = {fast: _obstacle(fast, u) for fast in ("mamba_ssm", "triton")}
        for fast, obstacle in obstacles.items():
            if not obstacle:
                return fast, "the fastest form that runs here"
        return "chunked", "; ".join(f"{fast}: {obstacle}" for fast, obstacle in obstacles.items())
    if form not in FORMS:
        raise ValueError(f"unknown selective scan form {form!r}: {suggest(form, ('auto', *FORMS))}")
    if obstacle := _obstacle(form, u):
        raise ValueError(f"selective scan form {form!r} cannot run: {obstacle}; use 'auto' or 'chunked'")
    return form, ASKED


def _obstacle(form: str, u: Tensor) -> str:
    """Return why a form cannot scan u, or an empty string if it can."""
    if form in ("chunked", "sequential"):
        return ""
    if u.dtype == torch.float64:
        return "it computes in float32, the input is float64"
    interpreted = form == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not u.is_cuda and not interpreted:
        return f"it needs a CUDA tensor, got one on {u.device.type}"
    if not _installed(form):
        return f"{form} cannot be imported"
    return ""


_FOUND = {package: find_spec(package) is not None for package in ("mamba_ssm", "triton")}


def _installed(package: str) -> bool:
    return _FOUND[package] and (torch.compiler.is_compiling() or _imports(package))


@cache
def _imports(package: str) -> bool:
    try:  # the compiled part of a package may not fit this torch
        import_module(MAMBA_SSM if package == "mamba_ssm" else package)
    except ImportError:
        return False
    return True


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _check(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, delta_bias: Tensor | None
) -> None:
    if u.dim() != 3 or A.dim() != 2:
        raise ValueError(f"expected u (B, D, L) and A (D, N), got {tuple(u.shape)} and {tuple(A.shape)}")
    batch, channels, length = u.shape
    sizes = {"delta": (batch, channels, length), "A": (channels, A.shape[1])}
    sizes |= {"B": (batch, A.shape[1], length), "C": (batch, A.shape[1], length)}
    sizes |= {"D": (channels,), "delta_bias": (channels,)}
    tensors = {"delta": delta, "A": A, "B": B, "C": C, "D": D, "delta_bias": delta_bias}
    for name, x in tensors.items():
        if x is not None and tuple(x.shape) != sizes[name]:
            raise ValueError(
                f"expected {name} of shape {sizes[name]} for u {tuple(u.shape)} and A {tuple(A.shape)}, "
                f"got {tuple(x.shape)}"
            )
        if x is not None and not x.is_floating_point():
            raise ValueError(f"expected a real floating-point {name}, got {x.dtype}")
