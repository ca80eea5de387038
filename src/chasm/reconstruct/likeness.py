"""Whether a scan is like the data that a run was trained on: its size, coils, acceleration and brightness."""

from typing import Any

from torch import Tensor

from chasm.common.text import counted
from chasm.data.files import crop_or_pad
from chasm.mri import ifft2c
from chasm.reconstruct.inputs import Scan
from chasm.tasks.sampling import MEASURED
from chasm.train import Run
from chasm.train.weights import brightness

MAX_OTHER_ACCELERATION = 1.1  # times that of the training
MAX_OTHER_BRIGHTNESS = 1.5  # times the brightest, or darkest, slice of the training


def unlike_training(scan: Scan, run: Run) -> str:
    """Return in one line how the middle slice of a scan differs from what a run was trained on; "" if it does not.

    Args:
        scan: what is to be reconstructed.
        run: with the facts that training recorded; without them, only the acceleration is compared.
    """
    image, acceleration = _middle(scan, run)
    coils, height, width = image.shape
    found = []
    trained = run.images.description
    trained_height, trained_width = height, width
    if trained:
        trained_coils, trained_height, trained_width = trained["shape"]
        if (height, width) != (trained_height, trained_width):
            found.append(f"{height} x {width} pixels (trained on {trained_height} x {trained_width})")
        if trained["complex"] and image.is_complex() and coils != trained_coils:
            found.append(f"{counted(coils, 'coil')} (trained on {trained_coils})")
    task: Any = run.config.task.create()
    usual = task.sampling.on(trained_height, trained_width).acceleration
    if task.masks != MEASURED and not 1 / MAX_OTHER_ACCELERATION < acceleration / usual < MAX_OTHER_ACCELERATION:
        found.append(f"acceleration {acceleration:.3g} (trained on {usual:.3g})")
    value, limits = brightness(image), trained.get("brightness")
    if value is not None and limits:
        low, high = limits
        if not low / MAX_OTHER_BRIGHTNESS < value < high * MAX_OTHER_BRIGHTNESS:
            found.append(f"a mean of {value:.2g} of the maximum (trained on {low:.2g} to {high:.2g})")
    return f"unlike the training data, so expect less of the run: {', '.join(found)}" if found else ""


def _middle(scan: Scan, run: Run) -> tuple[Tensor, float]:
    """Return the middle slice (M, H, W), zero-filled if it is undersampled, and the acceleration."""
    row = len(scan.data) // 2
    if scan.measured is None:
        image = scan.data[row].image
        return image, run.task.sampling.on(*image.shape[-2:]).acceleration  # type: ignore[attr-defined]
    raw, mask = scan.data.raw_slice(row), scan.measured  # type: ignore[attr-defined]
    size = (min(raw.size[0], raw.kspace.shape[-2]), min(raw.size[1], raw.kspace.shape[-1]))
    return crop_or_pad(ifft2c(raw.kspace), size), scan.masks.get(raw.case, mask).acceleration
