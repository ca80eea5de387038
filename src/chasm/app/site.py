"""Write the page as a folder of files that any web server can serve without chasm."""

import gzip
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from chasm.app.model import write_model
from chasm.common.files import expanded, read_json, write_bytes, write_json
from chasm.models import RECORD, list_models
from chasm.train import load_run

STATIC = Path(__file__).parent / "static"
VENDOR = STATIC / "vendor"
SITE = "site.json"


def build_site(
    models: Sequence[str | Path],
    folder: str | Path,
    *,
    convert: bool = False,
    on_model: Callable[[str], None] = lambda name: None,
) -> Path:
    """Write the page with some models into a folder.

    Args:
        models: run folders, names of shipped models, or owner/name on the Hub. Empty: all shipped models.
        folder: a new or empty folder, or one that an earlier call wrote.
        convert: whether a server of chasm converts files that the page cannot read; `serve` does.
        on_model: called with the name of each model before it is written.

    Returns:
        The folder.

    Raises:
        ValueError: if there is no model, the folder holds other files, or a model cannot run in the page.
    """
    chosen = list(models) or list_models()
    if not chosen:
        raise ValueError("no model comes with this installation: give a run folder, or owner/name on the Hub")
    folder = expanded(folder)
    if folder.is_dir() and any(folder.iterdir()) and not _is_site(folder):
        raise ValueError(f"{folder}: holds other files: give the name of a new folder")
    names: list[str] = []
    for source in chosen:
        run = load_run(source)
        record = run.folder / RECORD
        name = read_json(record)["name"] if record.is_file() else run.folder.resolve().name
        if name in names:
            raise ValueError(f"two models are called {name!r}: rename the folder of one")
        on_model(name)
        write_model(run, folder / "models" / name)
        names.append(name)
    for file in sorted(STATIC.glob("*.*")):
        write_bytes(folder / file.name, file.read_bytes())
    for name in read_json(VENDOR / "manifest.json")["sha256"]:
        write_bytes(folder / "vendor" / name, gzip.decompress((VENDOR / f"{name}.gz").read_bytes()))
    write_bytes(folder / "vendor" / "LICENCES.txt", (VENDOR / "LICENCES.txt").read_bytes())
    write_json(folder / SITE, {"models": names, "convert": convert, "version": version("chasm-mixer")})
    return folder


def _is_site(folder: Path) -> bool:
    """Return True for a folder that an earlier call wrote completely."""
    try:
        return {"models", "convert", "version"} <= set(read_json(folder / SITE))
    except (OSError, ValueError):
        return False
