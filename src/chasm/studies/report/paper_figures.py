"""The figures of the paper's page: the method, images of two datasets at two accelerations, and gains."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chasm.studies import paper
from chasm.studies.factors import HOSTS, RIVALS, SETTINGS
from chasm.studies.gather import FinishedRow, FinishedRows, paired_difference
from chasm.studies.records import Comparison, data_kind
from chasm.studies.report import figures
from chasm.studies.report.elements import Picture
from chasm.studies.report.examples import Example, read_example
from chasm.studies.report.overview import overview_figure
from chasm.studies.report.paper_tables import HIFI, LABELS, study_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUALITATIVE = ("fastmri-x4", "fastmri-x8", "cc359-x4", "cc359-x8")
BOX = "#3b7dd8"
CELL_INCHES = 1.15


def overview() -> Picture:
    """Draw the method, Figure 1 of the paper."""
    caption = (
        "Figure 1. (a) Mixers with a separate operator at every frequency. (b) CHASM has one learned basis for all "
        "frequencies and positive gains for each. (c) The mixer block. This package drew the figure, not the paper."
    )
    return _picture(overview_figure(), "the method in three panels", caption, "figure-1")


def qualitative(finished: FinishedRows) -> Picture | None:
    """Draw one test slice of two datasets at two accelerations, with errors; None without a saved image.

    The figure shows every finished mixer in the HiFi-Mamba host. The caption names the settings without runs.
    """
    blocks: dict[str, dict[str, Example]] = {}
    for setting in QUALITATIVE:
        rows = {arm: finished.get(study_of(setting), setting, HIFI, arm) for arm in paper.MIXERS}
        examples = {arm: _example(row.folder) for arm, row in rows.items() if row is not None}
        present = {arm: example for arm, example in examples.items() if example is not None}
        first = next((example.slice_name for example in present.values()), None)
        blocks[setting] = {arm: example for arm, example in present.items() if example.slice_name == first}
    shown = {setting: block for setting, block in blocks.items() if block}
    if not shown:
        return None
    missing = [SETTINGS[setting].title for setting in QUALITATIVE if setting not in shown]
    runs = [run for row in finished.rows if row.result.setting in shown for run in row.runs]
    kind = data_kind(runs)
    caption = "Figure 2. One test slice of each setting in HiFi-Mamba, first seed, as saved by the runs"
    caption += f" ({kind})" if kind else ""
    caption += (
        ". Below each image is its absolute error, on one scale per setting. Boxes mark where the zero-filled image "
        "errs most, and are enlarged in the corner. Numbers are the PSNR of this slice alone."
    )
    caption += f" These settings have no finished runs: {', '.join(missing)}." if missing else ""
    return _picture(_qualitative_figure(shown), "images and errors of every mixer", caption, "figure-2")


def _example(folder: Path) -> Example | None:
    try:
        return read_example(folder)
    except ValueError:  # show the other methods without the damaged file
        return None


def gains(finished: FinishedRows) -> Picture | None:
    """Draw CHASM's gain over the strongest rival in every column of Tables 1 and 2 beside the printed gain."""
    comparisons, labels = [], {"chasm": LABELS["chasm"]}
    for (setting, host), quotes in paper.MAIN.items():
        metric = SETTINGS[setting].metrics[0]
        if metric != "psnr":
            continue  # another unit
        rows = {arm: finished.get(study_of(setting), setting, host, arm) for arm in (*RIVALS, "chasm")}
        rivals = [row for arm in RIVALS if (row := rows[arm]) is not None]
        strongest: FinishedRow | None = max(rivals, key=lambda r: r.result.scores[metric].mean, default=None)
        d = paired_difference(rows["chasm"], strongest, metric)
        if d is None or strongest is None:
            continue
        printed = quotes["chasm"][metric].mean - max(quotes[arm][metric].mean for arm in RIVALS)
        key = f"{setting} {host}"
        labels[key] = f"{SETTINGS[setting].title}, {HOSTS[host].label} (ours: {LABELS[strongest.result.arm]})"
        comparisons.append(
            Comparison(setting, host, metric, "chasm", key, d.mean, d.low, d.high, d.cases, d.seeds, d.verdict, printed)
        )
    if not comparisons:
        return None
    caption = (
        "CHASM minus the strongest rival in each setting and host. Our difference names the rival and has its 95 % "
        "interval; a filled mark means that the interval excludes zero. The paper's difference is over the strongest "
        "rival in the paper."
    )
    return _picture(
        figures.forest(comparisons, labels, "PSNR, dB"), "gains beside the paper's", caption, "figure-gains"
    )


