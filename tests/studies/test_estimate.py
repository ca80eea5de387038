"""The arithmetic of a cost estimate, with times that are known."""

import pytest
import torch

from chasm.studies import estimate as module
from chasm.studies import make_plan
from chasm.studies.estimate import Probe, estimate, time_batch
from chasm.tasks import Reconstruction


@pytest.fixture
def known_times(monkeypatch):
    """A step takes 36 s (CHASM: 72), scoring a batch 18; a million parameters."""
    asked = []

    def fake(config, modalities, size, device, seconds):
        asked.append((config.name, modalities, size))
        return Probe(72.0 if config.mixer.name == "chasm" else 36.0, 18.0, 10**6)

    monkeypatch.setattr(module, "time_batch", fake)
    return asked


def test_hours_steps_and_disk(known_times):
    plan = make_plan("cc359", overrides=["train.steps=100", "train.val_every=50"])
    found = estimate(plan, gpus=4, limit=1e9)
    scored = (2 * 3 + 6) / 4 * 18  # 3 slices validated twice, 6 tested, in batches of 4
    total = (48 * 100 * 36 + 6 * 100 * 72 + 54 * scored) / 3600
    assert (found.runs, found.steps) == (54, 5400)
    assert found.hours == pytest.approx(total)
    assert found.wall_hours == pytest.approx(total / 4)
    assert found.disk == 54 * (10**6 * 4 * 7 + 2**21)
    assert len(known_times) == 27  # x4 and x8 are the same models


def test_no_faster_than_the_longest_run(known_times):
    found = estimate(make_plan("basis"), gpus=1000, limit=1e9)
    assert found.wall_hours == pytest.approx(found.hours / 5)


def test_models_without_time_take_the_mean_of_their_host(known_times):
    found = estimate(make_plan("wrapper"), limit=-1)
    assert len(known_times) == 3  # one per host in any case
    assert sum(not p.measured for p in found.probes.values()) == 6
    assert "6 of 9 models" in found.notes[0]


def test_sizes_that_nobody_counted_are_said_to_be_assumed_or_unknown(known_times):
    for study, runs, slices in (("basis", 5, 2754), ("fastmri", 18, 9730), ("brats", 18, 122600)):
        found = estimate(make_plan(study, "full"))
        assert found.steps == runs * round(100 * slices / 8)
        assert found.hours > 0
        assert any(f"{slices:,} training slices assumed: give its path" in note for note in found.notes)
    found = estimate(make_plan("basis", "proxy", overrides=["train.epochs=2", "train.steps=null"]))
    assert found.steps is found.hours is found.wall_hours is None
    assert any("not known: give its path" in note for note in found.notes)


def test_modalities_and_sizes_of_the_probes(known_times):
    for study, modalities, size in (("brats", 4, 240), ("ade20k", 3, 256), ("fastmri", 1, 320)):
        known_times.clear()
        estimate(make_plan(study, "full"), limit=1e9)
        assert {asked[1:] for asked in known_times} == {(modalities, size)}


@pytest.mark.parametrize("study", ["brats", "ade20k", "evidence"])
def test_a_real_probe(study):
    import torch

    cell = make_plan(study).runs[-1]
    found = time_batch(cell.config, {"brats": 4, "ade20k": 3, "evidence": 1}[study], 32, torch.device("cpu"), 0.0)
    assert found.step > 0
    assert found.forward > 0
    assert found.parameters > 1000


def test_large_images_are_timed_small_on_a_cpu(monkeypatch):
    cell, sizes = make_plan("evidence").runs[-1], []
    prepare = Reconstruction.prepare
    monkeypatch.setattr(module, "_time", lambda work, *_: work() or 1.0)
    monkeypatch.setattr(Reconstruction, "prepare", lambda task, x, label: sizes.append(x.shape) or prepare(task, x))
    found = time_batch(cell.config, 1, 256, torch.device("cpu"), 2.0)
    assert set(sizes) == {(1, 1, 64, 64)}
    assert found.step == 4 * 16  # four images a batch, and sixteen times the pixels


def test_a_limit_is_kept_when_a_model_takes_long(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def slow(*_args):
        clock[0] += 25.0
        return Probe(1.0, 0.3, 10)

    monkeypatch.setattr(module, "time_batch", slow)
    found = estimate(make_plan("basis"), limit=60)
    assert sum(p.measured for p in found.probes.values()) == 2
    assert clock[0] <= 60


def test_a_slow_first_step_is_the_measurement(monkeypatch):
    clock, steps = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def work():
        clock[0] += 7.0
        steps.append(1)

    assert module._time(work, torch.device("cpu"), 2.0) == 7.0
    assert len(steps) == 1


def test_many_models_share_the_time(monkeypatch):
    given = []
    monkeypatch.setattr(module, "time_batch", lambda *args: given.append(args[-1]) or Probe(1.0, 0.3, 10))
    estimate(make_plan("cc359"), limit=27)
    assert given == [0.5] * 27
    given.clear()
    estimate(make_plan("basis"), limit=1000)
    assert given == [2.0] * 5
