"""The images that a run saved of its test slices."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chasm.data.files import reading
from chasm.data.limits import read_npz


@dataclass(frozen=True)
class Example:
    """The middle one of the saved slices: target, reference and what the model made of it."""

    slice_name: str
    target: np.ndarray
    reference: np.ndarray
    output: np.ndarray

    @property
    def score(self) -> str:
        """PSNR or Dice of the output of this slice alone, as text."""
        return slice_score(self.output, self.target)

    @property
    def reference_score(self) -> str:
        """PSNR of the reference of this slice alone, as text."""
        return slice_score(self.reference, self.target)


def read_example(folder: Path) -> Example | None:
    """Return the example of a run, None if it has saved none.

    Raises:
        ValueError: with one line that names the file, if it cannot be read.
    """
    path = folder / "examples.npz"
    if not path.is_file():
        return None
    with reading(path), np.load(path, allow_pickle=False) as archive:
        names = read_npz(path, archive, "slices")
        i = len(names) // 2
        views = [read_npz(path, archive, key)[i] for key in ("target", "reference", "output")]
        if any(view.ndim not in (2, 3) or view.dtype.kind not in "uif" or not view.size for view in views):
            raise ValueError(f"no images: shapes {[view.shape for view in views]}")
        return Example(str(names[i]), *views)


def slice_score(output: np.ndarray, target: np.ndarray) -> str:
    """Return PSNR with the target's maximum as peak; of label maps Dice, all classes as one."""
    if target.dtype.kind in "ui":
        a, b = output > 0, target > 0
        total = int(a.sum() + b.sum())
        return f"Dice {2 * int((a & b).sum()) / total if total else 1:.3f}"
    error = float(np.square(output.astype(np.float64) - target).mean())
    peak = float(target.max()) or 1.0
    return f"{10 * np.log10(peak**2 / error):.2f} dB" if error > 0 else "equal"
