"""Triton kernels. A module that holds one is imported only where it runs: triton is not installed everywhere."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec


def has_triton() -> bool:
    """True if triton can be imported; a build that does not fit this machine cannot."""
    return _can_import("triton")


has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]  # to the compiler it is a constant


@cache
def _can_import(package: str) -> bool:
    if find_spec(package) is None:
        return False
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def is_interpreted() -> bool:
    """True in Triton's interpreter, where kernels run on CPU tensors of any dtype: in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
