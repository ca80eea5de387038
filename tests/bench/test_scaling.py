"""Sweeps over size, width and batch; their slopes; the picture, also from the file alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chasm import ops
from chasm.bench import report, scaling, table
from chasm.bench.clock import Limits, Pace

CPU = torch.device("cpu")


def config(**options: Any) -> table.BenchConfig:
    chosen = {"modes": ["step"], "mixers": ["chasm", "gfnet"], "pace": Pace(0.001, 1, 2), **options}
    return table.make_config(CPU, Limits(10.0, 1.0), **chosen)


@pytest.fixture(scope="module")
def rows() -> list[table.Row]:
    seen: list[str] = []
    found = [row for line in scaling.run(config(), scaling.SWEEPS, seen.append) for row in line]
    assert len(seen) == scaling.total(config(), scaling.SWEEPS) == len(found)
    return found


def test_every_mixer_at_every_size(rows: list[table.Row]) -> None:
    for sweep in scaling.SWEEPS:
        wanted = scaling.shapes(sweep, gpu=False)
        for mixer in ("chasm", "gfnet", "literal"):
            line = [r for r in rows if (r["sweep"], r["mixer"]) == (sweep, mixer)]
            assert [(r["n"], r["shape"]) for r in line] == wanted
            assert all(r["time_ms"] > 0 and r["error"] < 1e-4 for r in line)


def test_a_sweep_that_is_cut_short_has_every_mixer() -> None:
    rows = next(scaling.run(config(), ["size"]))
    assert [(r["mixer"], r["n"]) for r in rows] == [("chasm", 8), ("gfnet", 8), ("literal", 8)]


@pytest.mark.parametrize("gpu", [False, True])
def test_one_thing_grows_at_a_time(gpu: bool) -> None:
    for sweep, place in (("size", 2), ("channels", 1), ("batch", 0)):
        shapes = scaling.shapes(sweep, gpu)
        assert [n for n, _ in shapes] == sorted({n for n, _ in shapes})
        assert all(shape[place] == n for n, shape in shapes)
        rest = {tuple(v for i, v in enumerate(s) if i != place and (sweep != "size" or i < 2)) for _, s in shapes}
        assert len(rest) == 1
    odd = [n for n, shape in scaling.shapes("size", gpu) if n & (n - 1)]
    assert odd
    assert all(shape[2] == shape[3] for _, shape in scaling.shapes("size", gpu))


def test_slopes_are_the_exponents_of_the_large_end() -> None:
    def line(mixer: str, power: float, sizes: list[int]) -> list[table.Row]:
        flat = 5.0  # launches, at small sizes
        key = {"sweep": "size", "dtype": "bf16", "mode": "step", "mixer": mixer}
        return [{**key, "n": n, "time_ms": flat if n < 64 else 1e-3 * n**power} for n in sizes]

    sizes = [8, 16, 32, 64, 90, 128, 256, 512]
    rows = [*line("a", 2.0, sizes), *line("b", 1.5, sizes), *line("c", 2.0, [8, 16])]
    rows += [{**rows[0], "n": 1024, "time_ms": None, "note": "out of memory"}]
    found = {r["mixer"]: r for r in scaling.slopes(rows)}
    assert set(found) == {"a", "b"}  # two points make no slope
    assert found["a"]["slope"] == pytest.approx(2.0)
    assert found["b"]["slope"] == pytest.approx(1.5)
    assert found["a"]["range"] == "128 to 512"
    assert found["a"]["largest"] == 512


def test_a_line_ends_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.run

    def small_only(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if x.shape[-1] >= 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(x, *rest, **options)

    monkeypatch.setattr(ops, "run", small_only)
    rows = [row for line in scaling.run(config(mixers=["chasm"]), ["size"]) for row in line]
    mine = [(r["n"], r.get("note")) for r in rows if r["mixer"] == "chasm"]
    assert mine == [(8, None), (15, None), (16, "out of memory")]
    assert len([r for r in rows if r["mixer"] == "literal"]) == len(scaling.shapes("size", False))


def test_or_with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scaling.expected_ms("size", 64, 32, 10.0) == 40.0
    assert scaling.expected_ms("batch", 8, 4, 10.0) == 20.0
    monkeypatch.setattr(scaling, "MAX_CALL_MS", 0.0)
    rows = [row for line in scaling.run(config(mixers=["gfnet"]), ["batch"]) for row in line]
    for mixer in ("gfnet", "literal"):
        found = [("time_ms" in r, "over a second" in r.get("note", "")) for r in rows if r["mixer"] == mixer]
        assert found == [(True, False), (False, True)]


def test_where_the_oracle_does_not_fit_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "MAX_ORACLE_ELEMENTS", 32 * 16 * 16)
    rows = [row for line in scaling.run(config(mixers=["gfnet"]), ["size"]) for row in line if row["mixer"] == "gfnet"]
    assert [r["n"] for r in rows if "error" in r] == [8, 15, 16]
    assert all(r["note"] == "float64 compared at 1x32x16x16" and r["time_ms"] > 0 for r in rows if r["n"] > 16)
    monkeypatch.setattr(scaling, "MAX_ORACLE_ELEMENTS", 0)
    rows = [row for line in scaling.run(config(mixers=["gfnet"]), ["size"]) for row in line]
    assert all("time_ms" not in r and "never compared" in r["note"] for r in rows)


def test_picture_from_rows_and_from_the_file(rows: list[table.Row], tmp_path: Path) -> None:
    scaling.plot(rows, tmp_path / "a.png", "somewhere")
    report.write(tmp_path / "s", "# text", rows, scaling.COLUMNS)
    again = scaling.read(tmp_path / "s.csv")
    assert [(r["sweep"], r["mixer"], r["n"]) for r in again] == [(r["sweep"], r["mixer"], r["n"]) for r in rows]
    assert [r["time_ms"] for r in again] == pytest.approx([r["time_ms"] for r in rows], rel=1e-5)
    scaling.plot(again, tmp_path / "b.png", "somewhere")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "b.png").stat().st_size > 10_000


def test_what_cannot_be_drawn(tmp_path: Path, rows: list[table.Row]) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column"):
        scaling.read(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="nothing to draw"):
        scaling.plot([r for r in rows if r["sweep"] == "batch"], tmp_path / "x.png")
