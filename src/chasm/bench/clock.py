"""Clocks: CUDA events, calls captured in a CUDA graph, peak memory, and what a device does at best.

A call takes the number of the input set it runs on. Sets are rotated, so that at small shapes the caches do not
hold what is read.
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

Call = Callable[[int], dict[str, Tensor]]


class Timing(NamedTuple):
    median_ms: float
    best_ms: float


class Pace(NamedTuple):
    """How long to measure one thing: seconds, and the fewest and most calls."""

    seconds: float = 0.025
    least: int = 5
    most: int = 40


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(call: Callable[[int], object], sets: int, device: torch.device, pace: Pace, calls: int = 1) -> Timing:
    """Time of a call; `calls`: how many of them one invocation stands for. Call it once before, to warm up.

    On CUDA events around every call, read after the last one: a call that keeps the device waiting for launches
    costs what it costs a user, one that does not is timed by the device alone.
    """
    synchronize(device)
    start = time.perf_counter()
    call(0)
    synchronize(device)
    estimate = max(time.perf_counter() - start, 1e-6)
    repeats = min(max(round(pace.seconds / estimate), pace.least), pace.most)
    found = []
    if device.type == "cuda":
        for i in range(max(repeats // 5, 1)):
            call(i % sets)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for i, (before, after) in enumerate(events):
            before.record()
            call(i % sets)
            after.record()
        torch.cuda.synchronize(device)
        found = [before.elapsed_time(after) for before, after in events]
    else:
        for i in range(repeats):
            start = time.perf_counter()
            call(i % sets)
            found.append(1e3 * (time.perf_counter() - start))
    return Timing(statistics.median(found) / calls, min(found) / calls)


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Memory a call takes beyond what was there before it; only CUDA's allocator knows."""
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
    """A call waits for the host, so no CUDA graph can hold it."""


class Captured(NamedTuple):
    """One call on every input set in turn, as one CUDA graph."""

    replay: Callable[[], None]
    results: dict[str, Tensor]  # of set 0, written again by every replay
    peak_mib: float


def capture(call: Call, sets: int, device: torch.device) -> Captured:
    """The calls of a whole round as one graph: what a call costs inside the captured step of a training loop.

    Whether a call waits for the host is found out before capturing: a failed capture would leave torch's allocator
    and random generators in a state that later calls trip over.
    """
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # an empty slot
        call(0)  # libraries make their handles and plans
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(0)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise NotCapturableError(f"no CUDA graph: {first_line(e)}") from None
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # a graph has memory of its own: what the calls before it kept would halve the rest
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


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: what libraries and warm-ups leave behind belongs to a stream."""
    return torch.cuda.Stream(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage collection during a capture could free tensors of other streams, which a capture does not allow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__


def input_sets(touched_bytes: int, device: torch.device) -> int:
    """How many sets are rotated where a call touches this much: a round should pass twice what the last cache holds."""
    if device.type != "cuda":
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return min(max(-(-2 * cache // touched_bytes), 1), 8)


class Limits(NamedTuple):
    """What the device does at best, measured in the same run."""

    copy_gb_per_s: float  # read plus written
    gemm_tflop_per_s: float  # bfloat16 on CUDA, float32 on a CPU

    def floor_ms(self, moved_bytes: float) -> float:
        return moved_bytes / self.copy_gb_per_s / 1e6


@torch.no_grad()
def measure_limits(device: torch.device) -> Limits:
    gpu = device.type == "cuda"
    pace = Pace(0.05, 10, 40)
    source = torch.ones(2**28 if gpu else 2**23, device=device)  # 1 GiB on a GPU
    target = torch.empty_like(source)
    target.copy_(source)
    copy = clock(lambda _: target.copy_(source), 1, device, pace)
    n, dtype = (8192, torch.bfloat16) if gpu else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    gemm = clock(lambda _: torch.mm(a, b), 1, device, pace)
    return Limits(2 * source.nbytes / copy.median_ms / 1e6, 2 * n**3 / gemm.median_ms / 1e9)
