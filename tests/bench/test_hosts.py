"""Bases and hosts: each row compared before it is timed, and ratios to the right neighbour."""

import copy
from typing import Any

import pytest
import torch

from chasm import ops
from chasm.bench import hosts, report
from chasm.bench.clock import Pace
from chasm.bench.literal import LiteralBlock
from chasm.mixers import CHASM

CPU = torch.device("cpu")
QUICK = Pace(0.0, 1, 1)


def test_bases() -> None:
    rows = list(hosts.bases(CPU, QUICK))
    assert [r["mode"] for r in rows] == ["eager"] * 3  # no graph without a GPU
    assert rows[0]["times_literal"] == 1
    for r in rows:
        assert r["time_ms"] > 0
        assert r["error"] < 1e-4
        assert r["times_literal"] == rows[0]["time_ms"] / r["time_ms"]
        assert r["worst_gradient"] == "theta"


def test_wrong_bases_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.orthogonal_basis
    monkeypatch.setattr(hosts.ops, "orthogonal_basis", lambda theta: right(1.01 * theta))
    *_, ours = hosts.bases(CPU, QUICK)
    assert "wrong" in ours["note"]
    assert "time_ms" not in ours
    assert report.cell("time_ms", ours) == ours["note"]


def test_training_step_of_the_host() -> None:
    rows = list(hosts.hifi(CPU, QUICK))
    assert [(r["mixer"], r["mode"]) for r in rows] == [("identity", "eager"), ("literal", "eager"), ("chasm", "eager")]
    for r in rows:
        assert r["error"] < 2e-2
        assert r["ratio"] == r["time_ms"] / rows[0]["time_ms"]


def test_folded_inference() -> None:
    rows = list(hosts.unet(CPU, QUICK))
    assert [(r["batch"], r["mixer"]) for r in rows] == [(1, "identity"), (1, "chasm"), (2, "identity"), (2, "chasm")]
    for i, r in enumerate(rows):
        assert 1e-4 < r["error"] < 5e-2  # bfloat16, so not nothing
        assert r["ratio"] == r["time_ms"] / rows[i - i % 2]["time_ms"]
        assert r["layout"] in ("NCHW", "NHWC")


def test_a_wrong_host_gets_no_time_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHASM, "forward", lambda self, x: 3 * x)
    monkeypatch.setattr(hosts, "MAX_HOST_ERROR", 1e-3)  # a fresh network adds little to its input
    rows = {r["mixer"]: r for r in hosts.hifi(CPU, QUICK)}
    assert "wrong" in rows["chasm"]["note"]
    assert "time_ms" not in rows["chasm"]
    assert rows["identity"]["ratio"] == 1


def test_a_host_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("chasm.surgery.fold.FoldedCHASM.forward", broken)
    rows = list(hosts.unet(CPU, QUICK))
    assert [r.get("note") for r in rows] == [None, "out of memory"] * 2


def test_slots_are_the_paper_literal_ones_with_the_same_weights() -> None:
    model = hosts.host("unet", "chasm", 32, CPU, width=8, depth=1, levels=(0, 1)).eval()
    literal = hosts.literal_slots(model)
    assert all(isinstance(slot, LiteralBlock) for slot in literal.slots.values())
    assert all(isinstance(slot, CHASM) for slot in model.slots.values())
    x = torch.randn(1, 2, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), literal(x), rtol=1e-4, atol=1e-5)
        bare = hosts.host("unet", "identity", 32, CPU, width=8, depth=1, levels=(0, 1)).eval()
        assert not torch.allclose(bare(x), model(x), atol=1e-3)


def test_a_step_trains() -> None:
    model = hosts.host("unet", "chasm", 32, CPU, width=8, depth=1, levels=(0, 1))
    before = copy.deepcopy(model.state_dict())
    step = hosts.training_step(model, hosts.make_batch(2, 32, CPU), graph=False)
    step(0)
    assert all(not torch.equal(v, before[k]) for k, v in model.named_parameters())
