"""Compare the arms of a study with each other, on the cases and seeds that they share."""

from collections.abc import Mapping, Sequence
from math import nan
from statistics import fmean

import numpy as np

from chasm.studies.catalogue import Quotes
from chasm.studies.factors import RIVALS, SETTINGS, random_draws
from chasm.studies.paper import FALSIFICATION
from chasm.studies.records import ArmResult, Comparison, Drop, Falsification, Gain, RunRecord
from chasm.studies.statistics import DECIMALS, SIGNIFICANCE, Interval, difference, drop, holm, mean_difference

FOCUS, BASE = "chasm", "baseline"
SeedScores = dict[int, dict[str, float]]  # seed to test case to score


def per_seed(runs: Sequence[RunRecord], metric: str) -> SeedScores:
    """Return the scores of finished runs in one metric: seed to test case to score, nan where there is none."""
    return {run.seed: {case: scores.get(metric, nan) for case, scores in run.result.cases.items()} for run in runs}


def compare(
    rows: Sequence[ArmResult],
    runs: Sequence[RunRecord],
    metrics: Mapping[str, Sequence[str]],
    quotes: Quotes | None = None,
) -> list[Comparison]:
    """Compare every arm with the Baseline, and CHASM with every other arm, in the metrics of each setting.

    The comparisons of one setting, host and metric are one table, over which p-values and verdicts are corrected.
    """
    members = _runs_by_arm(rows, runs)
    comparisons = []
    for place in dict.fromkeys(row.place for row in rows):
        arms = [row.arm for row in rows if row.place == place]
        pairs = [(arm, BASE) for arm in arms if BASE in arms and arm != BASE]
        pairs += [(FOCUS, arm) for arm in arms if FOCUS in arms and arm not in (FOCUS, BASE)]
        for metric in metrics[place[0]]:
            found = {
                (arm, against): paired_difference(members[*place, arm], members[*place, against], metric)
                for arm, against in pairs
            }
            differences = {pair: d for pair, d in found.items() if d is not None}
            corrected = holm([d.p for d in differences.values()])  # over all comparisons of one table
            for ((arm, against), d), p in zip(differences.items(), corrected, strict=True):
                printed = [(quotes or {}).get((*place, a), {}).get(metric) for a in (arm, against)]
                paper = round(printed[0].mean - printed[1].mean, 4) if printed[0] and printed[1] else None
                verdict = "level" if p >= SIGNIFICANCE and d.verdict in ("win", "loss") else d.verdict
                comparisons.append(
                    Comparison(*place, metric, arm, against, d.mean, d.low, d.high, d.cases, d.seeds, verdict, paper, p)
                )
    return comparisons


def _runs_by_arm(rows: Sequence[ArmResult], runs: Sequence[RunRecord]) -> dict[tuple[str, str, str], list[RunRecord]]:
    by_key = {run.key: run for run in runs}
    return {(*row.place, row.arm): [by_key[key] for key in row.runs] for row in rows}


def falsify(rows: Sequence[ArmResult], runs: Sequence[RunRecord], has_paper: bool = True) -> list[Falsification]:
    """Return CHASM's gain over the strongest rival under a structured and random masks, and what is lost of it.

    The strongest rival is the one with the highest test score, as in the paper: one under the structured mask, and one
    over all draws of the random mask.
    """
    members = _runs_by_arm(rows, runs)
    results = []
    for setting, host in dict.fromkeys(row.place for row in rows):
        metric = SETTINGS[setting].metrics[0]
        sides = [
            _gain_over_the_strongest(rows, members, masks, host, metric) for masks in ([setting], random_draws(setting))
        ]
        if sides[0] is None or sides[1] is None:
            continue
        (rival, structured), (rival_random, random) = sides[0], sides[1]
        if structured.shape[1:] != random.shape[1:]:
            continue  # seeds are still missing on one side
        gains = [mean_difference(d, metric) for d in (structured, random)]
        paper = FALSIFICATION.get(setting) if host == "hifi-mamba" and has_paper else None
        gain, gain_random = (Gain(d.mean, d.low, d.high, d.verdict) for d in gains)
        lost = Drop(*drop(structured[0], random, digits=DECIMALS.get(metric, 2)))
        names = (setting, host, metric, rival, rival_random)
        results.append(Falsification(*names, gain, gain_random, lost, paper, draws=len(random)))
    return results


def mean_falsification(settings: Sequence[Falsification]) -> tuple[float, float, float]:
    """Return the mean structured gain, random gain and drop over settings, as in the last row of the paper's table."""
    structured, random, lost = (
        fmean(getattr(f, name).mean for f in settings) for name in ("structured", "random", "drop")
    )
    return structured, random, lost


def _gain_over_the_strongest(
    rows: Sequence[ArmResult],
    members: Mapping[tuple[str, str, str], Sequence[RunRecord]],
    masks: Sequence[str],
    host: str,
    metric: str,
) -> tuple[str, np.ndarray] | None:
    """Return the strongest rival over all masks, and CHASM's gain over it, (masks, seeds, cases).

    Masks without CHASM, or without any rival, are left out; None if nothing is left to compare.
    """
    means = {mask: {row.arm: row.scores[metric].mean for row in rows if row.place == (mask, host)} for mask in masks}
    means = {mask: arms for mask, arms in means.items() if FOCUS in arms and any(rival in arms for rival in RIVALS)}
    rivals = [rival for rival in RIVALS if means and all(rival in arms for arms in means.values())]
    if not rivals:
        return None
    strongest = max(rivals, key=lambda rival: sum(arms[rival] for arms in means.values()))
    pairs = [paired_scores(members[mask, host, FOCUS], members[mask, host, strongest], metric) for mask in means]
    scored = [scores for ours, theirs in pairs for scores in (*ours, *theirs)]
    if not scored or len({len(ours) for ours, _ in pairs}) > 1 or any(set(s) != set(scored[0]) for s in scored):
        return None  # seeds or cases are still missing under one of the masks
    cases = sorted(scored[0])
    gains = [[[a[case] - b[case] for case in cases] for a, b in zip(*pair, strict=True)] for pair in pairs]
    return strongest, np.array(gains)


def paired_scores(
    ours: Sequence[RunRecord], theirs: Sequence[RunRecord], metric: str
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return case to score of both sides, for the seeds that both have."""
    a, b = per_seed(ours, metric), per_seed(theirs, metric)
    seeds = sorted(set(a) & set(b))
    return [a[seed] for seed in seeds], [b[seed] for seed in seeds]


def paired_difference(ours: Sequence[RunRecord], theirs: Sequence[RunRecord], metric: str) -> Interval | None:
    """Return the mean paired difference of two arms, None unless they share seeds, all with the same test cases."""
    a, b = paired_scores(ours, theirs, metric)
    return difference(a, b, metric) if a and all(set(scores) == set(a[0]) for scores in (*a, *b)) else None
