"""CHASM on this CPU beside the paper-literal form and beside what people use instead: time ratios from one run.

    make bench                                              ratios
    python benchmarks/operator_cpu.py pieces 2,96,64,64     what each piece of the block takes, beside its roofline

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
from chasm.ops import basis
from chasm.ops.forms import fft

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


def fastest(calls: list[Callable[[], object]]) -> list[float]:
    # One thread has the time of its processor, which other programs on the machine hardly change.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(calls)
    for _ in range(REPETITIONS):
        for i, call in enumerate(calls):
            start = clock()
            call()
            best[i] = min(best[i], clock() - start)
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


def print_pieces(shape: tuple[int, int, int, int]) -> None:
    """Times of the pieces of a training step and of an eval forward, and the least they could take.

    The least is the arithmetic of a piece at the rate of a large product, or two maps at the rate of a copy. The sums
    leave out what is small (the wrapper's bias and residual, tables) and what a step costs besides: page faults of
    fresh memory, and Python.
    """
    _, C, H, W = shape
    x, A, dims = torch.randn(shape), torch.randn(C, C), (2, 3)
    X = fft._transform(x, dims)
    table, like = torch.rand(C, H, 1, 1), torch.rand(H // 2 + 1, C)
    last = x.contiguous(memory_format=torch.channels_last)
    weight, theta = torch.randn(C, 1, 3, 3), 0.3 * torch.randn(2, C * (C - 1) // 2)
    U, kept = basis.forward(theta)
    ones, square = [1, 1], torch.randn(1024, 1024)
    convolve = partial(nn.functional.conv2d, last, weight, padding=1, groups=C)
    back = partial(
        torch.ops.aten.convolution_backward,
        last, last, weight, [C], ones, ones, ones, False, [0, 0], C, [True, True, True],
    )  # fmt: skip
    product, exponential = 2 * C * C * x.numel() // C, 2 * 2 * C**3
    # Times it runs in a step and in an eval forward, multiply-adds times two (or 0: bound by memory), and the piece.
    pieces: dict[str, tuple[int, int, int, Callable[..., object]]] = {
        "channel product": (8, 4, product, partial(fft._product, A, X)),
        "sums for matrices": (4, 0, product, partial(fft._gram, X, X)),
        "FFT": (2, 1, 0, partial(fft._transform, x, dims)),
        "inverse FFT": (2, 1, 0, partial(fft._inverse, X, x.shape, dims)),
        "gains": (5, 2, 0, partial(fft._scaled, X, table)),
        "sums for gains": (2, 0, 0, partial(fft._gain_gradient, X, X, table, like)),
        "depthwise 3x3": (1, 1, 0, convolve),
        "its gradients": (1, 0, 0, back),
        "GELU": (1, 1, 0, partial(nn.functional.gelu, last)),
        "its gradient": (1, 0, 0, partial(torch.ops.aten.gelu_backward, last, last)),
        "bases": (1, 0, 10 * exponential, partial(basis.forward, theta)),
        "their gradients": (1, 0, 20 * exponential, partial(basis.backward, U.clone(), theta, kept)),
    }
    ours = trained(C, (H, W))
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        *times, peak, copied = fastest([*(p[-1] for p in pieces.values()), partial(torch.mm, square, square), x.clone])
    literal = LiteralBlock(copy.deepcopy(ours))
    train = fastest([partial(step, ours, leaf), partial(step, literal, leaf)])
    evaluate = fastest([partial(infer, ours.eval(), leaf), partial(infer, literal, leaf)])
    rate = 2 * 1024**3 / peak
    print(f"{shape}, {torch.get_num_threads()} threads, float32")
    print(f"a product of 1024: {rate / 1e9:.0f} GFLOP/s, a copy: {2 * x.numel() * 4 / copied / 1e9:.0f} GB/s\n")
    print(f"{'piece':>20} {'in a step':>10} {'in eval':>8} {'ms each':>8} {'at least':>9}")
    total, least = [0.0, 0.0], [0.0, 0.0]
    for (name, (in_step, in_eval, flops, _)), each in zip(pieces.items(), times, strict=True):
        bound = flops / rate if flops else copied
        print(f"{name:>20} {in_step:>10} {in_eval:>8} {1e3 * each:>8.2f} {1e3 * bound:>9.2f}")
        for i, count in enumerate((in_step, in_eval)):
            total[i] += count * each
            least[i] += count * bound
    for i, (name, took) in enumerate((("training step", train), ("eval forward", evaluate))):
        print(
            f"{name:>20}: pieces {1e3 * total[i]:.1f} ms, at least {1e3 * least[i]:.1f}; the block {1e3 * took[0]:.1f},"
            f" paper-literal {1e3 * took[1]:.1f}: {took[1] / took[0]:.2f} times"
        )


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
    if sys.argv[1:2] == ["pieces"]:
        B, C, H, W = map(int, sys.argv[2].split(","))
        return print_pieces((B, C, H, W))
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
