"""The card of a model, from its record: what it does, what it was trained on, how well, and what it is not for."""

from typing import Any

from chasm.common.tables import markdown_table
from chasm.data.terms import Terms, terms_of
from chasm.train import RunConfig

WORDS = {
    "reconstruction": "reconstructs MR images from undersampled k-space",
    "superres": "enlarges photographs",
    "segmentation": "segments tumours in MR images",
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
LIMITS = """\
**For research only. Not for diagnosis, treatment or any other decision about a person.** A network can remove real
structures and invent others, most where data differ from those below: other organs, contrasts, field strengths, masks,
accelerations and coils. The scores say how it does on average, not whether one image is right."""


def write_card(record: dict[str, Any], config: RunConfig, environment: dict[str, Any]) -> str:
    """Return the card as Markdown, with the header that the Hugging Face Hub reads.

    Args:
        record: of the model, as `pack` writes it.
        config: of the run.
        environment: of the run.
    """
    name, task = record["name"], record["task"]
    mask = task.get("mask")
    parts = [
        _header(record),
        f"# {name}\n\nThis network {WORDS.get(task['name'], task['name'])}. It is a {config.backbone.name} host with "
        f"{config.mixer.name} mixers, {record['parameters']['model']:,} parameters, made by `chasm`.",
        f"```bash\n{USE.get(task['name'], USE['segmentation']).format(name=name)}\n```",
        f'```python\nmodel = chasm.load_model("{name}")  # an nn.Module in eval mode\n```',
        LIMITS,
        "## Data\n\n" + _data(record),
        "## Scores\n\n" + _scores(record),
        "## Protocol\n\n" + _protocol(record, config, mask, environment),
    ]
    return "\n\n".join(parts) + "\n"


def _header(record: dict[str, Any]) -> str:
    task = "image-to-image" if record["task"]["name"] != "segmentation" else "image-segmentation"
    lines = ["library_name: chasm", "license: other", "license_name: research-only", f"pipeline_tag: {task}"]
    return "---\n" + "\n".join([*lines, "tags: [chasm, spectral, safetensors]"]) + "\n---"


def _data(record: dict[str, Any]) -> str:
    """The sources of the data, their licences, and what each was used for."""
    rows = [[terms["source"], terms["licence"], "training and scores"] for terms in record["trained_on"]]
    for scores in record["scores"]:
        terms = _terms(scores["source"])
        if terms and not any(row[0] == terms.source for row in rows):
            rows.append([terms.source, terms.licence, "scores only"])
    shape = record["image_shape"]
    return (
        markdown_table(["data", "licence", "used for"], rows)
        + f"\n\nImages of {shape[1]} x {shape[2]} pixels. The terms of the training data hold for the weights, too.\n"
        "Data whose terms do not let weights be given away is never trained on."
    )


def _terms(source: str) -> Terms | None:
    """The terms of the data that a row of scores names; None if they are not known here."""
    dataset, _, part = source.partition(":")
    known = terms_of(dataset, {"part": part} if part else {})
    return known[0] if known else None


def _scores(record: dict[str, Any]) -> str:
    """Two rows for each source: the model, and the image that it began with."""
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
        lines.append(
            f"Mask: {mask['kind']}, {mask['lines']} of {mask['columns']} columns (x{mask['acceleration']:g}), "
            f"{mask['center_lines']} of them in the centre."
        )
        images = "complex images" if record["task"].get("complex") else "magnitude images, each scaled to [0, 1]"
        drawn = ", with a phase that was drawn" if config.data.options.get("phase") else ""
        lines.append(f"k-space is re-made from {images}{drawn}.")
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
    lines.append("`config.yaml` is the whole recipe, and `model.json` has the checksums and these numbers.")
    return "\n".join(lines)


def _interval(value: dict[str, float], cases: int) -> str:
    """The interval of a score; one case has none."""
    return f" [{_number(value['low'])}, {_number(value['high'])}]" if cases > 1 else ""


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
