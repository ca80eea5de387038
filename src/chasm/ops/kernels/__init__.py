"""Triton kernels; each module here is imported only where it runs."""

from functools import cache
from importlib.util import find_spec


@cache
def triton_runs() -> bool:
    if find_spec("triton") is None:
        return False
    try:  # a build that does not fit this machine is as good as none
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
