"""The section about sampling: CHASM's gain over the strongest rival against the coherence of the mask."""

from chasm.studies.comparisons import FOCUS
from chasm.studies.factors import RIVALS
from chasm.studies.records import Comparison, Results
from chasm.studies.report import text
from chasm.studies.report.elements import Section, Table, TableCell, TableRow

MIN_MASKS = 3  # fewer do not show a trend


def sampling_section(results: Results) -> Section | None:
    """Return CHASM's gain for every mask of a host, from the most coherent one on; None with too few masks.

    Args:
        results: of a study.
    """
    if results.is_cost:
        return None
    found = {}
    for setting, host in results.places():
        coherence, gain = _coherence(results, setting, host), _gain(results, setting, host)
        if coherence is not None and gain is not None:
            found[setting, host] = (coherence, gain)
    rows = []
    for host in results.hosts:
        here = sorted(((c, s, gain) for (s, h), (c, gain) in found.items() if h == host), key=lambda x: -x[0])
        if len({coherence for coherence, *_ in here}) < MIN_MASKS:
            continue
        for coherence, setting, gain in here:
            kind = gain.verdict if gain.verdict in ("win", "loss") else ""
            names = [results.place_name(setting, host), f"{coherence:.3f}", results.arms[gain.against].label]
            difference = TableCell(f"{text.interval(gain, gain.metric)} {gain.verdict}", kind)
            rows.append(TableRow([*map(TableCell, names), difference]))
    if not rows:
        return None
    note = (
        "Coherence: the largest side lobe of the mask's point spread function, 0 to 1. Gain: over the rival with the "
        "highest test mean under that mask. The paper's claim is that the gain falls with the coherence."
    )
    columns = ["setting", "coherence", "strongest rival", "CHASM's gain"]
    return Section("Gain against coherence", items=[Table("", columns, rows, note)])


def _coherence(results: Results, setting: str, host: str) -> float | None:
    row = results.rows_of(setting, host)[0]
    mask = results.runs_of(row)[0].result.task.get("mask") or {}
    value: float | None = mask.get("coherence")
    return value


def _gain(results: Results, setting: str, host: str) -> Comparison | None:
    """Return the comparison of CHASM with the strongest rival, None if either is not finished."""
    rows = [row for row in results.rows_of(setting, host) if row.arm in RIVALS]
    if not rows:
        return None
    metric = results.metrics_of(setting, rows)[0]
    strongest = max(rows, key=lambda row: row.scores[metric].mean)
    pairs = results.comparisons_of(setting, host, metric)
    return next((c for c in pairs if (c.arm, c.against) == (FOCUS, strongest.arm)), None)
