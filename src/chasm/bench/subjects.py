"""The blocks that are timed: the paper-literal block, CHASM in each of its forms, all other mixers, and peers."""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chasm import ops
from chasm.bench.clock import Call
from chasm.bench.literal import LiteralBlock
from chasm.bench.peers import DEFAULT_PEERS, PEERS
from chasm.mixers import CHASM, MIXERS, create_slot

Shape = tuple[int, int, int, int]  # B, C, H, W
LITERAL = "literal"
PURE_CORES = ("gfnet",)  # rivals that are only a spectral core; mode "core" times them without the identity path


@dataclass
class Subject:
    """A block to time."""

    mixer: str  # name of the mixer
    form: str  # form of CHASM, or another word for how the block runs
    module: nn.Module  # the block with float32 parameters; bfloat16 runs under autocast
    core: Callable[[Tensor], Tensor] | None = None  # its spectral core, with the same parameters, if it has one
    chasm: CHASM | None = None  # the mixer if it is CHASM, to ask which form runs

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the mixer, without the prefixes of wrappers."""
        wrappers = ("_orig_mod.", "mixer.")
        named = {}
        for name, p in self.module.named_parameters():
            for wrapper in wrappers:
                name = name.removeprefix(wrapper)
            named[name] = p
        return named


def chasm_block(shape: Shape, form: str, device: torch.device) -> CHASM:
    """Create a CHASM mixer away from its initial point, the same in every call.

    Its branch is about as large as x, so that the residual does not hide an error.
    """
    torch.manual_seed(0)
    mixer = CHASM(shape[1], size=shape[2:], form=form)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            if "theta" in name or "table" in name:
                p.add_(0.3 / mixer.step_scale * torch.randn_like(p))
        assert mixer.fuse is not None
        mixer.fuse.weight *= 4
    return mixer.to(device)


def create(name: str, form: str, shape: Shape, device: torch.device) -> Subject:
    """Return CHASM in one of its forms, the paper-literal block "eager" or "compiled", another mixer, or a peer."""
    if name == "chasm":
        mixer = chasm_block(shape, form, device)
        return Subject(name, form, mixer, mixer.core, mixer)
    if name != LITERAL:
        return rival(name, shape, device)
    block = LiteralBlock(chasm_block(shape, "auto", device))
    if form == "eager":
        return Subject(name, form, block, block.core)
    torch.compiler.reset()  # otherwise a second shape makes torch compile for dynamic shapes
    return Subject(name, form, torch.compile(block), torch.compile(block.core))  # type: ignore[arg-type]


def rival(name: str, shape: Shape, device: torch.device) -> Subject:
    """Return another mixer in a slot, which adds the identity path if the mixer has none; or a peer."""
    torch.manual_seed(0)
    if name in PEERS:
        return Subject(name, "-", PEERS[name](shape[1]).to(device))
    slot = create_slot(name, shape[1], shape[2:]).to(device)
    with torch.no_grad():
        for p in slot.parameters():
            if not p.any():  # at sampling offsets of exactly zero only one-sided derivatives exist
                p.add_(0.01 * torch.randn_like(p))
    return Subject(name, "-", slot, slot.mixer if name in PURE_CORES else None)  # type: ignore[arg-type]


def fresh(subject: Subject) -> Subject:
    """Return a copy with its own running statistics and without cached constants."""
    if subject.form == "compiled":  # it has no state, and a copy would be compiled again
        return subject
    return copy.deepcopy(subject)


def rivals() -> list[str]:
    """Return the names of all mixers but CHASM, and of the peers that are timed by default."""
    return [*(name for name in MIXERS.list() if name != "chasm"), *DEFAULT_PEERS]


def forms(device: torch.device) -> list[str]:
    """Return "auto" and the forms of CHASM that run on a device."""
    return ["auto", *(form for form in ops.FORMS if form not in ops.GPU_FORMS or device.type == "cuda")]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return bfloat16 autocast, which is off for other dtypes."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


Inputs = list[tuple[Tensor, Tensor]]  # x and the gradient of the output, one pair per set
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def make_inputs(shape: Shape, dtype: torch.dtype, layout: str, sets: int, device: torch.device) -> Inputs:
    """Return x and the gradient of the output for every set: random numbers that bfloat16 represents exactly."""
    generator = torch.Generator(device).manual_seed(1)
    pairs = []
    for _ in range(sets):
        x, g = (
            torch.randn(shape, generator=generator, device=device)
            .to(torch.bfloat16)
            .to(dtype)
            .to(memory_format=LAYOUTS[layout])
            for _ in range(2)
        )
        pairs.append((x.requires_grad_(), g))
    return pairs


def call_of(subject: Subject, kind: str, inputs: Inputs, dtype: torch.dtype) -> Call:
    """Return the call that is timed, and set the block to training or eval.

    The kinds are "core" (spectral core in eval, with cached constants), "eval" (block without gradient) and "step"
    (forward and backward in training, including the bases).

    Returns:
        A function of the number of an input set. It returns the output "y" and, for "step", the gradients of "x" and
        of each parameter by its name.
    """
    device = inputs[0][0].device
    if kind == "step":
        subject.module.train()
        parameters = subject.parameters()

        def step(i: int) -> dict[str, Tensor]:
            x, g = inputs[i]
            with torch.enable_grad():
                with autocast(device, dtype):
                    y = subject.module(x)
                grads = torch.autograd.grad(y, [x, *parameters.values()], g.to(y.dtype), allow_unused=True)
            named = zip(("x", *parameters), grads, strict=True)
            return {"y": y.detach(), **{name: grad for name, grad in named if grad is not None}}

        return step

    subject.module.eval()
    run: Callable[[Tensor], Tensor] | None = subject.core if kind == "core" else subject.module
    assert run is not None

    def infer(i: int) -> dict[str, Tensor]:
        with torch.no_grad(), autocast(device, dtype):
            return {"y": run(inputs[i][0])}

    return infer


def form_that_runs(subject: Subject, kind: str, x: Tensor) -> str:
    """Return the form that runs, for example "auto (fft)"."""
    if subject.chasm is None or subject.form != "auto":
        return subject.form
    subject.chasm.train(kind == "step")
    with torch.set_grad_enabled(kind == "step"), autocast(x.device, x.dtype):
        return f"auto ({subject.chasm.explain(x).form})"


def errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float, str]:
    """Compare results with the exact ones.

    The error of a gradient that is zero up to rounding (a bias before a batch norm) is relative to the largest one.

    Returns:
        The relative error of y, the largest relative error of a gradient, and the name of that gradient. Both errors
        are NaN if a result is missing.
    """
    names = list(exact)
    missing = [name for name in names if name not in results]
    if missing:
        return float("nan"), float("nan"), f"no {missing[0]}"
    with torch.no_grad():
        pairs = [((results[n].double() - exact[n]).norm(), exact[n].norm()) for n in names]
        values = dict(zip(names, torch.tensor([[float(a) for a in pair] for pair in pairs]).tolist(), strict=True))
    largest = max((size for name, (_, size) in values.items() if name not in ("y", "x")), default=0.0)

    def relative(name: str) -> float:
        difference, size = values[name]
        return float(difference / max(size, 1e-3 * largest if name not in ("y", "x") else 0.0, 1e-30))

    gradients = {name: relative(name) for name in names if name != "y"}
    if any(g != g for g in gradients.values()):
        worst = next(name for name, g in gradients.items() if g != g)
    else:
        worst = max(gradients, key=gradients.__getitem__) if gradients else ""
    return relative("y"), gradients.get(worst, 0.0), worst


def exact_results(subject: Subject, kinds: Iterable[str], shape: Shape, device: torch.device) -> dict[str, Any]:
    """Return the results of each kind of call in float64; for CHASM, pass the paper-literal block."""
    results: dict[str, Any] = {}
    for kind in kinds:
        if kind == "core" and subject.core is None:
            continue
        double = fresh(subject)
        double.module.double()
        if isinstance(double.core, nn.Module):
            double.core.double()
        results[kind] = call_of(double, kind, make_inputs(shape, torch.float64, "NCHW", 1, device), torch.float64)(0)
    return results
