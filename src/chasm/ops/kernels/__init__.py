"""Triton kernels. Modules with kernels are imported only when one runs, because triton is not installed everywhere."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on CPU tensors of any dtype: in tests


def has_triton() -> bool:
    """Return True if triton can be imported. A build for another machine cannot."""
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
