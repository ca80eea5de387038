"""Whether runs may share a table: what they differ in beyond the factors of a study."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from chasm.studies.records import RunRecord
from chasm.train.config import flat_config

# A study varies these on purpose. The name of a run follows from the others.
FACTORS = ("name", "seed", "mixer", "train.spectral_multiplier")


def disagreements(runs: Sequence[RunRecord]) -> list[str]:
    """Say in what finished runs of one setting and host disagree, apart from the factors of a study.

    Returns:
        One sentence for each thing: a setting, the data, the test cases, the code of chasm, a file loaded with
        --with, an installed plug-in. Empty: the runs may be compared.
    """
    runs = [run for run in runs if run.metrics is not None]
    return [*_settings(runs), *_data(runs), *code_disagreements(runs)]


def _settings(runs: Sequence[RunRecord]) -> list[str]:
    configs = [flat_config(run.config) for run in runs if run.config is not None]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = []
    for key in keys:
        if any(key == factor or key.startswith(f"{factor}.") for factor in FACTORS):
            continue
        if values := _several(config.get(key, "unset") for config in configs):
            found.append(f"runs differ in {key}: {values}")
    return found


def _data(runs: Sequence[RunRecord]) -> list[str]:
    found = []
    if values := _several(run.result.source for run in runs):
        found.append(f"runs were tested on different data: {values}")
    if len({frozenset(run.result.cases) for run in runs}) > 1:
        found.append("runs were tested on different cases")
    return found


def code_disagreements(runs: Sequence[RunRecord]) -> list[str]:
    """Say in what code runs of any settings and hosts disagree, one sentence for each thing."""
    environments = [run.environment for run in runs if run.environment is not None]
    found = []
    if values := _several(e.commit[:12] for e in environments if e.commit):
        found.append(f"runs come from different commits of chasm: {values}")
    if any(e.modified for e in environments) and len(environments) > 1:
        found.append("some runs come from a checkout with uncommitted changes, so that their code may differ")
    for file in dict.fromkeys(file for e in environments for file in e.with_files):
        if values := _several(e.with_files[file][:12] for e in environments if file in e.with_files):
            found.append(f"{Path(file).name} (--with) changed between runs: SHA-256 {values}")
    for plugin in dict.fromkeys(plugin for e in environments for plugin in e.plugins):
        if values := _several(e.plugins[plugin] for e in environments if plugin in e.plugins):
            found.append(f"{plugin} comes from different packages: {values}")
    return found


def _several(values: Iterable[object]) -> str:
    """Return the distinct values as text, empty where there are fewer than two."""
    distinct = sorted(dict.fromkeys(str(value) for value in values))
    return " and ".join(distinct) if len(distinct) > 1 else ""
