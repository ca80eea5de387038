"""Arms of a study against each other, on the cases and seeds they share."""

from typing import Any

import numpy as np

from chasm.studies.paper import FALSIFICATION
from chasm.studies.plan import Plan
from chasm.studies.statistics import difference, drop
from chasm.studies.vocabulary import RIVALS, SETTINGS

FOCUS, BASE = "chasm", "baseline"


def per_seed(runs: list[dict[str, Any]], metric: str) -> dict[int, dict[str, float]]:
    """Seed -> case -> score."""
    return {r["seed"]: {case: v[metric] for case, v in r["metrics"]["cases"].items()} for r in runs}


class _Table:
    """The scores of the rows, case by case and seed by seed."""

    def __init__(self, rows: list[dict[str, Any]], cells: list[dict[str, Any]]) -> None:
        by_key = {c["key"]: c for c in cells}
        self.runs = {(r["setting"], r["host"], r["arm"]): [by_key[k] for k in r["cells"]] for r in rows}

    def pair(self, place: tuple[str, str], one: str, other: str, metric: str) -> tuple[list[Any], list[Any]]:
        """Both arms' case -> score, for the seeds both have."""
        a, b = (per_seed(self.runs[*place, arm], metric) for arm in (one, other))
        seeds = sorted(set(a) & set(b))
        return [a[s] for s in seeds], [b[s] for s in seeds]

    def arms(self, place: tuple[str, str]) -> list[str]:
        return [arm for setting, host, arm in self.runs if (setting, host) == place]

    def places(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((setting, host) for setting, host, _ in self.runs))


def comparisons(plan: Plan, rows: list[dict[str, Any]], cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if plan.study.kind == "cost":
        return []
    table, found = _Table(rows, cells), []
    for place in table.places():
        arms = table.arms(place)
        pairs = [(a, BASE) for a in arms if BASE in arms and a != BASE]
        pairs += [(FOCUS, a) for a in arms if FOCUS in arms and a not in (FOCUS, BASE)]
        for metric in SETTINGS[place[0]].metrics:
            for arm, against in pairs:
                ours, theirs = table.pair(place, arm, against, metric)
                if not ours:
                    continue
                d = difference(ours, theirs, metric)
                quotes = [plan.study.quotes.get((*place, a), {}).get(metric) for a in (arm, against)]
                printed = None if None in quotes else round(quotes[0].mean - quotes[1].mean, 4)  # type: ignore[union-attr]
                found.append(
                    {
                        **dict(zip(("setting", "host"), place, strict=True)),
                        "metric": metric,
                        "arm": arm,
                        "against": against,
                        **{k: getattr(d, k) for k in ("mean", "low", "high", "cases", "seeds", "verdict")},
                        "paper": printed,
                    }
                )
    return found


def falsification(plan: Plan, rows: list[dict[str, Any]], cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """CHASM's gain over the strongest rival under a structured and a random mask, and what is lost of it.

    Strongest by its test score, as in the paper; under each mask for itself.
    """
    if plan.study.kind == "cost":
        return []
    table, found = _Table(rows, cells), []
    means = {(r["setting"], r["host"], r["arm"]): r["scores"] for r in rows}
    for setting, host in table.places():
        metric = SETTINGS[setting].metrics[0]
        gains: list[Any] = []
        for place in ((setting, host), (f"{setting}-random", host)):
            rivals = [a for a in table.arms(place) if a in RIVALS]
            if FOCUS not in table.arms(place) or not rivals:
                break
            strongest = max(rivals, key=lambda a, p=place: means[*p, a][metric]["mean"])  # type: ignore[misc]
            gains.append((strongest, *table.pair(place, FOCUS, strongest, metric)))
        if len(gains) < 2 or not all(ours for _, ours, _ in gains):
            continue
        matrices = [
            np.array([[a[c] - b[c] for c in sorted(a)] for a, b in zip(o, t, strict=True)]) for _, o, t in gains
        ]
        if matrices[0].shape != matrices[1].shape:
            continue  # seeds still missing on one side
        value, low, high = drop(*matrices)
        sides = [difference(ours, theirs, metric) for _, ours, theirs in gains]
        found.append(
            {
                "setting": setting,
                "host": host,
                "metric": metric,
                "rival": gains[0][0],
                "rival_random": gains[1][0],
                **{
                    name: {k: getattr(d, k) for k in ("mean", "low", "high", "verdict")}
                    for name, d in zip(("structured", "random"), sides, strict=True)
                },
                "drop": {"mean": value, "low": low, "high": high},
                "paper": FALSIFICATION.get(setting) if host == "hifi-mamba" else None,
            }
        )
    return found
