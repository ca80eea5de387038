"""The section of a report about one setting in one host: scores, images, differences, cost, learning curves."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chasm.studies.comparisons import BASE, FOCUS
from chasm.studies.records import ArmResult, Results, RunRecord, Score
from chasm.studies.report import figures, text
from chasm.studies.report.elements import (
    Picture,
    Section,
    Table,
    TableCell,
    TableRow,
    row_kind,
    table_row,
    verdict_cell,
)
from chasm.studies.report.examples import read_example
from chasm.studies.report.pareto import Point, pareto_figure


def place_section(results: Results, setting: str, host: str, root: Path | None) -> Section:
    """Return the section about a setting in a host; without a folder of the runs it has numbers only."""
    rows = results.rows_of(setting, host)
    metrics = results.metrics_of(setting, rows)
    section = Section(results.place_name(setting, host))
    section.items.append(_scores(results, setting, rows, metrics))
    labels = {name: arm.label for name, arm in results.arms.items()}
    if results.is_cost:
        return section
    if root is not None and (picture := _panel(results, setting, rows, root)) is not None:
        section.items.append(picture)
    first = metrics[0]
    ours = [c for c in results.comparisons_of(setting, host, first) if c.arm == FOCUS]
    if ours:
        caption = (
            "Mean paired difference over test cases, with its 95 % bootstrap interval (cases and seeds resampled). A "
            "filled mark is a win (green) or a loss (red) of CHASM after Holm's correction. An open mark is level, or "
            "has too few cases."
        )
        forest = figures.forest(ours, labels, text.metric_name(first))
        section.items.append(Picture(figures.source(forest), "CHASM against each other mixer", caption))
    differences = [_differences(results, setting, host, metric) for metric in metrics]
    section.items += [table for table in differences if table.rows]
    points = [_point(results, row, first) for row in rows]
    if any(p.slot_numbers is not None or p.step_seconds is not None for p in points):
        section.items.append(_pareto(points, labels, text.metric_name(first), f"{setting}-{host}"))
    curves = [] if root is None else _curves(results, root, rows, first)
    if any(curve.val for curve in curves):
        caption = "Learning curves: the validation score, which selects the tested weights, and the training loss."
        drawn = figures.learning(curves, labels, text.metric_name(first))
        section.items.append(Picture(drawn, "learning curves", caption))
    return section


def _scores(results: Results, setting: str, rows: list[ArmResult], metrics: list[str]) -> Table:
    has_paper = {m: any(m in row.paper for row in rows) for m in metrics}
    is_tuned = any(row.chosen_from for row in rows)
    columns = ["Mixer", *(title for m in metrics for title in (text.short_name(m), *["paper"] * has_paper[m]))]
    empty = [""] * (3 * (not results.is_cost) + is_tuned)  # of lines that are no arms
    columns += [] if results.is_cost else ["slot numbers", "GMACs", "train time"]
    columns += ["step size ×"] if is_tuned else []
    lines = []
    for reference in (r for r in results.references if r.setting == setting):
        cells = [reference.name]
        for m in metrics:
            score = Score(reference.mean[m], reference.std[m], None, rows[0].scores[m].cases)
            cells += [text.score_text(score, m), *[""] * has_paper[m]]
        lines.append(table_row(*cells, *empty, kind="reference"))
    for row in rows:
        line: list[str | TableCell] = [results.label(row)]
        for m in metrics:
            best = max((r.scores[m].mean for r in rows if math.isfinite(r.scores[m].mean)), default=math.nan)
            is_best = not results.is_cost and row.scores[m].mean == best and len(rows) > 1
            line.append(TableCell(text.score_text(row.scores[m], m), "best" if is_best else ""))
            line += [TableCell(text.quote(row.paper.get(m), m), "paper")] * has_paper[m]
        if not results.is_cost:
            line += [text.thousands(row.slot_numbers), text.giga(row.macs), text.duration(row.seconds)]
        line += [f"{row.multiplier:g}" if row.chosen_from else text.UNKNOWN] * is_tuned
        lines.append(table_row(*line, kind=row_kind(row.arm)))
    if printed := results.paper.get("largest_spread", {}).get(setting):  # the last line of the paper's Table 2
        cells = ["Max std."]
        for m in metrics:
            largest = max(row.scores[m].std_cases or 0.0 for row in rows)
            cells += [text.number(largest, m), *[text.number(printed.get(m), m)] * has_paper[m]]
        lines.append(table_row(*cells, *empty, kind="reference"))
    return Table("", columns, lines, _scores_note(results, setting, rows, any(has_paper.values())))


def _scores_note(results: Results, setting: str, rows: list[ArmResult], has_paper: bool) -> str:
    if results.is_cost:
        note = (
            "Parameters are those of one mixer at 96 channels. Multiply-adds (the paper says FLOPs) are those of the "
            "whole model. Per image counts everything that runs in evaluation. Once per call counts work on the "
            "weights, such as matrix exponentials, which are done once for all images of a training batch, and kept "
            "in evaluation."
        )
        if results.scale == "tiny":
            note += " These are toy models on small images: do not compare their multiply-adds with the paper's."
        return note
    cases = len(next(iter(rows[0].scores.values())).cases)
    metrics = results.runs_of(rows[0])[0].result
    kind = results.data_kind(setting)
    seeds = max(len(row.seeds) for row in rows)
    note = f"Mean ± standard deviation over {cases} test cases" if cases > 1 else "One test case"
    note += f" (second ±: over {seeds} seeds)" if seeds > 1 else ""
    note += f". Metric protocol “{metrics.protocol}”: {metrics.meaning}. The highest mean is bold. This is no verdict."
    note += " Slot numbers are the real numbers stored in the slots. GMACs are those of one image in evaluation."
    if has_paper and kind:
        note += f" The paper's numbers are on {results.settings[setting].title}; ours are on {kind}."
    return note


def _differences(results: Results, setting: str, host: str, metric: str) -> Table:
    """Return one line for each mixer: its difference to the Baseline, and CHASM's difference to it."""
    comparisons = {(c.arm, c.against): c for c in results.comparisons_of(setting, host, metric)}
    has_paper = any(c.paper is not None for c in comparisons.values())
    columns, rows = ["Mixer"], []
    for side in ("it − Baseline", "CHASM − it"):
        columns += [side, *["paper"] * has_paper]
    for row in results.rows_of(setting, host):
        sides = comparisons.get((row.arm, BASE)), comparisons.get((FOCUS, row.arm))
        if not any(sides):
            continue
        cells: list[str | TableCell] = [results.label(row)]
        for c in sides:
            cells.append(verdict_cell(f"{text.interval(c, metric)} {c.verdict}", c.verdict) if c else "")
            printed = "" if c is None or c.paper is None else text.signed(c.paper, metric, 0)
            cells += [TableCell(printed, "paper")] * has_paper
        rows.append(table_row(*cells, kind=row_kind(row.arm)))
    filled = [i for i in range(len(columns)) if i == 0 or any(row.cells[i].text for row in rows)]
    rows = [TableRow([row.cells[i] for i in filled], row.kind) for row in rows]
    note = (
        "Mean paired difference [95 % interval] and verdict. It is a win or a loss of the first mixer only if the "
        "interval excludes zero, p stays below 0.05 when corrected for the number of comparisons in this table (Holm), "
        "and the mean is not zero in the digits printed here. Otherwise it is level, or there are too few cases."
    )
    return Table(f"Paired differences, {text.short_name(metric)}", [columns[i] for i in filled], rows, note)


