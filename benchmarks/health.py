"""Does every mixer train in every host? Losses and gradient norms of the runs of the study `health`, as one table.

    chasm study run health --set train.log_every=1 --set train.precision=float32 --out runs/float32
    chasm study run health --set train.log_every=1 --set train.precision=bf16 --out runs/bf16
    python benchmarks/health.py runs/float32 runs/bf16 --out health

Writes a Markdown table, and a CSV file with the smoothed loss and the largest gradient norm of every 50 steps. Losses
are means over 25 steps: where one step stands alone, the slices of its batch decide more than the weights do.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chasm.common.files import write_text
from chasm.common.tables import csv_text, markdown_table
from chasm.studies import collect, load_plan

WINDOW, EVERY = 25, 50


class Curve(NamedTuple):
    """The steps of one run."""

    host: str
    mixer: str
    precision: str
    loss: np.ndarray  # of every step
    grad_norm: np.ndarray  # before clipping; not a number where it was not finite

    def loss_at(self, step: int) -> float:
        """Return the mean loss of the steps up to this one, 25 at most."""
        return float(self.loss[max(0, step - WINDOW) : step].mean())


def read_curves(root: Path, scale: str) -> list[Curve]:
    """Return the curves of the finished runs in a folder of runs."""
    results = collect(load_plan(root, "health", scale), root)
    curves = []
    for run in results.runs:
        if run.status != "done" or run.config is None:
            raise SystemExit(f"{root}: {run.key} is {run.status}: run the study to its end first")
        lines = (root / run.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
            raise SystemExit(f"{root / run.folder}: not every step was logged: run with --set train.log_every=1")
        loss, norm = (np.array([row[name] for row in rows], dtype=float) for name in ("loss", "grad_norm"))
        mixer = results.arms[run.arm].label
        curves.append(Curve(results.hosts[run.host], mixer, run.config.train.precision, loss, norm))
    return curves


def table(curves: list[Curve]) -> str:
    """Return one row for each mixer in each host, with the precisions beside one another."""
    precisions = list(dict.fromkeys(c.precision for c in curves))
    steps = len(curves[0].loss)
    at = [WINDOW, steps // 5, steps // 2, steps]
    columns = ["host", "in the slots", *(f"loss to {s}" for s in at), "median norm", "largest norm"]
    rows = []
    for host, mixer in dict.fromkeys((c.host, c.mixer) for c in curves):
        found = {c.precision: c for c in curves if (c.host, c.mixer) == (host, mixer)}
        both = [found[p] for p in precisions]
        losses = [" / ".join(f"{c.loss_at(s):.4f}" for c in both) for s in at]
        norms = [" / ".join(f"{of(c.grad_norm):.2f}" for c in both) for of in (np.median, np.max)]
        rows.append([host, mixer, *losses, *norms])
    return f"Each cell: {' / '.join(precisions)}.\n\n" + markdown_table(columns, rows, right=columns[2:])


def curve_rows(curves: list[Curve]) -> str:
    """Return the curves as CSV."""
    rows = []
    for c in curves:
        for step in range(EVERY, len(c.loss) + 1, EVERY):
            largest = c.grad_norm[step - EVERY : step].max()
            rows.append((c.host, c.mixer, c.precision, step, f"{c.loss_at(step):.6g}", f"{largest:.6g}"))
    return csv_text(["host", "in the slots", "precision", "step", "loss", "largest gradient norm"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("roots", nargs="+", type=Path, help="folders of runs of `chasm study run health --out FOLDER`")
    parser.add_argument("--scale", default="tiny", help="the scale the study ran at")
    parser.add_argument("--out", type=Path, default=Path("health"), help="writes NAME.md and NAME.csv")
    args = parser.parse_args()
    curves = [curve for root in args.roots for curve in read_curves(root, args.scale)]
    write_text(args.out.with_suffix(".md"), table(curves) + "\n")
    write_text(args.out.with_suffix(".csv"), curve_rows(curves))
    print(table(curves))


if __name__ == "__main__":
    main()
