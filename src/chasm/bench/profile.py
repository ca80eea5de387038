"""Measure the parts and the kernels of a HiFi-Mamba training step.

Parts are marked in the forward pass. A backward operation belongs to the part of the forward operation that it
differentiates; torch's profiler links the two by number. The time of a part inside another part counts only once, for
the inner part.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from chasm.backbones import HiFiMamba
from chasm.backbones.hifi import blocks, layers, patches, ssm
from chasm.backbones.hifi.kernels import norm
from chasm.backbones.measurement import Measurement
from chasm.bench import hosts
from chasm.bench.report import Row, titles
from chasm.common.devices import synchronize

MARK = "part: "
ENGINE = "autograd::engine"  # begins the names of events around the backward pass
REST = "rest of the host"
PARTS: dict[type[nn.Module], str] = {
    blocks.InvertedBottleneck: "inverted bottlenecks",
    norm.NormGELU: "norms of the inverted bottlenecks",
    ssm.ModulatedSSM: "state-space layer around the scan",
    layers.ChannelNorm: "layer norms",
    blocks.ChannelGate: "channel gates",
    patches.PatchEmbed: "patches in and out",
    patches.ToImage: "patches in and out",
}
BY_PART = titles("part", "time_ms", "share", "forward_ms", "calls", time_ms="ms per step", calls="kernels")
BY_KERNEL = titles("kernel", "time_ms", "share", "calls", time_ms="ms per step")
COLUMNS = ("part", "kernel", "time_ms", "share", "forward_ms", "calls")


def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a mark around each call, which the profiler records."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(MARK + name):
            return function(*args, **kwargs)

    return call


def mark(model: nn.Module) -> None:
    """Mark the parts of a backbone permanently. Hooks would keep a mixer from its fastest kernels."""
    for module in model.modules():
        if type(module) in PARTS:
            module.forward = marked(PARTS[type(module)], module.forward)
    slots: Any = model.slots
    for slot in slots.values():
        slot.forward = marked("mixer slots", slot.forward)


@contextmanager
def marked_functions() -> Iterator[None]:
    """Mark the parts that are functions, inside this context."""
    scan, enforce, low_pass = ssm.selective_scan, Measurement.enforce, blocks.low_pass
    ssm.selective_scan = marked("selective scan", scan)
    blocks.low_pass = marked("low-pass filter", low_pass)
    Measurement.enforce = marked("data consistency", enforce)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ssm.selective_scan = scan
        blocks.low_pass = low_pass
        Measurement.enforce = enforce  # type: ignore[method-assign]


def profile_step(device: torch.device, mixer: str = "chasm", steps: int = 3) -> dict[str, Any]:
    """Profile eager training steps under bfloat16 autocast.

    Args:
        device: device to measure on.
        mixer: name of the mixer in the slots.
        steps: number of steps.

    Returns:
        Batch and image size, milliseconds per step by the clock and in kernels, and rows by part and by kernel.
    """
    gpu = device.type == "cuda"
    batch, size = (8, 256) if gpu else (1, 32)
    options: dict[str, Any] = {} if gpu else {"width": 16, "groups": 2, "blocks": 1, "state": 4}
    model = hosts.host("hifi-mamba", mixer, size, device, **options)
    assert isinstance(model, HiFiMamba)
    mark(model)
    with marked_functions():
        step = hosts.training_step(model, hosts.make_batch(batch, size, device), graph=False, part=_mark_part)
        for _ in range(3):
            step(0)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step(0)
        synchronize(device)
        wall = 1e3 * (time.perf_counter() - start) / steps
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        with profile(activities=kinds) as profiler:
            for _ in range(steps):
                step(0)
            synchronize(device)
    by_part, by_kernel = summarise(list(profiler.events()), steps, gpu)
    busy = sum(row["time_ms"] for row in by_part)
    return {"batch": batch, "size": size, "wall_ms": wall, "busy_ms": busy, "parts": by_part, "kernels": by_kernel}


def _mark_part(part: str) -> record_function:
    """Mark a part of the training step. The part of the model without an inner mark is the rest of the host."""
    return record_function(MARK + (REST if part == "model" else part))


def summarise(events: list[Any], steps: int, gpu: bool) -> tuple[list[Row], list[Row]]:
    """Add up the times of the kernels in profiled events, or of the operations if they ran on a CPU.

    Returns:
        Rows by part and rows by kernel, the largest first.
    """
    origin = _origins(events)
    times: dict[str, float] = defaultdict(float)
    forward: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event.name.startswith(MARK) and not gpu:
            continue
        spent = [(k.name, float(k.duration)) for k in event.kernels if not k.name.startswith(MARK)] if gpu else []
        if not gpu and event.device_type == torch.autograd.DeviceType.CPU and event.self_cpu_time_total > 0:
            spent = [(event.name, float(event.self_cpu_time_total))]
        if not spent:
            continue
        part, backward = _part_of(event, origin)
        for name, microseconds in spent:
            times[part] += microseconds
            forward[part] += 0 if backward else microseconds
            calls[part] += 1
            kernels[name][0] += microseconds
            kernels[name][1] += 1
    total = sum(times.values()) or 1
    by_part = [
        {
            "part": part,
            "time_ms": t / 1e3 / steps,
            "share": t / total,
            "forward_ms": forward[part] / 1e3 / steps,
            "calls": round(calls[part] / steps),
        }
        for part, t in sorted(times.items(), key=lambda item: -item[1])
    ]
    by_kernel = [
        {"kernel": name[:100], "time_ms": t / 1e3 / steps, "share": t / total, "calls": round(n / steps)}
        for name, (t, n) in sorted(kernels.items(), key=lambda item: -item[1][0])
    ]
    return by_part, by_kernel


def _origins(events: list[Any]) -> dict[int, str]:
    """Map the sequence number of each differentiable operation to the part whose forward pass ran it."""
    origin: dict[int, str] = {}
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.sequence_nr >= 0 and _ancestor(event, ENGINE) is None:
            part = _marked_parent(event)
            if part is not None:
                origin[event.sequence_nr] = part  # the last event with this number created the node
    return origin


def _ancestor(event: Any, prefix: str) -> Any:
    """Return the event itself or the innermost event around it whose name begins like this, None without one."""
    while event is not None and not event.name.startswith(prefix):
        event = event.cpu_parent
    return event


def _marked_parent(event: Any) -> str | None:
    mark = _ancestor(event, MARK)
    return None if mark is None else mark.name.removeprefix(MARK)


def _part_of(event: Any, origin: dict[int, str]) -> tuple[str, bool]:
    """Return the part that an event belongs to, and True if it ran in the backward pass."""
    engine = _ancestor(event, ENGINE)
    if engine is None:
        return _marked_parent(event) or "around the step", False
    return origin.get(engine.sequence_nr, "gradients of parameters"), True
