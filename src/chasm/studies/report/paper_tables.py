"""The tables of the paper in its own layout: under each line that it prints, the same line from our runs.

A dash stands for a run that is not there. Bold is the highest mean of a column, in the paper's lines and in ours.
"""

import math
from collections.abc import Sequence

from chasm.common.text import counted
from chasm.mixers import MIXERS
from chasm.studies import paper
from chasm.studies.agreement import code_disagreements, disagreements
from chasm.studies.comparisons import falsify, mean_falsification
from chasm.studies.factors import ARMS, HOSTS, RIVALS, SETTINGS, random_draws
from chasm.studies.gather import FinishedRows
from chasm.studies.paper import Quote
from chasm.studies.records import Falsification, RunRecord, data_kind
from chasm.studies.report import text
from chasm.studies.report.elements import SOURCE_COLUMN, Table, TableCell, TableRow, row_kind, table_row
from chasm.studies.worker import core_parameters

QuotesOfArms = dict[str, dict[str, Quote]]  # arm to metric to what the paper prints
LABELS = {name: arm.label for name, arm in ARMS.items()}
HIFI = "hifi-mamba"
MRI = ("cc359-x4", "cc359-x8", "fastmri-x4", "fastmri-x8")
# Settings, host, and what the paper prints: backbone, input operator, objective, purpose.
PROTOCOL = {
    "fastMRI": (
        ("fastmri-x8", "fastmri-x4"), HIFI,
        ("HiFi-Mamba-family", "Cartesian undersampling", "reconstruction loss", "MRI transfer"),
    ),
    "ADE20K": (
        ("ade20k",), "unet", ("U-Net-style", "4× bicubic downsampling", "ℓ1", "natural-image reconstruction"),
    ),
    "ImageNet": (
        ("imagenet",), "unet", ("U-Net-style", "4× bicubic downsampling", "ℓ1", "natural-image reconstruction"),
    ),
    "BraTS": (
        ("brats-x4", "brats-x8"), "unet",
        ("U-Net segmentation", "Cartesian undersampling", "Dice-CE", "undersampled segmentation"),
    ),
}  # fmt: skip
LOSSES = {
    "reconstruction": "ℓ1 of magnitudes",
    "superres": "ℓ1 of RGB",
    "segmentation": "cross-entropy plus soft Dice, equal weights",
}
# Title, what the paper prints, name of the files, and what the spread is over.
VARIANTS: dict[str, tuple[str, QuotesOfArms, str, str]] = {
    "basis": ("Table 3 (b). Constraints on the basis", paper.BASIS, "table-3b", "cases"),
    "axes": ("Table 3 (c). Compositions of the axes", paper.AXES, "table-3c", "cases"),
    "seeds-basis": (
        "Appendix. The shared-basis ablation over three seeds", paper.SEEDS_BASIS, "table-seeds-basis", "seeds",
    ),
}  # fmt: skip
OPERATORS = {  # what each mixer does to a frequency by default, as far as the paper's taxonomy leaves it open
    "gfnet": "one complex number per bin and channel: diagonal",
    "afno": "one small network for all bins, dense within 4 blocks of channels",
    "ffc": "one dense matrix for all bins, over real and imaginary parts",
    "fno-d": "a dense complex matrix per kept mode",
    "difffno": "a dense complex matrix per kept mode, gated with attention in space",
    "fsel": "a gate per bin and channel, from one dense network of the spectrum; attention between channels",
    "spectformer": "one complex number per bin and channel, on a coarse grid: diagonal",
    "chasm": "one dense symmetric positive matrix per bin and axis, all with one learned basis per axis",
}


def study_of(setting: str) -> str:
    """Return the study of a column of Table 1 or 2: "cc359" of "cc359-x8"."""
    return setting.partition("-x")[0]


class _Column:
    """One column of numbers: a metric of a setting in a host, as printed and as found."""

    def __init__(
        self, finished: FinishedRows, study: str, setting: str, host: str, metric: str, quotes: QuotesOfArms
    ) -> None:
        self.metric, self.quotes = metric, quotes
        rows = {arm: finished.get(study, setting, host, arm) for arm in quotes}
        self.rows = {arm: row for arm, row in rows.items() if row and metric in row.result.scores}
        self.scores = {arm: row.result.scores[metric] for arm, row in self.rows.items()}
        means = [score.mean for score in self.scores.values()]
        self.best = max(filter(math.isfinite, means), default=math.nan) if len(means) > 1 else math.nan
        self.best_printed = max(quote[metric].mean for quote in quotes.values())

    def printed(self, arm: str) -> TableCell:
        quote = self.quotes[arm][self.metric]
        return TableCell(text.quote(quote, self.metric), "best" if quote.mean == self.best_printed else "")

    def ours(self, arm: str, over: str = "cases") -> TableCell:
        if arm not in self.scores:
            return TableCell(text.UNKNOWN)
        score = self.scores[arm]
        spread = score.std_cases if over == "cases" else score.std_seeds
        mean = text.number(score.mean, self.metric)
        has_spread = spread is not None and (over == "seeds" or len(score.cases) > 1)
        is_best = mean == text.number(self.best, self.metric) != text.UNKNOWN
        return TableCell(mean + f" ± {text.number(spread, self.metric)}" * has_spread, "best" if is_best else "")

    def largest_spread(self) -> str:
        spreads = [score.std_cases for score in self.scores.values() if score.std_cases is not None]
        return text.number(max(spreads, default=None), self.metric)


