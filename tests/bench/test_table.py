"""The table: what is in it, what its ratios are made of, and that a wrong kernel gets no time."""

from typing import Any

import pytest
import torch

from chasm import ops
from chasm.bench import clock, subjects, table
from chasm.bench.clock import Limits, Pace
from chasm.bench.peers import DEFAULT_PEERS, MapAttention
from chasm.common.precision import tf32
from chasm.mixers import MIXERS
from chasm.ops.forms import fft

CPU = torch.device("cpu")
LIMITS = Limits(copy_gb_per_s=10.0, gemm_tflop_per_s=1.0)
SHAPE = (2, 32, 12, 9)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def measured(device: torch.device = CPU, **options: Any) -> list[table.Row]:
    options = {"shapes": [SHAPE], "pace": Pace(0.001, 1, 2), **options}
    config = table.make_config(device, LIMITS, **options)
    seen: list[str] = []
    rows = [row for found in table.run(config, seen.append) for row in found]
    assert len(seen) == config.rows() == len(rows)
    return rows


@pytest.fixture(scope="module")
def rows() -> list[table.Row]:
    return measured(dtypes=["float32", "bf16"])


def test_every_mixer_and_form_in_every_mode(rows: list[table.Row]) -> None:
    names = {(r["mode"], r["mixer"], r["form"].split(" ")[0]) for r in rows}
    forms = [("chasm", form) for form in ("auto", *ops.FORMS) if form not in ops.GPU_FORMS]
    rivals = [(name, "-") for name in (*MIXERS.list(), *DEFAULT_PEERS) if name != "chasm"]
    for mode in ("eval", "step"):
        assert {n[1:] for n in names if n[0] == mode} == {("literal", "eager"), *forms, *rivals}
    assert {n[1:] for n in names if n[0] == "core"} == {("literal", "eager"), *forms, ("gfnet", "-")}
    assert {r["mode"] for r in rows} == {"core", "eval", "step"}  # no graph without a GPU
    assert {r["dtype"] for r in rows} == {"float32", "bf16"}


def test_each_row_has_a_time_an_error_and_its_form(rows: list[table.Row]) -> None:
    for r in rows:
        assert r.get("time_ms", 0) > 0, r
        allowed = {"float32": 1e-4, "bf16": 5e-2}[r["dtype"]]
        assert 0 <= r["error"] < allowed, r
        assert bool(r["worst_gradient"]) == (r["mode"] == "step")
    auto = {r["mode"]: r["form"] for r in rows if r["form"].startswith("auto") and r["dtype"] == "float32"}
    assert auto == {"core": "auto (fft)", "eval": "auto (fft)", "step": "auto (fft)"}


def test_ratios(rows: list[table.Row]) -> None:
    for dtype, size in (("float32", 4), ("bf16", 2)):
        for mode, maps in (("core", 4), ("eval", 5), ("step", 12)):
            some = [r for r in rows if (r["dtype"], r["mode"]) == (dtype, mode)]
            base = next(r["time_ms"] for r in some if r["mixer"] == "literal")
            floor = maps * 2 * 32 * 12 * 9 * size / 10e9 * 1e3
            for r in some:
                assert r["times_literal"] == pytest.approx(base / r["time_ms"])
                assert r["times_floor"] == pytest.approx(r["time_ms"] / floor)


def test_selection() -> None:
    rows = measured(modes=["eval"], mixers=["chasm"], forms=["reference", "fft"])
    assert [(r["mixer"], r["form"]) for r in rows] == [("literal", "eager"), ("chasm", "reference"), ("chasm", "fft")]


def test_a_wrong_output_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fft._inverse
    monkeypatch.setattr(fft, "_inverse", lambda *args: 1.01 * right(*args))
    rows = {r["form"]: r for r in measured(modes=["eval"], mixers=["chasm"], forms=["reference", "fft"])}
    assert "time_ms" not in rows["fft"]
    assert 1e-3 < rows["fft"]["error"] < 0.1
    assert "wrong" in rows["fft"]["note"]
    assert rows["reference"]["time_ms"] > 0


