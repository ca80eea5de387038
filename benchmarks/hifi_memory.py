"""Peak memory and time of one HiFi-Mamba training step with CHASM in every slot.

    python benchmarks/hifi_memory.py --out hifi_memory.json

On CUDA: batch 8, 256 x 256, width 96, in float32 and under bfloat16 autocast, with and without recomputing
each group in the backward pass. On a CPU the same code runs a tiny configuration, without a peak.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from chasm.backbones import create_backbone
from chasm.bench.hosts import make_batch
from chasm.common.files import write_json
from chasm.common.provenance import provenance
from chasm.tasks import Reconstruction
from chasm.train.step import add_gradients

TARGET_GB = 24  # float32 with checkpointing


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    device: torch.device, *, mixer: str, batch: int, size: int, steps: int, bf16: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Median time of a whole step after two warm-up steps, and the peak over all of them."""
    torch.manual_seed(0)
    with device:
        model = create_backbone("hifi-mamba", mixer=mixer, size=(size, size), **options)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    prepared = make_batch(batch, size, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(2 + steps):
        synchronize(device)
        start = time.perf_counter()
        optimiser.zero_grad()
        loss = add_gradients(model, Reconstruction(), [prepared], bf16=bf16)
        optimiser.step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    return {"step_ms": 1e3 * statistics.median(times[2:]), "peak_gb": peak, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--mixer", default="chasm")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two others")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        setting: dict[str, Any] = {"batch": 8, "size": 256, "options": {"width": 96}}
    else:
        setting = {"batch": 1, "size": 32, "options": {"width": 16, "groups": 2}}
    rows = []
    print(f"{'precision':<10} {'checkpoint':<10} {'peak GB':>8} {'step ms':>9}")
    for bf16 in (False, True):
        for checkpoint in (False, True):
            own = setting | {"options": setting["options"] | {"checkpoint": checkpoint}}
            result = measure(device, mixer=args.mixer, steps=args.steps, bf16=bf16, **own)
            row = {"precision": "bf16" if bf16 else "float32", "checkpoint": checkpoint, **result}
            rows.append(row)
            peak = "-" if result["peak_gb"] is None else f"{result['peak_gb']:.2f}"
            print(f"{row['precision']:<10} {checkpoint!s:<10} {peak:>8} {result['step_ms']:>9.1f}", flush=True)
    report = {
        **provenance(device).lines(),
        "seed": 0,
        "mixer": args.mixer,
        **setting,
        "target_gb": TARGET_GB,
        "rows": rows,
    }
    if device.type == "cuda":
        report["under_target"] = rows[1]["peak_gb"] < TARGET_GB
        print(f"float32 with checkpointing under {TARGET_GB} GB: {report['under_target']}")
    if args.out:
        write_json(args.out, report)


if __name__ == "__main__":
    main()
