"""CHASM on this CPU beside the paper-literal form and beside what people use instead: time ratios from one run.

    make bench

Times are the fastest of interleaved repetitions; only the ratios mean anything on a shared machine. Outputs and
gradients of the paper-literal form are compared with CHASM's before anything is timed.
"""

import contextlib
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import chasm
from chasm.bench import subjects
from chasm.bench.literal import LiteralBlock

SHAPES = [(2, 96, 128, 128), (2, 96, 90, 90)]
PEER_SHAPES = [(1, 8, 4, 4), (2, 96, 64, 64), (2, 96, 128, 128)]  # in the first only the host's overhead counts
PEERS = ("gfnet", "afno", "spectformer", "depthwise-7x7", "convnext", "window-attention", "attention")
MAX_ATTENTION = 64 * 64  # positions: beyond, it takes minutes
REPETITIONS = 20


def trained(channels: int, size: tuple[int, ...]) -> chasm.CHASM:
    """A mixer away from its initial point, where bases and gains are not trivial."""
    torch.manual_seed(0)
    mixer = chasm.CHASM(channels, size=size)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            if "theta" in name or "table" in name:
                p.add_(0.3 / mixer.step_scale * torch.randn_like(p))
    return mixer


def step(block: nn.Module, x: Tensor) -> None:
    block.zero_grad()
    x.grad = None
    block(x).mean().backward()


def infer(block: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        block(x)


def fastest(calls: list[Callable[[], None]]) -> list[float]:
    best = [float("inf")] * len(calls)
    for _ in range(REPETITIONS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def check_parity(ours: nn.Module, literal: LiteralBlock, x: Tensor) -> None:
    results = []
    for block in (ours, literal):
        step(block, x)
        assert x.grad is not None
        results.append([block(x).detach(), x.grad, *[p.grad for p in block.parameters() if p.grad is not None]])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7, "forms disagree: no time is printed"


def high_water_mark() -> float:
    """Largest resident size of this process so far, in megabytes (Linux)."""
    line = next(ln for ln in Path("/proc/self/status").read_text().splitlines() if ln.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def peak_memory(kind: str, shape: tuple[int, ...]) -> float:
    """Megabytes a training step adds to this process; called in a fresh one."""
    mixer = trained(shape[1], shape[2:])
    block = LiteralBlock(mixer) if kind == "literal" else mixer
    step(block, torch.randn(1, shape[1], 16, 16, requires_grad=True))  # warm up libraries
    x = torch.randn(shape, requires_grad=True)
    before = high_water_mark()
    step(block, x)
    return high_water_mark() - before


def print_peers() -> None:
    """Times of a training step and of an eval forward over those of CHASM."""
    print("\ntime over CHASM's, training step / eval forward\n")
    print(f"{'':>18}" + "".join(f"{shape!s:>20}" for shape in PEER_SHAPES))
    columns = [_times_over_chasm(shape) for shape in PEER_SHAPES]
    for name in ("literal", *PEERS):
        print(f"{name:>18}" + "".join(f"{column.get(name, '-'):>20}" for column in columns))


def _times_over_chasm(shape: tuple[int, int, int, int]) -> dict[str, str]:
    x = torch.randn(shape, requires_grad=True)
    ours = trained(shape[1], shape[2:])
    blocks: dict[str, nn.Module] = {"chasm": ours, "literal": LiteralBlock(copy.deepcopy(ours))}
    for name in PEERS:
        if name == "attention" and x[0, 0].numel() > MAX_ATTENTION:
            continue
        with contextlib.suppress(ValueError):  # a peer that does not take this shape has no number
            block = subjects.rival(name, shape, x.device).module
            infer(block, x)
            blocks[name] = block
    train = fastest([partial(step, block.train(), x) for block in blocks.values()])
    evaluate = fastest([partial(infer, block.eval(), x) for block in blocks.values()])
    times = zip(blocks, train, evaluate, strict=True)
    return {name: f"{a / train[0]:.2f} / {b / evaluate[0]:.2f}" for name, a, b in times}


def main() -> None:
    if len(sys.argv) > 1:
        print(peak_memory(sys.argv[1], tuple(map(int, sys.argv[2].split(",")))))
        return
    # Every large block its own mapping, so that resident memory is live memory and not what malloc keeps back.
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32; ratios to the paper-literal block\n")
    print(f"{'shape':>18} {'forward+backward':>26} {'eval forward':>26} {'peak memory of a step':>28}")
    for shape in SHAPES:
        x = torch.randn(shape, requires_grad=True)
        ours = trained(shape[1], shape[2:])
        literal = LiteralBlock(copy.deepcopy(ours))
        check_parity(ours, literal, x)
        train = fastest([partial(step, b, x) for b in (literal, ours)])
        ours.eval()
        infer(ours, x)
        evaluate = fastest([partial(infer, b, x) for b in (literal, ours)])
        memory = [
            float(subprocess.check_output([sys.executable, __file__, kind, ",".join(map(str, shape))], env=exact))
            for kind in ("literal", "ours")
        ]
        cells = [f"{1e3 * a:.0f} -> {1e3 * b:.0f} ms  {a / b:.1f}x" for a, b in (train, evaluate)]
        cells.append(f"{memory[0]:.0f} -> {memory[1]:.0f} MB  {100 * memory[1] / memory[0]:.0f}%")
        print(f"{shape!s:>18} {cells[0]:>26} {cells[1]:>26} {cells[2]:>28}")
    print_peers()


if __name__ == "__main__":
    main()
