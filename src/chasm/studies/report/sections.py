"""The sections of a report: from the structure of `results` to text, tables and figures, in the order they are read."""

from pathlib import Path
from typing import Any

from chasm.common.text import counted
from chasm.studies.report import learned as learned_operators
from chasm.studies.report import words as w
from chasm.studies.report.words import Cell, Picture, Results, Row, Section, Table


def facts(results: Results) -> list[str]:
    counts = results["counts"]
    seeds = sorted({c["seed"] for c in results["cells"] if c["status"] == "done"})
    found = [results["study"]["source"], w.data_word(results)]
    found += [f"{k} {results[k]}" for k in ("scale", "protocol") if results.get(k)]
    found.append(f"{counts.get('done', 0)} of {sum(counts.values())} runs finished")
    if seeds and results["study"]["kind"] == "train":
        found.append(counted(len(seeds), "seed"))
    return [f for f in found if f]


def notices(results: Results) -> list[str]:
    """What a reader must know before any number."""
    found, word = [], w.data_word(results)
    titles = ", ".join(s["title"] for s in results["settings"].values())
    if word == "proxy data":
        found.append(
            f"Proxy data: small public images stand in for the datasets of {titles}. These are not results on those "
            "datasets; the paper's numbers beside them are, so compare orders and signs, not levels."
        )
    elif word == "embedded data":
        found.append(
            "Embedded data: drawn slices or a few bundled photographs. The numbers show that the machinery works and "
            "how the methods behave on easy images, not who wins on real data."
        )
    if results["study"]["kind"] == "train" and results["comparisons"]:
        if max(c["seeds"] for c in results["comparisons"]) < 2:
            found.append("One seed: the intervals are about other cases, not about other runs of the same training.")
        if any(c["verdict"] == "too few cases" for c in results["comparisons"]):
            found.append("Too few test cases for a verdict in some comparisons: their intervals are printed, no more.")
    missing = sum(n for status, n in results["counts"].items() if status != "done")
    if missing:
        found.append(f"{missing} of {sum(results['counts'].values())} runs are not finished: the tables lack them.")
    return found


def summary(results: Results) -> Section:
    section = Section("In short")
    for setting, host in w.places(results):
        rows = w.rows_of(results, setting, host)
        metric = w.metrics_of(results, setting, rows)[0]
        if results["study"]["kind"] == "cost":
            least = min(rows, key=lambda r: r["scores"][metric]["mean"])
            section.points.append(
                f"{w.place_name(results, setting, host)}: least {w.NAMES.get(metric, metric)} "
                f"{w.label(results, least)}, {w.number(least['scores'][metric]['mean'], metric)}."
            )
            continue
        best = max(rows, key=lambda r: r["scores"][metric]["mean"])
        text = (
            f"{w.place_name(results, setting, host)}: highest mean {w.NAMES.get(metric, metric)} "
            f"{w.label(results, best)}, {w.with_unit(best['scores'][metric]['mean'], metric)}."
        )
        section.points.append(text + _verdicts(results, setting, host, metric))
    if not section.points:
        section.text.append("No run is finished yet.")
    return section


def _verdicts(results: Results, setting: str, host: str, metric: str) -> str:
    """CHASM against the Baseline, and against all others, in words."""
    ours = [c for c in w.comparisons_of(results, setting, host, metric) if c["arm"] == w.FOCUS]
    text = ""
    for c in ours:
        if c["against"] == w.BASE:
            text += f" CHASM against the Baseline: {w.interval(c, metric)}, {c['verdict']}."
    others = [c["verdict"] for c in ours if c["against"] != w.BASE]
    if others:
        words = {"win": ("win", "wins"), "level": ("level", "level"), "loss": ("loss", "losses")}
        words["too few cases"] = ("without a verdict", "without a verdict")
        counts = [f"{n} {words[v][n > 1]}" for v in words if (n := others.count(v))]
        text += f" CHASM against the {counted(len(others), 'other')}: {', '.join(counts)}."
    return text


# --- beside the places --------------------------------------------------------------------------------------------


