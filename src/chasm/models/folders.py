"""Find the folder of a model by its name, and check its files."""

import re
from fnmatch import fnmatch
from pathlib import Path

from chasm.common.files import expanded, is_folder_name, read_json, sha256
from chasm.common.registry import suggest

RECORD = "model.json"
GRAPH = "page.onnx.gz"  # the network for `chasm app`, without its weights; a model may lack it
MODEL_FILES = ("config.yaml", "weights.safetensors", "environment.json", RECORD, "README.md", GRAPH)
MAX_CARD_CHARACTERS = 2**20
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
        FileNotFoundError: if the name is none of these.
        ValueError: if it is on the Hub and huggingface_hub is not installed.
        OSError: if the Hub does not have it, or cannot be reached.
    """
    folder, shipped = expanded(source), shipped_models()
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

    The name in the record must be one that a folder can have, because pages and copies are named after it.

    Raises:
        ValueError: if a file is missing, was changed, or is not as chasm writes it; the message names the file.
    """
    if not (folder / RECORD).is_file():
        return
    record = read_json(folder / RECORD)
    model, expected = record.get("name"), record.get("sha256")
    if not isinstance(expected, dict) or not {"config.yaml", "weights.safetensors"} <= set(expected):
        raise ValueError(f"{folder / RECORD}: sha256: expected one for config.yaml and weights.safetensors")
    if not is_folder_name(model):
        raise ValueError(f"{folder / RECORD}: name: expected one that a folder can have, got {model!r:.80}")
    for name, digest in expected.items():
        file = folder / Path(name).name
        if not file.is_file() or sha256(file) != digest:
            what = "changed" if file.is_file() else "missing"
            raise ValueError(f"{file}: {what}, by its SHA-256 in {RECORD}: install the package or get the model again")


def read_card(folder: Path) -> str:
    """Return the card of a model or run as Markdown, without the header for the Hub and without control characters.

    Raises:
        FileNotFoundError: if there is none.
    """
    card = folder / "README.md"
    if not card.is_file():
        raise FileNotFoundError(f"{card}: not there: 'chasm train' writes it when the run ends")
    with open(card, encoding="utf-8", errors="replace") as f:
        text = f.read(MAX_CARD_CHARACTERS)
    text = text.split("\n---\n", 1)[-1] if text.startswith("---\n") else text
    return "".join(c for c in text if c.isprintable() or c in "\n\t").strip()
