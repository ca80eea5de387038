"""Names of settings and hosts in reports. They name other data or another host that `--set` put in place."""

from collections.abc import Sequence

from chasm.studies.factors import DATASETS, HOSTS, SETTINGS
from chasm.train.config import flat
from chasm.train.yaml_text import parse_yaml

# Keys of a recipe that read better in words than as "key value".
KEY_PHRASES = {
    "data.depth": "{} slices a volume",
    "data.options.crop": "{0} x {0}",
    "data.options.size": "{0} x {0}",
    "task.name": "task {}",
    "task.options.masks": "masks drawn per {}",
    "task.options.sampling.center_fraction": "centre fraction {}",
    "task.options.sampling.kind": "{} mask",
    "task.options.sampling.seed": "mask seed {}",
    "task.options.snr_db": "SNR {} dB",
}
ACCELERATION = "task.options.sampling.acceleration"


def setting_title(name: str, overrides: Sequence[str]) -> str:
    """Return the title of a setting.

    >>> setting_title("cc359-x8", ["data.options.part=tumour_lgg_flair", "data.options.crop=128"])
    'tumour lgg flair ×8, 128 x 128'
    >>> setting_title("cc359-x8-random", ["task.options.sampling={kind: gaussian, acceleration: 6}"])
    'CC359 ×6, gaussian mask'
    """
    setting, changes = SETTINGS[name], _changes(overrides, ("data", "task"))
    dataset = DATASETS[setting.dataset].title
    data = changes.pop("data.options.part", None), changes.pop("data.name", None)
    shown = next((_value(value).replace("_", " ") for value in data if value is not None), dataset)
    title, *details = setting.title.replace(dataset, shown, 1).split(", ")
    if (acceleration := changes.pop(ACCELERATION, None)) is not None:
        title = title.replace(f"×{setting.acceleration}", f"×{_value(acceleration)}")
    if "task.options.sampling.kind" in changes:
        details = [detail for detail in details if "mask" not in detail]
    if "data.options.crop" in changes or "data.options.size" in changes:
        details = [detail for detail in details if " x " not in detail]
    return ", ".join([title, *details, *_in_words(changes)])


def host_label(name: str, overrides: Sequence[str]) -> str:
    """Return the label of a host.

    >>> host_label("hifi-mamba", ["backbone.name=unet", "backbone.options={width: 8, levels: [0, 1]}"])
    'unet, width 8, levels 0 1'
    """
    changes = _changes(overrides, ("backbone",))
    label = changes.pop("backbone.name", None)
    return ", ".join([HOSTS[name].label if label is None else _value(label), *_in_words(changes)])


def _changes(overrides: Sequence[str], parts: Sequence[str]) -> dict[str, object]:
    """Return the changes of some parts of a recipe: dotted key to value. The last change of a key counts."""
    changes: dict[str, object] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key.partition(".")[0] in parts and key != "data.path":
            value = parse_yaml(text, override)
            changes |= flat(value, key)
    return changes


def _in_words(changes: dict[str, object]) -> list[str]:
    phrases = []
    for key, value in changes.items():
        name = key.rpartition(".")[2].replace("_", " ")
        phrases.append(KEY_PHRASES[key].format(_value(value)) if key in KEY_PHRASES else f"{name} {_value(value)}")
    return phrases


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_value, value))
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
