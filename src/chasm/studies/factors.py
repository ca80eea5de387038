"""The factors of a study: settings (data and task), hosts, and arms (what is in their slots), at three scales.

`tiny` runs in seconds on generated data, and shows that the machinery works. `proxy` trains the paper's hosts on the
proxy bundle. `full` is the paper's protocol on its datasets. The paper does not define sizes and steps of tiny and
proxy.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from chasm.common.registry import OWN_NAME_HINT, suggest
from chasm.mixers import MIXERS
from chasm.train.config import Part
from chasm.train.yaml_text import parse_yaml

SCALES = ("tiny", "proxy", "full")
TINY_SIZE = 32  # height and width of images at tiny scale
MULTIPLIERS: tuple[float, ...] = (1, 10, 30, 100)  # times lr: the spectral step sizes that every mixer tries first


@dataclass(frozen=True)
class Setting:
    """A dataset of the paper with a task on it."""

    name: str
    title: str
    dataset: str  # key of DATASETS
    task: str
    metrics: tuple[str, str]
    acceleration: int | None = None
    mask: str = "equispaced"
    draw: int | None = None  # seed of a random mask; None for the mask's default
    snr_db: float | None = None  # signal-to-noise ratio of noisy k-space; None for no added noise
    depth: int | None = None  # slices of a volume; None for single slices
    size: int | None = None  # crop images in k-space to this size at proxy and full scale; None to keep their size

    @property
    def selection_metric(self) -> str:
        """The score that selects weights and step sizes on validation."""
        return "dice" if "dice" in self.metrics else self.metrics[0]


@dataclass(frozen=True)
class Dataset:
    """A dataset of the paper: its reader at full scale, and what replaces it at the other scales."""

    title: str
    reader: str  # name of the reader at full scale
    proxy: str  # part of the proxy bundle
    tiny: str  # content of the embedded data
    size: int  # height and width of its images at full scale
    slices: int  # number of training slices at full scale, used if the folder is not there to count them


DATASETS = {
    "cc359": Dataset("CC359", "cc359", "brain_siat_t2", "brain", 256, 2754),  # 4254 in 25 volumes, 60 skipped each
    # 973 volumes, about half of them fat-suppressed, 20 slices each
    "fastmri": Dataset("fastMRI knee", "fastmri", "knee_stanford_pdfs", "brain", 320, 9730),
    "ade20k": Dataset("ADE20K", "images", "natural_scenes_bsds_ade", "photos", 256, 20210),
    "imagenet": Dataset("ImageNet", "images", "natural_imagenet", "photos", 256, 1281167),
    # 1251 patients of 2021, 70 % of them, about 140 of 155 slices with brain
    "brats": Dataset("BraTS", "brats", "tumour_lgg_flair", "tumour", 240, 122600),
}


MASK_DRAWS = (1, 2, 3)  # seeds of the random mask: a single draw may happen to be a good or a bad mask
PATTERNS = ("equispaced-plain", "gaussian", "poisson-2d", "gaussian-2d", "radial-2d")  # beside equispaced and random


def _reconstruction(dataset: str, acceleration: int, name: str = "", title: str = "", **options: Any) -> Setting:
    title = f"{DATASETS[dataset].title} ×{acceleration}{title}"
    metrics = ("psnr", "ssim")
    return Setting(
        f"{dataset}-x{acceleration}{name}", title, dataset, "reconstruction", metrics, acceleration, **options
    )


def _settings() -> list[Setting]:
    image, overlap = ("psnr", "ssim"), ("iou", "dice")
    settings = []
    for name in ("cc359", "fastmri"):
        for r in (4, 8):
            settings.append(_reconstruction(name, r))
            settings.append(_reconstruction(name, r, "-random", ", random mask", mask="random"))
            for draw in MASK_DRAWS:
                title = f", random mask {draw}"
                settings.append(_reconstruction(name, r, f"-random-{draw}", title, mask="random", draw=draw))
    settings += [_reconstruction("cc359", 8, f"-{mask}", f", {mask} mask", mask=mask) for mask in PATTERNS]
    settings += [_reconstruction("cc359", 8, f"-snr{n}", f", SNR {n} dB", snr_db=float(n)) for n in (30, 20)]
    settings += [_reconstruction(name, 8, "-128", ", 128 x 128", size=128) for name in ("cc359", "fastmri")]
    for mask in ("equispaced", "poisson-2d"):
        title = f"CC359 volumes ×4, {mask} mask"
        settings.append(Setting(f"cc359-volume-x4-{mask}", title, "cc359", "volume", image, 4, mask, depth=8))
    for name in ("ade20k", "imagenet"):
        settings.append(Setting(name, f"{DATASETS[name].title} ×4 bicubic", name, "superres", image))
    for r in (4, 8):
        settings.append(Setting(f"brats-x{r}", f"BraTS ×{r}", "brats", "segmentation", overlap, r))
    return settings


SETTINGS = {s.name: s for s in _settings()}


def random_draws(setting: str) -> list[str]:
    """Return the settings that differ from a structured one only in a random mask, one for every draw.

    >>> random_draws("fastmri-x4")
    ['fastmri-x4-random', 'fastmri-x4-random-1', 'fastmri-x4-random-2', 'fastmri-x4-random-3']
    """
    return [name for name in SETTINGS if name.partition("-random")[0] == setting != name]


@dataclass(frozen=True)
class Host:
    """A backbone with its options; an empty dictionary means the paper's."""

    label: str
    backbone: str
    options: dict[str, Any] = field(default_factory=dict)  # at proxy and full scale
    tiny: dict[str, Any] = field(default_factory=dict)


