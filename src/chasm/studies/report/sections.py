"""The sections of a report: from the structure of `results` to text, tables and figures, in the order they are read."""

import math
from pathlib import Path
from typing import Any

from chasm.common.text import counted
from chasm.studies.agreement import disagreements
from chasm.studies.comparisons import BASE, FOCUS, mean_falsification
from chasm.studies.records import ArmResult, Falsification, Results
from chasm.studies.report import learned as learned_operators
from chasm.studies.report import text
from chasm.studies.report.elements import Picture, Section, Table, TableCell, TableRow, table_row, verdict_cell

MAX_METHODS_IN_ORDER = 8  # a longer list is easier to read in the table


def facts(results: Results) -> list[str]:
    """Return short facts about the study, for the line below the title."""
    seeds = {run.seed for run in results.runs if run.status == "done"}
    facts = [results.study.source, results.data_kind()]
    facts += [f"scale {results.scale}"] if results.scale else []
    facts += [f"protocol {results.protocol}"] if results.protocol else []
    facts.append(f"{results.counts.get('done', 0)} of {sum(results.counts.values())} runs finished")
    if seeds and not results.is_cost:
        facts.append(counted(len(seeds), "seed"))
    return [fact for fact in facts if fact]


def notices(results: Results) -> list[str]:
    """Return what a reader must know before any number."""
    lines, kind = [], results.data_kind()
    if kind == "proxy data":
        beside = "; the paper's numbers beside them are, so compare orders and signs, not levels"
        lines.append(
            "Proxy data: small public images replace the paper's datasets. These are not results on those "
            f"datasets{beside if any(row.paper for row in results.rows) else ''}."
        )
    elif kind == "embedded data":
        lines.append(
            "Embedded data: drawn slices or a few bundled photographs. The numbers show that the software "
            "works and how the methods behave on easy images, not which method wins on real data."
        )
    if not results.is_cost and results.comparisons:
        if max(c.seeds for c in results.comparisons) < 2:
            lines.append("One seed: the intervals cover other cases, but not other runs of the training.")
        if any(c.verdict == "too few cases" for c in results.comparisons):
            lines.append("Some comparisons have too few test cases for a verdict; only their intervals are printed.")
    for setting, host in results.places():
        runs = [run for row in results.rows_of(setting, host) for run in results.runs_of(row)]
        for line in disagreements(runs):
            lines.append(f"{results.place_name(setting, host)}: {line}.")
    missing = sum(n for status, n in results.counts.items() if status != "done")
    if missing:
        lines.append(f"{missing} of {sum(results.counts.values())} runs are not finished and not in the tables.")
    lines += [f"This file cannot be read and is not shown: {line}" for line in results.unreadable]
    return lines


def summary(results: Results) -> Section:
    """Return one or two sentences about every setting in every host."""
    section = Section("In short")
    for setting, host in results.places():
        rows = results.rows_of(setting, host)
        metric = results.metrics_of(setting, rows)[0]
        name, place = text.short_name(metric), results.place_name(setting, host)
        scored = [row for row in rows if math.isfinite(row.scores[metric].mean)]
        if not scored:
            section.points.append(f"{place}: no method has a score that is a number.")
        elif results.is_cost:
            least = min(scored, key=lambda row: row.scores[metric].mean)
            value = text.number(least.scores[metric].mean, metric)
            section.points.append(f"{place}: least {name} {results.label(least)}, {value}.")
        else:
            line = f"{place}: {_order(results, setting, scored, metric)}."
            section.points.append(line + _verdicts(results, setting, host, metric))
    if not section.points:
        section.text.append("No run is finished yet.")
    return section


def _order(results: Results, setting: str, rows: list[ArmResult], metric: str) -> str:
    """Name the methods from the highest mean score to the lowest, or only the highest if there are many."""
    means = {results.label(row): row.scores[metric].mean for row in rows}
    means |= {r.name: r.mean[metric] for r in results.references if r.setting == setting}
    ranked = sorted(means, key=lambda label: means[label], reverse=True)
    best = f"highest mean {text.short_name(metric)} {ranked[0]}, {text.number(means[ranked[0]], metric)}"
    best += f" {text.UNITS[metric]}" if metric in text.UNITS else ""
    if len(ranked) > MAX_METHODS_IN_ORDER:
        return best
    others = [f"{label} {text.number(means[label], metric)}" for label in ranked[1:]]
    return ", then ".join([best, *([", ".join(others)] if others else [])])


