"""The paper as data: its tables and ablations as studies, and the ones it lacks. The numbers are in `paper`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chasm.common.extensions import load_plugin, plugin_names
from chasm.studies import paper
from chasm.studies.factors import (
    ARMS,
    DATASETS,
    HOSTS,
    MASK_DRAWS,
    PATTERNS,
    RIVALS,
    SETTINGS,
    Arm,
    Dataset,
    Host,
    Setting,
    get_arm,
    lookup,
)
from chasm.studies.paper import Quote


@dataclass(frozen=True)
class Grid:
    """The cells of a study: each setting in each host with each arm, for each seed."""

    settings: tuple[str, ...]
    hosts: tuple[str, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Study:
    """A table or ablation: which settings, hosts and arms run, and the numbers that the paper prints for them."""

    name: str
    title: str
    source: str  # the table of the paper, or that the paper does not have it
    question: str
    grids: tuple[Grid, ...]
    quotes: dict[tuple[str, str, str], dict[str, Quote]]  # (setting, host, arm) -> metric -> what the paper prints
    kind: str = "train"  # or "cost": parameters and multiply-adds, nothing is trained
    sizes: tuple[int, ...] = ()  # finished runs are also scored on images of these sizes, without training again


PLUGINS = "chasm.studies"  # entry-point group of installed packages
HIFI, ALL_MIXERS = ("hifi-mamba",), paper.MIXERS
Quotes = dict[tuple[str, str, str], dict[str, Quote]]


def _quotes(setting: str, host: str, arms: Mapping[str, dict[str, Quote]]) -> Quotes:
    return {(setting, host, arm): metrics for arm, metrics in arms.items()}


def _main_quotes(settings: Sequence[str], hosts: Sequence[str]) -> Quotes:
    """Return what Tables 1 and 2 print for some settings in some hosts."""
    quotes: Quotes = {}
    for setting in settings:
        for host in hosts:
            quotes |= _quotes(setting, host, paper.MAIN[setting, host])
    return quotes


def _cost_quotes(metric: str, costs: Mapping[str, Mapping[str, float]]) -> Quotes:
    """Return printed costs, host to arm to value, which do not depend on the setting."""
    return {("cc359-x8", host, arm): {metric: Quote(v)} for host, arms in costs.items() for arm, v in arms.items()}


_MRI = ("cc359-x4", "cc359-x8", "fastmri-x4", "fastmri-x8")
_BASIS = ("chasm-identity", "chasm-untied", "chasm-signed", "chasm-complex", "chasm")
_AXES = ("chasm-ch", "chasm-cw", "chasm-cw-ch", "chasm-sum", "chasm")
_CC359_X8 = ("cc359-x8",)
_MIXERS_AND_VARIANTS = ("baseline", "wrapper", *RIVALS, *_BASIS)
_NOT_IN_PAPER = "not in the paper"


def _table_two(name: str, title: str, settings: tuple[str, ...], host: str) -> Study:
    question = f"Does the order of the mixers carry over to {title}?"
    quotes = _main_quotes(settings, (host,))
    return Study(name, title, "Table 2", question, (Grid(settings, (host,), ALL_MIXERS),), quotes)


_BUILT_IN = [
    Study(
        "cc359", "CC359 reconstruction", "Table 1",
        "Does CHASM beat every other mixer in the slots of each of three hosts?",
        (Grid(("cc359-x8", "cc359-x4"), paper.HOSTS, ALL_MIXERS),), _main_quotes(("cc359-x8", "cc359-x4"), paper.HOSTS),
    ),
    _table_two("fastmri", "fastMRI knee reconstruction", ("fastmri-x8", "fastmri-x4"), "hifi-mamba"),
    _table_two("ade20k", "ADE20K, 4x bicubic", ("ade20k",), "unet"),
    _table_two("imagenet", "ImageNet, 4x bicubic", ("imagenet",), "unet"),
    _table_two("brats", "BraTS segmentation from undersampled MRI", ("brats-x4", "brats-x8"), "unet"),
    Study(
        "random-mask", "Random-mask falsification, three draws", "Table 3 (a)",
        "Does CHASM's lead over the strongest rival shrink under random masks, whichever lines are drawn?",
        (Grid((*_MRI, *(f"{s}-random-{draw}" for s in _MRI for draw in MASK_DRAWS)), HIFI, (*RIVALS, "chasm")),),
        _main_quotes(_MRI, HIFI),
    ),
    Study(
        "basis", "Shared-basis constraint", "Table 3 (b)", "What does each constraint on the spectral core contribute?",
        (Grid(_CC359_X8, HIFI, _BASIS),), _quotes("cc359-x8", "hifi-mamba", paper.BASIS),
    ),
    Study(
        "axes", "Axis composition", "Table 3 (c)",
        "One axis or two, in which order, one after the other or side by side?",
        (Grid(_CC359_X8, HIFI, _AXES),), _quotes("cc359-x8", "hifi-mamba", paper.AXES),
    ),
    Study(
        "seeds", "Three-seed stability", "Appendix, seed stability",
        "Is the lead over the strongest rival larger than the spread from run to run?",
        tuple(Grid((setting,), HIFI, tuple(arms), (0, 1, 2)) for setting, arms in paper.SEEDS.items()),
        {key: q for setting, arms in paper.SEEDS.items() for key, q in _quotes(setting, "hifi-mamba", arms).items()},
    ),
    Study(
        "seeds-basis", "Three-seed stability of the shared-basis ablation", "Appendix, shared-basis ablation stability",
        "Is the lead of the shared over the untied basis larger than the spread from run to run?",
        (Grid(_CC359_X8, HIFI, ("chasm-untied", "chasm"), (0, 1, 2)),),
        _quotes("cc359-x8", "hifi-mamba", paper.SEEDS_BASIS),
    ),
    Study(
        "flops", "Multiply-adds of whole models", "Appendix, computational cost",
        "What does a model cost with each mixer?",
        (Grid(_CC359_X8, paper.HOSTS, ALL_MIXERS),), _cost_quotes("gmacs_paper", paper.FLOPS), kind="cost",
    ),
    Study(
        "parameters", "Parameters of one mixer at 96 channels", "Table 1, Core Params", "How large is each mixer?",
        (Grid(_CC359_X8, HIFI, ALL_MIXERS),), _cost_quotes("core_mparams", {"hifi-mamba": paper.CORE_PARAMETERS}),
        kind="cost",
    ),
    Study(
        "wrapper", "Wrapper-only control", _NOT_IN_PAPER,
        "How much of CHASM's gain remains when its spectral core is taken out and its convolutions stay?",
        (Grid(_CC359_X8, paper.HOSTS, ("baseline", "wrapper", "chasm")),), _main_quotes(_CC359_X8, paper.HOSTS),
    ),
    Study(
        "budget", "Parameter-matched rivals", _NOT_IN_PAPER, "Does CHASM lead rivals of about its own size?",
        (Grid(_CC359_X8, paper.HOSTS, ("baseline", *(f"{r}-budget" for r in RIVALS if r != "gfnet"), "chasm")),),
        _main_quotes(_CC359_X8, paper.HOSTS),
    ),
    Study(
        "hifi", "Every mixer and variant in HiFi-Mamba", _NOT_IN_PAPER,
        "Does CHASM lead in the paper's own host when every rival trains, and what does each of its parts give?",
        (Grid(_CC359_X8, HIFI, _MIXERS_AND_VARIANTS),), {},
    ),
    Study(
        "hifi-random", "Every mixer and variant in HiFi-Mamba, three draws of a random mask", _NOT_IN_PAPER,
        "Does CHASM's lead shrink when the mask loses its structure, whichever lines are drawn?",
        (Grid(("cc359-x8", *(f"cc359-x8-random-{draw}" for draw in MASK_DRAWS)), HIFI, _MIXERS_AND_VARIANTS),), {},
    ),
    Study(
        "bins", "Number of bins of the gain tables", _NOT_IN_PAPER,
        "Does a table with fewer or more bins than frequencies change anything?",
        (Grid(_CC359_X8, HIFI, ("chasm-bins-16", "chasm", "chasm-bins-256")),), {},
    ),
    Study(
        "sampling", "CHASM's gain over sampling patterns", _NOT_IN_PAPER,
        "Does CHASM's lead grow with the coherence of the mask?",
        (Grid(("cc359-x8", *(f"cc359-x8-{mask}" for mask in PATTERNS),
               *(f"cc359-x8-random-{draw}" for draw in MASK_DRAWS)), HIFI, (*RIVALS, "chasm")),), {},
    ),
    Study(
        "noise", "Noise on the k-space", _NOT_IN_PAPER,
        "Does the order of the mixers hold when the measurements are noisy?",
        (Grid(("cc359-x8", "cc359-x8-snr30", "cc359-x8-snr20"), HIFI, ALL_MIXERS),), {},
    ),
    Study(
        "readings", "Other readings of the untied basis and of SpectFormer", _NOT_IN_PAPER,
        "Does another reading of what the paper leaves open change the order?",
        (Grid(_CC359_X8, HIFI, ("chasm-untied", "untied-symmetric", "untied-any", "chasm-untied-complex", "spectformer",
                          "spectformer-dense", "chasm")),), {},
    ),
    Study(
        "resolution", "Trained on small images, tested at 2 and 2.5 times their size", _NOT_IN_PAPER,
        "Which mixers carry over to images of other sizes without training again?",
        (Grid(("cc359-x8-128", "fastmri-x8-128"), HIFI, ALL_MIXERS),), {}, sizes=(256, 320),
    ),
    Study(
        "volume", "Volumes in a 3-D U-Net", _NOT_IN_PAPER,
        "Does the axis across slices help, and does CHASM help in three dimensions at all?",
        (Grid(("cc359-volume-x4-poisson-2d", "cc359-volume-x4-equispaced"), ("unet-3d",),
              ("baseline", "wrapper", "gfnet", "chasm-slices", "chasm")),), {},
    ),
    Study(
        "hosts", "Every mixer in U-Net and ViT", _NOT_IN_PAPER,
        "Does the order of the mixers carry over to other hosts?",
        (Grid(_CC359_X8, ("unet-high", "vit"), _MIXERS_AND_VARIANTS),), {},
    ),
    Study(
        "health", "The first steps of every mixer in every host", _NOT_IN_PAPER,
        "Does every mixer train in every host, in float32 and in bfloat16?",
        (Grid(_CC359_X8, paper.HOSTS, ALL_MIXERS),), {},
    ),
    Study(
        "evidence", "First evidence: U-Net with slots at the three highest resolutions, x8", _NOT_IN_PAPER,
        "Which mixers help under a structured and a random mask, with one step size and with a tuned one?",
        (Grid(("cc359-x8", "cc359-x8-random"), ("unet-high",),
              ("baseline", "wrapper", *RIVALS, "chasm-identity", "chasm-untied", "chasm-signed", "chasm")),), {},
    ),
]  # fmt: skip
STUDIES = {study.name: study for study in _BUILT_IN}


def register_study(
    study: Study,
    *,
    settings: Sequence[Setting] = (),
    hosts: Mapping[str, Host] | None = None,
    arms: Mapping[str, Arm] | None = None,
    datasets: Mapping[str, Dataset] | None = None,
) -> None:
    """Add a study, and the settings, hosts, arms and datasets that it names.

    Call it in a file that `chasm --with FILE.py` imports, or in the module that an installed package announces as an
    entry point of its name in "chasm.studies".

    Args:
        study: the study. Its grids may also name what other studies use.
        settings: datasets with a task, by their own names.
        hosts: name to host.
        arms: name to what goes into the slots.
        datasets: name to what reads a dataset, for settings.

    Raises:
        ValueError: if a name is taken by something else, or a grid names something unknown.

    A file with a study of its own host, for `chasm --with mine.py study run mine`:

        grid = Grid(settings=("cc359-x8",), hosts=("small",), arms=("baseline", "chasm(bins=256)"))
        study = Study("mine", "A small U-Net", "not in the paper", "Does it help there?", (grid,), {})
        register_study(study, hosts={"small": Host("U-Net, small", "unet", {"width": 8})})
    """
    added: list[tuple[str, dict[str, Any], Mapping[str, Any]]] = [
        ("dataset", DATASETS, datasets or {}),
        ("setting", SETTINGS, {setting.name: setting for setting in settings}),
        ("host", HOSTS, hosts or {}),
        ("arm", ARMS, arms or {}),
        ("study", STUDIES, {study.name: study}),
    ]
    for kind, known, new in added:
        for name, value in new.items():
            if known.get(name, value) != value:
                raise ValueError(f"a {kind} named {name!r} is already there: choose another name")
    for _, known, new in added[:-1]:
        known.update(new)
    for grid in study.grids:
        for setting in grid.settings:
            lookup("dataset", lookup("setting", setting, SETTINGS).dataset, DATASETS)
        for host in grid.hosts:
            lookup("host", host, HOSTS)
        for arm in grid.arms:
            get_arm(arm)
    STUDIES[study.name] = study


def list_studies() -> list[Study]:
    """Return all studies: those of chasm, of files loaded with --with, and of installed packages."""
    for name in sorted(plugin_names(PLUGINS) - set(STUDIES)):
        get_study(name)
    return list(STUDIES.values())


def get_study(name: str) -> Study:
    """Return a study by its name.

    Raises:
        ValueError: if the name is unknown; the message suggests near ones.
    """
    if name not in STUDIES:
        load_plugin(PLUGINS, name, lambda: name in STUDIES)
    study: Study = lookup("study", name, STUDIES)
    return study


def paper_extras(study: Study) -> dict[str, Any]:
    """Return what the paper prints beside the cells: the falsification table, gains, and the largest spreads."""
    settings = {s for grid in study.grids for s in grid.settings}
    extras: dict[str, Any] = {}
    if study.name == "random-mask":
        extras["falsification"] = paper.FALSIFICATION
    if study.name == "seeds":
        extras["gain"] = paper.SEEDS_GAIN
    if spread := {s: v for s, v in paper.LARGEST_SPREAD.items() if s in settings and study.source == "Table 2"}:
        extras["largest_spread"] = spread
    return extras
