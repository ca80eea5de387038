"""The results of a study in one structure that JSON can hold: what `collect` returns is what a report is made from.

{"format": 1,
 "study": {"name", "title", "source", "question", "kind": "train" | "cost"},
 "scale", "protocol", "seeds": [..] | null, "overrides": [..],
 "settings": {setting: {"title", "dataset", "task", "acceleration", "mask", "metrics": [main one first]}},
 "hosts": {host: label},  "arms": {arm: {"label", "mixer", "options"}},
 "counts": {"done": 3, "missing": 1, ..},
 "cells": [{"key", "setting", "host", "arm", "multiplier", "seed", "folder": relative to the root of the runs,
            "status": "done" | "running" | "failed" | "interrupted" | "missing" |
            "other config", "error": one line | null,
            "config": RunConfig, "environment": {..} | null, "metrics": metrics.json | null}],
 "rows": [{"setting", "host", "arm", "multiplier": the one in use, "chosen_from": {multiplier: validation score} | null,
           "seeds": [finished ones], "cells": [their keys],
           "scores": {metric: {"mean", "std_cases", "std_seeds" | null, "cases": {case: mean over seeds}}},
           "paper": {metric: {"mean", "spread" | null, "over": "cases" | "seeds"}},
           "parameters": {..} | null, "macs": int | null, "seconds": float | null}],
 "selections": [{"setting", "host", "arm", "multiplier": chosen | null, "scores": {multiplier: validation | null}}],
 "references": [{"setting", "name": "zero-filled" | "bicubic", "mean": {..}, "std": {..}, "cases": {..}}],
 "comparisons": [{"setting", "host", "metric", "arm", "against", "mean", "low", "high", "cases", "seeds",
                  "verdict": "win" | "loss" | "level" | "too few cases",
                  "paper": difference of the printed means | null}],
 "falsification": [{"setting", "host", "metric", "rival", "rival_random", "structured": {mean, low, high, verdict},
                    "random": {same}, "drop": {"mean", "low", "high"} in per cent, "paper": {..} | null}],
 "paper": what it prints beside the cells: {"falsification", "gain", "largest_spread"}}

Comparisons are every arm against "baseline", and "chasm" against every other arm, on the cases and seeds both have.
Rows of a cost study hold single numbers: {"gmacs_paper": {"mean": 24.8}, ..}. Values that are not finite are null.
"""

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from chasm.common.files import json_safe, read_json
from chasm.studies.catalogue import paper_extras
from chasm.studies.comparisons import comparisons, falsification, per_seed
from chasm.studies.plan import POINT, Plan, PlannedRun, Selection
from chasm.studies.state import state
from chasm.studies.statistics import spread
from chasm.studies.tuning import with_selections
from chasm.studies.vocabulary import HOSTS, SETTINGS, get_arm
from chasm.studies.worker import COSTS


def collect(plan: Plan, root: str | Path) -> dict[str, Any]:
    """Everything known about the study's runs under `root`, finished or not; see the module's docstring."""
    plan = with_selections(plan, root)
    cells = [_cell(plan, root, run) for run in plan.runs]
    rows = _rows(plan, cells)
    study = plan.study
    found = {
        "format": 1,
        "study": {k: getattr(study, k) for k in ("name", "title", "source", "question", "kind")},
        "scale": plan.scale,
        "protocol": plan.protocol,
        "seeds": None if plan.seeds is None else list(plan.seeds),
        "overrides": list(plan.overrides),
        "settings": {s: _setting(s, study.kind) for s in dict.fromkeys(point[0] for point in plan.points)},
        "hosts": {h: HOSTS[h].label for h in dict.fromkeys(point[1] for point in plan.points)},
        "arms": {a: _arm(a) for a in dict.fromkeys(point[2] for point in plan.points)},
        "counts": _counts(plan, cells),
        "cells": cells,
        "rows": rows,
        "selections": [_selection(s) for s in plan.open_selections],
        "references": _references(cells),
        "comparisons": comparisons(plan, rows, cells),
        "falsification": falsification(plan, rows, cells),
        "paper": paper_extras(study),
    }
    plain: dict[str, Any] = json_safe(found)
    return plain


