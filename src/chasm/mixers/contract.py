"""Checks that a mixer keeps the promises that hosts, studies and commands rely on, before it trains.

>>> [check.name for check in check_mixer("identity") if check.problem]
[]
"""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from chasm.mixers.base import MIXERS, Mixer, create_mixer

SIZE = (8, 8)
OTHER_SIZES = ((7, 5), (12, 9), (1, 1), (2, 3), (1, 6), (20, 34))  # odd, tiny, below and above what it was built for


class Check(NamedTuple):
    """One promise, and the problem if it is broken."""

    name: str
    problem: str  # empty: it is kept


class _BrokenPromiseError(Exception):
    pass


def check_mixer(name: str, channels: int = 16, **options: Any) -> list[Check]:
    """Build a mixer and try every promise of the contract on small maps.

    Args:
        name: name of a registered mixer.
        channels: C.
        **options: options of the mixer.

    Returns:
        Every promise, in order, with its problem if it is broken. The first is the construction; if that fails, there
        are no others.

    Raises:
        ValueError: if there is no mixer of this name.
    """
    MIXERS.get(name)
    make = partial(_make, name, channels, options)
    checks: dict[str, Callable[[Callable[..., Mixer], int], None]] = {
        "construction": _construction,
        "shape, dtype and device": _shape,
        "other and odd sizes": _sizes,
        "precision": _precision,
        "memory formats": _memory_formats,
        "batch": _batch,
        "gradient": _gradient,
        "same result twice": _determinism,
        "state dict": _state_dict,
        "declared parameters": _declared,
        "identity path": _identity_path,
        "compile": _compile,
    }
    outcomes = []
    for title, check in checks.items():
        outcomes.append(Check(title, _problem(check, make, channels)))
        if title == "construction" and outcomes[0].problem:
            break
    return outcomes


def _problem(check: Callable[..., None], make: Callable[..., Mixer], channels: int) -> str:
    try:
        check(make, channels)
    except _BrokenPromiseError as e:
        return str(e)
    except Exception as e:  # whatever the mixer's code raises is what is wrong with it
        return " ".join(f"{type(e).__name__}: {e}".split())[:300]
    return ""


