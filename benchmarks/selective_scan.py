"""Time and memory of the forms of the selective scan, as ratios within one run.

    python benchmarks/selective_scan.py                     # CPU: chunked against the sequential oracle
    python benchmarks/selective_scan.py --sweep --out scan  # GPU: parity, then chunked against Triton -> scan.json, .md

On a GPU nothing is timed before outputs and all gradients of each form match the float64 oracle on fresh inputs.
The memory floor counts every input read once and every output written once, at the speed of a large copy.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chasm.common.files import write_json, write_text
from chasm.common.provenance import provenance
from chasm.common.tables import markdown_table
from chasm.ops.selective_scan import choose_form, chunked, selective_scan

Shape = tuple[int, int, int, int]  # B, D, L, N
PARITY: list[Shape] = [(2, 96, 1000, 16), (1, 33, 129, 5), (3, 17, 1, 16), (2, 96, 4096, 16)]


def make(shape: Shape, device: str, seed: int) -> list[Tensor]:
    """Inputs with the statistics of a fresh Mamba block: A = -1..-N, delta about 0.1."""
    batch, channels, length, states = shape
    generator = torch.Generator().manual_seed(seed)
    u, delta = torch.randn(2, batch, channels, length, generator=generator)
    B, C = torch.randn(2, batch, states, length, generator=generator)
    A = -torch.arange(1.0, states + 1).expand(channels, states) * (
        1 + 0.1 * torch.rand(channels, 1, generator=generator)
    )
    D, bias = torch.randn(2, channels, generator=generator)
    return [x.to(device).contiguous().requires_grad_() for x in (u, delta - 2.5, A, B, C, D, 0.1 * bias)]


def forward(inputs: list[Tensor], form: str) -> Tensor:
    u, delta, A, B, C, D, bias = inputs
    return selective_scan(u, delta, A, B, C, D, bias, True, form=form)


def forward_backward(inputs: list[Tensor], form: str) -> tuple[Tensor, ...]:
    y = forward(inputs, form)
    return y, *torch.autograd.grad(y, inputs, torch.ones_like(y))


def check(form: str, device: str, seed: int) -> float:
    """Largest relative error of y and of the seven gradients against the float64 oracle, over all shapes."""
    worst = 0.0
    for shape in PARITY:
        inputs = make(shape, device, seed)
        exact = forward_backward([x.detach().double().requires_grad_() for x in inputs], "sequential")
        found = forward_backward(inputs, form)
        for name, a, b in zip(("y", "du", "ddelta", "dA", "dB", "dC", "dD", "dbias"), found, exact, strict=True):
            error = ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
            if not error < 1e-4:
                raise SystemExit(f"{form} differs from the oracle at {shape}, seed {seed}: {name} by {error:.1e}")
            worst = max(worst, error)
    return worst


def times(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Milliseconds. With --threads 1 it is CPU time, so that other processes do not count."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end))
        else:
            begin = clock()
            run()
            found.append(1e3 * (clock() - begin))
    return found


def measure(shape: Shape, form: str, seed: int, repeats: int) -> dict[str, Any]:
    """Forward without a graph, forward + backward, and the peak of the latter above its inputs. CUDA only."""
    inputs = make(shape, "cuda", seed)

    def infer() -> None:
        with torch.no_grad():
            forward(inputs, form)

    def train() -> None:
        forward_backward(inputs, form)

    result: dict[str, Any] = {"form": form}
    for name, run in (("forward_ms", infer), ("forward_backward_ms", train)):
        times(run, "cuda", 3)
        result[name] = statistics.median(times(run, "cuda", repeats))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train()
    result["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return result


def floors(shape: Shape) -> dict[str, float]:
    """Milliseconds to move the bytes that have to be moved, at the measured speed of a copy."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    times(lambda: target.copy_(source), "cuda", 3)
    speed = 2 * 4 * 2**28 / statistics.median(times(lambda: target.copy_(source), "cuda", 10))  # bytes per ms
    batch, channels, length, states = shape
    rows, columns, rest = batch * channels * length, batch * states * length, channels * (states + 2)
    ahead = 4 * (3 * rows + 2 * columns + rest)  # u, delta, B, C, parameters in; y out
    back = 4 * (5 * rows + 4 * columns + 2 * rest)  # the same and dy in; du, ddelta, dB, dC, parameters out
    return {
        "copy_gb_per_s": speed / 1e6,
        "forward_floor_ms": ahead / speed,
        "forward_backward_floor_ms": (ahead + back) / speed,
    }