def _counts(plan: Plan, cells: list[dict[str, Any]]) -> dict[str, int]:
    undecided = len(plan.points) - len(plan.runs)
    return dict(Counter(c["status"] for c in cells)) | ({"waiting for a step size": undecided} if undecided else {})


def _selection(selection: Selection) -> dict[str, Any]:
    scores = {f"{m:g}": selection.scores.get(m) for m in selection.grid}
    place = {k: getattr(selection, k) for k in ("setting", "host", "arm")}
    return {**place, "multiplier": selection.chosen, "scores": scores}


def _setting(name: str, kind: str) -> dict[str, Any]:
    s = SETTINGS[name]
    metrics = COSTS if kind == "cost" else s.metrics
    return {k: getattr(s, k) for k in ("title", "dataset", "task", "acceleration", "mask")} | {"metrics": list(metrics)}


def _arm(name: str) -> dict[str, Any]:
    arm = get_arm(name)
    return {"label": arm.label, "mixer": arm.mixer.name, "options": dict(arm.mixer.options)}


def _cell(plan: Plan, root: str | Path, cell: PlannedRun) -> dict[str, Any]:
    folder = plan.folder(root, cell)
    status, error = state(folder, cell.config)
    return {
        "key": cell.key,
        **{k: getattr(cell, k) for k in POINT},
        "folder": str(folder.relative_to(root)),
        "status": status,
        "error": error,
        "config": cell.config.model_dump(mode="json"),
        "environment": _read(folder / "environment.json"),
        "metrics": _metrics(folder / "metrics.json") if status == "done" else None,
    }


def _metrics(path: Path) -> dict[str, Any]:
    """With nan again where the file, being JSON, has null: statistics take numbers."""
    found: dict[str, Any] = read_json(path)
    for values in (found.get("best_val", {}), *found.get("cases", {}).values()):
        values |= {k: math.nan for k, v in values.items() if v is None}
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _rows(plan: Plan, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per (setting, host, arm) with a finished run."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        if cell["metrics"] is not None:
            groups[cell["setting"], cell["host"], cell["arm"]].append(cell)
    selections = {(s.setting, s.host, s.arm): s for s in plan.open_selections}
    rows = []
    for place, runs in groups.items():
        quotes = plan.study.quotes.get(place, {})
        times = [r["metrics"]["seconds"] for r in runs if r["metrics"].get("seconds") is not None]
        rows.append(
            {
                **dict(zip(POINT[:3], place, strict=True)),
                "multiplier": runs[0]["multiplier"],
                "chosen_from": _selection(selections[place])["scores"] if place in selections else None,
                "seeds": [r["seed"] for r in runs],
                "cells": [r["key"] for r in runs],
                "scores": _costs(runs[0]["metrics"]) if plan.study.kind == "cost" else _scores(runs),
                "paper": {m: q._asdict() for m, q in quotes.items()},
                "parameters": runs[0]["metrics"].get("parameters"),
                "macs": runs[0]["metrics"].get("macs"),
                "seconds": sum(times) / len(times) if times else None,
            }
        )
    return rows


def _costs(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: {"mean": value} for name, value in metrics["costs"].items()}


def _scores(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for metric in next(iter(runs[0]["metrics"]["cases"].values())):
        seeds = list(per_seed(runs, metric).values())
        cases = {case: sum(s[case] for s in seeds) / len(seeds) for case in seeds[0]}
        mean, over_cases = spread(list(cases.values()))
        means = [sum(s.values()) / len(s) for s in seeds]
        found[metric] = {
            "mean": mean,
            "std_cases": over_cases,
            "std_seeds": spread(means, sample=True)[1] if len(seeds) > 1 else None,
            "cases": cases,
        }
    return found


def _references(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for every run of a setting: taken from the first."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        reference = (cell["metrics"] or {}).get("reference")
        if reference and cell["setting"] not in found:
            found[cell["setting"]] = {"setting": cell["setting"], **reference}
    return list(found.values())