def _verdicts(results: Results, setting: str, host: str, metric: str) -> str:
    """Say how CHASM does against the Baseline, and against all others."""
    ours = [c for c in results.comparisons_of(setting, host, metric) if c.arm == FOCUS]
    line = "".join(
        f" CHASM against the Baseline: {text.interval(c, metric)}, {c.verdict}." for c in ours if c.against == BASE
    )
    others = [c for c in ours if c.against != BASE]
    if len(others) == 1:
        rival = results.arms[others[0].against].label
        line += f" CHASM against {rival}: {text.interval(others[0], metric)}, {others[0].verdict}."
    elif others:
        plurals = {"win": "wins", "level": "level", "loss": "losses", "too few cases": "without a verdict"}
        singular = {"too few cases": "without a verdict"}
        counts = []
        for verdict, plural in plurals.items():
            if n := sum(c.verdict == verdict for c in others):
                counts.append(f"{n} {plural if n > 1 else singular.get(verdict, verdict)}")
        line += f" CHASM against the {len(others)} others: {', '.join(counts)}."
    return line


def falsification(results: Results) -> Section | None:
    """Return CHASM's gain under structured and random masks, with the mean row of the paper's table."""
    if not results.falsification:
        return None
    rows = []
    for f in results.falsification:
        paper = f.paper or {}
        rivals = [results.arms[rival].label for rival in (f.rival, f.rival_random)]
        gains = [verdict_cell(text.interval(gain, f.metric), gain.verdict) for gain in (f.structured, f.random)]
        printed = [TableCell(_printed_gain(paper.get(mask)), "paper") for mask in ("structured", "random")]
        printed_drop = TableCell(f"{paper['drop']:.1f} %" if paper else "", "paper")
        place, draws = results.place_name(f.setting, f.host), counted(f.draws, "draw")
        rows.append(table_row(place, "structured", rivals[0], gains[0], printed[0], "", TableCell("", "paper")))
        rows.append(table_row("", f"random, {draws}", rivals[1], gains[1], printed[1], _drop_text(f), printed_drop))
    if mean := results.paper.get("falsification", {}).get("mean"):
        rows += _mean_rows(results.falsification, mean)
    columns = ["setting", "mask", "strongest rival", "CHASM's gain", "paper", "drop", "paper"]
    note = (
        "The gain is over the rival with the highest test mean, as in the paper; this choice favours the rival. The "
        "random gain is the mean over the draws of the mask, with one rival for all draws, and its interval also "
        "covers other draws. The drop is one minus the random gain over the structured gain. It is undefined unless "
        "the structured gain is above zero, and has no interval unless the whole interval of that gain is above zero."
    )
    return Section("Random-mask falsification", items=[Table("", columns, rows, note)])


def _printed_gain(value: float | None) -> str:
    return text.UNKNOWN if value is None else f"{value:+.2f}"


def _drop_text(f: Falsification) -> str:
    if not math.isfinite(f.drop.mean):
        return "undefined"
    if not (math.isfinite(f.drop.low) and math.isfinite(f.drop.high)):
        return f"{f.drop.mean:.0f} % (no interval)"
    return f"{f.drop.mean:.0f} % [{f.drop.low:.0f}, {f.drop.high:.0f}]"


def _mean_rows(settings: list[Falsification], printed: dict[str, float]) -> list[TableRow]:
    """Return the mean over settings, of gains and of drops, as in the paper."""
    structured, random, mean_drop = mean_falsification(settings)
    gains = [text.signed(gain, settings[0].metric) for gain in (structured, random)]
    papers = [TableCell(_printed_gain(printed[mask]), "paper") for mask in ("structured", "random")]
    drop = f"{mean_drop:.0f} %" if math.isfinite(mean_drop) else "undefined"
    printed_drop = TableCell(f"{printed['drop']:.1f} %", "paper")
    mean = f"Mean of {counted(len(settings), 'setting')}"
    return [
        table_row(mean, "structured", "", gains[0], papers[0], "", TableCell("", "paper")),
        table_row("", "random", "", gains[1], papers[1], drop, printed_drop),
    ]