_TINY_UNET = {"width": 16, "depth": 2, "levels": [1, 2]}
HOSTS = {
    "hifi-mamba": Host("HiFi-Mamba", "hifi-mamba", {}, {"width": 16, "groups": 2, "blocks": 1, "state": 4}),
    "unet": Host("U-Net", "unet", {}, _TINY_UNET),
    "unet-high": Host(
        "U-Net, slots at high resolution", "unet", {"levels": [0, 1, 2]}, _TINY_UNET | {"levels": [0, 1, 2]}
    ),
    "unet-3d": Host(
        "3-D U-Net", "unet-3d", {"data_consistency": True}, _TINY_UNET | {"width": 8, "data_consistency": True}
    ),
    "vit": Host(
        "ViT", "vit", {}, {"width": 32, "depth": 2, "heads": 4, "patch": 4, "head_width": 8, "slot_blocks": [1, 2]}
    ),
}


@dataclass(frozen=True)
class Arm:
    """What is in the slots. An arm without spectral parameters runs once, since multipliers do not change it."""

    label: str
    mixer: Part
    spectral: bool = True
    budget: bool = False  # choose options so that the number of parameters is close to CHASM's


def _chasm(label: str, **options: Any) -> Arm:
    return Arm(label, Part(name="chasm", options=options))


_RIVALS = {
    "gfnet": "GFNet",
    "afno": "AFNO",
    "ffc": "FFC",
    "fno-d": "FNO-D",
    "difffno": "DiffFNO",
    "fsel": "FSEL",
    "spectformer": "SpectFormer",
}
RIVALS = tuple(_RIVALS)
ARMS: dict[str, Arm] = {
    "baseline": Arm("Baseline", Part(name="identity"), spectral=False),
    "wrapper": Arm("Wrapper only", Part(name="chasm", options={"basis": None}), spectral=False),
    **{name: Arm(label, Part(name=name)) for name, label in _RIVALS.items()},
    "chasm": Arm("CHASM", Part(name="chasm")),
    "chasm-identity": _chasm("Identity basis", basis="identity"),
    "chasm-untied": _chasm("Untied basis", basis="untied"),
    "chasm-signed": _chasm("Shared basis, signed gain", gain="signed"),
    "chasm-complex": _chasm("Shared basis, complex", gain="complex"),
    "untied-symmetric": Arm("Free symmetric positive matrices", Part(name="free-operator")),
    "untied-any": Arm("Free matrices", Part(name="free-operator", options={"operator": "any"})),
    "spectformer-dense": Arm("SpectFormer with projections", Part(name="spectformer", options={"projections": True})),
    "chasm-untied-complex": _chasm("Untied basis, complex", basis="untied", gain="complex"),
    "chasm-ch": _chasm("CH only", axes="ch"),
    "chasm-cw": _chasm("CW only", axes="cw"),
    "chasm-cw-ch": _chasm("CW → CH", axes="cw>ch"),
    "chasm-sum": _chasm("CH + CW", axes="ch+cw"),
    "chasm-slices": _chasm("CHASM within slices", axes="ch>cw"),
    "chasm-bins-16": _chasm("16 bins", bins=16),
    "chasm-bins-256": _chasm("256 bins", bins=256),
    **{
        f"{name}-budget": Arm(f"{label}, matched parameters", Part(name=name), budget=True)
        for name, label in _RIVALS.items()
        if name != "gfnet"  # its table follows the map; SpectFormer's is the same operator on a grid of any size
    },
}


class UnknownArmError(ValueError):
    """A name that is neither an arm of the studies nor a registered mixer."""


