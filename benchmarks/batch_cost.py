"""What a batch costs: gather, normalisation, mask and FFTs on the device, as a share of a U-Net training step.

    python benchmarks/batch_cost.py --out batch_cost.json

On CUDA: batch 8 of 256x256 slices that already lie on the GPU, against a step of the U-Net host (forward, L1 on
magnitudes, backward, AdamW) in single precision and under bfloat16 autocast. The aim is below 5 %. Both are
timed back to back without waiting for the device in between, so launch costs count in full. On the CPU it
runs at a small size and only shows that it works.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from chasm.backbones import create_backbone
from chasm.common.files import write_json
from chasm.common.provenance import provenance
from chasm.mri import Sampling
from chasm.tasks import Reconstruction
from chasm.train.step import add_gradients


def per_call(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Milliseconds of one call: the median of five runs of `calls` calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(max(2, calls // 4)):  # warm up: kernels chosen, FFT plans and memory made
        call()
    times = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return sorted(times)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    batch, size, width, calls = (8, 256, 32, 50) if gpu else (2, 64, 8, 4)

    torch.manual_seed(0)
    images = torch.rand(256 if gpu else 8, 1, size, size, device=device)
    task = Reconstruction(Sampling(acceleration=4))

    def make() -> object:
        rows = torch.randint(len(images), (batch,))
        return task.prepare(images.index_select(0, rows.to(device, non_blocking=True)))

    model = create_backbone("unet", size=(size, size), width=width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=gpu)
    fixed = task.prepare(images[:batch])

    def step(amp: bool) -> None:
        optimizer.zero_grad()
        add_gradients(model, task, [fixed], bf16=amp)
        optimizer.step()

    made = per_call(make, device, calls)
    result: dict[str, object] = {
        **provenance(device).lines(),
        "batch": batch,
        "size": size,
        "unet_width": width,
        "mask": str(task.sampling.mask(size)),
        "batch_ms": round(made, 4),
    }
    print(f"{result['device']}, torch {torch.__version__}: batch {batch} of {size}x{size}, U-Net width {width}")
    print(f"making a batch        {made:9.3f} ms")
    for name, amp in (("fp32", False), ("bf16", True)):
        took = per_call(lambda amp=amp: step(amp), device, calls)  # type: ignore[misc]
        result |= {f"step_{name}_ms": round(took, 4), f"share_{name}_percent": round(100 * made / took, 2)}
        print(f"training step, {name}   {took:9.3f} ms: a batch costs {100 * made / took:.2f} % of it (aim: < 5 %)")
    if not gpu:
        print("a small run on the CPU: the aim is about a GPU")
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
