"""The interface of a task: it makes batches of raw images, and defines the loss and the scores.

task = create_task("reconstruction", sampling=Sampling(acceleration=8))
batch = task.prepare(raw.image, raw.label, raw.case)           # on the device of raw.image
output = model(batch.input, **batch.physics)
loss = task.loss(output, batch)
meter = Meter(task.protocol)
meter.add(task.scores(output, batch), batch.case)              # score task.reference(batch) the same way
print(meter.summary())
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from chasm.common.registry import Registry
from chasm.tasks.metrics import Rows
from chasm.tasks.protocols import Protocol


@dataclass(slots=True)
class TaskBatch:
    """A batch ready for a model, all tensors on one device.

    Attributes:
        input: input of the model, (B, C, H, W) real.
        target: (B, C, H, W) real, or (B, H, W) int64 labels.
        case: name of the case (patient, volume, picture) of each image.
        mask: sampling mask, (1 or B, 1, 1 or H, W) zeros and ones; None without undersampling.
        maps: coil sensitivities, (B, Q, H, W) complex; None with one coil.
        measured: k-space under the mask, (B, Q, H, W) complex; None with one coil.
        low: offset that `prepare` took off, (B, C, 1, 1): target = (image - low) / scale.
        scale: factor that `prepare` divided by, (B, C, 1, 1).
        held_out: ones for measured lines that were kept from the input, (B, 1, 1, W); None without such lines.
        held_out_kspace: k-space of these lines, (B, Q, H, W) complex, zero elsewhere.
        full: images on the scale of the input, before undersampling, (B, M, H, W); None unless training draws masks.
    """

    input: Tensor
    target: Tensor
    case: Sequence[str] = ()
    mask: Tensor | None = None
    maps: Tensor | None = None
    measured: Tensor | None = None
    low: Tensor | None = None
    scale: Tensor | None = None
    held_out: Tensor | None = None
    held_out_kspace: Tensor | None = None
    full: Tensor | None = None

    @property
    def physics(self) -> dict[str, Tensor | None]:
        """The keyword arguments that every backbone takes. Backbones without data consistency ignore them."""
        return {"mask": self.mask, "maps": self.maps, "measured": self.measured}

    def in_units(self, x: Tensor) -> Tensor:
        """Return images (B, C, H, W) on the scale of the target in the units of the data: x * scale + low."""
        return x if self.low is None or self.scale is None else x * self.scale + self.low


class Task(ABC):
    """Defines what a batch is, its loss and its scores. A task holds no tensors and no random state.

    Attributes:
        protocol: defines the scores.
        residual: True if input and output are images of the same kind, so that a model may add its input to its
            output.
    """

    protocol: Protocol
    residual: ClassVar[bool]

    @abstractmethod
    def channels(self, modalities: int) -> tuple[int, int]:
        """Return the input and output channels of a model for raw images with this many channels."""

    @abstractmethod
    def prepare(self, image: Tensor, label: Tensor | None = None, case: Sequence[str] = ()) -> TaskBatch:
        """Turn raw images into a batch, on the device of the images.

        Args:
            image: raw images, (B, M, H, W).
            label: label maps, (B, H, W), for tasks that need them.
            case: name of the case of each image.

        Raises:
            ValueError: if the images do not suit the task.
        """

    def for_training(self, batch: TaskBatch, seeds: Sequence[int]) -> TaskBatch:
        """Return the batch that training uses, which may hold less than that for scoring.

        Args:
            batch: batch from `prepare`.
            seeds: one for each image, for random draws.
        """
        return batch

    def for_scoring(self, batch: TaskBatch) -> TaskBatch:
        """Return the batch that validation and test use. It never depends on chance."""
        return batch

    @abstractmethod
    def loss(self, output: Tensor, batch: TaskBatch) -> Tensor:
        """Return the loss of a model's output for ``batch.input``, which training minimises: a scalar."""

    @abstractmethod
    def scores(self, output: Tensor, batch: TaskBatch) -> Rows:
        """Return the scores of a model's output: one row per slice, for a `Meter` of the task's protocol."""

    def reference(self, batch: TaskBatch) -> Tensor | None:
        """Return the output without a model (zero-filled, bicubic), if there is one. It is scored beside all models."""
        return None

    def report(self, shape: Sequence[int]) -> dict[str, Any]:
        """Return the facts about the task for metrics.json. The shape (M, H, W) of a raw image decides the mask."""
        return {"protocol": self.protocol.name, "meaning": self.protocol.meaning}


TASKS = Registry("task", Task, "chasm.tasks")
register_task = TASKS.register


def create_task(name: str, **options: Any) -> Task:
    """Create a registered task.

    Args:
        name: name of the task: "reconstruction", "segmentation", "superres", or a registered one.
        **options: arguments of the task's class.

    Raises:
        ValueError: if the name or an option is unknown; the message suggests near ones.

    >>> create_task("superres", factor=2).channels(3)
    (3, 3)
    """
    task: Task = TASKS.create(name, **options)
    return task