def sweep(shape: Shape, seed: int) -> list[str]:
    """Try block sizes; leaves the best ones set in the modules. Triton's forward is settled before its backward."""
    from chasm.ops.selective_scan import kernels

    inputs, lines = make(shape, "cuda", seed), []

    def clock(form: str, backward: bool) -> float:
        def run() -> None:
            with torch.set_grad_enabled(backward):
                (forward_backward if backward else forward)(inputs, form)

        times(run, "cuda", 2)
        return statistics.median(times(run, "cuda", 5))

    def best_of(what: str, options: list[Any], use: Callable[[Any], None], form: str, backward: bool) -> float:
        found = []
        for option in options:
            use(option)
            found.append(clock(form, backward))
            lines.append(f"{what} {option}: {found[-1]:.3f} ms")
            print(lines[-1], flush=True)
        best = min(range(len(found)), key=found.__getitem__)
        use(options[best])
        return found[best]

    def set_chunked(option: tuple[int, int]) -> None:
        chunked.CHUNK, chunked.STEP_ELEMENTS = option

    best_of(
        "chunked (CHUNK, STEP_ELEMENTS), forward + backward",
        list(itertools.product((32, 64, 128), (2**18, 2**19, 2**20))),
        set_chunked, "chunked", True,
    )  # fmt: skip
    blocks = [{"BLOCK_D": d, "num_warps": w} for d, w in ((16, 1), (32, 1), (64, 2))]
    walks = [(note, block) for block in ((16, 1), (32, 1), (32, 2), (64, 4)) for note in (4, 8, 16)]

    def set_walk(option: tuple[int, tuple[int, int]]) -> None:
        kernels.NOTE, (block, warps) = option
        kernels.BACKWARD.update(BLOCK_D=block, num_warps=warps)

    results = []
    for kernels.CHUNK in (32, 64, 128):
        best_of(f"triton CHUNK {kernels.CHUNK}, forward", blocks, kernels.FORWARD.update, "triton", False)
        name = f"triton CHUNK {kernels.CHUNK}, (NOTE, (BLOCK_D, num_warps)) of the backward, forward + backward"
        best = best_of(name, walks, set_walk, "triton", True)
        results.append((best, kernels.CHUNK, kernels.NOTE, dict(kernels.FORWARD), dict(kernels.BACKWARD)))
    _, kernels.CHUNK, kernels.NOTE, ahead, back = min(results, key=lambda r: r[0])
    kernels.FORWARD.update(ahead)
    kernels.BACKWARD.update(back)
    lines.append(
        f"best: triton CHUNK {kernels.CHUNK}, NOTE {kernels.NOTE}, FORWARD {ahead}, BACKWARD {back}; "
        f"chunked CHUNK {chunked.CHUNK}, STEP_ELEMENTS {chunked.STEP_ELEMENTS}"
    )
    print(lines[-1])
    return lines