def printed_gains(results: Results) -> Section | None:
    """Return CHASM's gain over the one rival of each setting beside the gain that the paper prints."""
    printed = results.paper.get("gain")
    if not printed or not results.comparisons:
        return None
    rows = []
    for c in results.comparisons:
        if c.arm == FOCUS and c.metric == "psnr" and c.setting in printed:
            names = results.place_name(c.setting, c.host), results.arms[c.against].label
            gain = verdict_cell(text.interval(c, c.metric), c.verdict)
            rows.append(table_row(*names, gain, TableCell(_printed_gain(printed[c.setting]), "paper")))
    return Section("Gain over the strongest rival", items=[Table("", ["setting", "rival", "gain", "paper"], rows)])


def selections(results: Results) -> Section | None:
    """Return the chosen step size of every arm and the validation scores behind it; None unless it was tuned."""
    if not results.selections:
        return None
    multipliers = sorted({m for s in results.selections for m in s.scores}, key=float)
    rows = []
    for s in results.selections:
        metric = results.settings[s.setting].metrics[0]
        cells = []
        for m in multipliers:
            is_chosen = s.multiplier is not None and float(m) == s.multiplier
            score = text.number(s.scores[m], metric) if m in s.scores else ""
            cells.append(TableCell(score, "best" if is_chosen else ""))
        rows.append(table_row(results.place_name(s.setting, s.host), results.arms[s.arm].label, *cells))
    note = (
        "Validation score of a short run with seed 0 for each multiplier of the spectral step size. The bold one is "
        "chosen and trained at full length. A dash stands for a run that diverged or has not run yet. An "
        "empty cell stands for a multiplier that was not tried."
    )
    columns = ["setting", "mixer", *(f"×{m}" for m in multipliers)]
    return Section("Step sizes chosen on validation", items=[Table("", columns, rows, note)])


def learned(results: Results, root: Path | None) -> Section | None:
    """Return what every CHASM variant learned, from the first seed of each; None without weights to read."""
    if root is None:
        return None
    section = Section("What CHASM learned")
    variants = [row for row in results.rows if results.arms[row.arm].mixer == "chasm"]
    for row in sorted(variants, key=lambda row: row.arm != FOCUS):
        run = results.runs_of(row)[0]
        weights = root / run.folder / "weights.safetensors"
        gain = str(results.arms[row.arm].options.get("gain", "positive"))
        try:
            operators = learned_operators.read(weights, gain) if weights.is_file() else []
        except ValueError as e:
            results.unreadable.append(str(e))
            continue
        if not operators:
            continue
        title = f"{results.label(row)}: {results.place_name(row.setting, row.host)}"
        caption = (
            f"{title}, first slots, seed {run.seed}. U starts as the identity and all gains at 1. Each row of a gain "
            "picture is one direction (column of U) over frequency. Rows are sorted by the gain at high frequencies "
            "minus that at low ones. "
        )
        caption += "Signed gains are coloured linearly." if gain == "signed" else "Colours are logarithmic."
        section.items.append(Picture(learned_operators.figure(operators, gain), "basis and gains", caption))
        section.items.append(_learned_table(title, operators))
    if not section.items:
        return None
    section.text.append(
        "With flat gains and a basis at the identity the spectral core only passes its input. Any effect then comes "
        "from the convolutions around it."
    )
    return section


def _learned_table(title: str, operators: list[learned_operators.Learned]) -> Table:
    rows = []
    for x in operators:
        axis = learned_operators.AXES.get(x.axis, x.axis)
        bins, channels = x.gains.shape
        angle = text.UNKNOWN if x.rotation is None else f"{x.rotation:.1f}°"
        gains = [f"{value:.3f}" for value in (x.gains.min(), x.gains.mean(), x.gains.max())]
        spreads = [f"{value:.4f}" for value in (x.over_frequency, x.over_directions)]
        rows.append(table_row(f"{x.slot}", axis, f"{channels}", f"{bins}", angle, *gains, *spreads))
    columns = ["slot", "axis", "C", "bins", "mean turn of U", "least gain", "mean", "largest", "std over frequency"]
    note = (
        "The turn is the angle between a channel and the direction that was this channel at the start. The standard "
        "deviation over frequency is a mean over directions, and that over directions is a mean over frequencies."
    )
    return Table(title, [*columns, "std over directions"], rows, note)


