"""`chasm harmonise`: how far the operators of a run share a basis, and what a shared one costs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chasm.common.extras import require
from chasm.common.progress import ProgressBar
from chasm.common.tables import print_table
from chasm.common.text import counted

if TYPE_CHECKING:
    from chasm.studies.harmony import Harmony
    from chasm.studies.projection import Projection

AXES = {"ch": "height", "cw": "width"}
LEGEND = """\
commutator: ||[M(k), M(l)]|| / (||M(k)|| ||M(l)||), mean over pairs of frequencies. mixing: without the mean gains.
near, far, chance: angle between eigenbases one bin apart, half the band apart, and between random bases.
off diagonal: share of the energy of all M(k) that the best shared basis leaves out. of mixing: the same share of
their mixing parts."""


def harmonise(
    run: Path = typer.Argument(..., help="Run folder of 'chasm train', with CHASM or FNO-D in its slots."),
    out: Path | None = typer.Option(None, "--out", "-o", help="Folder of the harmonised run. Default: RUN/harmonised."),
    data: str | None = typer.Option(None, help="Folder of the dataset. Default: that of the training."),
    as_json: bool = typer.Option(False, "--json", help="Print the whole record as JSON."),
) -> None:
    """Measure how far the operators of a run share a basis; project untied ones onto the best shared basis.

    If the run has mixer.options.basis=untied, every slot is projected, and the run is scored on its test split before
    and after. The harmonised run is a run folder like any other, for 'chasm eval' and 'chasm reconstruct'. If it is in
    RUN/harmonised, 'chasm report' shows what was lost.
    """
    require("train", "data")
    from chasm.common.devices import usable_device
    from chasm.common.files import json_safe
    from chasm.studies.harmony import measure_harmony
    from chasm.studies.projection import has_untied, project_run
    from chasm.train.run import load_run

    device = usable_device()
    loaded = load_run(run, device)
    slots: Any = loaded.model.slots
    measured: dict[str, dict[str, Harmony]] = {}
    with ProgressBar(len(slots)) as bar:
        for name, slot in slots.items():
            measured[name] = measure_harmony(slot)
            bar.advance(f"slot {name}")
    if not any(measured.values()):
        raise ValueError(f"{run}: its slots have no spectral core to measure: give a run with CHASM or FNO-D")
    projection = project_run(loaded, out, device=device, data_path=data) if has_untied(loaded.model) else None
    if as_json:
        typer.echo(json.dumps(json_safe(_record(measured, projection)), indent=2))
        return
    _print_harmony(measured)
    if projection is None:
        typer.echo("No slot has an untied basis: nothing was projected.")
    else:
        _print_projection(projection)


def _print_harmony(measured: "dict[str, dict[str, Harmony]]") -> None:
    columns = ["slot", "axis", "commutator", "mixing", "near", "far", "chance", "off diagonal", "of mixing"]
    rows = []
    for slot, axes in measured.items():
        for axis, h in axes.items():
            rows.append([slot, AXES.get(axis, axis), *h.texts()])
    print_table(columns, rows, right=columns[2:])
    typer.echo(LEGEND)


def _print_projection(projection: "Projection") -> None:
    from chasm.studies.report import text

    columns = ["test score", "untied", "harmonised", "difference", "95 % interval"]
    rows, cases = [], len(projection.before)
    for metric in next(iter(projection.before.values())):
        d = projection.difference(metric)
        means = [sum(c[metric] for c in side.values()) / cases for side in (projection.before, projection.after)]
        name = text.metric_name(metric)
        limits = f"[{text.signed(d.low, metric)}, {text.signed(d.high, metric)}]"
        rows.append([name, *(text.number(m, metric) for m in means), text.signed(d.mean, metric), limits])
    print_table(columns, rows, right=columns[1:])
    typer.echo(f"Paired over {counted(cases, 'case')}. Harmonised run: {projection.folder}")


def _record(measured: "dict[str, dict[str, Harmony]]", projection: "Projection | None") -> dict[str, Any]:
    slots = {
        slot: {axis: asdict(h) | {"commutators": h.commutators.tolist()} for axis, h in axes.items()}
        for slot, axes in measured.items()
    }
    if projection is None:
        return {"slots": slots, "projection": None}
    metrics = next(iter(projection.before.values()))
    scored = {**asdict(projection), "folder": str(projection.folder)}
    scored["difference"] = {metric: asdict(projection.difference(metric)) for metric in metrics}
    return {"slots": slots, "projection": scored}
