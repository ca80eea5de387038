"""Finished runs without the training: scores, logs, pictures and weights that are made up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from chasm.studies.plan import Plan, make_plan, part_of, save_plan

# How far each arm is above the Baseline in the made-up runs, in dB: CHASM loses to one rival, and ties with another.
GAINS = {"baseline": 0.0, "wrapper": 0.4, "chasm": 0.8, "chasm-signed": 1.2, "chasm-untied": 0.8, "chasm-identity": 0.5}


def fill(folder: Path, config: dict[str, Any], gain: float, source: str, size: int = 40, cases: int = 8) -> None:
    """A finished run, without the training."""
    rng = np.random.default_rng(config["seed"])
    folder.mkdir(parents=True)
    hard = rng.normal(0, 1, cases)
    noise = 0.1 * np.random.default_rng([int(10 * gain), config["seed"]]).normal(size=cases)
    noise -= noise.mean()
    scores = {
        f"case{i}": {"psnr": 25 + hard[i] + gain + noise[i], "ssim": 0.7 + 0.02 * gain + 0.01 * noise[i]}
        for i in range(cases)
    }
    stats = {
        "mean": {m: float(np.mean([s[m] for s in scores.values()])) for m in ("psnr", "ssim")},
        "std": {m: float(np.std([s[m] for s in scores.values()])) for m in ("psnr", "ssim")},
    }
    zero = {"protocol": "hifi", "meaning": "per slice", "cases": scores, "mean": {"psnr": 21.0, "ssim": 0.5}}
    metrics = {
        "status": "done",
        "split": "test",
        "protocol": "hifi",
        "meaning": "per slice scaled to [0, 1]",
        "source": source,
        "proxy": "proxy" in source,
        "task": {"mask": {"kind": "equispaced", "nominal": 8, "lines": 5}},
        "cases": scores,
        **stats,
        "reference": {"name": "zero-filled", **zero, "std": {"psnr": 0.5, "ssim": 0.01}},
        "best_step": 1400,
        "best_val": stats["mean"],
        "steps": 1500,
        "seconds": 321.0,
        "seed": config["seed"],
        "parameters": {"model": 10**6, "slots_complex_once": 900, "slots_real": int(1000 * (1 + gain) ** 6)},
        "macs": int(12e9 + 1e9 * gain),
        "device": "CPU",
        "peak_memory": None,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    environment = {"python": "3.11", "versions": {"torch": "2.9"}, "device": "CPU, 2 threads", "commit": "a" * 40}
    (folder / "environment.json").write_text(json.dumps({**environment, "modified": True, "command": "chasm"}))
    steps = range(20, 1501, 20)
    lines = [{"step": s, "loss": 0.1 / np.sqrt(s)} for s in steps]
    lines += [{"step": s, "val_psnr": 25 + gain - 30 / s**0.6} for s in steps[::4]]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))

    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    target = ((x**2 + y**2 < 0.7) * (0.5 + 0.4 * np.sin(9 * x) * np.cos(7 * y))).astype(np.float16)
    blurred = (target + np.roll(target, size // 8, 1) + np.roll(target, -size // 8, 1)) / 3
    output = target + (blurred - target) * (0.6 - 0.25 * gain)
    pictures = {"target": target, "reference": blurred, "output": output}
    three = {k: np.stack([v] * 3).astype(np.float16) for k, v in pictures.items()}
    np.savez(folder / "examples.npz", slices=np.array(["case0:0", "case3:1", "case7:2"]), **three)
    if config["mixer"]["name"] == "chasm" and config["mixer"]["options"].get("basis", "shared") == "shared":
        torch.manual_seed(0)
        C, B = 8, 17
        tensors = {}
        for slot in (0, 1):
            for axis in ("ch", "cw"):
                tensors[f"slots.{slot}.theta.{axis}"] = 0.15 * torch.randn(C * (C - 1) // 2)
                lean = torch.linspace(-0.5, 0.5, B)[:, None] * torch.randn(C)
                tensors[f"slots.{slot}.gain_table.{axis}"] = lean
            tensors[f"slots.{slot}.stored_step_scale"] = torch.tensor(1.0)
        save_file({**tensors, "head.weight": torch.zeros(2)}, folder / "weights.safetensors")


def fill_plan(plan: Plan, root: Path, source: str, size: int = 40, leave: int = 0) -> None:
    for cell in plan.runs[: len(plan.runs) - leave]:
        config = cell.config.model_dump(mode="json")
        fill(plan.folder(root, cell), config, GAINS.get(cell.arm, 0.3), source, size)


def finish(root: Path, study: str, *only: str) -> None:
    """Made-up finished runs of a part of a study. CHASM's gain shrinks to a fifth under a random mask."""
    plan = part_of(make_plan(study, "tiny"), only)
    save_plan(plan, root)
    for cell in plan.runs:
        folder, share = plan.folder(root, cell), 0.2 if "random" in cell.setting else 1.0
        if not folder.exists():
            fill(folder, cell.config.model_dump(mode="json"), share * GAINS.get(cell.arm, 0.3), "embedded brain", 24)
