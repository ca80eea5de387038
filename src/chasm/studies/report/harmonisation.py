"""The section about harmonisation: whether the operators of a run share a basis, and what a shared one costs."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chasm.studies.comparisons import FOCUS
from chasm.studies.harmony import Harmony, measure_harmony
from chasm.studies.projection import harmonised_folder
from chasm.studies.records import ArmResult, Metrics, Results
from chasm.studies.report import text
from chasm.studies.report.elements import Picture, Section, Table, row_kind, table_row
from chasm.studies.report.figures import INK, new_figure, source
from chasm.studies.statistics import difference
from chasm.train.run import load_run

TEXT = (
    "CHASM gives all frequencies of an axis one basis. Mixers with an untied basis and FNO-D need not share one. The "
    "table shows how far they do after training. An operator near the identity commutes with any other, so commutators "
    "and energy off the diagonal are also given for the operators without their mean gain (mixing)."
)
NOTE = (
    "Means are over all slots and axes of the first seed. The commutator is ||[M(k), M(l)]|| / (||M(k)|| ||M(l)||) in "
    "the Frobenius norm, mean over pairs of frequencies. The angle is that of an eigenvector to the nearest one of "
    "another frequency, one bin apart (near) or half the band apart (far), or of two random bases. Energy off the "
    "diagonal is the share of the energy of all M(k) that the best shared basis leaves out. For FNO-D the modes (k, 0) "
    "and (0, k) are measured; their matrices are not normal, so some energy stays off the diagonal even of a single "
    "one. In the last column every slot is projected onto its best shared basis by 'chasm harmonise RUN', in the seeds "
    "for which that was done."
)


def harmonisation(results: Results, root: Path | None) -> Section | None:
    """Return the section, or None if no run with weights under `root` could be without a shared basis."""
    if root is None:
        return None
    section = Section("Harmonisation measured", [TEXT])
    for setting, host in results.places():
        rows = [r for r in results.rows_of(setting, host) if _may_differ(results, r) or r.arm == FOCUS]
        if not any(_may_differ(results, r) for r in rows):
            continue
        measured = {}
        for row in rows:
            try:
                if measures := _measured(results, row, root):
                    measured[row.arm] = measures
            except ValueError as e:  # weights that cannot be read: the other methods are shown
                section.text.append(f"{results.label(row)} is missing here: {e}.")
        if not any(_may_differ(results, r) for r in rows if r.arm in measured):
            continue
        labels = {r.arm: results.label(r) for r in rows}
        title = results.place_name(setting, host)
        caption = (
            f"{title}: commutators of the operators of every pair of frequencies, mean over slots and axes. 0 is DC, 1 "
            "is Nyquist or the highest mode that FNO-D keeps."
        )
        picture = figure({labels[arm]: measures for arm, measures in measured.items()})
        section.items.append(Picture(picture, "commutators over pairs of frequencies", caption))
        section.items.append(_table(results, title, [r for r in rows if r.arm in measured], measured, root))
    return section if section.items else None


def figure(measured: Mapping[str, list[Harmony]]) -> str:
    """Draw the commutators of each method in a panel, as the mean over the members of its list."""
    means = {label: _mean_matrix([h.commutators for h in measures]) for label, measures in measured.items()}
    fig = new_figure(2.6 * len(means) + 0.9, 2.9)
    axes = fig.subplots(1, len(means), squeeze=False, sharey=True)[0]
    top = max(max(float(m.max()) for m in means.values()), 1e-3)
    shown: Any = None
    for ax, (label, matrix) in zip(axes, means.items(), strict=True):
        shown = ax.imshow(matrix, origin="lower", extent=(0, 1, 0, 1), cmap="magma_r", vmin=0, vmax=top)
        ax.set_title(label, fontsize=9.5, color=INK)
        ax.set_xlabel("$l$ / highest", fontsize=8.5)
        ax.tick_params(labelsize=8)
    axes[0].set_ylabel("$k$ / highest", fontsize=8.5)
    bar = fig.colorbar(shown, ax=axes.tolist(), shrink=0.8, pad=0.02)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("commutator", fontsize=8.5)
    return source(fig)


def _mean_matrix(matrices: list[Tensor]) -> np.ndarray:
    """Return the mean of matrices with different numbers of bins, each read at the bins of the largest."""
    bins = max(len(m) for m in matrices)
    at = [(torch.linspace(0, len(m) - 1, bins)).round().long() for m in matrices]
    return torch.stack([m[i][:, i] for m, i in zip(matrices, at, strict=True)]).mean(0).numpy()


def _may_differ(results: Results, row: ArmResult) -> bool:
    """Return True for methods whose operators need not share a basis."""
    arm = results.arms[row.arm]
    return arm.mixer == "fno-d" or (arm.mixer == "chasm" and arm.options.get("basis") == "untied")


def _measured(results: Results, row: ArmResult, root: Path) -> list[Harmony]:
    """Return the measures of all slots and axes of the first seed; none if its weights are not there."""
    folder = root / results.runs_of(row)[0].folder
    if not (folder / "weights.safetensors").is_file():
        return []
    slots: Any = load_run(folder).model.slots
    return [h for slot in slots.values() for h in measure_harmony(slot).values()]


def _table(
    results: Results, title: str, rows: list[ArmResult], measured: Mapping[str, list[Harmony]], root: Path
) -> Table:
    metric = results.metrics_of(rows[0].setting, rows)[0]
    columns = ["Mixer", "commutator", "mixing", "angle, near", "far", "random", "off the diagonal", "of mixing"]
    table_rows = []
    for row in rows:
        each = measured[row.arm]
        names = [field.name for field in fields(Harmony) if field.name != "commutators"]
        means: dict[str, Any] = {name: fmean(getattr(h, name) for h in each) for name in names}
        table_rows.append(
            table_row(
                results.label(row),
                *replace(each[0], **means).texts(),
                _lost(results, row, metric, root),
                kind=row_kind(row.arm),
            )
        )
    return Table(title, [*columns, f"{text.short_name(metric)}, harmonised − before"], table_rows, NOTE)


def _lost(results: Results, row: ArmResult, metric: str, root: Path) -> str:
    """Return the cost of the projection over the seeds it was scored for."""
    before, after = [], []
    for run in results.runs_of(row):
        scored = harmonised_folder(root / run.folder) / "metrics.json"
        if scored.is_file():
            before.append({case: values[metric] for case, values in run.result.cases.items()})
            after.append({case: values[metric] for case, values in Metrics.read(scored).cases.items()})
    return text.interval(difference(after, before, metric), metric) if before else text.UNKNOWN
