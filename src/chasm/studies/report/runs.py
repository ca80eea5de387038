"""A handful of run folders in the form of a study's results, so that one report serves both."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chasm.common.files import read_json
from chasm.studies.statistics import difference, spread
from chasm.train.config import read_yaml

FOCUS, BASE = "chasm", "baseline"
_SHORT = {"wrapper only": "wrapper"}  # names that studies also use, so that colours agree
_FIRST = ("psnr", "ssim", "dice", "iou")


def as_results(runs: Mapping[str, str | Path] | Sequence[str | Path], title: str) -> dict[str, Any]:
    """The structure of `chasm.studies.results` for finished runs; methods are arms, in the order given."""
    named = dict(runs) if isinstance(runs, Mapping) else {_name(Path(r)): r for r in runs}
    if not named:
        raise ValueError("a report needs at least one run folder, got none")
    cells, arms = [], {}
    places: dict[str, tuple[str, str]] = {}  # method -> setting, host
    for label, folder in named.items():
        cell = _cell(label, Path(folder).expanduser().resolve())
        cells.append(cell)
        mixer = (cell["config"] or {}).get("mixer", {})
        arms[cell["arm"]] = {"label": label, "mixer": mixer.get("name"), "options": mixer.get("options", {})}
        if cell["config"]:
            places[label] = _place(cell)
    usual = next(iter(places.values()), ("runs", ""))
    for label, cell in zip(named, cells, strict=True):
        cell["setting"], cell["host"] = places.get(label, usual)  # a method without training stands with the others
    rows = [_row(cell) for cell in cells]
    settings: dict[str, Any] = {}
    for cell in cells:
        mean = cell["metrics"]["mean"]
        metrics = [m for m in _FIRST if m in mean] or list(mean)
        settings.setdefault(cell["setting"], {"title": cell["setting"], "metrics": metrics})
    return {
        "format": 1,
        "study": {"name": title, "title": title, "source": "", "question": "", "kind": "train"},
        "settings": settings,
        "hosts": {cell["host"]: cell["host"] for cell in cells},
        "arms": arms,
        "counts": dict(Counter(cell["status"] for cell in cells)),
        "cells": cells,
        "rows": rows,
        "references": _references(cells),
        "comparisons": _comparisons(cells, settings),
        "falsification": [],
        "paper": {},
    }


def _name(folder: Path) -> str:
    config = _config(folder)
    return str(config["name"]) if config else folder.name


def _config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    config = read_yaml(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected the config of a run, got {type(config).__name__}")
    return config


def _json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _cell(label: str, folder: Path) -> dict[str, Any]:
    metrics = _json(folder / "metrics.json")
    if metrics is None:
        raise FileNotFoundError(f"{folder / 'metrics.json'}: not there: give the folder of a finished run")
    config = _config(folder)
    word = label.lower()
    return {
        "key": label,
        "arm": _SHORT.get(word, word),
        "multiplier": f"{config['train']['spectral_multiplier']:g}" if config else None,
        "seed": metrics.get("seed", 0),
        "folder": str(folder),  # absolute: joined to any root it stays what it is
        "status": "done",
        "error": None,
        "config": config,
        "environment": _json(folder / "environment.json"),
        "metrics": metrics,
    }


def _place(cell: dict[str, Any]) -> tuple[str, str]:
    """Words for the data with its task, and for the host: runs that agree in both are compared."""
    config, metrics = cell["config"], cell["metrics"]
    mask = metrics.get("task", {}).get("mask")
    how = f" ×{mask['nominal']:g} {mask['kind']}" if mask and mask.get("nominal") else ""
    factor = metrics.get("task", {}).get("factor")
    how += f" ×{factor:g}" if factor else ""
    return f"{metrics.get('source', config['data']['name'])}: {config['task']['name']}{how}", config["backbone"]["name"]


def _row(cell: dict[str, Any]) -> dict[str, Any]:
    metrics = cell["metrics"]
    scores = {}
    for metric in metrics["mean"]:
        cases = {case: values[metric] for case, values in metrics["cases"].items()}
        mean, over_cases = spread(list(cases.values()))
        scores[metric] = {"mean": mean, "std_cases": over_cases, "std_seeds": None, "cases": cases}
    return {
        **{k: cell[k] for k in ("setting", "host", "arm", "multiplier")},
        "chosen_from": None,
        "seeds": [cell["seed"]],
        "cells": [cell["key"]],
        "scores": scores,
        "paper": {},
        **{k: metrics.get(k) for k in ("parameters", "macs", "seconds")},
    }


def _references(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        reference = cell["metrics"].get("reference")
        if reference:
            found.setdefault(cell["setting"], {"setting": cell["setting"], **reference})
    return list(found.values())


def _comparisons(cells: list[dict[str, Any]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Every method against the Baseline, and CHASM against every other, where they were tested on the same cases."""
    found = []
    for place in dict.fromkeys((c["setting"], c["host"]) for c in cells):
        here = {c["arm"]: c["metrics"]["cases"] for c in cells if (c["setting"], c["host"]) == place}
        pairs = [(a, BASE) for a in here if BASE in here and a != BASE]
        pairs += [(FOCUS, a) for a in here if FOCUS in here and a not in (FOCUS, BASE)]
        for metric in settings[place[0]]["metrics"]:
            for arm, against in pairs:
                if set(here[arm]) != set(here[against]):
                    continue
                ours, theirs = ({case: v[metric] for case, v in here[a].items()} for a in (arm, against))
                d = difference([ours], [theirs], metric)
                found.append(
                    {
                        "setting": place[0],
                        "host": place[1],
                        "metric": metric,
                        "arm": arm,
                        "against": against,
                        **{k: getattr(d, k) for k in ("mean", "low", "high", "cases", "seeds", "verdict")},
                        "paper": None,
                    }
                )
    return found
