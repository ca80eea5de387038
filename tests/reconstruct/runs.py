"""Runs without training, whose output is known, and the command."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers

from chasm.cli.app import app
from chasm.data.embedded import Embedded
from chasm.mri import create_mask
from chasm.train.config import dump, load_recipe
from chasm.train.run import build_model
from chasm.train.weights import TrainingImages, save_weights


def make_run(
    folder: Path,
    size: int | tuple[int, int] = 16,
    weights: str = "zero",
    seed: int = 0,
    training_data: Any = None,
    **task: Any,
) -> Path:
    """A run folder without training. Zero weights leave y = x: the reconstruction is then the zero-filled image."""
    options = {"sampling": {"kind": "equispaced", "acceleration": 4}, **task}
    recipe = {
        "seed": seed,
        "task": {"options": options},
        "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
        "mixer": {"name": "chasm"},
        "train": {"steps": 1},
    }
    config = load_recipe(recipe)
    shape = (1, size, size) if isinstance(size, int) else (1, *size)
    model = build_model(config, config.task.create(), shape)
    state = {k: torch.zeros_like(v) if weights == "zero" else v for k, v in model.state_dict().items()}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    save_weights(folder / "weights.safetensors", state, TrainingImages(shape, training_data or {}))
    return folder


def zero_filled(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Magnitude of (.., H, W) after its k-space lost the unmeasured columns."""
    k = writers.centred_fft(image) * mask
    back = np.fft.ifft2(np.fft.ifftshift(k, axes=(-2, -1)), norm="ortho")
    return np.abs(np.fft.fftshift(back, axes=(-2, -1)))


def as_trained(images: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What a run of zero weights makes of magnitudes: each slice to [0, 1], undersampled, and back."""
    low, high = (f(images, axis=(-2, -1), keepdims=True) for f in (np.min, np.max))
    return zero_filled((images - low) / (high - low), mask) * (high - low) + low


def columns(n: int) -> np.ndarray:
    return create_mask("equispaced", n, 4).tensor()[0, 0, 0].numpy()


def brains(n: int, size: tuple[int, int] = (48, 40)) -> np.ndarray:
    """Complex images with a phase."""
    data = Embedded("test", size=size, cases=10, slices=n)
    return np.stack([data[i].image[0].numpy() for i in range(n)])


def coil_images(n: int = 1, coils: int = 6, size: tuple[int, int] = (48, 40)) -> np.ndarray:
    """Complex images (n, coils, H, W) of smooth sensitivities around the head, whose squares sum to 1."""
    y, x = np.meshgrid(*(np.linspace(-1, 1, k) for k in size), indexing="ij")
    angles = 2 * np.pi * np.arange(coils) / coils
    maps = np.stack([np.exp(-((x - np.cos(a)) ** 2 + (y - np.sin(a)) ** 2) + 1j * (a + x)) for a in angles])
    maps /= np.sqrt((np.abs(maps) ** 2).sum(0))
    return brains(n, size)[:, None] * maps


def call(*words: object) -> Any:
    """`chasm reconstruct` with these words."""
    return CliRunner().invoke(app, ["reconstruct", *map(str, words)])