def _make(name: str, channels: int, options: dict[str, Any], seed: int = 0, **more: Any) -> Mixer:
    """Return a mixer whose parameters have moved a little, so that nothing is zero only because it starts there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixer = create_mixer(name, channels, SIZE, **{**options, **more})
        with torch.no_grad():
            for p in mixer.parameters():
                if not p.is_meta:
                    p.add_(0.05 * torch.randn_like(p))
    return mixer


def _map(channels: int, size: tuple[int, int] = SIZE, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, *size, generator=generator)


def _demand(holds: Any, otherwise: str) -> None:
    if not holds:
        raise _BrokenPromiseError(otherwise)


def _demand_like(y: Any, x: Tensor, where: str = "") -> None:
    _demand(isinstance(y, Tensor), f"expected a tensor, got {type(y).__name__}")
    _demand(y.shape == x.shape, f"{tuple(x.shape)} came back as {tuple(y.shape)}: a mixer keeps its shape")
    _demand(y.dtype == x.dtype, f"{where}{x.dtype} came back as {y.dtype}: return y.to(x.dtype)")
    _demand(y.device == x.device, f"an input on {x.device} came back on {y.device}")
    _demand(y.isfinite().all(), f"values that are not finite, for an input of {tuple(x.shape)}")


def _relative(y: Tensor, wanted: Tensor) -> float:
    return ((y.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-12)).item()


def _construction(make: Callable[..., Mixer], channels: int) -> None:
    mixer = make()
    _demand(any(True for _ in mixer.parameters()) or not mixer.spectral_parameters, "no parameters")
    on_meta = make(device="meta", dtype=torch.float64)
    for key, t in (*on_meta.named_parameters(), *on_meta.named_buffers()):
        _demand(t.is_meta, f"{key} is on {t.device}: pass device= on to every layer")
        _demand(t.dtype == torch.float64 or not t.is_floating_point(), f"{key} is {t.dtype}: pass dtype= on")


def _shape(make: Callable[..., Mixer], channels: int) -> None:
    x = _map(channels)
    before = x.clone()
    for mixer in (make(), make().eval()):
        _demand_like(mixer(x), x)
        _demand(torch.equal(x, before), "the input was changed: work on a copy")
    if torch.cuda.is_available():
        _demand_like(make().cuda()(x.cuda()), x.cuda())


def _sizes(make: Callable[..., Mixer], channels: int) -> None:
    for size in OTHER_SIZES:
        x = _map(channels, size)
        _demand_like(make()(x), x)


def _precision(make: Callable[..., Mixer], channels: int) -> None:
    mixer, x = make().eval(), _map(channels, (7, 6))
    y = mixer(x)
    double = copy.deepcopy(mixer).double()(x.double())
    _demand_like(double, x.double())
    _demand(_relative(y, double) < 1e-4, f"float32 and float64 differ by {_relative(y, double):.1e}")
    half = copy.deepcopy(mixer).bfloat16()
    _demand_like(half(x.bfloat16()), x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        under = mixer(x)
    _demand_like(under, x, "under autocast ")
    _demand(_relative(under, y) < 0.1, f"under autocast the result differs by {_relative(under, y):.1e}")


def _memory_formats(make: Callable[..., Mixer], channels: int) -> None:
    mixer, x = make().eval(), _map(channels, (8, 6))
    y = mixer(x)
    for view in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        error = _relative(mixer(view), y)
        _demand(error < 1e-5, f"strides {view.stride()} give another result: off by {error:.1e}")


def _batch(make: Callable[..., Mixer], channels: int) -> None:
    mixer, x = make().eval(), _map(channels, batch=3)
    error = _relative(mixer(x[1:2]), mixer(x)[1:2])
    _demand(error < 1e-5, f"in eval mode a map depends on others of its batch: off by {error:.1e}")
    empty = _map(channels, batch=0)
    try:
        y = mixer(empty)
    except RuntimeError as e:  # FFT libraries refuse to transform nothing
        raise _BrokenPromiseError(f"an empty batch fails ({e}): return x.clone() if x.shape[0] is 0") from e
    _demand(y.shape == empty.shape, "an empty batch came back with another shape")


def _gradient(make: Callable[..., Mixer], channels: int) -> None:
    mixer, x = make(), _map(channels, (8, 7)).requires_grad_()
    weight = _map(channels, (8, 7)).flip(0)
    (mixer(x) * weight).sum().backward()
    for key, t in (("the input", x), *mixer.named_parameters()):
        _demand(t.grad is not None, f"no gradient reaches {key}")
        assert t.grad is not None
        _demand(t.grad.isfinite().all(), f"the gradient of {key} is not finite")
        _demand(t.grad.any(), f"the gradient of {key} is zero")
    exact, z, v = (
        make(dtype=torch.float64).eval(),
        _map(channels, (5, 4)).double(),
        _map(channels, (5, 4)).double().flip(1),
    )
    h = 1e-6
    numeric = ((exact(z + h * v) - exact(z - h * v)) / (2 * h)).sum().item()
    (computed,) = torch.autograd.grad(exact(z.requires_grad_()).sum(), z)
    analytic = (computed * v).sum().item()
    same = abs(analytic - numeric) <= 1e-4 * max(abs(numeric), 1e-2)
    _demand(same, f"the gradient is wrong: {analytic:.6g} where differences give {numeric:.6g}")


def _determinism(make: Callable[..., Mixer], channels: int) -> None:
    x = _map(channels)
    mixer, twin = make().eval(), make().eval()
    _demand(torch.equal(mixer(x), mixer(x)), "in eval mode two calls differ")
    _demand(torch.equal(mixer(x), twin(x)), "two mixers of one seed differ: draw initial values from torch only")


def _state_dict(make: Callable[..., Mixer], channels: int) -> None:
    mixer, other, x = make().eval(), make(seed=1).eval(), _map(channels)
    with torch.no_grad():
        mixer(x)  # what is made in the first call is found out here
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "mixer.safetensors")
            save_file(mixer.state_dict(), file)
            other.load_state_dict(load_file(file))
        _demand(torch.equal(mixer(x), other(x)), "weights that were saved and loaded give another result")
    names = [key for key, t in mixer.state_dict().items() if t.is_complex()]
    _demand(not names, f"{', '.join(names)}: complex: store real pairs with a trailing dimension of 2")


def _declared(make: Callable[..., Mixer], channels: int) -> None:
    mixer = make()
    for key in (*mixer.spectral_parameters, *mixer.complex_parameters):
        item = getattr(mixer, key, _declared)
        _demand(item is None or isinstance(item, nn.Module | nn.Parameter), f"{key!r} is declared and is no parameter")
    for key in mixer.complex_parameters:
        item = getattr(mixer, key)
        for p in item.parameters() if isinstance(item, nn.Module) else (item,):
            _demand(p.shape[-1] == 2, f"complex parameter {key!r} has shape {tuple(p.shape)}: expected a trailing 2")


def _identity_path(make: Callable[..., Mixer], channels: int) -> None:
    mixer, x = make().eval(), _map(channels)
    if not mixer.owns_residual:
        return
    bare = make(residual=False).eval()
    _demand(_relative(bare(x), mixer(x)) > 1e-6, "owns_residual is set, but residual=False changes nothing")


def _compile(make: Callable[..., Mixer], channels: int) -> None:
    mixer, x, z = make(), _map(channels).requires_grad_(), _map(channels).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    (g,) = torch.autograd.grad(mixer(x).square().sum(), x)
    y = compiled(z)
    (h,) = torch.autograd.grad(y.square().sum(), z)
    error = max(_relative(y, mixer(x)), _relative(h, g))
    _demand(error < 1e-4, f"compiled, outputs or gradients differ by {error:.1e}")
