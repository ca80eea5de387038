"""Times of bases and hosts: the cost of CHASM where it is used.

bases   all orthogonal bases of a HiFi-Mamba host, forward and backward, and torch's matrix exponential
hifi    a training step (forward, loss, backward, AdamW) under bfloat16 autocast, with CHASM and with empty (identity)
        slots; mode "graph" captures forward and backward as `train.cuda_graph` does, "compiled graph" as it does with
        `train.compile`
unet    inference in bfloat16, with CHASM folded to constants and with empty slots

Before a host is timed, its output is compared with the same network in float64 with paper-literal blocks in its slots.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import chasm
from chasm import ops
from chasm.backbones import create_backbone
from chasm.bench.clock import Pace, capture, clock, peak_mib, timed
from chasm.bench.literal import LiteralBlock
from chasm.bench.report import Row, titles
from chasm.bench.subjects import LAYOUTS, errors
from chasm.bench.table import reason
from chasm.mixers import CHASM
from chasm.ops import reference
from chasm.tasks import Reconstruction, TaskBatch
from chasm.train.step import Context, add_gradients

BASES = titles("what", "mode", "time_ms", "times_literal", "peak_mib", "error")
TITLES = titles("what", "batch", "mode", "mixer", "layout", "time_ms", "ratio", "peak_mib", "error", mixer="slots")
COLUMNS = (*TITLES, "times_literal", "grad_error", "worst_gradient", "note")
MAX_HOST_ERROR = 5e-2  # relative error of a whole network in bfloat16


def guarded(row: Row, measure: Callable[[], Row]) -> Row:
    """Return the row with its measurements, or with a note that says why it could not be measured."""
    try:
        return row | measure()
    except Exception as e:  # the other rows are still measured
        return row | {"note": reason(e)}


# --- bases ------------------------------------------------------------------------------------------


def bases(device: torch.device, pace: Pace) -> Iterator[Row]:
    """Yield the rows of the bases: torch's matrix exponential first, then `chasm.ops.orthogonal_basis`."""
    count, channels = (12, 96) if device.type == "cuda" else (4, 32)
    generator = torch.Generator().manual_seed(0)
    entries = channels * (channels - 1) // 2
    thetas = [(0.3 * torch.randn(entries, generator=generator)).to(device).requires_grad_() for _ in range(count)]
    weight = torch.randn(count, channels, channels, generator=generator).to(device)  # gradient of the bases

    def gradients(build: Callable[[list[Tensor]], Tensor], inputs: list[Tensor]) -> Callable[[int], dict[str, Tensor]]:
        def call(_: int) -> dict[str, Tensor]:
            with torch.enable_grad():
                U = build(inputs)
                grads = torch.autograd.grad(U, inputs, weight.to(U.dtype))
            return {"y": U.detach(), "theta": torch.stack(grads)}

        return call

    ways: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "torch's matrix exponential, one by one": lambda t: torch.stack([reference.basis(theta) for theta in t]),
        "torch's matrix exponential, batched": lambda t: reference.basis(torch.stack(t)),
        "ours, batched": lambda t: ops.orthogonal_basis(torch.stack(t)),
    }
    in_float64 = [t.detach().double().requires_grad_() for t in thetas]
    exact = gradients(ways["torch's matrix exponential, batched"], in_float64)(0)
    literal = None
    for what, build in ways.items():
        for mode in ("eager", "graph") if device.type == "cuda" and what.startswith("ours") else ("eager",):
            call = gradients(build, thetas)

            def measure(call: Any = call, mode: str = mode) -> Row:
                captured = capture(call, 1, device) if mode == "graph" else None
                if captured is not None:
                    for result in captured.results.values():
                        result.fill_(float("nan"))  # shows results that the replay does not write
                    captured.replay()
                error, grad_error, worst = errors(captured.results if captured else call(0), exact)
                record = {"error": error, "grad_error": grad_error, "worst_gradient": worst}
                if not (error <= 1e-4 and grad_error <= 1e-2):
                    return record | {"note": f"wrong: error {error:.1e} of U, {grad_error:.1e} of its gradient"}
                return record | timed(call, captured, 1, device, pace)

            row = guarded({"what": f"{count} bases, C = {channels}: {what}", "mode": mode}, measure)
            if literal is None:
                literal = row.get("time_ms")
            if row.get("time_ms") is not None and literal is not None:
                row["times_literal"] = literal / row["time_ms"]
            yield row


