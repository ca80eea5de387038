"""The report: numbers beside the paper's, verdicts that follow the intervals, one file that a browser shows offline."""

import base64
import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from finished_runs import GAINS, fill, fill_plan

from chasm.studies.plan import make_plan, part_of
from chasm.studies.records import ArmResult, Comparison, Drop, Falsification, Gain, Results, Score
from chasm.studies.report import report_runs, sections, write_report
from chasm.studies.report import text as formatting
from chasm.studies.report.sampling import rank_correlation, sampling_section
from chasm.studies.results import collect


class Page(HTMLParser):
    """Tags, links and texts of a page; complains about tags that do not match."""

    VOID = frozenset(("meta", "img", "br", "link", "hr"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.sources: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.stack.append(tag)
        self.sources += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def differences(page: Page) -> dict[str, dict[str, str]]:
    """Mixer -> column -> cell of the first table of paired differences."""
    start = next(i for i, r in enumerate(page.rows) if len(r) > 1 and " − " in r[1])
    header, found = page.rows[start], {}
    for row in page.rows[start + 1 :]:
        if len(row) != len(header) or row[0] in found:
            break
        found[row[0]] = dict(zip(header, row, strict=True))
    return found


@pytest.fixture(scope="module")
def basis(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Results]:
    """The report of a study on proxy data, one run of which is missing: (report, root of the runs, results)."""
    root = tmp_path_factory.mktemp("runs")
    plan = make_plan("basis", scale="proxy", paths={"proxy": "bundle"})
    by_arm = {c.arm: c for c in plan.runs}
    for arm in ("chasm-identity", "chasm-untied", "chasm-signed", "chasm"):
        config = by_arm[arm].config.model_dump(mode="json")
        fill(plan.folder(root, by_arm[arm]), config, GAINS[arm], "proxy brain_siat_t2")
    results = collect(plan, root)
    return write_report(results, root / "out", root=root), root, results


def test_the_page_needs_nothing_else(basis: tuple[Path, Path, Results]) -> None:
    page = basis[0]
    assert page.name == "report.html"
    text = page.read_text()
    parsed = Page(text)
    others = [s for s in parsed.sources if not s.startswith(("data:image/", "#"))]
    assert {Path(name).suffix for name in others} == {".svg", ".png"}  # to download; they are drawn in the page, too
    assert all((page.parent / name).is_file() for name in others)
    assert "<script" not in text
    assert "@import" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    images = [s for s in parsed.sources if s.startswith("data:")]
    assert len(images) == 6  # differences, cost, curves, panel, learned by CHASM and by its signed variant
    for image in images:
        payload = base64.b64decode(image.partition(",")[2], validate=True)
        assert payload.startswith((b"\x89PNG", b"<?xml"))
    assert "@media print" in text
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        figure = (page.parent / f"report-pareto-cc359-x8-hifi-mamba.{kind}").read_bytes()
        assert figure.startswith(start)


def test_the_papers_numbers_stand_beside_ours(basis: tuple[Path, Path, Results]) -> None:
    rows = Page(basis[0].read_text()).rows
    table = {r[0]: r for r in rows if len(r) >= 6}
    header = next(r for r in rows if r[0] == "Mixer")
    assert header[:5] == ["Mixer", "PSNR", "paper", "SSIM", "paper"]
    assert table["CHASM"][2] == "28.68"
    assert table["Untied basis"][2:5:2] == ["28.43", "0.833"]
    ours = next(r for r in basis[2].rows if r.arm == "chasm")
    assert table["CHASM"][1].startswith(f"{ours.scores['psnr'].mean:.2f} ± ")
    assert table["zero-filled"][1] == "21.00 ± 0.50"


def test_proxy_is_said_wherever_the_numbers_are(basis: tuple[Path, Path, Results]) -> None:
    text = basis[0].read_text()
    headings = re.findall(r"<h[23]>(.*?)</h[23]>", text)
    assert sum("CC359" in h for h in headings) >= 2
    assert all("proxy data" in h for h in headings if "CC359" in h)
    assert 'class="notice"' in text
    assert "These are not results on those datasets" in text.replace("\n", " ")
    markdown = basis[0].with_suffix(".md").read_text()
    assert "Proxy data" in markdown
    lines = list(csv.DictReader(basis[0].with_suffix(".csv").open()))
    assert {line["data"] for line in lines} == {"proxy data"}


def test_results_against_chasm_are_printed_like_any_other(basis: tuple[Path, Path, Results]) -> None:
    table = differences(Page(basis[0].read_text()))
    assert table["Shared basis, signed gain"]["CHASM − it"].endswith("] loss")
    assert table["Identity basis"]["CHASM − it"].endswith("] win")
    assert table["Untied basis"]["CHASM − it"].endswith("] level")
    text = basis[0].with_suffix(".md").read_text()
    assert "highest mean PSNR Shared basis, signed gain" in text
    assert "CHASM against the 3 others: 1 win, 1 level, 1 loss." in text


def test_a_missing_run_is_said(basis: tuple[Path, Path, Results]) -> None:
    text = basis[0].with_suffix(".md").read_text()
    assert "1 of 5 runs are not finished" in text
    assert re.search(r"\| .*chasm-complex.* \| missing \|", text)


def test_protocol_hardware_versions_commit_and_time(basis: tuple[Path, Path, Results]) -> None:
    text = basis[0].with_suffix(".md").read_text()
    for wanted in (
        "per slice scaled to [0, 1]",
        "CPU, 2 threads",
        "torch 2.9",
        "aaaaaaaaaaaa with uncommitted changes",
    ):
        assert wanted in text
    assert "21 min of training over 4 runs" in text
    assert "chasm report basis --scale proxy --protocol default" in text


def test_csv_files(basis: tuple[Path, Path, Results]) -> None:
    page, _, results = basis
    scores = list(csv.DictReader(page.with_suffix(".csv").open()))
    chasm = next(s for s in scores if s["arm"] == "chasm" and s["metric"] == "psnr")
    assert float(chasm["paper_mean"]) == 28.68
    assert int(chasm["cases"]) == 8
    differences = list(csv.DictReader((page.parent / "report-differences.csv").open()))
    assert len(differences) == len(results.comparisons)


def test_markdown_has_no_picture(basis: tuple[Path, Path, Results]) -> None:
    assert "data:image" not in basis[0].with_suffix(".md").read_text()


@pytest.mark.usefixtures("numbers_only")
def test_seeds_settings_and_falsification(tmp_path: Path) -> None:
    overrides = ["data.options.cases=12"]
    plan = make_plan("evidence", scale="tiny", seeds=[0, 1], overrides=overrides)
    fill_plan(plan, tmp_path, "embedded brain", size=24)
    results = collect(plan, tmp_path)
    text = write_report(results, tmp_path / "page.html").with_suffix(".md").read_text()  # no root: numbers only
    assert "Random-mask falsification" in text
    assert "2 seeds" in text
    assert "second ±: over 2 seeds" in text
    assert "One seed" not in text
    assert text.count("embedded data") >= 2
    assert (tmp_path / "page-differences.csv").is_file()


def test_seeds_that_were_tested_on_different_cases(tmp_path: Path) -> None:
    plan = make_plan("basis", scale="tiny", seeds=[0, 1])
    fill_plan(plan, tmp_path, "embedded brain", size=24)
    path = plan.folder(tmp_path, next(cell for cell in plan.runs if cell.arm == "chasm")) / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["cases"]["another"] = metrics["cases"].pop("case0")
    path.write_text(json.dumps(metrics))
    text = write_report(collect(plan, tmp_path), tmp_path / "page.html").with_suffix(".md").read_text()
    assert "runs were tested on different cases" in text


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    config = make_plan("basis", scale="tiny").runs[0].config.model_dump(mode="json")
    for seed in (0, 1):
        fill(tmp_path / f"s{seed}", {**config, "name": "mine", "seed": seed}, 0.4, "embedded brain")
    page = report_runs([tmp_path / "s0", tmp_path / "s1"], tmp_path / "report.html", title="seeds")
    text = page.read_text()
    assert all(f"mine ({tmp_path}/s{seed})" in text for seed in (0, 1))


def test_cost_study(tmp_path: Path) -> None:
    plan = make_plan("flops", scale="tiny")
    results = collect(plan, tmp_path)
    for i, cell in enumerate(plan.runs):
        quotes = plan.study.quotes[cell.setting, cell.host, cell.arm]
        place = (cell.setting, cell.host, cell.arm)
        scores = {next(iter(quotes)): Score(1.0 + i)}
        results.rows.append(ArmResult(*place, 1, [0], [cell.key], scores, paper=quotes))
    text = write_report(results, tmp_path / "out", root=tmp_path).with_suffix(".md").read_text()
    assert re.search(r"\| CHASM \| [\d.]+ \| 28.22 \|", text)
    assert re.search("least GMACs.* Baseline, 1.00", text)


def test_nothing_finished_is_a_report_too(tmp_path: Path) -> None:
    results = collect(make_plan("axes", scale="tiny"), tmp_path)
    text = write_report(results, tmp_path / "out", root=tmp_path).read_text()
    assert "No run is finished yet" in text


def test_report_of_run_folders(tmp_path: Path) -> None:
    config = make_plan("basis", scale="tiny").runs[0].config.model_dump(mode="json")
    runs = {"Baseline": 0.0, "wrapper only": 0.4, "CHASM": 0.8}
    mixers = {"Baseline": ("identity", {}), "wrapper only": ("chasm", {"basis": None}), "CHASM": ("chasm", {})}
    for label, gain in runs.items():
        name, options = mixers[label]
        fill(tmp_path / label, {**config, "mixer": {"name": name, "options": options}}, gain, "embedded brain")
    classic = tmp_path / "compressed sensing"  # a method without training: scores and pictures only
    classic.mkdir()
    metrics = json.loads((tmp_path / "Baseline" / "metrics.json").read_text())
    kept = {k: metrics[k] for k in ("protocol", "meaning", "source", "cases", "mean", "std")}
    (classic / "metrics.json").write_text(json.dumps(kept))
    shutil.copy(tmp_path / "Baseline" / "examples.npz", classic)
    folders = {label: tmp_path / label for label in ("compressed sensing", *runs)}
    folders["$^$ <b> *x*"] = folders.pop("wrapper only")
    for name in ("log.jsonl", "examples.npz", "weights.safetensors"):  # cut files do not take the rest of the report
        (tmp_path / "wrapper only" / name).write_bytes(b'{"')
    page = report_runs(folders, tmp_path / "report.html", title="A <demo> & more", question="Which one?")
    text = page.read_text()
    for name in ("log.jsonl", "examples.npz", "weights.safetensors"):
        assert re.search(rf"This file cannot be read and is not shown: \S*wrapper only/{name}", text)
    parsed = Page(text)
    pictures = [s for s in parsed.sources if s.startswith("data:")]
    assert len(pictures) == 5
    assert pictures[0].startswith("data:image/png"), "images come before charts"
    assert "A &lt;demo&gt; &amp; more" in text
    assert "Which one?" in text
    number = r"\d\d\.\d\d"
    odd = re.escape("$^$ &lt;b&gt; *x*")
    order = f"highest mean PSNR CHASM, {number} dB, then {odd} {number}, compressed sensing {number}, Baseline"
    assert re.search(order, text)
    table = differences(parsed)
    assert table["compressed sensing"]["CHASM − it"].endswith("] win")
    assert table["CHASM"]["it − Baseline"].endswith("] win")
    markdown = page.with_suffix(".md").read_text()
    assert "Embedded data" in markdown
    assert "| paper" not in markdown
    assert "×1, ×30 the learning rate" in markdown  # CHASM brings its own
    assert r"| $^$ \<b> \*x\* |" in markdown
    assert r"# A \<demo> & more" in markdown


def test_numbers_as_they_are_printed() -> None:
    assert formatting.signed(-0.0004, "psnr") == formatting.signed(0.0004, "psnr") == "0.000"
    assert formatting.signed(-0.0006, "psnr") == "−0.001"
    one = Score(20.0, 0.0, None, {"a": 20.0})
    assert formatting.score_text(one, "psnr") == "20.00"  # one case has no spread
    assert formatting.score_text(Score(20.0, 0.0, None, {"a": 20.0, "b": 20.0}), "psnr") == "20.00 ± 0.00"


def test_the_rule_and_the_whole_command_are_in_the_report(basis: tuple[Path, Path, Results]) -> None:
    text = basis[0].with_suffix(".md").read_text()
    assert "and the mean is not zero in the digits printed here" in text
    assert f"Made by `chasm report basis --scale proxy --protocol default --out {basis[1]}`" in text


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the folder of a finished run"):
        report_runs([tmp_path], tmp_path / "report.html", title="x")
    with pytest.raises(ValueError, match="at least one run"):
        report_runs([], tmp_path / "report.html", title="x")


def test_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from chasm.cli.app import app
    from chasm.studies.plan import save_plan

    plan = make_plan("seeds-basis", scale="tiny")
    missing = CliRunner().invoke(app, ["report", "seeds-basis", "--out", str(tmp_path)])
    assert missing.exit_code == 3
    assert len(missing.output.strip().splitlines()) == 1
    save_plan(plan, tmp_path)
    found = CliRunner().invoke(app, ["report", "seeds-basis", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "6 missing" in found.output
    folder = tmp_path / "tiny" / "reports" / "seeds-basis.default"
    assert json.loads((folder / "report.json").read_text())["study"]["name"] == "seeds-basis"
    assert (folder / "report.html").is_file()


def falsified(mean: float, low: float, high: float) -> Results:
    """The results of one setting with a drop."""
    results = collect(make_plan("random-mask"), Path("nowhere"))
    gains = Gain(0.5, 0.1, 0.9, "win"), Gain(0.1, -0.1, 0.3, "level")
    drop = Drop(mean, low, high)
    paper = {"structured": 0.83, "random": 0.10, "drop": 88.0}
    results.falsification = [Falsification("cc359-x4", "hifi-mamba", "psnr", "fsel", "gfnet", *gains, drop, paper)]
    return results


@pytest.mark.parametrize(
    ("drop", "text"),
    [
        ((80.0, 60.0, 95.0), "80 % [60, 95]"),
        ((80.0, -np.inf, np.inf), "80 % (no interval)"),
        ((np.nan, -np.inf, np.inf), "undefined"),
    ],
)
def test_a_drop_is_undefined_only_without_a_structured_gain(drop: tuple[float, float, float], text: str) -> None:
    section = sections.falsification(falsified(*drop))
    assert section is not None
    rows = [[cell.text for cell in row.cells] for row in section.items[0].rows]  # type: ignore[union-attr]
    assert rows[1][5:] == [text, "88.0 %"]
    assert rows[2][:5] == ["Mean of 1 setting", "structured", "", "+0.500", "+0.62"]
    assert rows[3][3:] == ["+0.100", "+0.08", text.partition(" %")[0] + " %" * ("%" in text), "86.9 %"]


def test_one_rival_is_named() -> None:
    results = collect(make_plan("seeds-basis"), Path("nowhere"))
    place = ("cc359-x8", "hifi-mamba")
    for arm, mean in (("chasm-untied", 20.0), ("chasm", 21.0)):
        results.rows.append(ArmResult(*place, arm, 30, [0], [], {"psnr": Score(mean)}))
    results.comparisons = [Comparison(*place, "psnr", "chasm", "chasm-untied", 1.0, 0.5, 1.5, 8, 1, "win")]
    (point,) = sections.summary(results).points
    assert point.endswith("CHASM against Untied basis: +1.000 dB [+0.500, +1.500], win.")


@pytest.mark.usefixtures("numbers_only")
def test_what_the_paper_prints_beside_the_arms_is_shown(tmp_path: Path) -> None:
    plan = make_plan("fastmri", scale="tiny")
    fill_plan(plan, tmp_path, "embedded brain", size=24)
    text = write_report(collect(plan, tmp_path), tmp_path / "out").with_suffix(".md").read_text()
    assert re.search(r"\| Max std. \| [\d.]+ \| 1.85 \| [\d.]+ \| 0.076 \|", text)
    plan = make_plan("seeds", scale="tiny", seeds=[0])
    fill_plan(plan, tmp_path / "seeds", "embedded brain", size=24)
    text = write_report(collect(plan, tmp_path / "seeds"), tmp_path / "out").with_suffix(".md").read_text()
    assert re.search(r"\| FSEL \| .*dB \[.*\] \| \+0.83 \|", text)


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (24.637, "gmacs", "24.64"),
        (0.0034567, "gmacs", "0.00346"),
        (0.07, "core_mparams", "0.0700"),
        (0.0, "gmacs", "0.00"),
        (0.5, "psnr", "0.50"),
        (None, "gmacs", "–"),
    ],
)
def test_costs_of_tiny_models_have_digits(value, metric, text):
    assert formatting.number(value, metric) == text


def test_gains_stand_against_the_coherence_of_the_masks(tmp_path: Path) -> None:
    plan = part_of(make_plan("sampling"), ["arm=gfnet,chasm"])
    lobes = {"cc359-x8": 0.5, "cc359-x8-gaussian": 0.3}
    for cell in plan.runs:
        folder, lobe = plan.folder(tmp_path, cell), lobes.get(cell.setting, 0.1)
        fill(folder, cell.config.model_dump(mode="json"), lobe if cell.arm == "chasm" else 0, "embedded brain", 24)
        metrics = json.loads((folder / "metrics.json").read_text())
        metrics["task"]["mask"]["coherence"] = lobe
        (folder / "metrics.json").write_text(json.dumps(metrics))
    section = sampling_section(collect(plan, tmp_path))
    assert section is not None
    picture, table = section.items
    assert picture.source.startswith("data:image/svg")  # type: ignore[union-attr]
    assert "over 9 masks is +1.00" in section.text[0]  # the gains are the coherences
    rows = [[cell.text for cell in row.cells] for row in table.rows]  # type: ignore[union-attr]
    assert [row[1] for row in rows] == ["0.500", "0.300", *["0.100"] * 7]
    assert rows[0][2] == "GFNet"
    assert rows[0][3].startswith("+0.500 dB")
    assert sampling_section(collect(part_of(plan, ["setting=cc359-x8,cc359-x8-gaussian"]), tmp_path)) is None


def test_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    a, b = [0.5, 0.1, 0.1, 0.3, 0.9], [1.0, 0.2, 0.2, 0.1, -3.0]
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert rank_correlation(a, [1.0] * 5) == 0