def cc359(finished: FinishedRows) -> Table:
    """Return Table 1: CC359 at two accelerations in three hosts."""
    rows, used = [], []
    for r in (8, 4):
        columns = [
            _Column(finished, "cc359", f"cc359-x{r}", host, metric, paper.MAIN[f"cc359-x{r}", host])
            for host in paper.HOSTS
            for metric in paper.IMAGE
        ]
        used += columns
        for arm in paper.MIXERS:
            names = f"×{r}" if arm == "baseline" else "", LABELS[arm]
            printed_core = TableCell(f"{paper.CORE_PARAMETERS[arm]:.2f}M", "name")
            core = TableCell(f"{core_parameters(ARMS[arm].mixer)[0] / 1e6:.3f}M", "name")
            printed, ours = [c.printed(arm) for c in columns], [c.ours(arm) for c in columns]
            rows += _two_lines(names, [printed_core, *printed], [core, *ours], arm, starts_block=arm == "baseline")
    return Table(
        "Table 1. CC359: reconstruction from a fourth and an eighth of k-space",
        ["AR", "Method", SOURCE_COLUMN, "Core Params", *[text.NAMES[m] for m in paper.IMAGE] * 3],
        rows,
        "Mean ± standard deviation over test cases. Core Params are those of one mixer at 96 channels, with a complex "
        f"number counted once; ours are for maps of 128 x 128.{_origin(used)}",
        groups=[("", 4), *((HOSTS[host].label, 2) for host in paper.HOSTS)],
        file="table-1",
    )


def cross_domain(finished: FinishedRows) -> Table:
    """Return Table 2: six settings of four datasets, with the largest spread of any method."""
    columns = {
        (setting, metric): _Column(finished, study_of(setting), setting, host, metric, paper.MAIN[setting, host])
        for setting, host in paper.CROSS_DOMAIN_HOSTS.items()
        for metric in SETTINGS[setting].metrics
    }
    rows = []
    for arm in paper.MIXERS:
        printed = [_without_spread(c.printed(arm)) for c in columns.values()]
        ours = [_without_spread(c.ours(arm)) for c in columns.values()]
        rows += _two_lines([LABELS[arm]], printed, ours, arm, starts_block=arm == "chasm")
    largest = [text.number(paper.LARGEST_SPREAD[setting][m], m) for setting, m in columns]
    rows += _two_lines(["Max std."], largest, [c.largest_spread() for c in columns.values()], starts_block=True)
    return Table(
        "Table 2. fastMRI reconstruction, natural images, and segmentation of undersampled MRI",
        ["Mixer block", SOURCE_COLUMN, *("mIoU" if m == "iou" else text.NAMES[m] for _, m in columns)],
        rows,
        "Means over test cases; the last lines are the largest standard deviation over cases of any method."
        + _origin(list(columns.values())),
        groups=[("", 2), *((SETTINGS[setting].title, 2) for setting in paper.CROSS_DOMAIN)],
        file="table-2",
    )


def falsification(finished: FinishedRows) -> tuple[Table, list[Falsification]]:
    """Return Table 3 (a), and the gains behind its lines."""
    wanted = [
        finished.get("random-mask", setting, HIFI, arm)
        for s in MRI
        for setting in (s, *random_draws(s))
        for arm in (*RIVALS, "chasm")
    ]
    here = [row for row in wanted if row is not None]
    falsified = falsify([r.result for r in here], [run for r in here for run in r.runs])
    measured = {f.setting: f for f in falsified}
    rows = []
    for setting, printed in paper.FALSIFICATION.items():
        found = _mean_falsified(falsified) if setting == "mean" else _falsified(measured.get(setting))
        title = "Mean" if setting == "mean" else SETTINGS[setting].title
        texts = [_signed(printed["structured"]), _signed(printed["random"]), f"{printed['drop']:.1f} %"]
        rows += _two_lines([title], texts, found, starts_block=setting == "mean")
    return (
        Table(
            "Table 3 (a). CHASM's gain in PSNR over the strongest rival, under structured and random masks",
            ["Setting", SOURCE_COLUMN, "Struct.", "Random", "Drop"],
            rows,
            f"{_draws_text(falsified)}The strongest rival is the one with the highest test mean, under the "
            "structured mask and over all draws of the random one. A † means that the 95 % interval of the paired "
            "difference includes zero, or that there are too few cases. The drop is one minus the random over the "
            "structured gain, and has no meaning unless the structured gain is above zero. The last line has the means "
            "of gains and of drops." + _note([run for row in here for run in row.runs]),
            file="table-3a",
        ),
        falsified,
    )


