"""Protocol `tuned`: the step-size multiplier of each arm, chosen on validation.

Every arm with spectral parameters trains a short run per multiplier of a grid, with seed 0. The one with the best
validation score is chosen. When that is the smallest or largest of the grid, the grid is extended by about a factor of
three in that direction, at most three times. Then the chosen multiplier alone is trained at full length with all seeds.

Only this file makes a plan depend on results; other files call `with_selections` for the present state.
"""

import math
from dataclasses import replace
from pathlib import Path

from chasm.common.text import counted
from chasm.studies.factors import MULTIPLIERS, SETTINGS
from chasm.studies.plan import Plan, Selection
from chasm.studies.records import Metrics
from chasm.studies.state import has_diverged, state

MAX_EXTENSIONS = 3


def with_selections(plan: Plan, root: str | Path) -> Plan:
    """Return the plan with the multipliers that the selection runs under `root` decide so far."""
    return replace(plan, selections=tuple(_decide(plan, selection, Path(root)) for selection in plan.open_selections))


def extended(grid: tuple[float, ...], best: float) -> tuple[float, ...]:
    """Return the grid with one more multiplier if the best one is at its edge.

    >>> extended((1, 10, 30, 100), 100), extended((1, 10, 30, 100), 1)
    ((1, 10, 30, 100, 300), (0.3, 1, 10, 30, 100))
    >>> extended((1, 10, 30, 100), 30)
    (1, 10, 30, 100)
    """
    if best == grid[-1]:
        return (*grid, _half_decade(best, +1))
    return (_half_decade(best, -1), *grid) if best == grid[0] else grid


def _half_decade(multiplier: float, steps: int) -> float:
    """Return the multiplier that is `steps` places further in the sequence .., 0.1, 0.3, 1, 3, 10, 30, .."""
    value = float(f"{10 ** ((round(2 * math.log10(multiplier)) + steps) / 2):.0e}")
    return int(value) if value >= 1 else value


def _decide(plan: Plan, selection: Selection, root: Path) -> Selection:
    grid: tuple[float, ...] = MULTIPLIERS
    for extension in range(MAX_EXTENSIONS + 1):
        scores = _scores(plan, replace(selection, grid=grid), root)
        if len(scores) < len(grid):
            return replace(selection, grid=grid, scores=scores)
        # Of equal scores the smallest multiplier is the best. A run that diverged is worse than any other.
        best = max(grid, key=lambda m: (-math.inf if scores[m] is None else scores[m], -m))
        wider = extended(grid, best)
        if wider == grid or extension == MAX_EXTENSIONS:
            break
        grid = wider
    return replace(selection, grid=grid, scores=scores, chosen=best)


def _scores(plan: Plan, selection: Selection, root: Path) -> dict[float, float | None]:
    """Return the validation score of every multiplier whose selection run is finished, None for one that diverged."""
    scores: dict[float, float | None] = {}
    for multiplier in selection.grid:
        run = plan.selection_run(selection, multiplier)
        folder = plan.folder(root, run)
        if state(folder, run.config)[0] == "done":
            value = Metrics.read(folder / "metrics.json").best_val.get(SETTINGS[selection.setting].selection_metric)
            scores[multiplier] = value if value is not None and math.isfinite(value) else None
        elif has_diverged(folder):
            scores[multiplier] = None
    return scores


def assume_choices(plan: Plan) -> Plan:
    """Return the plan with a multiplier for every arm, so that runs without a chosen multiplier can be counted."""
    selections = (replace(s, chosen=s.grid[0] if s.chosen is None else s.chosen) for s in plan.open_selections)
    return replace(plan, selections=tuple(selections))


def stage(plan: Plan) -> str:
    """Say in one line how many step sizes are chosen; empty if there is nothing to choose."""
    selections = plan.open_selections
    if not selections:
        return ""
    decided = sum(s.chosen is not None for s in selections)
    text = f"step sizes chosen for {decided} of {counted(len(selections), 'arm')}"
    missing = sum(len(s.grid) - len(s.scores) for s in selections)
    if missing:
        text += f"; {counted(missing, 'selection run')} to do before the others"
    return text


def choice_text(selection: Selection) -> str:
    """Say what was chosen from which validation scores: "x30 of x1 29.65, x10 29.80, x30 30.14, x100 30.10"."""
    tried = ", ".join(f"x{m:g} {_score_text(selection, m)}" for m in selection.grid)
    return f"x{selection.chosen:g} of {tried}" if selection.chosen is not None else f"not chosen yet: {tried}"


def _score_text(selection: Selection, multiplier: float) -> str:
    if multiplier not in selection.scores:
        return "to do"
    score = selection.scores[multiplier]
    return "diverged" if score is None else f"{score:.4g}"
