"""The picture of `chasm data preview`: what a model gets for a few slices, and what it must restore."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import interpolate

from chasm.data import Slice
from chasm.mri import Sampling, to_complex
from chasm.tasks.reconstruction import Reconstruction
from chasm.tasks.superres import SuperResolution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panel = tuple[str, Tensor, dict[str, Any]]  # title, picture, imshow's options
_GREY = {"cmap": "gray", "vmin": 0, "vmax": 1}


def montage(slices: Sequence[Slice], domain: str, sampling: Sampling) -> "Figure":
    """Draw one row per slice: target with outlined labels, mask or reduced image, plain reconstruction, error."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3 * len(slices)), layout="constrained", facecolor="0.88")
    for row, s in zip(figure.subplots(len(slices), 4, squeeze=False), slices, strict=True):
        panels = _photo(s) if domain == "photo" else _mri(s, sampling)
        for ax, (title, picture, options) in zip(row, panels, strict=True):
            ax.imshow(picture.numpy(), **options)
            ax.set_title(title, fontsize=8, parse_math=False)  # a $ in a file name is a $
            ax.set_axis_off()
        if s.label is not None:
            for value, colour in enumerate(("tab:blue", "tab:green", "tab:red"), start=1):
                inside = (s.label == value).numpy()
                if inside.any():
                    row[0].contour(inside, levels=[0.5], colors=colour, linewidths=0.8)
    return figure


def _mri(s: Slice, sampling: Sampling) -> list[Panel]:
    image = s.image if s.image.is_complex() else s.image[-1:]  # of several modalities the last (FLAIR)
    task = Reconstruction(sampling, complex=image.is_complex())
    batch = task.prepare(image[None])
    target, plain = batch.target[0, 0], to_complex(batch.input)[0, 0].abs()
    mask = sampling.on(*image.shape[-2:])
    psnr = task.scores(batch.input, batch)["psnr"][0]
    magnitude = s.image.abs()
    size = "x".join(map(str, s.image.shape))
    lines = f"{mask.kept}, x{mask.acceleration:.2f}"
    return [
        (f"{s.case} slice {s.index}\n{size}, {magnitude.min():.3g} to {magnitude.max():.3g}", target, _GREY),
        (f"{mask.kind} mask\n{lines}", mask.tensor()[0, 0].expand(target.shape), _GREY),
        (f"zero-filled\nPSNR {psnr:.2f} dB ({task.protocol.name})", plain, _GREY),
        ("error x 3", 3 * (plain - target).abs(), {**_GREY, "cmap": "inferno"}),
    ]


def _photo(s: Slice) -> list[Panel]:
    task = SuperResolution()
    batch = task.prepare(s.image[None])
    target, plain = batch.target[0].permute(1, 2, 0), batch.input[0].permute(1, 2, 0)  # (H,W,3)
    psnr = task.scores(batch.input, batch)["psnr"][0]
    reduced = tuple(n // task.factor for n in s.image.shape[-2:])
    small = interpolate(s.image[None], size=reduced, mode="bicubic", antialias=True)[0].clamp(0, 1)
    return [
        (f"{s.case}\n{'x'.join(map(str, s.image.shape))}", target, {}),
        (f"reduced {task.factor} times", small.permute(1, 2, 0), {}),
        (f"bicubic\nPSNR {psnr:.2f} dB ({task.protocol.name})", plain, {}),
        ("error x 3", (3 * (plain - target).abs()).clamp(0, 1), {}),
    ]