def unfinished(results: Results) -> Section | None:
    """Return the runs that are not finished, and what went wrong."""
    runs = [run for run in results.runs if run.status != "done"]
    if not runs:
        return None
    rows = [table_row(run.key, run.status, run.error or "") for run in runs]
    table = Table("", ["run", "state", "error"], rows, is_text=True)
    return Section("Runs that are not finished", items=[table])


def protocol(results: Results) -> Section | None:
    """Return what all runs of a setting in a host have in common."""
    finished = [run for run in results.runs if run.metrics and run.config]
    if not finished or results.is_cost:
        return None
    section = Section("Protocol")
    section.text.append("Within a setting and host, runs differ only in the slot, its step size and the seed.")
    for setting, host in results.places():
        runs = [run for run in finished if (run.setting, run.host) == (setting, host)]
        if not runs or runs[0].config is None:
            continue
        config, metrics = runs[0].config, runs[0].result
        training = {k: v for k, v in config.train.model_dump().items() if v is not None and k != "spectral_multiplier"}
        multipliers = sorted({run.multiplier for run in runs if run.multiplier is not None})
        lines = {
            "data": f"{config.data.name} {text.options_text(config.data.options)}",
            "source": f"{metrics.source}{' (proxy)' if metrics.proxy else ''}",
            "test cases": str(len(metrics.cases)),
            "task": f"{config.task.name} {text.options_text(config.task.options)}",
            "mask": text.options_text(metrics.task.get("mask") or {}) or "none",
            "metric protocol": f"{metrics.protocol}: {metrics.meaning}",
            "host": f"{config.backbone.name} {text.options_text(config.backbone.options)}",
            "training": text.options_text(training),
            "spectral step size": ", ".join(f"×{m:g}" for m in multipliers) + " the learning rate" * bool(multipliers),
            "selection": "best validation score; the test split is read once, at the end",
        }
        rows = [table_row(name, value) for name, value in lines.items() if value.strip()]
        section.items.append(Table(results.place_name(setting, host), ["", ""], rows, is_text=True))
    return section


def runs(results: Results) -> Section | None:
    """Return the section about the hardware, code and time of the runs."""
    finished = [run for run in results.runs if run.metrics]
    if not finished:
        return None
    environments = [run.environment for run in finished if run.environment]
    origin = {
        "hardware": {e.device for e in environments},
        "versions": {text.versions(e) for e in environments},
        "commit": {text.commit(e) for e in environments},
        "command": {e.command for e in environments},
    }
    rows = [table_row(name, "; ".join(sorted(values))) for name, values in origin.items() if any(values)]
    if results.is_cost:
        line = f"{counted(len(finished), 'model')} counted; nothing was trained."
        return Section("Runs", [line], items=[Table("", ["", ""], rows, is_text=True)])
    seconds = sum(run.result.seconds or 0 for run in finished)
    rows.append(table_row("time", f"{text.duration(seconds)} of training over {counted(len(finished), 'run')}"))
    columns = ["run", "seed", "step size ×", "best step", "steps", "time", "peak memory", "device"]
    lines = []
    for run in finished:
        m = run.result
        memory = f"{m.peak_memory / 2**30:.2f} GiB" if m.peak_memory else None
        multiplier = None if run.multiplier is None else f"{run.multiplier:g}"
        values = [run.key, run.seed, multiplier, m.best_step, m.steps, text.duration(m.seconds), memory, m.device]
        lines.append(table_row(*(text.UNKNOWN if value is None else str(value) for value in values)))
    return Section("Runs", items=[Table("", ["", ""], rows, is_text=True), Table("", columns, lines)])


def score_lines(results: Results) -> list[dict[str, Any]]:
    """Return one line per setting, host, mixer and metric, for CSV."""
    return [
        {
            "setting": row.setting,
            "host": row.host,
            "arm": row.arm,
            "data": results.data_kind(row.setting) or "as named",
            "metric": metric,
            "mean": score.mean,
            "std_cases": score.std_cases,
            "std_seeds": score.std_seeds,
            "cases": len(score.cases) or None,
            "seeds": len(row.seeds),
            "multiplier": row.multiplier,
            "paper_mean": row.paper[metric].mean if metric in row.paper else None,
            "paper_spread": row.paper[metric].spread if metric in row.paper else None,
            "slot_numbers": row.slot_numbers,
            "macs": row.macs,
            "seconds": row.seconds,
        }
        for row in results.rows
        for metric, score in row.scores.items()
    ]
