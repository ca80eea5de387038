"""Super-resolution: photographs are reduced (bicubic, rounded to 8 bits) and restored; the loss is L1 on RGB."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.common.precision import full_precision
from chasm.tasks.base import Task, TaskBatch, register_task
from chasm.tasks.metrics import Rows
from chasm.tasks.protocols import get_protocol


@register_task("superres")
class SuperResolution(Task):
    """Restores reduced photographs. The input is the reduced image, enlarged to its old size.

    The target is RGB in [0, 1], and scores include the border. Both steps are bicubic with the Catmull-Rom kernel
    (a = -0.5) of Pillow and MATLAB, which torch uses only with ``antialias=True`` (otherwise a = -0.75). The reduction
    is antialiased: its kernel is as many times wider as the image gets smaller.

    Args:
        factor: factor by which height and width are reduced.

    >>> SuperResolution(factor=4).prepare(torch.rand(1, 3, 16, 16)).input.shape
    torch.Size([1, 3, 16, 16])
    """

    residual = True

    def __init__(self, factor: int = 4) -> None:
        if factor < 2:
            raise ValueError(f"the reduction factor must be 2 or more, got {factor}")
        self.factor = factor
        self.protocol = get_protocol("unit")

    def channels(self, modalities: int) -> tuple[int, int]:
        return modalities, modalities

    def prepare(self, image: Tensor, label: Tensor | None = None, case: Sequence[str] = ()) -> TaskBatch:
        target = image.float() / 255 if image.dtype == torch.uint8 else image.float()
        H, W = target.shape[-2:]
        if H % self.factor or W % self.factor:
            raise ValueError(f"{H}x{W} images are not divisible by {self.factor}: crop them to a multiple of it")
        small = _bicubic(target, (H // self.factor, W // self.factor))
        small = (small.clamp(0, 1) * 255).round() / 255
        return TaskBatch(self.enlarge(small), target, case)

    def enlarge(self, small: Tensor) -> Tensor:
        """Return the input of the network: reduced images in [0, 1], enlarged by bicubic interpolation."""
        H, W = small.shape[-2:]
        return _bicubic(small, (H * self.factor, W * self.factor)).clamp(0, 1)

    def loss(self, output: Tensor, batch: TaskBatch) -> Tensor:
        return (output - batch.target).abs().mean()

    def scores(self, output: Tensor, batch: TaskBatch) -> Rows:
        return self.protocol.rows(output, batch.target)

    def reference(self, batch: TaskBatch) -> Tensor:
        """Return the image that bicubic interpolation enlarged."""
        return batch.input

    def report(self, shape: Sequence[int]) -> dict[str, Any]:
        return {**super().report(shape), "factor": self.factor}


def _bicubic(x: Tensor, size: tuple[int, int]) -> Tensor:
    with full_precision(x):
        return F.interpolate(x, size=size, mode="bicubic", align_corners=False, antialias=True)