def falsification(results: Results) -> Section | None:
    if not results["falsification"]:
        return None
    found = []
    for f in results["falsification"]:
        m, paper = f["metric"], f["paper"] or {}
        cells = [Cell(w.place_name(results, f["setting"], f["host"]))]
        for side in ("structured", "random"):
            rival = results["arms"][f["rival" if side == "structured" else "rival_random"]]["label"]
            kind = f[side]["verdict"] if f[side]["verdict"] in ("win", "loss") else ""
            cells += [Cell(rival), Cell(f"{w.interval(f[side], m)}", kind), Cell(w.gain(paper.get(side)), "paper")]
        d = f["drop"]
        open_ended = d["low"] is None or d["high"] is None
        cells.append(Cell("undefined" if open_ended else f"{d['mean']:.0f} % [{d['low']:.0f}, {d['high']:.0f}]"))
        cells.append(Cell(f"{paper['drop']:.1f} %" if paper else "–", "paper"))
        found.append(Row(cells))
    each = ["strongest rival", "CHASM's gain", "paper"]
    columns = ["setting", *each, *(f"{s}, random" for s in each), "drop", "paper"]
    note = (
        "Gain over the rival with the highest test mean, as in the paper: a choice in the rival's favour. Drop: one "
        "minus random over structured; undefined where the structured gain is not above zero."
    )
    return Section("Random-mask falsification", items=[Table("", columns, found, note)])


def learned(results: Results, root: Path | None) -> Section | None:
    """Of each setting in each host, the first seed of CHASM proper."""
    if root is None:
        return None
    section = Section("What CHASM learned")
    for row in (r for r in results["rows"] if r["arm"] == w.FOCUS):
        cell = w.cells_of(results, [row], first_seed=True)[0]
        weights = root / cell["folder"] / "weights.safetensors"
        if not weights.is_file():
            continue
        found = learned_operators.read(weights, results["arms"][row["arm"]]["options"].get("gain", "positive"))
        if not found:
            continue
        title = w.place_name(results, row["setting"], row["host"])
        caption = (
            f"{title}, first slots, seed {cell['seed']}. U starts as the identity and all gains at 1. Each row of a "
            "gain picture is one direction (column of U) over frequency, ordered by how it leans from low to high."
        )
        section.items.append(Picture(learned_operators.figure(found), "basis and gains", caption))
        section.items.append(_learned_table(title, found))
    if not section.items:
        return None
    section.text.append(
        "Flat gains and a basis at the identity mean that the spectral core does nothing but pass its input; "
        "any effect is then that of the convolutions around it."
    )
    return section


def _learned_table(title: str, found: list[learned_operators.Learned]) -> Table:
    rows = []
    for x in found:
        turned = "–" if x.rotation is None else f"{x.rotation:.1f}°"
        values = [f"{x.slot}", {"ch": "height", "cw": "width"}.get(x.axis, x.axis), f"{x.gains.shape[1]}"]
        values += [
            f"{x.gains.shape[0]}",
            turned,
            f"{x.gains.min():.3f}",
            f"{x.gains.mean():.3f}",
            f"{x.gains.max():.3f}",
        ]
        values += [f"{x.over_frequency:.4f}", f"{x.over_directions:.4f}"]
        rows.append(Row([Cell(v) for v in values]))
    columns = ["slot", "axis", "C", "bins", "mean turn of U", "least gain", "mean", "largest", "std over frequency"]
    note = (
        "Turn: angle between a channel and the direction that started on it. Standard deviations: over frequency, mean "
        "over directions; and over directions, mean over frequencies."
    )
    return Table(title, [*columns, "std over directions"], rows, note)


def unfinished(results: Results) -> Section | None:
    cells = [c for c in results["cells"] if c["status"] != "done"]
    if not cells:
        return None
    rows = [Row([Cell(c["key"]), Cell(c["status"]), Cell(c["error"] or "")]) for c in cells]
    return Section("Runs that are not finished", items=[Table("", ["run", "state", "error"], rows, words=True)])