def seeds(finished: FinishedRows) -> Table:
    """Return the appendix table of stability over three seeds."""
    rows, used = [], []
    for setting, quotes in paper.SEEDS.items():
        rival = next(arm for arm in quotes if arm != "chasm")
        arms = rival, "chasm"
        psnr, ssim = (_Column(finished, "seeds", setting, HIFI, metric, quotes) for metric in paper.IMAGE)
        used.append(psnr)
        means = [psnr.scores[arm].mean for arm in arms if arm in psnr.scores]
        gain: str | TableCell = _signed(means[1] - means[0]) if len(means) == 2 else text.UNKNOWN
        printed_gain: str | TableCell = _signed(paper.SEEDS_GAIN[setting])
        printed = [*map(psnr.printed, arms), printed_gain, *map(ssim.printed, arms)]
        ours = [*(psnr.ours(arm, "seeds") for arm in arms), gain, *(ssim.ours(arm, "seeds") for arm in arms)]
        rows += _two_lines([SETTINGS[setting].title, LABELS[rival]], printed, ours)
    columns = ["Setting", "Best baseline", SOURCE_COLUMN, "Base PSNR", "CHASM PSNR", "ΔPSNR", "Base SSIM", "CHASM SSIM"]
    note = f"Mean ± standard deviation over seeds. A number without ± has one seed.{_origin(used)}"
    return Table("Appendix. Stability over three seeds, HiFi-Mamba", columns, rows, note, file="table-seeds")


def flops(finished: FinishedRows, scale: str) -> Table:
    """Return the appendix table of multiply-adds of whole models."""
    quotes = {h: {arm: {"gmacs_paper": Quote(v)} for arm, v in arms.items()} for h, arms in paper.FLOPS.items()}
    columns = [_Column(finished, "flops", "cc359-x8", host, "gmacs_paper", quotes[host]) for host in paper.HOSTS]
    rows = []
    for arm in paper.MIXERS:
        printed, ours = [c.printed(arm).text for c in columns], [c.ours(arm).text for c in columns]  # most is not best
        rows += _two_lines([LABELS[arm]], printed, ours, arm)
    note = "In G, for one complex image, counted as the paper's table seems to count (help(chasm.surgery.count))."
    if scale == "tiny":
        note += " Ours are toy models on images of 32 x 32: do not compare them with the paper's full-size models."
    title = "Appendix. Multiply-adds of whole models (the paper says FLOPs), CC359"
    return Table(
        title, ["Mixer block", SOURCE_COLUMN, *(HOSTS[h].label for h in paper.HOSTS)], rows, note, file="table-flops"
    )


def protocol(finished: FinishedRows) -> Table:
    """Return the appendix table of the cross-domain protocol: the paper's, and that of our runs."""
    rows = []
    for dataset, (settings, host, printed) in PROTOCOL.items():
        rows_of_runs = (finished.get(study_of(s), s, host, arm) for s in settings for arm in paper.MIXERS)
        run = next((row.runs[0] for row in rows_of_runs if row is not None), None)
        ours = [text.UNKNOWN] * 3
        if run is not None and run.config is not None:
            mask, factor = run.result.task.get("mask"), run.result.task.get("factor")
            operator = f"{mask['kind']} Cartesian mask" if mask else f"bicubic reduction by {factor}"
            host_texts = run.config.backbone.name, text.options_text(run.config.backbone.options)
            ours = [", ".join(filter(None, host_texts)), f"{operator}, {run.result.source}"]
            ours.append(LOSSES.get(run.config.task.name, text.UNKNOWN))
        rows += _two_lines([dataset], printed, [*ours, ""], starts_block=dataset != "fastMRI")
    columns = ["Setting", SOURCE_COLUMN, "Backbone", "Input operator", "Objective", "Purpose"]
    return Table("Appendix. Protocol of Table 2", columns, rows, is_text=True, file="table-protocol")


