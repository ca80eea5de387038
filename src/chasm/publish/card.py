"""Write the card of a model from its record: purpose, training data, scores and limits."""

import math
from pathlib import Path
from typing import Any

from chasm.common.files import expanded, write_text
from chasm.common.tables import markdown_table
from chasm.data.terms import Terms, terms_of
from chasm.publish.record import describe, read_environment, read_record
from chasm.train import RunConfig, load_recipe
from chasm.train.weights import training_images

TASK_PHRASES = {
    "reconstruction": "reconstructs MR images from undersampled k-space",
    "superres": "enlarges photographs",
    "segmentation": "segments tumours in MR images",
    "volume": "reconstructs volumes from undersampled k-space",
}
USE = {
    "reconstruction": "chasm reconstruct scan.h5 --run {name}",
    "superres": "chasm reconstruct photo.png --run {name}",
    "segmentation": "chasm eval {name} --data FOLDER",
}
VARIED = "turned, zoomed, shifted, sheared and changed in contrast"
HEADINGS = {"psnr": "PSNR in dB", "ssim": "SSIM", "nmse": "NMSE", "dice": "Dice"}
ELSEWHERE = "not trained on"  # in the split of scores on data of another source
UNKNOWN_ELSEWHERE = """\
**No data of another source was at hand.** All scores are of the source it was trained on, so how well it carries over
to another scanner or hospital is not known. Expect less."""
UNSTATED = "not stated: only the owner of the data knows them"
LIMITS = """\
**For research only. Not for diagnosis, treatment or any other decision about a person.** A network can remove real
structures and invent others, most where data differ from those below: other organs, contrasts, field strengths, masks,
accelerations and coils. The scores say how it does on average, not whether one image is right."""


MASK_ADVICE = {  # what a task's option `masks` means for those who use the model
    "fixed": "All training slices had these lines. Expect less of scans with other lines.",
    "slice": "These are the lines of one slice: in training and scores each has its own, drawn by the same rule.",
    "epoch": "Training drew other lines by the same rule for every slice in every epoch; scores are at these.",
    "measured": "Training took the lines of each slice as they were measured.",
}
FIRST_LINES = "---\nlibrary_name: chasm\n"  # of a card, and of no README.md that a person writes


def write_run_card(folder: str | Path, *, replace: bool = False) -> bool:
    """Write the card of a finished run into its folder, as README.md.

    Args:
        folder: of the run.
        replace: whether an older card may be replaced.

    Returns:
        Whether README.md is a card now. One that is none is never replaced.

    Raises:
        ValueError: if the run is not finished.
    """
    folder = expanded(folder)
    card = folder / "README.md"
    if card.exists():
        is_card = card.is_file() and card.read_bytes().startswith(FIRST_LINES.encode())
        if not is_card or not replace:
            return is_card
    config, environment = load_recipe(folder / "config.yaml"), read_environment(folder)
    terms = terms_of(config.data.name, config.data.options) or [Terms(f"dataset `{config.data.name}`", UNSTATED, False)]
    shape = training_images(folder).shape
    record = describe(folder.resolve().name, config, shape, terms, read_record(folder))
    place = folder.name if folder.is_absolute() else str(folder)  # a card names no path of the machine
    write_text(card, write_card(record, config, environment, place))
    return True


def write_card(record: dict[str, Any], config: RunConfig, environment: dict[str, Any], place: str | None = None) -> str:
    """Return the card as Markdown, with the header that the Hugging Face Hub reads.

    Args:
        record: a record of `chasm.publish.record.describe`, or the record of a model, which contains one.
        config: config of the run.
        environment: environment of the run.
        place: argument of `--run`, if that is not the name.
    """
    name, task = record["name"], record["task"]
    what = TASK_PHRASES.get(task["name"], f"was trained for the task {task['name']}")
    mask = task.get("mask")
    parts = [
        _header(record),
        f"# {name}\n\nThis network {what}. It is a {config.backbone.name} host with "
        f"{config.mixer.name} mixers, {record['parameters']['model']:,} parameters, made by `chasm`.",
        f"```bash\n{USE.get(task['name'], USE['segmentation']).format(name=place or name)}\n```",
        f'```python\nmodel = chasm.load_model("{place or name}")  # an nn.Module in eval mode\n```',
        LIMITS,
        "## Data\n\n" + _data(record),
        "## Scores\n\n" + _scores(record),
        "## Protocol\n\n" + _protocol(record, config, mask, environment),
    ]
    return "\n\n".join(parts) + "\n"


def _header(record: dict[str, Any]) -> str:
    task = "image-to-image" if record["task"]["name"] != "segmentation" else "image-segmentation"
    lines = ["license: other", "license_name: research-only", f"pipeline_tag: {task}"]
    return FIRST_LINES + "\n".join([*lines, "tags: [chasm, spectral, safetensors]"]) + "\n---"


