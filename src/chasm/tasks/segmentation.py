"""Segmentation from undersampled multi-modal MRI: soft Dice and cross-entropy, Dice and IoU per region."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.mri import Operator, Sampling, to_channels
from chasm.tasks.base import Task, TaskBatch, register_task
from chasm.tasks.metrics import Rows
from chasm.tasks.protocols import BRATS_REGIONS, Overlap
from chasm.tasks.sampling import check_masks, drawn_masks, masks_of


@register_task("segmentation")
class Segmentation(Task):
    """Segments undersampled images. The input is every modality under one mask, as real and imaginary channels.

    The output is one logit per class. Modalities keep the scale of the dataset (BraTS: each volume in [0, 1]). The
    loss is cross-entropy plus soft Dice with equal weights.

    Args:
        sampling: kind of mask, acceleration and seed; its defaults if None.
        classes: number of classes including the background.
        regions: unions of classes that are scored, by name. By default WT, TC and ET for four classes, and each
            foreground class otherwise.
        masks: "fixed", "slice" or "epoch", as for `Reconstruction`.

    >>> Segmentation(classes=3).channels(modalities=4)
    (8, 3)
    """

    residual = False
    protocol: Overlap

    def __init__(
        self,
        sampling: Sampling | None = None,
        *,
        classes: int = 4,
        regions: Mapping[str, Sequence[int]] | None = None,
        masks: str = "fixed",
    ) -> None:
        if classes < 2:
            raise ValueError(f"segmentation needs 2 or more classes with the background, got {classes}")
        self.sampling = sampling or Sampling()
        self.masks = check_masks(masks, self.sampling)
        self.classes = classes
        if regions is None:
            regions = BRATS_REGIONS if classes == 4 else {f"class{c}": (c,) for c in range(1, classes)}
        self.protocol = Overlap(regions)

    def channels(self, modalities: int) -> tuple[int, int]:
        return 2 * modalities, self.classes

    def prepare(self, image: Tensor, label: Tensor | None = None, case: Sequence[str] = ()) -> TaskBatch:
        if label is None:
            raise ValueError("segmentation needs labels, and this dataset has none: choose another task or dataset")
        mask = masks_of(image, self.sampling, self.masks)
        if not image.is_complex():
            image = image.float() / (255 if image.dtype == torch.uint8 else 1)
        full = image if self.masks == "epoch" else None
        return TaskBatch(to_channels(Operator(mask).normal(image)), label, case, mask, full=full)

    def for_training(self, batch: TaskBatch, seeds: Sequence[int]) -> TaskBatch:
        if batch.full is None:
            return batch
        mask = drawn_masks(batch.full, self.sampling, seeds)
        return replace(batch, input=to_channels(Operator(mask).normal(batch.full)), mask=mask, full=None)

    def loss(self, output: Tensor, batch: TaskBatch) -> Tensor:
        logits = output.float()  # sums over a batch of pixels are too long for half precision
        return F.cross_entropy(logits, batch.target) + dice_loss(logits, batch.target)

    def scores(self, output: Tensor, batch: TaskBatch) -> Rows:
        return self.protocol.rows(output.argmax(1), batch.target)

    def report(self, shape: Sequence[int]) -> dict[str, Any]:
        return {
            **super().report(shape),
            "mask": self.sampling.on(*shape[-2:]).report(),
            "masks": self.masks,
            "classes": self.classes,
            "regions": {name: list(members) for name, members in self.protocol.regions.items()},
        }


def dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Return 1 - soft Dice of logits (B, K, H, W) and labels (B, H, W), averaged over the foreground classes.

    Sums run over the whole batch, so that false positives of a class count even in slices without that class
    (reading: the paper only names the loss).
    """
    p = logits.softmax(1)[:, 1:]
    t = torch.stack([label == c for c in range(1, logits.shape[1])], dim=1).to(p.dtype)
    both, total = (p * t).sum((0, 2, 3)), p.sum((0, 2, 3)) + t.sum((0, 2, 3))
    smooth = 1e-5  # a class that is missing from the whole batch still has a gradient
    return 1 - ((2 * both + smooth) / (total + smooth)).mean()
