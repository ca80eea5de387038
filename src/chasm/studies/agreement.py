"""Find what runs differ in beyond the factors of a study, so that they should not share a table."""

from collections.abc import Sequence
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
    configs = [flat_config(run.config) for run in runs if run.config is not None]
    sentences = []
    for key in dict.fromkeys(key for config in configs for key in config):
        if not any(key == factor or key.startswith(f"{factor}.") for factor in FACTORS):
            sentences += _if_several(f"runs differ in {key}:", [config.get(key, "unset") for config in configs])
    sentences += _if_several("runs were tested on different data:", [run.result.source for run in runs])
    if len({frozenset(run.result.cases) for run in runs}) > 1:
        sentences.append("runs were tested on different cases")
    return [*sentences, *code_disagreements(runs)]


def code_disagreements(runs: Sequence[RunRecord]) -> list[str]:
    """Say in what code runs of any settings and hosts disagree, one sentence for each thing."""
    environments = [run.environment for run in runs if run.environment is not None]
    commits = [e.commit[:12] for e in environments if e.commit]
    sentences = _if_several("runs come from different commits of chasm:", commits)
    if any(e.modified for e in environments) and len(environments) > 1:
        sentences.append("some runs come from a checkout with uncommitted changes, so that their code may differ")
    for file in dict.fromkeys(file for e in environments for file in e.with_files):
        digests = [e.with_files[file][:12] for e in environments if file in e.with_files]
        sentences += _if_several(f"{Path(file).name} (--with) changed between runs: SHA-256", digests)
    for plugin in dict.fromkeys(plugin for e in environments for plugin in e.plugins):
        packages = [e.plugins[plugin] for e in environments if plugin in e.plugins]
        sentences += _if_several(f"{plugin} comes from different packages:", packages)
    return sentences


def _if_several(text: str, values: Sequence[object]) -> list[str]:
    """Return one sentence that names the distinct values, none if there are fewer than two."""
    distinct = sorted({str(value) for value in values})
    return [f"{text} {' and '.join(distinct)}"] if len(distinct) > 1 else []
