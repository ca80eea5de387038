"""Read the results of a study from its run folders."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from chasm.common.files import MAKE_AGAIN
from chasm.studies.catalogue import paper_extras
from chasm.studies.comparisons import compare, falsify, per_seed
from chasm.studies.factors import SETTINGS
from chasm.studies.plan import Plan, PlannedRun, Selection
from chasm.studies.records import (
    ArmInfo,
    ArmResult,
    Environment,
    Metrics,
    Reference,
    Results,
    RunRecord,
    Score,
    SelectionRecord,
    SettingInfo,
    StudyInfo,
)
from chasm.studies.state import state
from chasm.studies.statistics import spread
from chasm.studies.tuning import with_selections
from chasm.studies.worker import COSTS


def collect(plan: Plan, root: str | Path) -> Results:
    """Return everything known about the runs of a study, finished or not.

    Args:
        plan: the study, or a part of it.
        root: folder of the runs.
    """
    plan = with_selections(plan, root)
    runs = [_run(plan, root, planned) for planned in plan.runs]
    rows = _rows(plan, runs)
    study = plan.study
    counts = Counter(run.status for run in runs)
    if undecided := len(plan.points) - len(plan.runs):
        counts["waiting for a step size"] = undecided
    settings, hosts, arms = (dict.fromkeys(str(point[i]) for point in plan.points) for i in range(3))
    train = study.kind == "train"
    return Results(
        study=StudyInfo(study.name, study.title, study.source, study.question, study.kind),
        settings={name: _setting(plan, name) for name in settings},
        hosts={name: plan.host_label(name) for name in hosts},
        arms={name: _arm(plan, name) for name in arms},
        counts=dict(counts),
        runs=runs,
        rows=rows,
        references=references_of(runs),
        comparisons=compare(rows, runs, {s: SETTINGS[s].metrics for s in settings}, plan.quotes) if train else [],
        falsification=falsify(rows, runs, has_paper=not plan.own_parts) if train else [],
        selections=[_selection(selection) for selection in plan.open_selections],
        paper={} if plan.own_parts else paper_extras(study),
        scale=plan.scale,
        protocol=plan.protocol,
        seeds=None if plan.seeds is None else list(plan.seeds),
        overrides=list(plan.overrides),
    )


def read_environment(path: Path) -> Environment | None:
    """Read environment.json of a run; None if it is not there or cannot be read."""
    try:
        return Environment.read(path)
    except (OSError, ValueError):
        return None


def score_over(seeds: Sequence[dict[str, float]]) -> Score:
    """Summarise one metric, from the scores by test case of each seed. A case counts for the seeds that have it."""
    names = dict.fromkeys(case for scores in seeds for case in scores)
    by_case = {case: [scores[case] for scores in seeds if case in scores] for case in names}
    cases = {case: sum(values) / len(values) for case, values in by_case.items()}
    mean, over_cases = spread(list(cases.values()))
    means = [sum(scores.values()) / len(scores) for scores in seeds]
    return Score(mean, over_cases, spread(means, sample=True)[1] if len(seeds) > 1 else None, cases)


def references_of(runs: Sequence[RunRecord]) -> list[Reference]:
    """Return the reference of every setting. All runs of a setting have the same, so the first one is taken."""
    references: dict[str, Reference] = {}
    for run in runs:
        if run.metrics and run.metrics.reference and run.setting not in references:
            reference = run.metrics.reference
            references[run.setting] = Reference(reference.name, reference.mean, reference.std, run.setting)
    return list(references.values())


def _setting(plan: Plan, name: str) -> SettingInfo:
    setting = SETTINGS[name]
    metrics = list(COSTS if plan.study.kind == "cost" else setting.metrics)
    title = plan.setting_title(name)
    return SettingInfo(title, metrics, setting.dataset, setting.task, setting.acceleration, setting.mask)


def _arm(plan: Plan, name: str) -> ArmInfo:
    arm = plan.arm(name)
    return ArmInfo(arm.label, arm.mixer.name, dict(arm.mixer.options))


def _selection(selection: Selection) -> SelectionRecord:
    scores = {f"{m:g}": selection.scores.get(m) for m in selection.grid}
    return SelectionRecord(selection.setting, selection.host, selection.arm, selection.chosen, scores)


def _run(plan: Plan, root: str | Path, planned: PlannedRun) -> RunRecord:
    folder = plan.folder(root, planned)
    status, error = state(folder, planned.config)
    metrics = Metrics.read(folder / "metrics.json") if status == "done" else None
    if metrics is not None and plan.study.kind == "train" and not metrics.cases:
        status, error, metrics = "failed", f"{folder / 'metrics.json'}: cases: no scores: {MAKE_AGAIN}", None
    return RunRecord(
        key=planned.key,
        setting=planned.setting,
        host=planned.host,
        arm=planned.arm,
        multiplier=planned.multiplier,
        seed=planned.seed,
        folder=str(folder.relative_to(root)),
        status=status,
        error=error,
        config=planned.config,
        environment=read_environment(folder / "environment.json"),
        metrics=metrics,
    )


def _rows(plan: Plan, runs: list[RunRecord]) -> list[ArmResult]:
    """Return one row per (setting, host, arm) with a finished run."""
    groups: dict[tuple[str, str, str], list[RunRecord]] = defaultdict(list)
    for run in runs:
        if run.metrics is not None:
            groups[run.setting, run.host, run.arm].append(run)
    chosen_from = {(s.setting, s.host, s.arm): _selection(s).scores for s in plan.open_selections}
    rows = []
    for place, members in groups.items():
        row = arm_result(members, [] if plan.study.kind == "cost" else SETTINGS[place[0]].metrics)
        row.chosen_from, row.paper = chosen_from.get(place), plan.quotes.get(place, {})
        rows.append(row)
    return rows


def arm_result(runs: Sequence[RunRecord], metrics: Sequence[str] = ()) -> ArmResult:
    """Summarise finished runs that differ only in their seed, in their own metrics and those that are expected."""
    run, first = runs[0], runs[0].result
    scores = {name: Score(value) for name, value in first.costs.items()}
    for metric in dict.fromkeys((*next(iter(first.cases.values()), {}), *metrics)):
        scores[metric] = score_over(list(per_seed(runs, metric).values()))
    seconds = [run.result.seconds for run in runs if run.result.seconds is not None]
    return ArmResult(
        run.setting,
        run.host,
        run.arm,
        run.multiplier,
        seeds=[run.seed for run in runs],
        runs=[run.key for run in runs],
        scores=scores,
        slot_numbers=first.slot_numbers,
        macs=first.macs,
        seconds=sum(seconds) / len(seconds) if seconds else None,
    )
