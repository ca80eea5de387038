"""Another project on PyPI is called `chasm` and is imported under the same name. Ours is `chasm-mixer`."""

from importlib.metadata import PackageNotFoundError, version


def namesake_warning() -> str:
    """Return one line that says what to do if the other project is installed too; "" if it is not.

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
