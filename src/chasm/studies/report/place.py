"""The section of a report about one setting in one host: scores, differences, cost, learning curves, images."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from chasm.studies.report import figures as figures
from chasm.studies.report import words as w
from chasm.studies.report.pareto import Point, pareto_figure
from chasm.studies.report.words import Cell, Picture, Results, Row, Section, Table


def place(results: Results, setting: str, host: str, root: Path | None) -> Section:
    rows = w.rows_of(results, setting, host)
    metrics = w.metrics_of(results, setting, rows)
    section = Section(w.place_name(results, setting, host))
    section.items.append(_scores(results, setting, host, rows, metrics))
    labels = {a: v["label"] for a, v in results["arms"].items()}
    if results["study"]["kind"] == "cost":
        return section
    first = metrics[0]
    name = f"{w.NAMES.get(first, first)}{', ' + w.UNITS[first] if first in w.UNITS else ''}"
    ours = [c for c in w.comparisons_of(results, setting, host, first) if c["arm"] == w.FOCUS]
    if ours:
        caption = (
            "Paired difference per test case, with its 95 % bootstrap interval (cases and seeds resampled). Filled: "
            "the interval excludes zero. Green: CHASM ahead; red: CHASM behind; open: level, or too few cases."
        )
        section.items.append(Picture(figures.forest(ours, labels, name), "CHASM against each other mixer", caption))
    differences = [_differences(results, setting, host, m) for m in metrics]
    section.items += [table for table in differences if table.rows]
    points = [_point(results, row, first) for row in rows]
    if any(p.slot_numbers is not None or p.step_seconds is not None for p in points):
        section.items.append(_pareto(points, labels, name, f"{setting}-{host}"))
    if root is not None:
        curves = [c for c in (_curve(root, cell, first) for cell in w.cells_of(results, rows)) if c is not None]
        if any(c.val for c in curves):
            caption = "Learning curves: validation score (it selects the weights that are tested) and training loss."
            section.items.append(Picture(figures.learning(curves, labels, name), "learning curves", caption))
        picture = _panel(results, setting, rows, root)
        if picture is not None:
            section.items.append(picture)
    return section


def _scores(results: Results, setting: str, host: str, rows: list[dict[str, Any]], metrics: list[str]) -> Table:
    paper = {m: any(m in r["paper"] for r in rows) for m in metrics}
    columns, training = ["Mixer"], results["study"]["kind"] == "train"
    for m in metrics:
        columns += [w.NAMES.get(m, m), *(["paper"] if paper[m] else [])]
    columns += ["slot numbers", "GMACs", "train time"] if training else []
    tuned = any(r["chosen_from"] for r in rows)
    columns += ["step size ×"] if tuned else []
    found = []
    for reference in (r for r in results["references"] if r["setting"] == setting):
        cells = [Cell(str(reference["name"]))]
        for m in metrics:
            own = {
                "mean": reference["mean"][m],
                "std_cases": reference["std"][m],
                "cases": rows[0]["scores"][m]["cases"],
            }
            cells.append(Cell(w.score_text(own, m)))
            cells += [Cell("")] if paper[m] else []
        found.append(Row(cells + [Cell("")] * (len(columns) - len(cells)), "reference"))
    best = {m: max(r["scores"][m]["mean"] for r in rows) for m in metrics}
    for r in rows:
        cells = [Cell(w.label(results, r))]
        for m in metrics:
            top = training and r["scores"][m]["mean"] == best[m] and len(rows) > 1
            cells.append(Cell(w.score_text(r["scores"][m], m), "best" if top else ""))
            cells += [Cell(w.quote(r["paper"].get(m), m), "paper")] if paper[m] else []
        if training:
            cells += [Cell(w.thousands((r["parameters"] or {}).get("slots_real"))), Cell(w.giga(r["macs"]))]
            cells.append(Cell(w.duration(r["seconds"])))
        cells += [Cell(f"{r['multiplier']}" if r["chosen_from"] else "–")] if tuned else []
        found.append(Row(cells, "focus" if r["arm"] == w.FOCUS else ""))
    return Table("", columns, found, _scores_note(results, setting, rows, any(paper.values())))


def _scores_note(results: Results, setting: str, rows: list[dict[str, Any]], paper: bool) -> str:
    if results["study"]["kind"] == "cost":
        return "One mixer at 96 channels for parameters; the whole model for multiply-adds (the paper says FLOPs)."
    cells = w.cells_of(results, rows)
    cases = len(next(iter(rows[0]["scores"].values()))["cases"])
    m = cells[0]["metrics"]
    word = w.data_word(results, setting)
    seeds = max(len(r["seeds"]) for r in rows)
    text = f"Mean ± standard deviation over {cases} test cases" if cases > 1 else "One test case"
    text += f" (second ±: over {seeds} seeds)" if seeds > 1 else ""
    text += f". Metric protocol “{m['protocol']}”: {m['meaning']}. Bold: highest mean, not a verdict."
    text += " Slot numbers: real numbers stored in the slots."
    if paper:
        text += " Paper: as printed there"
        text += f", on {results['settings'][setting]['title']}; ours: {word}." if word else "."
    return text


def _differences(results: Results, setting: str, host: str, metric: str) -> Table:
    """One line per mixer: it against the Baseline, and CHASM against it."""
    found = {(c["arm"], c["against"]): c for c in w.comparisons_of(results, setting, host, metric)}
    printed = any(c["paper"] is not None for c in found.values())
    columns, rows = ["Mixer"], []
    for side in ("it − Baseline", "CHASM − it"):
        columns += [side, *(["paper"] if printed else [])]
    for r in w.rows_of(results, setting, host):
        cells = [Cell(w.label(results, r))]
        for pair in ((r["arm"], w.BASE), (w.FOCUS, r["arm"])):
            c = found.get(pair)
            kind = c["verdict"] if c and c["verdict"] in ("win", "loss") else ""
            cells.append(Cell("" if c is None else f"{w.interval(c, metric)} {c['verdict']}", kind))
            if printed:
                cells.append(Cell("" if c is None or c["paper"] is None else w.signed(c["paper"], metric, 0), "paper"))
        if any(c.text for c in cells[1:]):
            rows.append(Row(cells, "focus" if r["arm"] == w.FOCUS else ""))
    kept = [i for i in range(len(columns)) if i == 0 or any(row.cells[i].text for row in rows)]
    rows = [Row([row.cells[i] for i in kept], row.kind) for row in rows]
    note = (
        "Mean paired difference [95 % interval] and verdict: a win or a loss of the first named only where the "
        "interval excludes zero and the mean is not zero in the digits printed here; everything else is level, or has "
        "too few cases to say."
    )
    return Table(f"Paired differences, {w.NAMES.get(metric, metric)}", [columns[i] for i in kept], rows, note)


def _point(results: Results, row: dict[str, Any], metric: str) -> Point:
    numbers = (row["parameters"] or {}).get("slots_real")
    metrics = [c["metrics"] for c in w.cells_of(results, [row])]
    times = [m["seconds"] / m["steps"] for m in metrics if m.get("seconds") and m.get("steps")]
    score = row["scores"][metric]["mean"]
    return Point(row["arm"], math.nan if score is None else score, numbers, float(np.mean(times)) if times else None)


def _pareto(points: list[Point], labels: dict[str, str], metric: str, place: str) -> Picture:
    figure = pareto_figure(points, labels, metric)
    caption = (
        "Mean test score against cost. The line is the Pareto front: no other method has a higher mean for less. "
        "Whether a difference holds is said above, not here. Time is that of the whole training divided by its steps: "
        "it includes validation, and runs that shared a device took longer. A triangle at the lower edge is a method "
        "that scored less than is shown; its score stands beside it."
    )
    stem = "pareto-" + re.sub(r"[^\w.]+", "-", place).strip("-").lower()
    files = {f"{stem}.{kind}": figures.encoded(figure, kind) for kind in ("svg", "png")}
    return Picture(figures.source(figure), "score against cost", caption, files)


def _curve(root: Path, cell: dict[str, Any], metric: str) -> figures.Curve | None:
    path = root / cell["folder"] / "log.jsonl"
    if not path.is_file():
        return None
    curve = figures.Curve(cell["arm"], cell["seed"])
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("loss") is not None:  # null: not finite
            curve.steps.append(row["step"])
            curve.loss.append(row["loss"])
        if row.get(f"val_{metric}") is not None:
            curve.val_steps.append(row["step"])
            curve.val.append(row[f"val_{metric}"])
    return curve


def _panel(results: Results, setting: str, rows: list[dict[str, Any]], root: Path) -> Picture | None:
    """The middle one of the slices every run kept."""
    outputs, notes, first, name = {}, {}, None, ""
    for row, cell in zip(rows, w.cells_of(results, rows, first_seed=True), strict=True):
        path = root / cell["folder"] / "examples.npz"
        if not path.is_file():
            continue
        with np.load(path, allow_pickle=False) as kept:
            i = len(kept["slices"]) // 2
            here = {k: kept[k][i] for k in ("target", "reference", "output")}
            slice_ = str(kept["slices"][i])
        if first is None:
            first, name = here, slice_
        if slice_ == name:
            label = w.label(results, row)
            outputs[label] = here["output"]
            notes[label] = _slice_score(here["output"], here["target"])
    if first is None:
        return None
    plain = next((str(r["name"]) for r in results["references"] if r["setting"] == setting), "input")
    if plain != "input":
        notes[plain] = _slice_score(first["reference"], first["target"])
    source, said = figures.panel(first["target"], (plain, first["reference"]), outputs, notes)
    rule = "where the target has labels" if said["labelled"] else f"where the {plain} image errs most"
    scale = "wrong pixels" if said["labelled"] else "absolute, one scale"
    word = w.data_word(results, setting)
    caption = (
        f"Test slice {name}{f' ({word})' if word else ''}, first seed. Below each image: the box {rule}, and the error "
        f"({scale}). Numbers: of this slice alone{', all classes as one' if said['labelled'] else ''}."
    )
    return Picture(source, "target, reference and each method with zoomed boxes and errors", caption)


def _slice_score(output: np.ndarray, target: np.ndarray) -> str:
    if target.dtype.kind in "ui":
        a, b = output > 0, target > 0
        total = int(a.sum() + b.sum())
        return f"Dice {2 * int((a & b).sum()) / total if total else 1:.3f}"
    error = float(np.square(output.astype(np.float64) - target).mean())
    peak = float(target.max()) or 1.0
    return f"{10 * np.log10(peak**2 / error):.2f} dB" if error > 0 else "equal"
