"""Protocol `tuned`: which short runs are made, what they decide, and what then runs at full length."""

import json
import math

import pytest

from chasm.studies import collect, make_plan, runner
from chasm.studies.runner import jobs_of, run
from chasm.studies.state import failed
from chasm.studies.tuning import choice_text, with_selections
from chasm.train import NonFiniteError

PLACE = "cc359-x8.hifi-mamba"


def write(folder, config, validation, psnr=20.0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    cases = {f"c{i}": {"psnr": psnr + i, "ssim": 0.5} for i in range(8)}
    (folder / "metrics.json").write_text(json.dumps({"best_val": {"psnr": validation}, "cases": cases}))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Run a tuned study whose validation scores are given by multiplier; returns the keys in the order they ran."""

    def start(scores, plan=None):
        plan = plan or make_plan("seeds-basis", protocol="tuned", arms=["wrapper"])
        keys = []

        def fake(jobs, at_once):
            for job in jobs:
                keys.append(job["key"])
                multiplier = float(job["key"].split(".m")[1].split(".s")[0])
                score = scores(multiplier)
                if score is None:
                    failed(runner.Path(job["folder"]), NonFiniteError("step 3: loss nan"))
                    yield job["key"], "failed"
                else:
                    # On the test split the order is another one, which must have no say.
                    write(runner.Path(job["folder"]), job["config"], score, psnr=50 - score)
                    yield job["key"], "done"

        monkeypatch.setattr(runner, "local", fake)
        run(plan, tmp_path, say=lambda line: None)
        return keys, with_selections(plan, tmp_path)

    return start


def peak(best):
    """Scores with their maximum at a multiplier."""
    return lambda m: 30 - abs(math.log(m / best))


def test_short_runs_decide_and_only_the_choice_runs_at_full_length(study, tmp_path):
    keys, plan = study(peak(30))
    short = [f"{PLACE}.{arm}.m{m}.s0.select" for arm in ("chasm-untied", "chasm") for m in (1, 10, 30, 100)]
    assert sorted(keys[:-6]) == sorted([*short, *(f"{PLACE}.wrapper.m1.s{s}" for s in range(3))])
    assert keys[-6:] == [f"{PLACE}.{arm}.m30.s{s}" for arm in ("chasm-untied", "chasm") for s in range(3)]
    assert jobs_of(plan, tmp_path) == []
    results = collect(make_plan("seeds-basis", protocol="tuned"), tmp_path)
    row = next(r for r in results.rows if r.arm == "chasm")
    assert (row.multiplier, row.seeds) == (30, [0, 1, 2])
    assert list(row.chosen_from) == ["1", "10", "30", "100"]
    assert row.chosen_from["30"] == max(row.chosen_from.values()) == 30
    assert results.counts == {"done": 6}


@pytest.mark.parametrize(
    ("best", "grid", "chosen"),
    [
        (10, (1, 10, 30, 100), 10),
        (100, (1, 10, 30, 100, 300), 100),
        (300, (1, 10, 30, 100, 300, 1000), 300),
        (1e6, (1, 10, 30, 100, 300, 1000, 3000), 3000),  # three extensions, and no more
        (1, (0.3, 1, 10, 30, 100), 1),
        (1e-6, (0.03, 0.1, 0.3, 1, 10, 30, 100), 0.03),
    ],
)
def test_a_choice_at_the_edge_extends_the_grid(study, best, grid, chosen):
    keys, plan = study(peak(best))
    for selection in plan.open_selections:
        assert (selection.grid, selection.chosen) == (grid, chosen)
    assert f"{PLACE}.chasm.m{chosen:g}.s2" in keys
    assert len(keys) == 2 * len(grid) + 9


def test_a_run_that_diverges_is_never_the_best_and_not_tried_again(study, tmp_path):
    keys, plan = study(lambda m: None if m > 10 else 20 + m)
    assert {s.chosen for s in plan.open_selections} == {10}
    assert choice_text(plan.open_selections[0]) == "x10 of x1 21, x10 30, x30 diverged, x100 diverged"
    assert jobs_of(plan, tmp_path) == []
    keys, _ = study(lambda m: None if m > 10 else 20 + m)
    assert keys == []


def test_another_failure_leaves_the_choice_open_and_is_tried_again(study, tmp_path):
    plan = make_plan("seeds-basis", protocol="tuned")
    for planned in plan.selection_runs:
        folder = plan.folder(tmp_path, planned)
        failed(folder, "power cut") if planned.multiplier == 30 else write(
            folder, planned.config.model_dump(mode="json"), 20.0
        )
    assert [s.chosen for s in with_selections(plan, tmp_path).open_selections] == [None, None]
    keys, _ = study(peak(30), plan)
    assert keys[:2] == [f"{PLACE}.{arm}.m30.s0.select" for arm in ("chasm-untied", "chasm")]
    assert len(keys) == 2 + 6


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    plan = make_plan("seeds-basis", protocol="tuned")
    for planned in plan.selection_runs:
        value = {1: float("nan"), 10: 31.0, 30: 32.0, 100: None}[planned.multiplier]
        write(plan.folder(tmp_path, planned), planned.config.model_dump(mode="json"), value)
    assert {s.chosen for s in with_selections(plan, tmp_path).open_selections} == {30}


def test_selection_runs_are_never_longer_than_the_study():
    def lengths(scale, **options):
        runs = make_plan("seeds-basis", scale, "tuned", **options).selection_runs
        return {(run.config.train.steps, run.config.train.epochs, run.config.train.val_every) for run in runs}

    assert lengths("tiny") == {(6, None, 3)}
    assert lengths("tiny", selection_steps=2) == {(2, None, 2)}
    assert lengths("proxy") == lengths("full") == {(1000, None, None)}
    assert {run.seed for run in make_plan("seeds-basis", protocol="tuned", seeds=(3, 4)).selection_runs} == {0}


def test_runs_are_shared_with_the_other_protocols(study, tmp_path):
    default = make_plan("seeds-basis")
    for planned in default.runs:
        write(default.folder(tmp_path, planned), planned.config.model_dump(mode="json"), 25.0)
    keys, _ = study(peak(30), make_plan("seeds-basis", protocol="tuned"))
    assert all(key.endswith(".select") for key in keys)


def test_a_part_of_a_tuned_study_selects_with_seed_0(study):
    from chasm.studies.plan import part_of

    plan = part_of(make_plan("seeds-basis", protocol="tuned"), ["arm=chasm", "seed=2"])
    keys, _ = study(peak(10), plan)
    assert keys == [*(f"{PLACE}.chasm.m{m}.s0.select" for m in (1, 10, 30, 100)), f"{PLACE}.chasm.m10.s2"]