def taxonomy() -> Table:
    """Return the appendix table of the mixers' structure, with what the mixers of this package do."""
    rows = []
    for arm, operator in OPERATORS.items():
        facts = MIXERS.get(arm).facts  # type: ignore[attr-defined]
        printed = [facts.response, facts.channel_mixing, facts.shared_basis, facts.positive_gains]
        rows.append(table_row(LABELS[arm], *(TableCell(t, "paper") for t in printed), operator))
    properties = ["Spectral response", "Channel mixing", "Shared basis", "Positive gains"]
    columns = ["Mixer", *properties, "Here, at one frequency"]
    title = "Appendix. Taxonomy of the mixers, and the operators of this package"
    return Table(title, columns, rows, is_text=True, file="table-taxonomy")


def variants(finished: FinishedRows, study: str) -> Table:
    """Return Table 3 (b), 3 (c), or the appendix table of the shared-basis ablation over three seeds."""
    title, quotes, file, over = VARIANTS[study]
    columns = [_Column(finished, study, "cc359-x8", HIFI, metric, quotes) for metric in paper.IMAGE]
    rows = []
    for arm in quotes:
        label = "CH → CW" if study == "axes" and arm == "chasm" else LABELS[arm]
        rows += _two_lines([label], [c.printed(arm) for c in columns], [c.ours(arm, over) for c in columns], arm)
    note = f"Mean ± standard deviation over {over}.{_origin(columns)}"
    columns_titles = ["Variant", SOURCE_COLUMN, *(text.NAMES[m] for m in paper.IMAGE)]
    return Table(f"{title}, CC359 ×8 in HiFi-Mamba", columns_titles, rows, note, file=file)


def _two_lines(
    names: Sequence[str],
    printed: Sequence[str | TableCell],
    ours: Sequence[str | TableCell],
    arm: str = "",
    *,
    starts_block: bool = False,
) -> list[TableRow]:
    """Return the line that the paper prints, and the line of our runs below it."""
    cells = [TableCell(c, "paper") if isinstance(c, str) else TableCell(c.text, c.kind or "paper") for c in printed]
    first, second = (
        [TableCell(name, "name") for name in line] for line in ([*names, "paper"], [""] * len(names) + ["ours"])
    )
    return [
        table_row(*first, *cells, starts_block=starts_block),
        table_row(*second, *ours, kind=row_kind(arm)),
    ]


def _without_spread(cell: TableCell) -> TableCell:
    return TableCell(cell.text.partition(" ± ")[0], cell.kind)


def _signed(value: float) -> str:
    return text.signed(value, "psnr", 0)


def _falsified(f: Falsification | None) -> list[str]:
    if f is None:
        return [text.UNKNOWN] * 3
    gains = [_signed(g.mean) + ("" if g.verdict in ("win", "loss") else "†") for g in (f.structured, f.random)]
    return [*gains, f"{f.drop.mean:.1f} %" if math.isfinite(f.drop.mean) else text.UNKNOWN]


def _mean_falsified(measured: list[Falsification]) -> list[str]:
    """Return the line of means, or dashes unless all four settings are there, as in the paper's mean."""
    if len(measured) < len(MRI):
        return [text.UNKNOWN] * 3
    structured, random, drop = mean_falsification(measured)
    return [_signed(structured), _signed(random), f"{drop:.1f} %" if math.isfinite(drop) else text.UNKNOWN]


def _draws_text(measured: list[Falsification]) -> str:
    counts = sorted({f.draws for f in measured})
    if not counts:
        return ""
    words = f"{counts[0]} to {counts[-1]} draws" if len(counts) > 1 else counted(counts[0], "draw")
    return f"The random gain is the mean over {words} of the mask. "


def _origin(columns: Sequence[_Column]) -> str:
    return _note([run for column in columns for row in column.rows.values() for run in row.runs])


def _note(runs: list[RunRecord]) -> str:
    """Say if the runs behind a table used other data, and which of them should not be compared."""
    if not runs:
        return " None of our runs is finished."
    sentences, kind = [], data_kind(runs)
    if kind:
        sentences.append(f"Our runs use {kind}, so compare orders and signs, not levels.")
    places = dict.fromkeys((run.setting, run.host) for run in runs)
    code = code_disagreements(runs)  # over all places: a table compares them with each other
    sentences += [f"{line}." for line in code]
    lines: dict[str, list[str]] = {}
    for setting, host in places:
        here = {run.key: run for run in runs if (run.setting, run.host) == (setting, host)}
        for line in (line for line in disagreements([*here.values()]) if line not in code):
            lines.setdefault(line, []).append(f"{SETTINGS[setting].title} in {HOSTS[host].label}")
    for line, where in lines.items():
        sentences.append(f"{line}." if len(where) == len(places) else f"{line} ({'; '.join(where)}).")
    return "".join(f" {line[0].upper()}{line[1:]}" for line in sentences)
