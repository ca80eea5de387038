"""The section about other resolutions: scores of runs on images of sizes they were not trained on."""

from pathlib import Path

from chasm.common.files import read_json
from chasm.studies.records import Results
from chasm.studies.report import text
from chasm.studies.report.elements import Section, Table, row_kind, table_row


def sizes_section(results: Results, root: Path | None) -> Section | None:
    """Return a table per setting and host with a column per size; None if nothing was scored at another size."""
    if root is None:
        return None
    section = Section("Other resolutions")
    for setting, host in results.places():
        rows = results.rows_of(setting, host)
        metric = results.metrics_of(setting, rows)[0]
        by_arm = {row.arm: _means(root, [run.folder for run in results.runs_of(row)], metric) for row in rows}
        sizes = sorted({size for means in by_arm.values() for size in means})
        if not sizes:
            continue
        lines = []
        for row in rows:
            means = by_arm[row.arm]
            scores = [row.scores[metric].mean, *(means.get(size) for size in sizes)]
            cells = [results.label(row), *(text.number(score, metric) for score in scores)]
            lines.append(table_row(*cells, kind=row_kind(row.arm)))
        columns = ["Mixer", "as trained", *(f"{size} x {size}" for size in sizes)]
        note = f"Mean {text.metric_name(metric)} over test cases and scored seeds. Nothing was trained again."
        section.items.append(Table(results.place_name(setting, host), columns, lines, note))
    return section if section.items else None


def _means(root: Path, folders: list[str], metric: str) -> dict[int, float]:
    """Return size to the mean score over seeds."""
    scores: dict[int, list[float]] = {}
    for folder in folders:
        for file in sorted((root / folder / "sizes").glob("*.json")):
            content = read_json(file)
            scores.setdefault(int(content["size"]), []).append(float(content["mean"][metric]))
    return {size: sum(values) / len(values) for size, values in scores.items()}