@pytest.mark.parametrize("place", [0, 1, 2])  # x, gains, bases
def test_a_wrong_gradient_gets_no_time(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fft.FFT.backward

    def wrong(*args: Any) -> Any:
        grads = list(right(*args))
        grads[place] = 1.02 * grads[place] if place == 0 else [1.02 * g for g in grads[place]]
        return tuple(grads)

    monkeypatch.setattr(fft.FFT, "backward", wrong)
    rows = {r["form"]: r for r in measured(modes=["step"], mixers=["chasm"], forms=["fft", "reference"])}
    assert "time_ms" not in rows["fft"]
    assert rows["fft"]["worst_gradient"] in rows["fft"]["note"]
    assert rows["reference"]["time_ms"] > 0


def test_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fft._inverse
    monkeypatch.setattr(fft, "_inverse", lambda *args: right(*args) * torch.nan)
    (_, row) = measured(modes=["eval"], mixers=["chasm"], forms=["fft"])
    assert "time_ms" not in row
    assert "wrong" in row["note"]


def test_a_row_that_cannot_run_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    monkeypatch.setattr(fft, "_inverse", no_memory)
    rows = measured(
        shapes=[(1, 12, 8, 8)], modes=["eval"], mixers=["chasm", "ffc", "gfnet"], forms=["reference", "fft"]
    )
    notes = {(r["mixer"], r["form"]): r.get("note") for r in rows}
    assert notes["chasm", "fft"] == "out of memory"
    assert "multiple of 8" in notes["ffc", "-"]  # its global half of 12 channels
    assert notes["chasm", "reference"] is notes["gfnet", "-"] is notes["literal", "eager"] is None


def test_both_layouts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = subjects.make_inputs

    def noting(*args: Any) -> subjects.Inputs:
        pairs = original(*args)
        seen.append((args[1], pairs[0][0].is_contiguous(memory_format=torch.channels_last)))
        return pairs

    monkeypatch.setattr(subjects, "make_inputs", noting)
    (row,) = [r for r in measured(modes=["eval"], mixers=["gfnet"]) if r["mixer"] == "gfnet"]
    assert row["layout"] in ("NCHW", "NHWC")
    assert seen[-2:] == [(torch.float32, False), (torch.float32, True)]


def test_one_oracle_serves_all_dtypes_and_layouts() -> None:
    x = [subjects.make_inputs(SHAPE, d, f, 2, CPU) for d in (torch.float64, torch.bfloat16) for f in ("NCHW", "NHWC")]
    for other in x[1:]:
        for (a, b), (c, d) in zip(x[0], other, strict=True):
            assert torch.equal(a, c.double())
            assert torch.equal(b, d.double())
    assert not torch.equal(x[0][0][0], x[0][1][0])  # sets differ


def test_missing_gradient_is_an_error() -> None:
    exact = {"y": torch.ones(2).double(), "x": torch.ones(2).double()}
    assert subjects.errors({"y": torch.ones(2)}, exact)[2] == "no x"
    assert not subjects.errors({"y": torch.ones(2)}, exact)[0] <= 1


def test_names_are_checked() -> None:
    for options, message in (
        ({"mixers": ["gfnt"]}, "did you mean 'gfnet'"),
        ({"forms": ["ftt"]}, "did you mean 'fft'"),
        ({"dtypes": ["float16"]}, "float32"),
        ({"modes": ["graph"]}, "mode 'graph' needs a CUDA device"),
        ({"forms": ["fused"]}, "form 'fused' needs a CUDA device"),
    ):
        with pytest.raises(ValueError, match=message):
            table.make_config(CPU, LIMITS, **options)  # type: ignore[arg-type]


def test_other_spellings_of_a_dtype() -> None:
    assert table.make_config(CPU, LIMITS, dtypes=["fp32", "bfloat16"]).dtypes == ["float32", "bf16"]


def test_tf32_is_set_and_put_back() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    for allowed in (True, False):
        with tf32(allowed):
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
        assert (matmul.allow_tf32, cudnn.allow_tf32) == before


def test_limits() -> None:
    limits = clock.measure_limits(CPU)
    assert limits.copy_gb_per_s > 0.1
    assert limits.floor_ms(limits.copy_gb_per_s * 1e9) == pytest.approx(1e3)


def test_a_time_on_a_cpu_is_the_best_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    durations = [1, 5, 3, 4, 9, 6, 7, 8]  # the first is for the estimate
    readings = iter([t for i, d in enumerate(durations) for t in (100 * i, 100 * i + d)])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(readings))
    assert clock.clock(calls.append, 3, CPU, Pace(0.0, 7, 9), calls=2) == 1500
    assert calls == [0, *(i % 3 for i in range(7))]


@GPU
def test_on_a_gpu_graphs_are_rows_too() -> None:
    rows = measured(torch.device("cuda"), shapes=[(2, 32, 20, 17)], dtypes=["bf16"])
    assert {r["mode"] for r in rows} == set(table.MODES)
    timed = [r for r in rows if "time_ms" in r]
    assert all(r["peak_mib"] >= 0 for r in timed)
    assert {r["mixer"] for r in timed if r["mode"] == "graph"} >= {"chasm", "gfnet"}
    for r in rows:  # a form may not take this size, and a rival may wait for the host
        assert "time_ms" in r or r["form"] == "triton" or r["note"].startswith("no CUDA graph"), r


@GPU
def test_what_waits_for_the_host_is_not_captured() -> None:
    def call(i: int) -> dict[str, torch.Tensor]:
        x = torch.ones(3, device="cuda")
        return {"y": x * x.sum().item()}

    with pytest.raises(clock.NotCapturableError, match="no CUDA graph"):
        clock.capture(call, 1, torch.device("cuda"))
    torch.rand(3, device="cuda")  # the generator is still sound


def test_attention_within_windows_is_attention_of_each_window() -> None:
    torch.manual_seed(0)
    windowed, full = MapAttention(32, window=8), MapAttention(32)
    full.load_state_dict(windowed.state_dict())
    x = torch.randn(2, 32, 16, 8)
    torch.testing.assert_close(windowed(x), torch.cat([full(half) for half in x.split(8, 2)], 2))
    assert windowed(x[:, :, 1:]).shape == (2, 32, 15, 8)
