"""Clocks: CUDA events, calls captured in a CUDA graph, peak memory, and the peak rates of a device.

A call takes the number of the input set to run on. Sets are rotated, so that caches do not hold the inputs of small
shapes.
"""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from chasm.common.devices import synchronize, waiting_for_the_host_raises
from chasm.common.text import first_line

Call = Callable[[int], dict[str, Tensor]]


class Pace(NamedTuple):
    """The time to spend on one row: seconds, and the smallest and the largest number of calls."""

    seconds: float = 0.025
    min_calls: int = 5
    max_calls: int = 40


def clock(call: Callable[[int], object], sets: int, device: torch.device, pace: Pace, calls: int = 1) -> float:
    """Return the milliseconds of a call that has already run once: the median on CUDA, the best on a CPU.

    On CUDA, events are recorded around every call and read after the last one. A call that keeps the device waiting for
    launches is therefore charged for the wait, as its user would be. The time is divided by `calls`, for a graph that
    holds several.
    """
    synchronize(device)
    start = time.perf_counter()
    call(0)
    synchronize(device)
    estimate = max(time.perf_counter() - start, 1e-6)
    repeats = min(max(round(pace.seconds / estimate), pace.min_calls), pace.max_calls)
    if device.type == "cuda":
        for i in range(max(repeats // 5, 1)):
            call(i % sets)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for i, (before, after) in enumerate(events):
            before.record()
            call(i % sets)
            after.record()
        torch.cuda.synchronize(device)
        return statistics.median(before.elapsed_time(after) for before, after in events) / calls
    seconds = []
    for i in range(repeats):
        start = time.perf_counter()
        call(i % sets)
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds) / calls


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Run a call; return the MiB that it takes beyond what was allocated before, None on devices that do not count."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


class NotCapturableError(RuntimeError):
    """The call waits for the host, so that a CUDA graph cannot hold it."""


class Captured(NamedTuple):
    """A CUDA graph of one call on each input set."""

    replay: Callable[[], None]  # runs the graph
    results: dict[str, Tensor]  # results of the first set, which every replay overwrites
    peak_mib: float  # memory that the calls take


def capture(call: Call, sets: int, device: torch.device) -> Captured:
    """Capture one call on each input set as one graph, to measure a call inside the captured step of a training loop.

    Raises:
        NotCapturableError: if the call waits for the host.
        torch.OutOfMemoryError: if the graph does not fit.
    """
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # the identity mixer runs no kernel
        call(0)  # libraries create their handles and plans
        try:
            with waiting_for_the_host_raises():
                call(0)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise NotCapturableError(f"no CUDA graph: {first_line(e)[:120]}") from None
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # a graph has its own memory pool, which needs what earlier calls left in the cache
        graph = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with no_collection():
            graph.capture_begin()
            try:
                results = call(0)
                for i in range(1, sets):
                    call(i)
            finally:
                graph.capture_end()
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    torch.cuda.current_stream(device).wait_stream(stream)
    return Captured(graph.replay, results, peak)


def timed(
    call: Callable[[int], object], captured: Captured | None, sets: int, device: torch.device, pace: Pace
) -> dict[str, float | None]:
    """Return the milliseconds and MiB of a call, replayed if it is captured."""
    if captured is None:
        return {"time_ms": clock(call, sets, device, pace), "peak_mib": peak_mib(lambda: call(0), device)}
    time_ms = clock(lambda _: captured.replay(), 1, device, pace, calls=sets)
    return {"time_ms": time_ms, "peak_mib": captured.peak_mib}


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures. Libraries keep workspaces per stream, so one stream keeps them few."""
    return torch.cuda.Stream(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn garbage collection off, which could free tensors of other streams; a capture does not allow that."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def input_sets(touched_bytes: int, device: torch.device) -> int:
    """Return how many input sets to rotate, so that one round touches twice as many bytes as the last cache holds.

    Returns:
        1 to 8; always 1 on a CPU.
    """
    if device.type != "cuda":
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return min(max(-(-2 * cache // touched_bytes), 1), 8)


class Limits(NamedTuple):
    """Peak rates of the device, measured in the same run."""

    copy_gb_per_s: float  # bytes read plus bytes written by a copy
    gemm_tflop_per_s: float  # rate of a large matrix product, bfloat16 on CUDA and float32 on a CPU

    def floor_ms(self, moved_bytes: float) -> float:
        """Return the least time to move this many bytes through memory."""
        return moved_bytes / self.copy_gb_per_s / 1e6


@torch.no_grad()
def measure_limits(device: torch.device) -> Limits:
    """Measure the peak rates of a device."""
    gpu = device.type == "cuda"
    pace = Pace(0.05, 10, 40)
    source = torch.ones(2**28 if gpu else 2**23, device=device)  # 1 GiB on a GPU
    target = torch.empty_like(source)
    target.copy_(source)
    copy_ms = clock(lambda _: target.copy_(source), 1, device, pace)
    n, dtype = (8192, torch.bfloat16) if gpu else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    gemm_ms = clock(lambda _: torch.mm(a, b), 1, device, pace)
    return Limits(2 * source.nbytes / copy_ms / 1e6, 2 * n**3 / gemm_ms / 1e9)