def get_arm(name: str) -> Arm:
    """Return an arm of the studies, or a registered mixer. Options may follow its name in brackets.

    >>> get_arm("chasm-untied(bins=8)").mixer.options
    {'basis': 'untied', 'bins': 8}
    """
    name, bracket, options = name.partition("(")
    if bracket:
        return _with_options(get_arm(name), options)
    if name not in ARMS and name in MIXERS.list():
        spectral = bool(MIXERS.get(name).spectral_parameters)  # type: ignore[attr-defined]
        return Arm(name, Part(name=name), spectral=spectral)
    if name not in ARMS:
        known = suggest(name, {*ARMS, *MIXERS.list()})
        raise UnknownArmError(f"unknown arm or mixer {name!r}: {known} {OWN_NAME_HINT}")
    return ARMS[name]


def _with_options(arm: Arm, text: str) -> Arm:
    """Return an arm with the options of "a=1, b=[2, 3])"."""
    inner = text.removesuffix(")")
    if inner == text or not inner.strip():
        raise ValueError(f"({text}: write options in brackets, as in chasm(bins=256)")
    options = {}
    for entry in split_outside_brackets(inner):
        key, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"({text}: write {entry.strip()} as option=value, as in chasm(bins=256)")
        options[key.strip()] = parse_yaml(value, f"({text}")
    known = MIXERS.options(arm.mixer.name)
    for key in options:
        if key not in known:
            raise ValueError(f"mixer {arm.mixer.name!r} has no option {key!r}: {suggest(key, known)}")
    return with_options(arm, options)


def with_options(arm: Arm, options: dict[str, Any]) -> Arm:
    """Return an arm with options of its mixer, which its label names."""
    if not options:
        return arm
    label = f"{arm.label} ({', '.join(f'{k}={v}' for k, v in options.items())})"
    return replace(arm, label=label, mixer=Part(name=arm.mixer.name, options=arm.mixer.options | options))


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are in no brackets.

    >>> split_outside_brackets("a=1, b=[2, 3]")
    ['a=1', ' b=[2, 3]']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def lookup(kind: str, name: str, known: dict[str, Any]) -> Any:
    """Return the value of a name; `kind` says in the message what the name stands for."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: {suggest(name, known)}")
    return known[name]


def image_size(setting: Setting, scale: str) -> int:
    """Return the height and width of the images."""
    if scale == "tiny":
        return TINY_SIZE
    return setting.size or {"proxy": 256, "full": DATASETS[setting.dataset].size}[scale]


def base_recipe(setting: Setting, host: Host, scale: str, paths: dict[str, str]) -> dict[str, Any]:
    """Return the part of the recipe that all runs of a setting in a host share: all but the slot, step size and seed.

    The folders in `paths` have the keys of `needed_path`.
    """
    dataset = DATASETS[setting.dataset]
    data: dict[str, Any]
    if scale == "tiny":
        data = {"name": "embedded", "options": {"content": dataset.tiny, "size": TINY_SIZE, "cases": 30, "slices": 1}}
        training = {"steps": 6, "batch": 4, "val_every": 3, "save_every": 3, "log_every": 1}
    elif scale == "proxy":
        data = {"name": "proxy", "path": paths.get("proxy"), "options": {"part": dataset.proxy}}
        training = {"steps": 1500}
    else:
        data = {"name": dataset.reader, "path": paths.get(setting.dataset)}
        training = {"epochs": 100}
    if setting.size is not None and scale != "tiny":
        data["options"] = data.get("options", {}) | {"crop": setting.size}
    if setting.depth is not None:
        data["depth"] = setting.depth
        if scale == "tiny":
            data["options"]["slices"] = setting.depth
    options: dict[str, Any] = {}
    if setting.acceleration is not None:
        options["sampling"] = {"kind": setting.mask, "acceleration": setting.acceleration}
        if setting.draw is not None:
            options["sampling"]["seed"] = setting.draw
    if setting.snr_db is not None:
        options["snr_db"] = setting.snr_db
    if setting.task == "segmentation" and scale == "proxy":
        options["classes"] = 2  # the bundle's masks are lesion or not
    return {
        "data": data,
        "task": {"name": setting.task, "options": options},
        "backbone": {"name": host.backbone, "options": dict(host.tiny if scale == "tiny" else host.options)},
        "train": {"lr": 5e-4, "batch": 8, **training},  # AdamW; the paper gives no other number
    }


def needed_path(setting: Setting, scale: str) -> str | None:
    """Return the key of `--path KEY=FOLDER` that a setting needs, or None."""
    return {"tiny": None, "proxy": "proxy", "full": setting.dataset}[scale]
