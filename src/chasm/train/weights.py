"""The weights of a run. The header of their file says which images the run was built for and trained on."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from chasm.common.files import read_json
from chasm.data import SliceDataset
from chasm.train.checkpoints import Tensors, save_tensors

WEIGHTS = "weights.safetensors"
HEADER = "chasm"  # the entry of the file's metadata, as JSON
ENVIRONMENT = "environment.json"  # says the same, and is read for weights that were saved without a header


@dataclass(frozen=True)
class TrainingImages:
    """The images that a run was trained on."""

    shape: tuple[int, ...] = ()  # (M, H, W) of the raw images that the model was built for; () if there is none
    # from `describe_training_data`; {} if nothing was recorded
    description: dict[str, Any] = field(default_factory=dict)

    def header(self) -> dict[str, str]:
        """Return the metadata of a file of weights."""
        return {HEADER: json.dumps({"image_shape": list(self.shape), "training_data": self.description})}


def save_weights(path: Path, tensors: Tensors, images: TrainingImages) -> None:
    """Write the weights of a run, atomically. With the config beside them they are all that is needed to use the run.

    Args:
        path: file to write; its folder is created.
        tensors: tensors by name, on any device.
        images: facts about the training images.
    """
    save_tensors(path, tensors, images.header())


def check_weights(folder: Path) -> dict[str, str]:
    """Return the metadata of the weights of a run, after a check that they are there and not cut short.

    Raises:
        ValueError: if they cannot be read.
    """
    weights = folder / WEIGHTS
    try:
        with safe_open(weights, "pt") as f:
            return dict(f.metadata() or {})
    except (SafetensorError, OSError) as e:
        why = str(e).partition("\n")[0] or type(e).__name__
        advice = f"remove {folder / 'metrics.json'} and train again: the last checkpoint has them too"
        raise ValueError(f"{weights}: cannot be read ({why}): {advice}") from None


def training_images(folder: Path) -> TrainingImages:
    """Return facts about the training images of a run, from the header of its weights or else from environment.json.

    Raises:
        ValueError: if neither has it, or in another form than training writes.
    """
    file, header = folder / WEIGHTS, check_weights(folder).get(HEADER)
    if header is None:
        file = folder / ENVIRONMENT
        if not file.is_file():
            raise ValueError(f"{folder / WEIGHTS}: does not say its image size: copy {ENVIRONMENT} of the run, too")
        facts = read_json(file)
    else:
        try:
            facts = json.loads(header)
        except ValueError:
            facts = None
    if not isinstance(facts, dict):
        raise ValueError(f"{file}: training does not write such a header: copy the file again")
    shape = facts.get("image_shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape)):
        raise ValueError(f"{file}: image_shape: expected three numbers, got {shape!r:.80}")
    return TrainingImages(tuple(shape), _description(facts.get("training_data"), file))


def _description(description: Any, file: Path) -> dict[str, Any]:
    def numbers(values: Any, n: int) -> bool:
        return isinstance(values, list) and len(values) == n and all(isinstance(v, int | float) for v in values)

    if not description:
        return {}
    if not (
        isinstance(description, dict)
        and numbers(description.get("shape"), 3)
        and isinstance(description.get("complex"), bool)
        and (description.get("brightness") is None or numbers(description["brightness"], 2))
    ):
        problem = "training_data: expected shape (three numbers), complex and brightness (two numbers)"
        raise ValueError(f"{file}: {problem}, got {description!r:.80}")
    return description


def describe_training_data(data: SliceDataset) -> dict[str, Any]:
    """Return the facts about training data that a later reconstruction compares its input with.

    Args:
        data: the training split, of which up to 32 slices are looked at.

    Returns:
        "shape" (M, H, W), "complex", and "brightness": the smallest and largest mean of a slice, as a fraction of its
        maximum. (The scale itself does not matter: every slice is scaled before it reaches the model.)
    """
    count = min(32, len(data))
    rows = [round(i * (len(data) - 1) / max(count - 1, 1)) for i in range(count)]
    images = [data[row].image for row in rows]
    levels = [value for image in images if (value := brightness(image)) is not None]
    return {
        "shape": list(images[0].shape),
        "complex": images[0].is_complex(),
        "brightness": [min(levels), max(levels)] if levels else None,
    }


def brightness(image: Tensor) -> float | None:
    """Return the mean of the magnitude of (M, H, W), all M combined, as a fraction of its maximum; None if blank."""
    values = image.abs().float()
    if not float(values.max()) > 0:
        return None
    magnitude = (values / values.max()).square().sum(0).sqrt()  # the squares of large values are beyond float32
    return float(magnitude.mean() / magnitude.max())
