"""Python files of your own: `chasm --with mine.py ...` imports them, and what they register has a name everywhere.

Nothing is looked for by itself, and a run folder never causes an import: whoever reads one says --with again.
"""

import hashlib
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

_loaded: dict[str, str] = {}


def load(files: Iterable[str | Path]) -> None:
    """Import each file once, as a module of its name; its folder can be imported from, after everything else."""
    for file in map(Path, files):
        file = file.expanduser().resolve()
        if str(file) in _loaded:
            continue
        if not file.is_file() or file.suffix != ".py":
            absent = "" if file.exists() else "not there: "
            raise ValueError(f"--with {file}: {absent}expected a Python file (.py)")
        if not file.stem.isidentifier():
            raise ValueError(f"--with {file}: expected a name that can be imported: letters, digits and _")
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # data loaders that are started anew get this list, too
        try:
            found = getattr(import_module(file.stem), "__file__", None)
        except Exception as e:
            near = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).is_relative_to(file.parent)]
            # The file, or one beside it that it imports; a SyntaxError has no frame there.
            name, line = (near[-1].filename, near[-1].lineno) if near else (str(file), getattr(e, "lineno", "?"))
            where = f"--with {file}" if name == str(file) else f"--with {file}: {name}"
            raise ValueError(" ".join(f"{where}, line {line}: {type(e).__name__}: {e}".split())) from e
        if found is None or Path(found).resolve() != file:
            raise ValueError(f"--with {file}: there is another module named {file.stem}: rename the file")
        _loaded[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()


def loaded() -> dict[str, str]:
    """Absolute path of each file -> SHA-256 of its text."""
    return dict(_loaded)
