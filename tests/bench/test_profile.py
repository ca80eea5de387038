"""The profile of a training step: every part is seen, forward and backward, and nothing stays marked."""

import pytest
import torch

from chasm.backbones.hifi import ssm
from chasm.backbones.measurement import Measurement
from chasm.bench import profile


@pytest.fixture(scope="module")
def found() -> dict:
    return profile.profile_step(torch.device("cpu"), steps=2)


def test_every_part_is_seen_in_both_passes(found: dict) -> None:
    parts = {row["part"]: row for row in found["parts"]}
    named = {
        *profile.PARTS.values(),
        "low-pass filter",
        "selective scan",
        "data consistency",
        "mixer slots",
        "bases",
        "loss",
        profile.REST,
    }
    assert named <= set(parts)
    for name in named:
        assert 0 < parts[name]["forward_ms"] < parts[name]["time_ms"], name
    assert parts["optimiser"]["forward_ms"] == parts["optimiser"]["time_ms"] > 0
    strangers = set(parts) - named - {"optimiser", "gradients of parameters", "around the step"}
    assert not strangers
    lost = sum(parts[p]["share"] for p in ("gradients of parameters", "around the step") if p in parts)
    assert lost < 0.2


def test_numbers_add_up(found: dict) -> None:
    for rows in (found["parts"], found["kernels"]):
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert sum(row["time_ms"] for row in rows) == pytest.approx(found["busy_ms"])
        assert [row["time_ms"] for row in rows] == sorted((row["time_ms"] for row in rows), reverse=True)
    assert found["wall_ms"] > 0
    assert any("convolution_backward" in row["kernel"] for row in found["kernels"])


def test_functions_are_put_back(found: dict) -> None:
    assert ssm.selective_scan.__module__ == "chasm.ops.selective_scan"
    assert Measurement.enforce.__module__ == "chasm.backbones.measurement"


def test_an_empty_slot_is_nothing() -> None:
    parts = {row["part"] for row in profile.profile_step(torch.device("cpu"), "identity", steps=1)["parts"]}
    assert "bases" not in parts
    assert "selective scan" in parts
