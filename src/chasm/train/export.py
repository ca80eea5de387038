"""Write a trained run as one ONNX file, with scaling, Fourier transforms, coils and data consistency inside."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from chasm.backbones.base import Backbone
from chasm.backbones.measurement import RealMeasurement
from chasm.mri import Operator, create_mask, estimate_maps, fft2c, mask_from_array, to_channels, to_complex
from chasm.mri.real import estimate_real_maps
from chasm.surgery.free_size import free_size
from chasm.surgery.onnx import fixed_copy, require_runtime, write_checked
from chasm.tasks import Reconstruction
from chasm.train.run import Run, load_run

Shape = list[int | str]  # a word is a size that is free
MIN_SIZE, MAX_SIZE = 32, 4096  # size of images, in a file for any size
MAX_COILS = 256
MARK = "chasm.run"  # a name in the metadata of every file


@dataclass(frozen=True)
class ExportedRun:
    """An ONNX file."""

    path: Path  # path of the file
    inputs: dict[str, Shape]  # name to shape of its inputs
    outputs: dict[str, Shape]  # name to shape of its outputs
    error: float  # the largest relative difference to the run that was found in onnxruntime


class FromKSpace(nn.Module):
    """k-space (B, 2 Q, H, W) and mask (1, 1, 1, W) -> magnitude, image and zero-filled magnitude, in real arithmetic.

    Every slice is scaled by the largest magnitude of its zero-filled image, as `chasm reconstruct` does, and back.
    """

    def __init__(self, model: Backbone, has_coils: bool) -> None:
        super().__init__()
        self.model, self.has_coils = model, has_coils
        model.measurement = RealMeasurement

    def forward(self, kspace: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = kspace.unflatten(1, (-1, 2)) * mask  # (B, Q, 2, H, W)
        maps = estimate_real_maps(k, mask) if self.has_coils else None
        plain = RealMeasurement(mask > 0, k, maps, (k.shape[-2], k.shape[-1])).reduce(k)
        scale = _magnitude(plain).amax((-2, -1), keepdim=True)
        scale = torch.where(scale > 0, scale, 1)  # (B, images, 1, 1)
        measured = k / scale.unsqueeze(2) if self.has_coils else None
        scale = torch.stack([scale, scale], 2).flatten(1, 2)
        image = self.model(plain / scale, mask=mask, maps=maps, measured=measured) * scale
        return _magnitude(image), image, _magnitude(plain)


def _magnitude(image: Tensor) -> Tensor:
    """Return the magnitude (B, M, H, W) of channels (B, 2 M, H, W)."""
    return image.unflatten(1, (-1, 2)).square().sum(2).sqrt()


@torch.no_grad()
def from_complex_kspace(model: nn.Module, kspace: Tensor, mask: Tensor, has_coils: bool) -> tuple[Tensor, ...]:
    """Return the outputs of `FromKSpace` by FFTs and complex numbers, to compare a file with.

    Args:
        model: the host as it was trained.
        kspace: (B, 2 Q, H, W).
        mask: (1, 1, 1, W).
        has_coils: whether the Q k-spaces are coils of one image; otherwise each is an image.
    """
    y = mask * to_complex(kspace)
    maps = estimate_maps(y, mask_from_array(mask.numpy()).center) if has_coils else None
    plain = Operator(mask, maps).adjoint(y)
    scale = plain.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    measured = y / scale if has_coils else None
    output = to_complex(model(to_channels(plain / scale), mask=mask, maps=maps, measured=measured)) * scale
    return output.abs(), to_channels(output), plain.abs()


def export_run(
    run: str | Path, path: str | Path, *, size: tuple[int, int] | None = None, coils: int | None = None
) -> ExportedRun:
    """Write a trained run as one ONNX file, and compare the file with the run in onnxruntime.

    The file of a reconstruction run takes ``kspace`` (batch, 2 coils, height, width), centred, real and imaginary part
    of each coil in turn, and ``mask`` (1, 1, 1, width), ones where columns were measured. It returns ``magnitude``,
    ``image`` (real and imaginary part) and ``zero_filled``, in the units of the data. The file of another task takes
    ``input`` and returns ``output``, as its model does. Only real operators of the standard set are used, and Fourier
    transforms are matrix products, unless a mixer other than CHASM brings its own.

    Args:
        run: run folder, or name of a model.
        path: the file to write; its folder must exist.
        size: height and width of images, for a faster file of this one size; by default any size from 32 on.
        coils: 1, or more for a file that takes any number of coils and estimates their sensitivities; by default as
            the data of the run.

    Returns:
        The names and shapes of inputs and outputs, and the difference that was found.

    Raises:
        ValueError: when onnxruntime is missing, the model cannot be exported like this, or the file differs from it.
    """
    require_runtime(Path(path))
    trained = load_run(run)
    shape = trained.images.shape
    coils = (shape[0] if getattr(trained.task, "complex", False) else 1) if coils is None else coils
    subject = _subject(trained, coils, size)
    H, W = size or (max(n, MIN_SIZE) for n in shape[1:])
    # The first size is not that of the run, for which tables have a shortcut that a file for all sizes must not keep.
    sizes = [(2, H, W), (1, H, W)] if size else [(2, H + 16, W + 32), (1, H + 5, W), (1, H, W)]
    examples = [subject.example(*each) for each in sizes]
    with torch.no_grad():
        checks = [(each, subject.expected(*each)) for each in examples]
    free = {
        "batch": torch.export.Dim("batch"),
        "2 coils": 2 * torch.export.Dim("coils", min=2, max=MAX_COILS),
        "height": torch.export.Dim("height", min=MIN_SIZE, max=MAX_SIZE),
        "width": torch.export.Dim("width", min=MIN_SIZE, max=MAX_SIZE),
    }
    try:
        program = torch.export.export(
            fixed_copy(subject.module, examples[0]) if size else free_size(subject.module),
            examples[0],
            dynamic_shapes=tuple(
                {i: free[n] for i, n in enumerate(axes) if isinstance(n, str)} for axes in subject.inputs.values()
            ),
            prefer_deferred_runtime_asserts_over_guards=True,  # it cannot prove that two layers agree in size
        )
        error = write_checked(
            Path(path),
            program,
            checks,
            shapes={**subject.inputs, **subject.outputs},
            metadata=_facts(trained),
            input_names=list(subject.inputs),
            output_names=list(subject.outputs),
        )
    except RuntimeError as e:  # torch's own, of many lines
        raise ValueError(f"{trained.folder}: cannot be exported ({_reason(e)}): {_advice(e, size)}") from e
    return ExportedRun(Path(path), subject.inputs, subject.outputs, error)


@dataclass(frozen=True)
class _Subject:
    """A module to export, and the reference to compare it with."""

    module: nn.Module
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    example: Callable[[int, int, int], tuple[Tensor, ...]]  # called with batch, height and width
    expected: Callable[..., tuple[Tensor, ...]]


def _subject(run: Run, coils: int, size: tuple[int, int] | None) -> _Subject:
    model = run.model
    assert isinstance(model, Backbone)
    sized: Shape = list(size or ("height", "width"))
    if not isinstance(run.task, Reconstruction):
        if coils != 1:
            raise ValueError(f"coils={coils}: {run.config.task.name} has no coils: leave --coils out")
        into, out = (
            {name: ["batch", n, *sized]} for name, n in (("input", model.in_channels), ("output", model.out_channels))
        )
        return _Subject(
            model, into, out, lambda B, H, W: (torch.rand(B, model.in_channels, H, W),), lambda x: (model(x),)
        )
    images = model.in_channels // 2
    if coils < 1 or (coils > 1 and images > 1):
        raise ValueError(f"coils={coils}: expected 1 or more, and 1 for a run of {images} images: leave --coils out")
    channels: int | str = "2 coils" if coils > 1 else 2 * images
    outputs = {"magnitude": images, "image": 2 * images, "zero_filled": images}
    return _Subject(
        FromKSpace(copy.deepcopy(model), coils > 1),
        {"kspace": ["batch", channels, *sized], "mask": [1, 1, 1, sized[1]]},
        {name: ["batch", n, *sized] for name, n in outputs.items()},
        lambda B, H, W: _measurement(B, max(images, coils), H, W),
        lambda kspace, mask: from_complex_kspace(model, kspace, mask, coils > 1),
    )


def _measurement(batch: int, coils: int, H: int, W: int) -> tuple[Tensor, Tensor]:
    """Return k-space of random images, nowhere dark, and a mask."""
    generator = torch.Generator().manual_seed(0)
    real, imaginary = torch.rand(2, batch, coils, H, W, generator=generator)
    image = torch.complex(0.5 + real, imaginary)
    mask = create_mask("equispaced", W).tensor()
    return to_channels(mask * fft2c(image)), mask


def _reason(error: RuntimeError) -> str:
    """Return the line of an error that matters: torch's exporter has it under a heading, other errors have it first."""
    text = str(error).partition("## Exception summary")
    lines = [line.strip() for line in (text[2] or text[0]).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _advice(error: RuntimeError, size: tuple[int, int] | None) -> str:
    if "complex-valued" in str(error):
        return "among mixers with Fourier transforms only CHASM can do without complex numbers"
    return "ONNX lacks what this model needs" if size else "try --size HEIGHTxWIDTH"


def _facts(run: Run) -> dict[str, str]:
    """Return the metadata of the file."""
    config = run.config
    parts = {"task": config.task, "backbone": config.backbone, "mixer": config.mixer}
    return {MARK: config.name, **{f"chasm.{k}": json.dumps(v.model_dump(mode="json")) for k, v in parts.items()}}
