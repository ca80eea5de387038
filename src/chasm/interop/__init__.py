"""Bridges to other libraries, each imported on first use: `chasm.interop.deepinv`."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "deepinv":
        raise AttributeError(f"module 'chasm.interop' has no attribute {name!r}")
    return import_module("chasm.interop.deepinv")
