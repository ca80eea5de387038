"""What is timed: the paper-literal block, CHASM in each of its forms, and every rival as its users run it."""

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
from chasm.mixers import CHASM, MIXERS, create_slot

Shape = tuple[int, int, int, int]  # B, C, H, W
LITERAL = "literal"
PURE_CORES = ("gfnet",)  # rivals that are a spectral core and nothing else, timed beside ours without identity path


@dataclass
class Subject:
    mixer: str
    form: str
    module: nn.Module  # the block; float32 parameters, run under autocast for bfloat16
    core: Callable[[Tensor], Tensor] | None = None  # the spectral core alone, of the same parameters
    chasm: CHASM | None = None  # who can say which form runs

    def parameters(self) -> dict[str, nn.Parameter]:
        """By the names they have in the mixer, whatever is around it."""
        wrappers = ("_orig_mod.", "mixer.")
        found = {}
        for name, p in self.module.named_parameters():
            for wrapper in wrappers:
                name = name.removeprefix(wrapper)
            found[name] = p
        return found


def chasm_block(shape: Shape, form: str, device: torch.device) -> CHASM:
    """A mixer away from its initial point, where bases and gains are not trivial. Always the same one.

    What it adds is made about as large as x, so that the residual does not hide an error of it.
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


def literal(shape: Shape, device: torch.device) -> Subject:
    block = LiteralBlock(chasm_block(shape, "auto", device))
    return Subject(LITERAL, "eager", block, block.core)


def compiled_literal(shape: Shape, device: torch.device) -> Subject:
    torch.compiler.reset()  # else one more shape is a reason to compile for all shapes
    block = LiteralBlock(chasm_block(shape, "auto", device))
    return Subject(LITERAL, "compiled", torch.compile(block), torch.compile(block.core))  # type: ignore[arg-type]


def ours(shape: Shape, form: str, device: torch.device) -> Subject:
    mixer = chasm_block(shape, form, device)
    return Subject("chasm", form, mixer, mixer.core, mixer)


def rival(name: str, shape: Shape, device: torch.device) -> Subject:
    """In a slot of its own: the mixer, and the identity path where it brings none."""
    torch.manual_seed(0)
    slot = create_slot(name, shape[1], shape[2:]).to(device)
    with torch.no_grad():
        for p in slot.parameters():
            if not p.any():  # sampling offsets of exactly zero have no gradient to compare, only two one-sided ones
                p.add_(0.01 * torch.randn_like(p))
    return Subject(name, "-", slot, slot.mixer if name in PURE_CORES else None)  # type: ignore[arg-type]


def fresh(subject: Subject) -> Subject:
    """A copy with its own buffers (running statistics move in training) and no cached constants."""
    if subject.form == "compiled":  # stateless, and a copy would be compiled again
        return subject
    return copy.deepcopy(subject)


def rivals() -> list[str]:
    return [name for name in MIXERS.list() if name != "chasm"]


def forms(device: torch.device) -> list[str]:
    return ["auto", *(form for form in ops.FORMS if form not in ops.GPU_FORMS or device.type == "cuda")]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


Inputs = list[tuple[Tensor, Tensor]]  # x and the gradient of the output, one pair per set
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def make_inputs(shape: Shape, dtype: torch.dtype, layout: str, sets: int, device: torch.device) -> Inputs:
    """Numbers that bfloat16 holds exactly: one oracle then serves every dtype."""
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
    """kind "core": the core in eval, constants cached; "eval": the block without gradient; "step": forward and
    backward in training, bases included. Results by name: y, x (its gradient) and parameters (theirs)."""
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
    """ "auto (dft)": what the mixer's own choice is here."""
    if subject.chasm is None or subject.form != "auto":
        return subject.form
    subject.chasm.train(kind == "step")
    with torch.set_grad_enabled(kind == "step"), autocast(x.device, x.dtype):
        return f"auto ({subject.chasm.explain(x).form})"


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float, str]:
    """Relative error of y, the largest among the gradients, and whose that is.

    A gradient that is zero up to rounding (a bias before a batch norm) is measured on the scale of the largest one.
    """
    names = list(exact)
    missing = [name for name in names if name not in found]
    if missing:
        return float("nan"), float("nan"), f"no {missing[0]}"
    with torch.no_grad():
        pairs = [((found[n].double() - exact[n]).norm(), exact[n].norm()) for n in names]
        values = dict(zip(names, torch.tensor([[float(a) for a in pair] for pair in pairs]).tolist(), strict=True))
    own = max((size for name, (_, size) in values.items() if name not in ("y", "x")), default=0.0)

    def relative(name: str) -> float:
        difference, size = values[name]
        return float(difference / max(size, 1e-3 * own if name not in ("y", "x") else 0.0, 1e-30))

    gradients = {name: relative(name) for name in names if name != "y"}
    if any(g != g for g in gradients.values()):
        worst = next(name for name, g in gradients.items() if g != g)
    else:
        worst = max(gradients, key=gradients.__getitem__) if gradients else ""
    return relative("y"), gradients.get(worst, 0.0), worst


def exact_results(subject: Subject, kinds: Iterable[str], shape: Shape, device: torch.device) -> dict[str, Any]:
    """Float64 results by kind; of CHASM, let `subject` be the paper-literal block."""
    found: dict[str, Any] = {}
    for kind in kinds:
        if kind == "core" and subject.core is None:
            continue
        double = fresh(subject)
        double.module.double()
        if isinstance(double.core, nn.Module):
            double.core.double()
        found[kind] = call_of(double, kind, make_inputs(shape, torch.float64, "NCHW", 1, device), torch.float64)(0)
    return found