# --- hosts ------------------------------------------------------------------------------------------


def host(name: str, mixer: str, size: int, device: torch.device, **options: Any) -> nn.Module:
    """Create a backbone with the same weights in every call, and bases and gains away from their initial point."""
    torch.manual_seed(0)
    model = create_backbone(name, mixer=mixer, size=(size, size), **options)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, CHASM):
                for p in (*module.theta.values(), *module.gain_table.values()):
                    p.add_(0.3 / module.step_scale * torch.randn_like(p))
    return model.to(device)


def literal_slots(model: nn.Module) -> nn.Module:
    """Return a copy of a backbone in which paper-literal blocks replace CHASM."""
    model = copy.deepcopy(model)
    slots: Any = model.slots
    for name, slot in slots.items():
        if isinstance(slot, CHASM):
            slots[name] = LiteralBlock(slot)
    return model


def output_error(model: nn.Module, exact: nn.Module, batch: TaskBatch, dtype: torch.dtype) -> float:
    """Return the relative error of a model in eval mode for the first image of a batch.

    The exact network is the same, and runs in float64.
    """
    x, mask = batch.input[:1], batch.mask
    with torch.no_grad():
        y = model(x.to(dtype), mask=mask).double()
        exact = copy.deepcopy(exact).double().eval()
        want = exact(x.double(), mask=mask)
    return float((y - want).norm() / want.norm())


def make_batch(batch: int, size: int, device: torch.device) -> TaskBatch:
    """Prepare random images for reconstruction, the same in every call."""
    generator = torch.Generator(device).manual_seed(0)
    return Reconstruction().prepare(torch.rand(batch, 1, size, size, generator=generator, device=device))


def hifi(device: torch.device, pace: Pace) -> Iterator[Row]:
    """Yield the rows of a HiFi-Mamba training step: with empty slots, paper-literal blocks, and CHASM."""
    gpu = device.type == "cuda"
    batch, size = (8, 256) if gpu else (1, 32)
    options: dict[str, Any] = {} if gpu else {"width": 16, "groups": 2, "blocks": 1, "state": 4}
    prepared = make_batch(batch, size, device)
    base: dict[str, float] = {}
    for mixer in ("identity", "literal", "chasm"):
        for mode in ("eager", "graph", "compiled graph") if gpu and mixer != "literal" else ("eager",):
            row = {
                "what": f"HiFi-Mamba, training step, {size}x{size}, bf16",
                "batch": batch,
                "mode": mode,
                "mixer": mixer,
            }
            row = guarded(row, lambda: _hifi_row(mixer, mode, size, prepared, options, device, pace))  # noqa: B023
            if gpu:
                torch.cuda.empty_cache()
            yield _with_ratio(row, base, mixer == "identity", mode)


def _hifi_row(
    mixer: str, mode: str, size: int, batch: TaskBatch, options: dict[str, Any], device: torch.device, pace: Pace
) -> Row:
    model = host("hifi-mamba", "identity" if mixer == "identity" else "chasm", size, device, **options)
    exact = literal_slots(model)
    model = exact if mixer == "literal" else model
    model.eval()
    with torch.autocast(device.type, torch.bfloat16):
        error = output_error(model, exact, batch, torch.float32)
    if not error <= MAX_HOST_ERROR:
        return {"error": error, "note": f"wrong: error {error:.1e} of the output, allowed {MAX_HOST_ERROR:.0e}"}
    timed: Any = copy.deepcopy(model)
    if mode == "compiled graph":
        timed.compile()
    step = training_step(timed, batch, graph=mode != "eager")
    peak = peak_mib(
        lambda: [step(0) for _ in range(5)], device
    )  # enough steps to capture the graph, whose memory counts
    return {"error": error, "layout": "NCHW", "time_ms": clock(step, 1, device, pace), "peak_mib": peak}


