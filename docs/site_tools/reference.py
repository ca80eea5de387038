"""Signatures and members of classes in the API reference."""

import inspect
from typing import Any

from sphinx.util.inspect import stringify_signature


def of_init(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Return the arguments of `__init__` where a class also has a `__new__` that takes anything.

    A handler of Sphinx's event `autodoc-process-signature`. None keeps the signature that Sphinx found.

    Args:
        app: the Sphinx application, which is not used.
        what: "class" for a class.
        name: its full name, which is not used.
        thing: the class itself.
        options: of the directive, which are not used.
        signature: what Sphinx found.
        returns: what it returns, which is not used.
    """
    if what != "class" or signature is None or not signature.startswith("(*args"):
        return None
    found = inspect.signature(thing)
    return stringify_signature(found, show_return_annotation=False, unqualified_typehints=True), None


def skip_foreign(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Return True for a member of a class that is a function or class of torch, like `conv = nn.Conv3d`.

    A handler of Sphinx's event `autodoc-skip-member`. None keeps what Sphinx decided.

    Args:
        app: the Sphinx application, which is not used.
        what: the kind of thing that has the member, which is not used.
        name: of the member, which is not used.
        thing: the member itself.
        skip: whether Sphinx leaves it out, which is not used.
        options: of the directive, which are not used.
    """
    return True if str(getattr(thing, "__module__", "")).startswith("torch") else None
