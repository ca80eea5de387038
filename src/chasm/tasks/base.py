"""What a task is: how raw images become a batch, what is minimised, what is reported.

task = create_task("reconstruction", sampling=Sampling(acceleration=8))
batch = task.prepare(raw.image, raw.label, raw.case)           # on the device of raw.image
output = model(batch.input, **batch.physics)
loss = task.loss(output, batch)
meter = Meter(task.protocol)
meter.add(task.scores(output, batch), batch.case)              # and with task.reference(batch)
print(meter.summary())
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from chasm.common.registry import Registry
from chasm.tasks.metrics import Protocol, Rows


@dataclass(slots=True)
class TaskBatch:
    """A batch ready for a model, all tensors on one device."""

    input: Tensor  # (B, C, H, W) real
    target: Tensor  # (B, C, H, W) real, or (B, H, W) int64 labels
    case: Sequence[str] = ()
    mask: Tensor | None = None  # (1, 1, 1, W) zeros and ones
    maps: Tensor | None = None  # (B, Q, H, W) complex, several coils only
    measured: Tensor | None = None  # (B, Q, H, W) complex k-space under the mask, several coils only
    low: Tensor | None = None  # (B, C, 1, 1): target = (image - low) / scale
    scale: Tensor | None = None  # (B, C, 1, 1)

    @property
    def physics(self) -> dict[str, Tensor | None]:
        """The keywords every backbone takes; those without data consistency ignore them."""
        return {"mask": self.mask, "maps": self.maps, "measured": self.measured}

    def in_units(self, x: Tensor) -> Tensor:
        """Back from the scale of the target to that of the data."""
        return x if self.low is None or self.scale is None else x * self.scale + self.low


class Task(ABC):
    """Says what a batch is, its loss and its scores; holds no tensors and no random state."""

    protocol: Protocol
    residual: ClassVar[bool]  # whether the output lives in the space of the input, so that a model may add it

    @abstractmethod
    def channels(self, modalities: int) -> tuple[int, int]:
        """Input and output channels of a model, for images of that many modalities."""

    @abstractmethod
    def prepare(self, image: Tensor, label: Tensor | None = None, case: Sequence[str] = ()) -> TaskBatch:
        """Raw images (B, M, H, W), and labels (B, H, W) -> batch, computed where the images are."""

    @abstractmethod
    def loss(self, output: Tensor, batch: TaskBatch) -> Tensor: ...

    @abstractmethod
    def scores(self, output: Tensor, batch: TaskBatch) -> Rows:
        """One row per slice, for `Meter` of the task's protocol."""

    def reference(self, batch: TaskBatch) -> Tensor | None:
        """The output of doing nothing (zero-filled, bicubic): its scores stand beside every model's."""
        return None

    def report(self, width: int) -> dict[str, Any]:
        """What a result at this image width should say about its task."""
        return {"protocol": self.protocol.name, "meaning": self.protocol.meaning}


TASKS = Registry("task", Task, "chasm.tasks")
register_task = TASKS.register


def create_task(name: str, **options: Any) -> Task:
    task: Task = TASKS.create(name, **options)
    return task
