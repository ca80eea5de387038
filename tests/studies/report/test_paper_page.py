"""The paper's tables with our runs in them: in its layout, as LaTeX and CSV, with a dash where a run is missing."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from finished_runs import GAINS, fill, fill_plan, finish
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.studies import paper
from chasm.studies.plan import load_plan, make_plan, part_of, save_plan
from chasm.studies.report import sections, write_paper_page, write_report
from chasm.studies.report.exports import SHRUNK
from chasm.studies.results import collect


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of some studies in two folders."""
    root = tmp_path_factory.mktemp("paper")
    finish(root / "a", "cc359", "host=hifi-mamba,arm=gfnet,fsel,chasm")
    finish(root / "b", "random-mask", "arm=gfnet,fsel,chasm")
    finish(root / "b", "seeds-basis")
    arguments = ["report", "paper", str(root / "a"), str(root / "b"), "-o", str(root / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "59 finished runs" in result.output
    return root / "out"


def read(out: Path, name: str) -> list[dict[str, str]]:
    with (out / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_line_of_table_one_stands_above_ours(out: Path) -> None:
    rows = read(out, "table-1")
    assert len(rows) == 2 * 2 * len(paper.MIXERS)
    assert [r["source"] for r in rows[:4]] == ["paper", "ours"] * 2
    by_name = {(r["AR"], r["Method"], r["source"]): r for r in rows}
    printed = by_name["×8", "CHASM", "paper"]
    assert (printed["HiFi-Mamba PSNR"], printed["HiFi-Mamba PSNR std"], printed["ViT SSIM"]) == (
        "28.68",
        "0.74",
        "0.745",
    )
    ours = by_name["×8", "CHASM", "ours"]
    gained = float(ours["HiFi-Mamba PSNR"]) - float(by_name["×8", "GFNet", "ours"]["HiFi-Mamba PSNR"])
    assert gained == pytest.approx(GAINS["chasm"] - 0.3, abs=0.011)
    assert ours["Core Params"] == "0.032M"
    assert ours["U-Net PSNR"] == by_name["×4", "AFNO", "ours"]["HiFi-Mamba PSNR"] == ""


def test_mean_row_of_table_three_needs_all_settings(out: Path) -> None:
    rows = {(r["Setting"], r["source"]): r for r in read(out, "table-3a")}
    assert rows["Mean", "paper"]["Drop"] == "86.9 %"
    assert rows["fastMRI knee ×8", "ours"]["Drop"] == rows["Mean", "ours"]["Drop"] == "80.0 %"


def test_runs_of_another_study_fill_a_table_and_missing_ones_are_dashes(out: Path) -> None:
    variants = {(r["Variant"], r["source"]): r["PSNR"] for r in read(out, "table-3b")}
    assert variants["Untied basis", "ours"]
    assert variants["CHASM", "ours"]
    assert variants["Identity basis", "ours"] == ""
    claims = {r["claim"]: r for r in read(out, "claims")}
    assert claims["A shared basis beats an untied one (Table 3b)"]["paper"] == "+0.25 dB"
    assert claims["A shared basis beats an untied one (Table 3b)"]["ours"].endswith("level")
    assert claims["A learned basis beats the identity (Table 3b)"]["ours"] == ""
    assert "CH → CW beats CH only (Table 3c)" in claims


def test_methods_that_print_the_same_are_best_together(out: Path) -> None:
    lines = (out / "table-3b.tex").read_text().splitlines()
    ours = [line for line in lines if "& ours" in line and "--" not in line]  # untied and shared: the same scores
    assert len(ours) == 2
    assert all(r"\textbf" in line for line in ours)


def test_seeds_have_their_own_spread(out: Path) -> None:
    rows = {(r["Variant"], r["source"]): r for r in read(out, "table-seeds-basis")}
    assert rows["CHASM", "paper"]["PSNR std"] == "0.02"
    assert float(rows["CHASM", "ours"]["PSNR std"]) > 0


def test_latex_has_the_cells_of_its_columns(out: Path) -> None:
    tables = sorted(out.glob("*.tex"))
    assert len(tables) == 11
    for path in tables:
        text = path.read_text()
        alignment = re.search(r"\\begin\{tabular\}\{((p\{[^}]*\}|[lr])+)\}", text)
        assert alignment is not None
        columns = len(re.findall(r"p\{[^}]*\}|[lr]", alignment[1]))
        for line in text.splitlines():
            if line.endswith(r"\\"):
                spanned = sum(int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
                cells = len(re.findall(r"(?<!\\)&", line)) + 1
                assert (spanned or cells) == columns, line
        assert text.count("{") == text.count("}")
        assert not re.search(r"(?<!\\)[%#_]", text.partition("\n")[2].replace(SHRUNK, "")), path
        assert not re.search(r"\\caption\{(Table|Appendix)", text)  # LaTeX counts for itself
        assert not re.search("[^\x00-\x7f]", text), path


def test_figures_are_files_and_their_gaps_are_named(out: Path) -> None:
    page = (out / "paper.html").read_text()
    for stem in ("figure-1", "figure-2", "figure-gains"):
        assert (out / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
        assert (out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert f'href="{stem}.pdf"' in page
    assert "embedded data" in page
    assert "toy models" in page
    assert 'href="table-1.tex"' in page


def test_a_folder_without_studies_gives_the_paper_alone(tmp_path: Path) -> None:
    page, runs = write_paper_page([tmp_path], tmp_path / "out")
    assert runs == 0
    assert "There are no finished runs" in page.read_text()
    assert not any(r["PSNR"] for r in read(tmp_path / "out", "table-3b") if r["source"] == "ours")
    assert not (tmp_path / "out" / "figure-2.png").exists()


def test_a_study_with_a_mixer_that_is_not_loaded_is_left_out_and_named(tmp_path: Path) -> None:
    plan = make_plan("axes")
    save_plan(replace(plan, arms=("mine",)), tmp_path)
    page, runs = write_paper_page([tmp_path], tmp_path / "out")
    assert runs == 0
    assert "unknown arm or mixer 'mine'" in page.with_suffix(".md").read_text()
    with pytest.raises(ValueError, match=r"--with FILE.py\)$"):
        load_plan(tmp_path, "axes")


def test_a_study_on_other_data_is_left_out_and_named(tmp_path: Path) -> None:
    plan = part_of(make_plan("basis", "tiny", overrides=["data.options.content=photos"]), ["arm=chasm"])
    save_plan(plan, tmp_path)
    fill_plan(plan, tmp_path, "embedded photos", size=24)
    page, runs = write_paper_page([tmp_path], tmp_path / "out")
    text = page.with_suffix(".md").read_text()
    assert runs == 0
    assert "There are no finished runs for these tables" in text
    assert f"Left out: basis in {tmp_path}, which ran with --set data.options.content=photos" in text


@pytest.mark.usefixtures("numbers_only")
def test_runs_under_other_settings_are_said(tmp_path: Path) -> None:
    finish(tmp_path / "a", "basis", "arm=chasm")
    plan = part_of(make_plan("basis", "tiny", overrides=["train.lr=1e-3"]), ["arm=chasm-untied"])
    save_plan(plan, tmp_path / "b")
    fill(
        plan.folder(tmp_path / "b", plan.runs[0]), plan.runs[0].config.model_dump(mode="json"), 0, "embedded brain", 24
    )
    environment = plan.folder(tmp_path / "b", plan.runs[0]) / "environment.json"
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"commit": "b" * 40}))
    page, _ = write_paper_page([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    text = page.with_suffix(".md").read_text()
    assert "Runs differ in train.lr: 0.0005 and 0.001." in text
    assert f"Runs come from different commits of chasm: {'a' * 12} and {'b' * 12}." in text


@pytest.mark.usefixtures("numbers_only")
def test_code_that_changed_between_the_settings_of_a_table_is_said(tmp_path: Path) -> None:
    finish(tmp_path, "random-mask", "arm=gfnet,chasm,setting=cc359-x4,cc359-x4-random-1")
    for environment in tmp_path.glob("tiny/*random-1*/environment.json"):
        environment.write_text(json.dumps(json.loads(environment.read_text()) | {"commit": "b" * 40}))
    page, _ = write_paper_page([tmp_path], tmp_path / "out")
    text = page.with_suffix(".md").read_text()
    assert text.count(f"Runs come from different commits of chasm: {'a' * 12} and {'b' * 12}.") == 1  # Table 3 (a)


def test_a_file_that_changed_between_seeds_is_said_in_the_report(tmp_path: Path) -> None:
    plan = make_plan("seeds-basis", "tiny")
    for i, cell in enumerate(plan.runs):
        folder = plan.folder(tmp_path, cell)
        fill(folder, cell.config.model_dump(mode="json"), 0.3, "embedded brain", 24)
        environment = json.loads((folder / "environment.json").read_text())
        environment |= {"with": {"/data/mine.py": f"{i % 2}" * 64}, "modified": False}
        (folder / "environment.json").write_text(json.dumps(environment))
    notices = sections.notices(collect(plan, tmp_path))
    assert any(f"mine.py (--with) changed between runs: SHA-256 {'0' * 12} and {'1' * 12}" in n for n in notices)


def test_runs_on_other_data_stay_out_of_the_papers_tables(tmp_path: Path) -> None:
    plan = part_of(make_plan("basis", "tiny", overrides=["backbone.options.width=24"]), ["arm=chasm"])
    save_plan(plan, tmp_path)
    fill(plan.folder(tmp_path, plan.runs[0]), plan.runs[0].config.model_dump(mode="json"), 0, "embedded brain", 24)
    assert write_paper_page([tmp_path], tmp_path / "out")[1] == 0


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    for arguments, words in (
        (["report", "paper", str(tmp_path / "none")], "not a folder"),
        (["report", "paper", str(tmp_path), "--only", "arm=chasm"], "--only is for the report of one study"),
        (["report", "basis", str(tmp_path)], "with --out"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code != 0
        assert words in result.output + result.stderr


@pytest.mark.usefixtures("numbers_only")
def test_nothing_is_said_of_the_papers_numbers_where_none_are_shown(tmp_path: Path) -> None:
    part = ["data.options.part=knee_stanford_pdfs"]
    plan = make_plan("seeds-basis", scale="proxy", paths={"proxy": "bundle"}, seeds=[0], overrides=part)
    fill_plan(plan, tmp_path, "proxy knee_stanford_pdfs", size=24)
    text = write_report(collect(plan, tmp_path), tmp_path / "out", root=tmp_path).with_suffix(".md").read_text()
    assert "Proxy data" in text
    assert "the paper's numbers" not in text
    assert "## knee stanford pdfs ×8, proxy data, HiFi-Mamba" in text
    assert "| spectral step size | ×30 the learning rate |" in text  # CHASM's own, which is no part of the optimiser