def _point(results: Results, row: ArmResult, metric: str) -> Point:
    metrics = [run.result for run in results.runs_of(row)]
    times = [m.seconds / m.steps for m in metrics if m.seconds and m.steps]
    return Point(row.arm, row.scores[metric].mean, row.slot_numbers, float(np.mean(times)) if times else None)


def _pareto(points: list[Point], labels: dict[str, str], metric: str, place: str) -> Picture:
    figure = pareto_figure(points, labels, metric)
    caption = (
        "Mean test score against cost. The line is the Pareto front: no other method has a higher mean for less. The "
        "differences above say whether one method is better than another. Time is that of the whole training divided "
        "by its steps. It includes validation, and runs that shared a device took longer. A triangle at the lower edge "
        "stands for a method whose score, printed beside it, is below the range of the figure."
    )
    stem = "pareto-" + re.sub(r"[^\w.]+", "-", place).strip("-").lower()
    files = {f"{stem}.{kind}": figures.encoded(figure, kind) for kind in ("svg", "png")}
    return Picture(figures.source(figure), "score against cost", caption, files)


def _curves(results: Results, root: Path, rows: Sequence[ArmResult], metric: str) -> list[figures.Curve]:
    """Return what the runs logged. A log that cannot be read is left out and named in the results."""
    curves = []
    for run in (run for row in rows for run in results.runs_of(row)):
        path = root / run.folder / "log.jsonl"
        if not path.is_file():
            continue
        try:
            curves.append(_curve(run, path.read_text(encoding="utf-8"), metric))
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as e:
            results.unreadable.append(f"{path} ({' '.join(str(e).split())})")
    return curves


def _curve(run: RunRecord, log: str, metric: str) -> figures.Curve:
    curve = figures.Curve(run.arm, run.seed)
    for line in log.splitlines():
        row = json.loads(line)
        for name, steps, values in (("loss", curve.steps, curve.loss), (f"val_{metric}", curve.val_steps, curve.val)):
            if row.get(name) is not None:  # null: not finite
                steps.append(int(row["step"]))
                values.append(float(row[name]))
    return curve


def _panel(results: Results, setting: str, rows: Sequence[ArmResult], root: Path) -> Picture | None:
    """Draw the middle one of the slices that every run saved, with the first seed of each method."""
    outputs, notes, first = {}, {}, None
    for row in rows:
        try:
            example = read_example(root / results.runs_of(row)[0].folder)
        except ValueError as e:
            results.unreadable.append(str(e))
            continue
        if example is None:
            continue
        first = first or example
        if example.slice_name == first.slice_name:
            outputs[results.label(row)] = example.output
            notes[results.label(row)] = example.score
    if first is None:
        return None
    plain = next((r.name for r in results.references if r.setting == setting), "input")
    if plain != "input":
        notes[plain] = first.reference_score
    source, is_labelled = figures.panel(first.target, (plain, first.reference), outputs, notes)
    rule = "where the target has labels" if is_labelled else f"where the {plain} image errs most"
    scale = "wrong pixels" if is_labelled else "absolute, one scale"
    kind = results.data_kind(setting)
    caption = (
        f"Test slice {first.slice_name}{f' ({kind})' if kind else ''}, first seed. Below each image: the box {rule}, "
        f"and the error ({scale}). Numbers are of this slice alone{', all classes as one' if is_labelled else ''}."
    )
    return Picture(source, "target, reference and each method with zoomed boxes and errors", caption)