def _picture(figure: "Figure", alt: str, caption: str, stem: str) -> Picture:
    files = {f"{stem}.{kind}": figures.encoded(figure, kind) for kind in ("pdf", "png")}
    return Picture(figures.data_uri(files[f"{stem}.png"], "png"), alt, caption, files)


def _qualitative_figure(blocks: dict[str, dict[str, Example]]) -> "Figure":
    arms = [arm for arm in paper.MIXERS if any(arm in block for block in blocks.values())]
    columns = 2 + len(arms)
    heights = [h / w for block in blocks.values() for h, w in [next(iter(block.values())).target.shape[-2:]]]
    figure = figures.new_figure(CELL_INCHES * columns, sum(CELL_INCHES * (2 * height) + 0.42 for height in heights))
    parts: Any = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (setting, block) in zip(parts, blocks.items(), strict=True):
        _draw_block(part, SETTINGS[setting].title, block, arms)
    return figure


def _draw_block(part: Any, title: str, block: dict[str, Example], arms: list[str]) -> None:
    example = next(iter(block.values()))
    target, plain = figures.as_image(example.target), figures.as_image(example.reference)
    box = figures.find_box(figures.error_map(plain, target))
    top = max(
        max(float(np.percentile(figures.error_map(figures.as_image(e.output), target), 99.7)) for e in block.values()),
        1e-3,
    )
    part.suptitle(title, fontsize=10.5, weight="bold", x=0.005, ha="left", color=figures.INK)
    axes = part.subplots(2, 2 + len(arms), squeeze=False)
    for ax in axes.ravel():
        ax.set_axis_off()
    _draw(axes[:, 0], "target", "", target, None, box, top)
    _draw(axes[:, 1], "zero-filled", example.reference_score, plain, target, box, top)
    for column, arm in zip(axes.T[2:], arms, strict=True):
        if arm in block:
            _draw(column, LABELS[arm], block[arm].score, figures.as_image(block[arm].output), target, box, top)
        else:
            column[0].set_title(f"{LABELS[arm]}\n–", fontsize=8.5, color=figures.INK)


def _draw(
    axes: Any,
    title: str,
    score: str,
    image: np.ndarray,
    target: np.ndarray | None,
    box: tuple[int, int, int],
    top: float,
) -> None:
    from matplotlib.patches import Rectangle

    y, x, n = box
    grey: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    axes[0].imshow(image, **grey)
    axes[0].add_patch(Rectangle((x - 0.5, y - 0.5), n, n, fill=False, ec=BOX, lw=1))
    inset = axes[0].inset_axes((0.0, 0.0, 0.42, 0.42 * image.shape[1] / image.shape[0]))
    inset.imshow(image[y : y + n, x : x + n], **grey)
    inset.set_xticks([])
    inset.set_yticks([])
    for spine in inset.spines.values():
        spine.set(color=BOX, linewidth=1)
    axes[0].set_title(f"{title}\n{score}", fontsize=8.5, color=figures.INK, linespacing=1.2)
    if target is not None:
        axes[1].imshow(figures.error_map(image, target), cmap="inferno", vmin=0, vmax=top, interpolation="nearest")
    else:
        axes[1].text(0.5, 0.5, f"error\n0 to {top:.2g}", fontsize=8.5, ha="center", va="center", color=figures.INK)
