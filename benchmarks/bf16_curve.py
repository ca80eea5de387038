"""Does training in bfloat16 follow float32? The loss curves of one small run in both, same seed and order of slices.

    python benchmarks/bf16_curve.py --out bf16_curve.json

A U-Net with CHASM at three levels learns x4 reconstruction on drawn brains for 500 steps, under float32 (no TF32) and
under bfloat16 autocast. Deviations are those of the losses averaged over 25 steps, relative to float32; beside
them stands how far a second float32 run goes astray whose weights start off by rounding errors of bfloat16: a run
is no better defined than that. On a CPU use --tiny.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from chasm.common.files import write_json
from chasm.common.precision import tf32
from chasm.common.provenance import provenance
from chasm.train.config import RunConfig, load_recipe
from chasm.train.loop import Trainer

WINDOW = 25
ALLOWED_MEAN = 0.05  # of the relative deviation of the smoothed loss


def recipe(precision: str, steps: int, tiny: bool, cuda_graph: bool) -> RunConfig:
    size, width, cases = (32, 4, 6) if tiny else (96, 16, 24)
    return load_recipe(
        {
            "data": {"name": "embedded", "options": {"content": "brain", "size": size, "cases": cases, "slices": 4}},
            "task": {"options": {"sampling": {"kind": "equispaced", "acceleration": 4}}},
            "backbone": {"name": "unet", "options": {"width": width, "depth": 2, "levels": [0, 1, 2]}},
            "mixer": {"name": "chasm"},
            "train": {
                "steps": steps,
                "batch": 4 if tiny else 8,
                "lr": 1e-3,
                "spectral_multiplier": 10,
                "precision": precision,
                "cuda_graph": cuda_graph,
            },
        }
    )


def losses(config: RunConfig, *, rounded_start: bool = False) -> list[float]:
    """Of every step; no validation. `rounded_start`: initial weights rounded to bfloat16."""
    with tempfile.TemporaryDirectory() as folder, tf32(config.train.tf32):
        trainer = Trainer(config, Path(folder), quiet=True)
        if rounded_start:
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.copy_(p.to(torch.bfloat16))
        trainer.model.train()
        trainer.wrapped = trainer.model
        found = []
        for micro, step in trainer._stream():
            found.append(trainer._update(micro, step)[0])
            trainer.step = step + 1
    return found


def smoothed(values: list[float], window: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unfold(0, window, 1).mean(-1)


def deviation(values: list[float], base: list[float], window: int) -> dict[str, float]:
    a, b = smoothed(values, window), smoothed(base, window)
    relative = ((a - b) / b).abs()
    return {"mean": float(relative.mean()), "max": float(relative.max()), "end": float(relative[-1])}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tiny", action="store_true", help="32 px and width 4, for a CPU")
    parser.add_argument("--cuda-graph", action="store_true", help="the bfloat16 run as CUDA graphs")
    parser.add_argument("--out", type=Path, help="write curves and numbers here as JSON")
    args = parser.parse_args(argv)
    window = min(WINDOW, max(args.steps // 4, 1))
    result: dict[str, Any] = dict(provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")).lines())
    curves: dict[str, list[float]] = {}
    for name, precision, rounded in (
        ("float32", "float32", False),
        ("bf16", "bf16", False),
        ("float32, rounded start", "float32", True),
    ):
        start = time.perf_counter()
        config = recipe(precision, args.steps, args.tiny, args.cuda_graph and precision == "bf16")
        curves[name] = losses(config, rounded_start=rounded)
        ends = f"loss {curves[name][0]:.4f} -> {smoothed(curves[name], window)[-1]:.4f}"
        print(f"{name:<24} {ends}, {time.perf_counter() - start:.0f} s", flush=True)
    result |= {"steps": args.steps, "window": window, "allowed_mean": ALLOWED_MEAN}
    for name in ("bf16", "float32, rounded start"):
        found = deviation(curves[name], curves["float32"], window)
        result[name] = found
        words = ", ".join(f"{key} {100 * value:.2f} %" for key, value in found.items())
        print(f"{name} against float32, smoothed over {window} steps: {words}")
    result["follows"] = result["bf16"]["mean"] <= ALLOWED_MEAN
    print(f"bfloat16 follows float32: {result['follows']} (mean deviation, allowed {100 * ALLOWED_MEAN:.0f} %)")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, {**result, "curves": curves})
    return 0 if result["follows"] else 1


if __name__ == "__main__":
    sys.exit(main())
