"""Read a few run folders as the results of a study, so that the same report serves both."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from chasm.common.files import expanded
from chasm.mixers import MIXERS
from chasm.studies.comparisons import compare
from chasm.studies.records import ArmInfo, Metrics, Results, RunRecord, SettingInfo, StudyInfo
from chasm.studies.results import arm_result, read_environment, references_of
from chasm.train.config import RunConfig, load_recipe

ARM_NAMES = {"wrapper only": "wrapper"}  # names that studies also use, so that colours agree
MAIN_METRICS = ("psnr", "ssim", "dice", "iou")


def as_results(runs: Mapping[str, str | Path] | Sequence[str | Path], title: str, question: str = "") -> Results:
    """Return the results of finished runs: folders by the name of the method, or under the names in their configs."""
    named = dict(runs) if isinstance(runs, Mapping) else _labels([expanded(folder) for folder in runs])
    if not named:
        raise ValueError("a report needs at least one run folder, got none")
    records = [_record(label, expanded(folder).resolve()) for label, folder in named.items()]
    usual = next(((r.setting, r.host) for r in records if r.config), ("runs", ""))
    for record in records:
        if record.config is None:  # a method without training stands with the others
            record.setting, record.host = usual
    settings: dict[str, SettingInfo] = {}
    for record in records:
        scores = next(iter(record.result.cases.values()), {})
        metrics = [m for m in MAIN_METRICS if m in scores] or list(scores)
        settings.setdefault(record.setting, SettingInfo(record.setting, metrics))
    rows = [arm_result([record]) for record in records]
    return Results(
        study=StudyInfo(title, title, question=question),
        settings=settings,
        hosts={record.host: record.host for record in records},
        arms={record.arm: _arm(record) for record in records},
        counts={"done": len(records)},
        runs=records,
        rows=rows,
        references=references_of(records),
        comparisons=compare(rows, records, {name: setting.metrics for name, setting in settings.items()}),
    )


def _labels(folders: Sequence[Path]) -> dict[str, str | Path]:
    """Return the folders by the names in their configs, with the folder where several have the same name."""
    configs = [_config(folder) for folder in folders]
    names = [config.name if config else folder.name for folder, config in zip(folders, configs, strict=True)]
    pairs = zip(names, folders, strict=True)
    return {name if names.count(name) == 1 else f"{name} ({folder})": folder for name, folder in pairs}


def _config(folder: Path) -> RunConfig | None:
    path = folder / "config.yaml"
    return load_recipe(path) if path.is_file() else None


def _arm(record: RunRecord) -> ArmInfo:
    mixer = record.config.mixer if record.config else None
    return ArmInfo(record.key, mixer.name if mixer else None, dict(mixer.options) if mixer else {})


def _record(label: str, folder: Path) -> RunRecord:
    if not (folder / "metrics.json").is_file():
        raise FileNotFoundError(f"{folder / 'metrics.json'}: not there: give the folder of a finished run")
    metrics, config = Metrics.read(folder / "metrics.json"), _config(folder)
    setting, host = _place(config, metrics) if config else ("", "")
    return RunRecord(
        key=label,
        setting=setting,
        host=host,
        arm=ARM_NAMES.get(label.lower(), label.lower()),
        multiplier=_spectral_step(config) if config else None,
        seed=metrics.seed,
        folder=str(folder),  # absolute: joined to any root it stays what it is
        status="done",
        config=config,
        environment=read_environment(folder / "environment.json"),
        metrics=metrics,
    )


def _spectral_step(config: RunConfig) -> float | None:
    """Return the step size of the spectral parameters over the learning rate; None if the mixer is not known here."""
    name, options = config.mixer.name, config.mixer.options
    if name not in MIXERS.list():
        return None
    default = MIXERS.get(name).default_step_scale or 1.0  # type: ignore[attr-defined]
    return config.train.spectral_multiplier * float(options.get("step_scale", default))


def _place(config: RunConfig, metrics: Metrics) -> tuple[str, str]:
    """Return names for the data with its task, and for the host. Runs that agree in both are compared."""
    mask, factor = metrics.task.get("mask"), metrics.task.get("factor")
    how = f" ×{mask['nominal']:g} {mask['kind']}" if mask and mask.get("nominal") else ""
    how += f" ×{factor:g}" if factor else ""
    return f"{metrics.source or config.data.name}: {config.task.name}{how}", config.backbone.name
