"""What the extras of the package install, and one line where something is missing or in the way."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# Extra -> the modules it brings, as pyproject.toml declares them.
EXTRAS = {
    "train": ("accelerate", "pydantic", "yaml", "typer", "rich", "tensorboard"),
    "data": ("h5py", "nibabel", "pydicom", "ismrmrd", "twixtools", "PIL", "tifffile", "skimage", "typer", "rich"),
    "report": ("matplotlib", "jinja2", "typer", "rich"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "hub": ("huggingface_hub",),
    "cluster": ("ray", "submitit"),
}
# Needed for some files or options only. Code that meets one of those says what to install.
_RARE = {"pydicom", "ismrmrd", "twixtools", "tifffile", "tensorboard"}


def require(*extras: str) -> None:
    """Raise if modules of these extras are not installed, before any work is done.

    Raises:
        ValueError: if a module is missing; the message says what to install.

    >>> require()
    """
    missing = {extra: [m for m in EXTRAS[extra] if m not in _RARE and find_spec(m) is None] for extra in extras}
    lacking = [extra for extra, modules in missing.items() if modules]
    if lacking:
        names = ", ".join(dict.fromkeys(m for modules in missing.values() for m in modules))
        raise ValueError(f"this needs {names}: pip install 'chasm-mixer[{','.join(lacking)}]'")


def how_to_install(module: str) -> str:
    """Return the command that installs a module which an import did not find.

    >>> how_to_install("onnxruntime.capi"), how_to_install("somebody_elses")
    ("pip install 'chasm-mixer[export]'", 'pip install somebody_elses')
    """
    name = module.split(".")[0]
    for extra, modules in EXTRAS.items():
        if name in modules:
            return f"pip install 'chasm-mixer[{extra}]'"
    return f"pip install {name}"


def namesake_warning() -> str:
    """Return one line if the other project called `chasm` is installed, which has the same import name; else "".

    >>> namesake_warning()
    ''
    """
    try:
        other = version("chasm")
    except PackageNotFoundError:
        return ""
    return (
        f"the package chasm {other} is another project with the same import name: "
        "pip uninstall chasm chasm-mixer, then pip install chasm-mixer"
    )