def protocol(results: Results) -> Section | None:
    """What every run of a setting in a host had in common."""
    done = [c for c in results["cells"] if c["metrics"] and c.get("config")]
    if not done or results["study"]["kind"] == "cost":
        return None
    section = Section("Protocol")
    section.text.append("Within a setting and host, runs differ in the slot, its step size and the seed, nothing else.")
    for setting, host in w.places(results):
        cells = [c for c in done if (c["setting"], c["host"]) == (setting, host)]
        if not cells:
            continue
        config, metrics = cells[0]["config"], cells[0]["metrics"]
        t = {k: v for k, v in config["train"].items() if v is not None and k != "spectral_multiplier"}
        multipliers = sorted({c["config"]["train"]["spectral_multiplier"] for c in cells})
        lines = {
            "data": f"{config['data']['name']} {w.options_text(config['data']['options'])}",
            "source": f"{metrics.get('source', '')}{' (proxy)' if metrics.get('proxy') else ''}",
            "test cases": str(len(metrics.get("cases", {}))),
            "task": f"{config['task']['name']} {w.options_text(config['task']['options'])}",
            "mask": w.options_text(metrics.get("task", {}).get("mask", {})) or "none",
            "metric protocol": f"{metrics.get('protocol', '')}: {metrics.get('meaning', '')}",
            "host": f"{config['backbone']['name']} {w.options_text(config['backbone']['options'])}",
            "training": w.options_text(t),
            "spectral step size": ", ".join(f"×{m:g}" for m in multipliers) + " the learning rate",
            "selection": "best validation score; the test split is read once, at the end",
        }
        rows = [Row([Cell(k), Cell(v)]) for k, v in lines.items() if v.strip()]
        section.items.append(Table(w.place_name(results, setting, host), ["", ""], rows, words=True))
    return section


def runs(results: Results) -> Section | None:
    done = [c for c in results["cells"] if c["metrics"]]
    if not done:
        return None
    seconds = sum(c["metrics"].get("seconds") or 0 for c in done)
    machines = sorted({c["environment"]["device"] for c in done if c["environment"]})
    versions = sorted({w.versions(c["environment"]) for c in done if c["environment"]})
    commits = sorted({w.commit(c["environment"]) for c in done if c["environment"]})
    commands = sorted({c["environment"].get("command", "") for c in done if c["environment"]})
    made = {"hardware": machines, "versions": versions, "commit": commits, "command": commands}
    rows = [Row([Cell(k), Cell("; ".join(v))]) for k, v in made.items() if any(v)]
    if results["study"]["kind"] == "cost":
        text = [f"{counted(len(done), 'model')} counted, none trained."]
        return Section("Runs", text, items=[Table("", ["", ""], rows, words=True)])
    rows.append(Row([Cell("time"), Cell(f"{w.duration(seconds)} of training over {counted(len(done), 'run')}")]))
    columns = ["run", "seed", "step size ×", "best step", "steps", "time", "peak memory", "device"]
    table = []
    for c in done:
        m = c["metrics"]
        memory = f"{m['peak_memory'] / 2**30:.2f} GiB" if m.get("peak_memory") else "–"
        values = [c["key"], c["seed"], c["multiplier"], m.get("best_step", "–"), m.get("steps", "–")]
        cells = [*values, w.duration(m.get("seconds")), memory, m.get("device", "–")]
        table.append(Row([Cell("–" if v is None else str(v)) for v in cells]))
    return Section("Runs", items=[Table("", ["", ""], rows, words=True), Table("", columns, table)])


def score_rows(results: Results) -> list[dict[str, Any]]:
    """One line per setting, host, mixer and metric, for CSV."""
    found = []
    for r in results["rows"]:
        for metric, score in r["scores"].items():
            quote = r["paper"].get(metric) or {}
            found.append(
                {
                    **{k: r[k] for k in ("setting", "host", "arm")},
                    "data": w.data_word(results, r["setting"]) or "as named",
                    "metric": metric,
                    **{k: score.get(k) for k in ("mean", "std_cases", "std_seeds")},
                    "cases": len(score.get("cases", {})) or None,
                    "seeds": len(r["seeds"]),
                    "multiplier": r["multiplier"],
                    "paper_mean": quote.get("mean"),
                    "paper_spread": quote.get("spread"),
                    "slot_numbers": (r["parameters"] or {}).get("slots_real"),
                    "macs": r["macs"],
                    "seconds": r["seconds"],
                }
            )
    return found
