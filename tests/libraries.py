"""Networks of other libraries, on a machine whose torchvision may have been built for another torch."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def library(name: str) -> Any:
    """Import timm, transformers or deepinv, or skip the test where it is not installed.

    They import torchvision, which cannot load its operators when it was built for CUDA and torch was not. It needs
    only that the operators exist, and the networks tested here use none of them.
    """
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    found = find_spec("torchvision")
    if found is not None and found.origin is not None and not hasattr(torch.ops.torchvision, "nms"):
        try:
            torch.ops.load_library(str(next(Path(found.origin).parent.glob("_C*.so"))))
        except (OSError, StopIteration):
            for operator in ("nms", "qnms"):
                _DECLARED.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return import_module(name)
