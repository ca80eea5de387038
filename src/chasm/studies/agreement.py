"""Find what runs differ in beyond the factors of a study, so that they should not share a table."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from chasm.studies.records import RunRecord
from chasm.train.config import flat_config

# A study varies these on purpose. The name of a run follows from the others.
FACTORS = ("name", "seed", "mixer", "train.spectral_multiplier")


def disagreements(runs: Sequence[RunRecord]) -> list[str]:
    """Say in what finished runs of one setting and host disagree, apart from the factors of a study.

    Returns:
        One sentence for each difference in a setting, the data, the test cases, the code of chasm, a file loaded with
        --with, or an installed plug-in. The runs may be compared if the list is empty.
    """
    runs = [run for run in runs if run.metrics is not None]
    return [*_settings(runs), *_data(runs), *code_disagreements(runs)]


def _settings(runs: Sequence[RunRecord]) -> list[str]:
    configs = [flat_config(run.config) for run in runs if run.config is not None]
    keys = dict.fromkeys(key for config in configs for key in config)
    sentences = []
    for key in keys:
        if any(key == factor or key.startswith(f"{factor}.") for factor in FACTORS):
            continue
        if values := _several(config.get(key, "unset") for config in configs):
            sentences.append(f"runs differ in {key}: {values}")
    return sentences


def _data(runs: Sequence[RunRecord]) -> list[str]:
    sentences = []
    if values := _several(run.result.source for run in runs):
        sentences.append(f"runs were tested on different data: {values}")
    if len({frozenset(run.result.cases) for run in runs}) > 1:
        sentences.append("runs were tested on different cases")
    return sentences


def code_disagreements(runs: Sequence[RunRecord]) -> list[str]:
    """Say in what code runs of any settings and hosts disagree, one sentence for each thing."""
    environments = [run.environment for run in runs if run.environment is not None]
    sentences = []
    if values := _several(e.commit[:12] for e in environments if e.commit):
        sentences.append(f"runs come from different commits of chasm: {values}")
    if any(e.modified for e in environments) and len(environments) > 1:
        sentences.append("some runs come from a checkout with uncommitted changes, so that their code may differ")
    for file in dict.fromkeys(file for e in environments for file in e.with_files):
        if values := _several(e.with_files[file][:12] for e in environments if file in e.with_files):
            sentences.append(f"{Path(file).name} (--with) changed between runs: SHA-256 {values}")
    for plugin in dict.fromkeys(plugin for e in environments for plugin in e.plugins):
        if values := _several(e.plugins[plugin] for e in environments if plugin in e.plugins):
            sentences.append(f"{plugin} comes from different packages: {values}")
    return sentences


def _several(values: Iterable[object]) -> str:
    """Return the distinct values as text, empty where there are fewer than two."""
    distinct = sorted(dict.fromkeys(str(value) for value in values))
    return " and ".join(distinct) if len(distinct) > 1 else ""
