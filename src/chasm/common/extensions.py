"""Mixers, datasets, backbones, tasks and studies from outside this package: single files, and installed packages.

`chasm --with mine.py ...` imports a file; the classes it registers can then be named everywhere. An installed package
needs no option: it announces the module that registers a name as an entry point,

    [project.entry-points."chasm.mixers"]     # or chasm.datasets, chasm.backbones, chasm.tasks, chasm.studies
    mine = "my_package.mine"

and the module is imported when the name is first used. A name of chasm itself is never replaced. Files are not found
by themselves, and a run folder never names one to import: pass --with again to resume or evaluate such a run.
"""

import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from chasm.common.files import expanded

_loaded: dict[str, str] = {}
_plugins: dict[str, str] = {}


def load_extensions(files: Iterable[str | Path]) -> None:
    """Import each file once, as a module of its name. It can import the files beside it.

    Raises:
        ValueError: if a file is missing, cannot be imported, or has the name of another module.
    """
    for file in map(Path, files):
        file = expanded(file).resolve()
        if str(file) in _loaded:
            continue
        if not file.is_file() or file.suffix != ".py":
            absent = "" if file.exists() else "not there: "
            raise ValueError(f"--with {file}: {absent}expected a Python file (.py)")
        if not file.stem.isidentifier():
            raise ValueError(f"--with {file}: expected a name that can be imported: letters, digits and _")
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # data loaders in new processes get this list, too
        try:
            imported = getattr(import_module(file.stem), "__file__", None)
        except Exception as e:
            frames = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).is_relative_to(file.parent)]
            # The error is in the file or in one beside it that it imports; a SyntaxError has no frame there.
            name, line = (frames[-1].filename, frames[-1].lineno) if frames else (str(file), getattr(e, "lineno", "?"))
            where = f"--with {file}" if name == str(file) else f"--with {file}: {name}"
            raise ValueError(" ".join(f"{where}, line {line}: {type(e).__name__}: {e}".split())) from e
        if imported is None or Path(imported).resolve() != file:
            raise ValueError(f"--with {file}: there is another module named {file.stem}: rename the file")
        _loaded[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()


def loaded() -> dict[str, str]:
    """Return the files that were imported: absolute path -> SHA-256 of the content."""
    return dict(_loaded)


def plugin_names(group: str) -> set[str]:
    """Return the names that installed packages announce in an entry-point group. Imports none of them."""
    from importlib.metadata import entry_points  # imported late: names of chasm need no entry points

    return {point.name for point in entry_points(group=group)}


def load_plugin(group: str, name: str, is_registered: Callable[[], bool]) -> None:
    """Import the module that an installed package announces for a name; do nothing if there is no such package.

    Args:
        group: the entry-point group, such as "chasm.mixers".
        name: the name that the module registers.
        is_registered: tells whether it has.

    Raises:
        ValueError: if the import fails or does not register the name, or two packages announce it; the message names
            the package.
    """
    from importlib.metadata import entry_points

    points = list(entry_points(group=group, name=name))
    if not points:
        return
    packages = [f"{point.dist.name} {point.dist.version}" for point in points if point.dist is not None]
    if len(points) > 1:
        raise ValueError(f"{group}: {name!r} is announced by {' and '.join(packages)}: uninstall one of them")
    where = f"package {packages[0]}: {group}: {name} = {points[0].value}"
    try:
        points[0].load()
    except Exception as e:
        what = " ".join(f"{type(e).__name__}: {e}".split())
        raise ValueError(f"{where}: cannot be imported ({what}): update or uninstall the package") from e
    if not is_registered():
        raise ValueError(f"{where}: does not register {name!r}: update or uninstall the package")
    _plugins[f"{group}: {name}"] = packages[0]


def plugins() -> dict[str, str]:
    """Return the plug-ins that were imported: "group: name" -> package and version."""
    return dict(_plugins)
