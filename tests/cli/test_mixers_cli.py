"""`chasm mixers`: the numbers in the table are those of the counter and of the registry."""

import json

import pytest
import torch
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.cli.mixers import TABLES, agreement
from chasm.mixers import MIXERS, create_mixer
from chasm.surgery.count import count, count_parameters

SMALL = ["--channels", "32", "--size", "16x12"]


def run(*args: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["mixers", *args])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def records() -> dict:
    return {r["mixer"]: r for r in json.loads(run("--json", *SMALL))}


def test_every_registered_mixer_is_measured(records):
    assert sorted(records) == MIXERS.list()
    for name, record in records.items():
        assert "error" not in record
        assert (record["params"], record["params_real"]) == count_parameters(create_mixer(name, 32, (16, 12)))
        assert record["macs"] == sum(record["macs_by_kind"].values())
        assert record["macs_fft"] == record["macs_by_kind"].get("fft", 0)
        assert record["identity_path"] == ("inside" if MIXERS.get(name).owns_residual else "slot")
        assert {field for columns in TABLES.values() for field in columns} <= set(record)


def test_a_row_by_hand(records):
    gfnet = records["gfnet"]
    assert gfnet["params"] == 32 * 16 * 7
    assert gfnet["params_real"] == 2 * gfnet["params"]
    assert gfnet["macs_by_kind"]["complex product"] == 4 * 32 * 16 * 7
    assert gfnet["macs_paper"] == 0
    assert gfnet["saved_bytes"] > 0
    # the paper's rule is applied to the equations, whatever form ran
    literal = create_mixer("chasm", 32, (16, 12), form="reference")
    assert records["chasm"]["macs_paper"] == count(literal, torch.randn(1, 32, 16, 12)).paper


def test_tables_for_people():
    text = run("[ag]*", *SMALL)
    assert "afno" in text
    assert "gfnet" in text
    assert "fsel" not in text
    assert "another resolution" in text
    assert "16 x 12" in text


def test_markdown():
    lines = run("gfnet", "--markdown", *SMALL).splitlines()
    rows = [line for line in lines if line.startswith("| gfnet |")]
    assert [row.count("|") - 1 for row in rows] == [len(columns) for columns in TABLES.values()]
    assert f"| {32 * 16 * 7:,} | {2 * 32 * 16 * 7:,} | 0.80M | - |" in rows[0]  # the paper's column is for C = 96


def test_a_width_a_mixer_cannot_have_is_a_note_in_its_row():
    (record,) = json.loads(run("afno", "--json", "--channels", "6", "--size", "8"))
    assert "blocks" in record["error"]
    assert "blocks" in run("afno", "--channels", "6", "--size", "8", "--markdown")
    assert "afno" in run("*", "--channels", "6", "--size", "8")


def test_agreement_with_the_papers_column():
    assert agreement(798_720, 1_597_440, "0.80M") == "once"
    assert agreement(4_800, 9_600, "0.01M") == "as two"
    assert agreement(68_544, 68_544, "0.07M") == "yes"
    assert agreement(69_552, 69_552, "1.19M") == "no"
    assert agreement(1, 2, "-") == "-"


def test_bad_arguments_say_what_to_do():
    assert "did you mean 'gfnet'" in run("gfnt", code=3)
    for size in ("12by3", "1x2x3", "0x4", ""):
        assert "128x96" in run("--size", size, code=3)
