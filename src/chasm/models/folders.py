"""What a model folder holds, where the shipped ones are, and what a name stands for."""

import hashlib
import re
from fnmatch import fnmatch
from pathlib import Path

from chasm.common.files import read_json
from chasm.common.registry import suggest

RECORD = "model.json"
MODEL_FILES = ("config.yaml", "weights.safetensors", "environment.json", RECORD, "README.md")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def shipped_models() -> dict[str, Path]:
    """Return the folder of every model that comes with the package, by its name."""
    return {file.parent.name: file.parent for file in sorted(Path(__file__).parent.glob(f"*/{RECORD}"))}


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the shipped models that match a shell-style pattern."""
    return [name for name in shipped_models() if fnmatch(name, pattern)]


def find_model(source: str | Path) -> Path:
    """Return the folder that a run folder, the name of a shipped model or the name of a Hub repository stands for.

    A folder goes before a shipped model of the same name, and both before the Hub. A Hub repository is downloaded to
    the cache of huggingface_hub, config and weights only, unless it is there already.

    Args:
        source: the folder, ``"brain-x8"`` or ``"owner/name"``.

    Raises:
        FileNotFoundError: with one line, if it is none of these.
        ValueError: if it is on the Hub and huggingface_hub is not installed.
        OSError: if the Hub does not have it, or cannot be reached.
    """
    folder, shipped = Path(source).expanduser(), shipped_models()
    if folder.is_dir():
        return folder
    if str(source) in shipped:
        return shipped[str(source)]
    if _HUB_NAME.fullmatch(str(source)) and not folder.parent.is_dir():
        from chasm.models.hub import download

        return download(str(source), MODEL_FILES)
    what = "not a folder" if folder.exists() else "no such run folder or model"
    raise FileNotFoundError(f"{source}: {what}: give a run folder, owner/name on the Hub, or a model: {_known(source)}")


def _known(source: str | Path) -> str:
    shipped = shipped_models()
    return suggest(str(source), shipped) if shipped else "(none comes with this installation)"


def check_model(folder: Path) -> None:
    """Compare the files of a model folder with the SHA-256 in its record; a run folder without a record has none.

    Raises:
        ValueError: with one line that names the file that is missing or was changed.
    """
    if not (folder / RECORD).is_file():
        return
    expected = read_json(folder / RECORD).get("sha256")
    if not isinstance(expected, dict) or not {"config.yaml", "weights.safetensors"} <= set(expected):
        raise ValueError(f"{folder / RECORD}: sha256: expected one for config.yaml and weights.safetensors")
    for name, digest in expected.items():
        file = folder / Path(name).name
        if not file.is_file() or sha256(file) != digest:
            what = "changed" if file.is_file() else "missing"
            raise ValueError(f"{file}: {what}, by its SHA-256 in {RECORD}: install the package or get the model again")


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