def _data(record: dict[str, Any]) -> str:
    """List the sources of the data, their licences, and the use of each."""
    trained = {terms["source"]: terms["licence"] for terms in record["trained_on"]}
    known = [_terms(scores["source"]) for scores in record["scores"]]
    scored = {terms.source: terms.licence for terms in known if terms}
    every = "training" if None not in known else "training and scores"
    rows = [[name, licence, "training and scores" if name in scored else every] for name, licence in trained.items()]
    rows += [[name, licence, "scores only"] for name, licence in scored.items() if name not in trained]
    shape = record["image_shape"]
    if all(terms["weights"] for terms in record["trained_on"]):
        allowed = "Data whose terms do not let weights be given away is never trained on."
    else:
        allowed = "chasm knows of no terms that allow these weights to be given away."
    return (
        markdown_table(["data", "licence", "used for"], rows)
        + f"\n\nImages of {shape[1]} x {shape[2]} pixels. The terms of the training data hold for the weights, too.\n"
        + allowed
    )


def _terms(source: str) -> Terms | None:
    """Return the terms of the data that a row of scores names; None if they are not known."""
    dataset, _, part = source.partition(":")
    known = terms_of(dataset, {"part": part} if part else {})
    return known[0] if known else None


def _scores(record: dict[str, Any]) -> str:
    """Return two rows for each source: the scores of the model, and of the image that it began with."""
    metrics = list(record["scores"][0]["values"])
    rows = []
    for scores in record["scores"]:
        terms = _terms(scores["source"])
        name = scores["source"].removeprefix("proxy:")
        data = f"{terms.source.partition(' (')[0]} (`{name}`)" if terms and name != scores["source"] else name
        values = [scores["values"][m] for m in metrics]
        cells = [_number(v["mean"]) + _interval(v, scores["cases"]) for v in values]
        rows.append([f"{data}, {scores['split']}", str(scores["cases"]), record["name"], *cells])
        if reference := scores["reference"]:
            rows.append(["", "", reference["name"], *(_number(reference[m]) for m in metrics)])
    columns = ["data", "cases", "image", *(HEADINGS.get(m, m) for m in metrics)]
    text = (
        markdown_table(columns, rows, right=["cases", *columns[3:]])
        + f"\n\nMean over cases [95 % interval from resampled cases]. Protocol `{record['scores'][0]['protocol']}`: "
        + record["scores"][0]["meaning"]
    )
    if not any(ELSEWHERE in scores["split"] for scores in record["scores"]):
        text += f"\n\n{UNKNOWN_ELSEWHERE}"
    return text


def _protocol(record: dict[str, Any], config: RunConfig, mask: Any, environment: dict[str, Any]) -> str:
    lines = []
    if mask:
        if "points" in mask:
            amount = f"{mask['points']} of {mask['size'][0]} x {mask['size'][1]} points"
            center = "{} x {} in the centre".format(*mask["center_size"])
        else:
            amount, center = f"{mask['lines']} of {mask['columns']} columns", f"{mask['center_lines']} in the centre"
        offset = f", the first at column {mask['offset']}" if "offset" in mask else ""
        lines.append(f"Mask: {mask['kind']}, {amount} (x{mask['acceleration']:.3g}), {center}{offset}.")
        lines.append(MASK_ADVICE[record["task"].get("masks", "fixed")])
        images = "complex images" if record["task"].get("complex") else "magnitude images, each scaled to [0, 1]"
        drawn = ", with a phase that was drawn" if config.data.options.get("phase") else ""
        noise = record["task"].get("snr_db")
        added = "" if noise is None else f", and has noise of {noise:g} dB added"
        lines.append(f"k-space is re-made from {images}{drawn}{added}.")
    if held_out := record["task"].get("self_supervised"):
        lines.append(f"Training was self-supervised: it held out {held_out:g} of the lines, and had no other target.")
    changed = [word for word, on in (("mirrored", config.train.flips), (VARIED, config.train.vary)) if on]
    if changed:
        lines.append(f"Training slices were {' and '.join(changed)}, at random.")
    average = f", average of the weights with decay {config.train.ema:g}" if config.train.ema else ""
    if start := environment.get("start"):
        before = "" if start["steps"] is None else f", trained for {start['steps']} steps"
        lines.append(f"Began with the weights of `{start['name']}` (SHA-256 {start['sha256'][:12]}{before}).")
    lines.append(
        f"Trained for {record['steps']} steps of {config.train.batch} slices{average}; the best of validation was step "
        f"{record['best_step']}. Seed {config.seed}, {environment.get('device', 'unknown device')}, commit "
        f"{(environment.get('commit') or 'unknown')[:10]}."
    )
    numbers = "`model.json` has the checksums and" if "sha256" in record else "`metrics.json` has"
    lines.append(f"`config.yaml` is the whole recipe, and {numbers} these numbers.")
    return "\n".join(lines)


def _interval(value: dict[str, float], cases: int) -> str:
    """Return the interval of a score; "" for a single case."""
    return f" [{_number(value['low'])}, {_number(value['high'])}]" if cases > 1 else ""


def _number(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "not finite"