def on_gpu(shape: Shape, seed: int, repeats: int, with_sweep: bool) -> tuple[dict[str, Any], str]:
    forms = ["chunked", "triton"]
    fastest, reason = choose_form(torch.empty(1, 1, 1, device="cuda"))
    print(f"auto: {fastest} ({reason})")
    if fastest == "mamba_ssm":
        forms.append(fastest)
    parity = {form: check(form, "cuda", seed) for form in forms}
    print("parity with the float64 oracle:", {form: f"{error:.1e}" for form, error in parity.items()})
    tried = sweep(shape, seed) if with_sweep else []
    if with_sweep:
        check("triton", "cuda", seed + 1)  # what is timed below is what was checked
        check("chunked", "cuda", seed + 1)
    floor = floors(shape)
    rows = [measure(shape, form, seed, repeats) for form in forms]
    base = rows[0]
    columns = ["form"]
    for key in ("forward", "forward + backward"):
        columns += [f"{key} ms", "x chunked", "x floor"]
    lines = []
    for row in rows:
        cells = [row["form"]]
        for key in ("forward", "forward_backward"):
            t = row[f"{key}_ms"]
            cells += [f"{t:.3f}", f"{base[f'{key}_ms'] / t:.1f}", f"{t / floor[f'{key}_floor_ms']:.1f}"]
        lines.append([*cells, f"{row['peak_mib']:.0f}"])
    table = markdown_table([*columns, "peak MiB"], lines) + "\n\n"
    table += (
        f"Memory floor: {floor['forward_floor_ms']:.3f} ms forward, {floor['forward_backward_floor_ms']:.3f} ms with "
        f"backward, at {floor['copy_gb_per_s']:.0f} GB/s (a copy, read + write). "
        f"Parity with the float64 oracle: {', '.join(f'{form} {error:.1e}' for form, error in parity.items())}.\n"
    )
    return {"parity": parity, "sweep": tried, "rows": rows, **floor}, table


def on_cpu(shape: Shape, seed: int, repeats: int) -> tuple[dict[str, Any], str]:
    """The forms take turns, so that a busy machine slows both; minima and medians are printed."""
    inputs = make(shape, "cpu", seed)
    found: dict[str, list[float]] = {"sequential": [], "chunked": []}
    for form in found:
        forward_backward([x[..., :64].detach().requires_grad_() if x.dim() == 3 else x for x in inputs], form)
    for _ in range(repeats):
        found["sequential"] += times(lambda: forward_backward(inputs, "sequential"), "cpu", 1)
        found["chunked"] += times(lambda: forward_backward(inputs, "chunked"), "cpu", 5)
    slow, fast = found["sequential"], found["chunked"]
    ratios = {f.__name__: f(slow) / f(fast) for f in (min, statistics.median)}
    lines = [[form, f"{min(values):.1f}", f"{statistics.median(values):.1f}"] for form, values in found.items()]
    table = markdown_table(["form", "forward + backward, best ms", "median ms"], lines)
    table += f"\n\nsequential / chunked: {ratios['min']:.1f} (best), {ratios['median']:.1f} (median)\n"
    return {"times_ms": found, "ratios": ratios}, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", type=int, nargs=4, metavar=("B", "D", "L", "N"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, help="timed runs (GPU 20; CPU 3 rounds)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="default: a fresh one")
    parser.add_argument("--sweep", action="store_true", help="GPU: try block sizes first and use the best")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    torch.set_num_threads(args.threads)
    shape: Shape = tuple(args.shape) if args.shape else (8, 96, 16384, 16) if gpu else (2, 96, 4096, 16)
    if gpu:
        result, table = on_gpu(shape, args.seed, args.repeats or 20, args.sweep)
    else:
        result, table = on_cpu(shape, args.seed, args.repeats or 3)
    header = {
        "shape": dict(zip("BDLN", shape, strict=True)),
        "seed": args.seed,
        **provenance(torch.device(args.device)).lines(),
    }
    text = "# Selective scan\n\n" + "\n".join(f"- {key}: {value}" for key, value in header.items()) + f"\n\n{table}"
    print(text)
    if args.out:
        write_json(args.out.with_suffix(".json"), {**header, **result})
        write_text(args.out.with_suffix(".md"), text)


if __name__ == "__main__":
    main()