def training_step(
    model: nn.Module, batch: TaskBatch, *, graph: bool, part: Callable[[str], Context] = nullcontext
) -> Callable[[int], object]:
    """Return a step (forward, loss, backward, AdamW) under bfloat16 autocast, as `chasm train` runs it.

    A profiler passes `part`, the context around the parts of `add_gradients` and around "optimiser".
    """
    model.train()
    task = Reconstruction()
    optimizer = torch.optim.AdamW(chasm.param_groups(model, lr=1e-4))

    def gradients(batches: Iterable[TaskBatch]) -> Tensor:
        return add_gradients(model, task, batches, bf16=True, is_graphed=graph, part=part)

    if graph:
        from chasm.train.graphed import GraphedGradients

        graphed = GraphedGradients(gradients, model.parameters())

    def step(_: int) -> None:
        if graph:
            graphed([batch])
        else:
            optimizer.zero_grad(set_to_none=True)
            gradients([batch])
        with part("optimiser"):
            optimizer.step()

    return step


def _with_ratio(row: Row, base: dict[str, float], is_base: bool, key: str) -> Row:
    time = row.get("time_ms")
    if time is not None:
        if is_base:
            base[key] = time
        row["ratio"] = time / base[key] if key in base else None
    return row


def unet(device: torch.device, pace: Pace) -> Iterator[Row]:
    """Yield the rows of U-Net inference: with empty slots and with folded CHASM, each in its faster layout."""
    gpu = device.type == "cuda"
    batches, size = ((1, 16), 256) if gpu else ((1, 2), 32)
    options: dict[str, Any] = {} if gpu else {"width": 8, "depth": 2, "levels": (0, 1, 2)}
    base: dict[str, float] = {}
    for batch in batches:
        prepared = make_batch(batch, size, device)
        for mode in ("eager", "graph") if gpu else ("eager",):
            for mixer in ("identity", "chasm"):
                row = {"what": f"U-Net, inference, {size}x{size}, bf16", "batch": batch, "mode": mode, "mixer": mixer}
                row = guarded(row, lambda: _unet_row(mixer, mode, size, prepared, options, pace))  # noqa: B023
                yield _with_ratio(row, base, mixer == "identity", f"{batch} {mode}")


@torch.no_grad()
def _unet_row(mixer: str, mode: str, size: int, batch: TaskBatch, options: dict[str, Any], pace: Pace) -> Row:
    device = batch.input.device
    original = host("unet", mixer, size, device, **options).eval()
    best: Row = {}
    for layout, memory_format in LAYOUTS.items():
        model = copy.deepcopy(original) if mixer == "identity" else chasm.fold(original, example=batch.input)
        model = model.to(torch.bfloat16).to(memory_format=memory_format)  # type: ignore[call-overload]
        error = output_error(model, literal_slots(original), batch, torch.bfloat16)
        if not error <= MAX_HOST_ERROR:
            return {"error": error, "note": f"wrong: error {error:.1e} of the output, allowed {MAX_HOST_ERROR:.0e}"}
        x = batch.input.to(torch.bfloat16).to(memory_format=memory_format)

        def call(_: int, model: nn.Module = model, x: Tensor = x) -> dict[str, Tensor]:
            with torch.no_grad():
                return {"y": model(x)}

        captured = None
        want = call(0)["y"].clone()
        if mode == "graph":
            captured = capture(call, 1, device)
            captured.results["y"].fill_(float("nan"))
            captured.replay()
            if not torch.allclose(captured.results["y"], want, rtol=0.1, atol=0.1):
                return {"error": error, "note": "wrong: the graph does not repeat the eager call"}
        measured = {"error": error, "layout": layout, **timed(call, captured, 1, device, pace)}
        if not best or measured["time_ms"] < best["time_ms"]:
            best = measured
    return best
