"""Reconstruct a scan with a trained run: k-space or magnitude images in, a volume and a side-by-side picture out.

What goes through the network is one slice at a time, and a volume is written as it is made: neither has to fit the GPU,
or memory (scores of the `fastmri` protocol need the whole volume, and keep it). Two kinds of input:

- fully sampled (CC359, fastMRI with its reconstruction, magnitude images): undersampled by the run's mask, or by a mask
  file, exactly as in training; the full data is the target, and the scores are those of the run's protocol.
- measured with a mask (fastMRI's test files): the lines there are, are all there is. No target, no scores. The scale
  is the maximum of the zero-filled image (reading: training scales by the target, which nobody has here).
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chasm.data.base import Case, FileDataset, existing, fault
from chasm.data.cc359 import CC359
from chasm.data.fastmri import FastMRI
from chasm.data.files import H5Files, fit, open_npy
from chasm.data.folder import Folder
from chasm.mri import Operator, estimate_maps, fft2c, ifft2c, mask_from_array, to_channels, to_complex
from chasm.ops.precision import tf32
from chasm.tasks import Meter
from chasm.train import Run, load_run
from chasm.train.files import write_json
from chasm.volumes import Place, Result, plan, side_by_side, spare, suffix_of, write

RUN_FILES = ("config.yaml", "environment.json", "metrics.json", "weights.safetensors")
PICTURED = 3  # slices of a volume in the side-by-side picture


class _FastMRIFile(FastMRI):
    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        return [Case(path.stem, "test", (path,))], "one file"


class _CC359File(CC359):
    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        return [Case(path.stem, "test", (path,))], "one file"


@dataclass
class Volume:
    """What was written for one case."""

    case: str
    files: list[Path]  # one; or one PNG for each slice
    picture: Path
    slices: int
    replaced: bool  # an earlier file of this name
    scores: dict[str, float] = field(default_factory=dict)
    reference: dict[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    volumes: list[Volume]
    protocol: str
    meaning: str
    sampling: str
    notes: list[str]
    seconds: float


def reconstruct(
    source: str | Path,
    run: str | Path,
    out: str | Path | None = None,
    *,
    mask: str | Path | None = None,
    device: torch.device | str = "cpu",
    on_slice: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Reconstruct every slice of `source` with a run, into `out` (HDF5, NIfTI or PNG by its suffix).

    `source` is a fastMRI .h5, a CC359 .npy or .h5, or a file or folder of magnitude images. Several cases in a folder
    go to one file each, with the case's name added. Beside the volume: a picture, and a JSON record with the scores.
    """
    started, device = time.monotonic(), torch.device(device)
    path = existing(source)
    out = Path(out).expanduser() if out is not None else Path(f"{_name(path)}-reconstructed.h5")
    suffix_of(out)  # before the work
    trained = load_run(run, device)
    if trained.config.task.name != "reconstruction":
        raise ValueError(
            f"{trained.folder}: trained for {trained.config.task.name}: give a run of a reconstruction task"
        )
    inputs = [trained.folder / name for name in RUN_FILES]
    if mask is not None:
        inputs.append(existing(mask))
        trained = _with_mask(trained, inputs[-1])
    scan = _Scan(path, trained, device, mask is not None)
    places = plan(out, {case: len(rows) for case, rows in scan.cases.items()})
    spare(places.values(), inputs + scan.files)
    volumes: list[Volume] = []
    for case, rows in scan.cases.items():
        before = sum(v.slices for v in volumes)
        say = partial(_forward, on_slice, before, scan.total)
        volumes.append(_volume(scan, case, rows, places[case], say))
    return Outcome(
        volumes,
        trained.task.protocol.name,
        trained.task.protocol.meaning,
        scan.sampling,
        scan.notes,
        round(time.monotonic() - started, 2),
    )


def _name(path: Path) -> str:
    """Without the suffix of its format; other dots belong to the name."""
    path = path.resolve()
    return path.name if path.is_dir() else path.name.removesuffix(".gz").rpartition(".")[0] or path.name


def _forward(on_slice: Callable[[int, int], None], before: int, total: int, i: int) -> None:
    on_slice(before + i, total)


# --- input --------------------------------------------------------------------------------------------------------


class _Scan:
    """The slices of an input, and what the run makes of each."""

    def __init__(self, path: Path, run: Run, device: torch.device, own_mask: bool) -> None:
        self.run, self.device, self.notes = run, device, list[str]()
        complex_ = bool(getattr(run.task, "complex", False))
        self.kind = _kind(path)
        self.prospective = self.kind == "fastmri" and _holds_mask(path)
        self.data: FileDataset
        if self.kind == "fastmri":
            whole = {"acquisition": None, "slices": None}
            target = "kspace" if complex_ or self.prospective else run.config.data.options.get("target", "rss")
            self.data = _FastMRIFile(path, "all", target=target, **whole)  # type: ignore[arg-type]
        elif self.kind == "cc359":
            self.data = _CC359File(path, "all", skip=0, combine="coils" if complex_ else "rss")
        else:
            self.data = Folder(path, "all")
        if self.prospective and own_mask:
            raise ValueError(f"{path}: holds undersampled k-space with its own mask: leave out --mask")
        if self.prospective and not complex_:
            self.notes.append(
                "the run was trained on magnitudes, whose phase is zero, and measured data has a phase: "
                "expect less than the scores of the run"
            )
        self.total = len(self.data)
        self.cases: dict[str, list[int]] = {}
        for row, (case, _) in enumerate(self.data._rows):  # known without reading a slice
            self.cases.setdefault(self.data._cases[case].name, []).append(row)
        self.files = [file for case in self.data._cases for file in case.files]
        self.sampling = self._sampling()

    def _sampling(self) -> str:
        if isinstance(self.data, FastMRI) and self.prospective:
            kept = self.data.raw(0).mask
            assert kept is not None
            return f"as measured: {mask_from_array(kept.numpy())}"
        width = self.data[0].image.shape[-1]
        return str(self.run.task.sampling.mask(width))  # type: ignore[attr-defined]

    @torch.no_grad()
    def result(self, row: int, meters: tuple[Meter, Meter]) -> Result:
        return self._measured(row) if self.prospective else self._simulated(row, meters)

    def _simulated(self, row: int, meters: tuple[Meter, Meter]) -> Result:
        """Fully sampled: prepared, and scored, as in training."""
        task, s = self.run.task, self.data[row]
        batch = task.prepare(s.image[None].to(self.device), None, [s.case])
        with tf32(self.run.config.train.tf32):
            output = self.run.model(batch.input, **batch.physics).float()
        meters[0].add(task.scores(output, batch), [s.case])
        meters[1].add(task.scores(batch.input, batch), [s.case])
        image, plain = (batch.in_units(to_complex(x).abs()) for x in (output, batch.input))
        return Result(_array(image), _array(plain), _array(batch.in_units(batch.target)))

    def _measured(self, row: int) -> Result:
        """The lines that were measured. The readout is cropped first: the mask is the same in every row."""
        assert isinstance(self.data, FastMRI)
        raw = self.data.raw(row)
        assert raw.mask is not None
        H, W = (min(a, b) for a, b in zip(raw.header.recon, raw.kspace.shape[-2:], strict=True))
        mask = raw.mask.to(self.device, torch.float32)[None, None, None]
        coils = fit(ifft2c(raw.kspace[None].to(self.device)), (H, raw.kspace.shape[-1]))
        y = mask * fft2c(coils)
        maps = None
        if y.shape[1] > 1:
            maps = estimate_maps(y, mask_from_array(raw.mask.numpy()).center)
        plain = Operator(mask, maps).adjoint(y)
        scale = plain.abs().amax()
        scale = torch.where(scale > 0, scale, 1)
        measured = None if maps is None else y / scale
        with tf32(self.run.config.train.tf32):
            output = self.run.model(to_channels(plain / scale), mask=mask, maps=maps, measured=measured).float()
        image, plain = (fit(x, (H, W)) for x in (to_complex(output).abs() * scale, plain.abs()))
        return Result(_array(image), _array(plain))


def _kind(path: Path) -> str:
    if path.is_file() and path.suffix == ".h5":
        files = H5Files()
        handle = files[path]
        if "kspace" not in handle:
            raise fault(path, "kspace", f"missing; the file has {', '.join(sorted(handle)) or 'nothing'}")
        kind = "fastmri" if handle["kspace"].dtype.kind == "c" else "cc359"
        files.close()
        return kind
    if path.is_file() and path.suffix == ".npy":
        array = open_npy(path)
        return "cc359" if array.ndim == 4 and array.shape[-1] == 2 else "folder"
    return "folder"


def _holds_mask(path: Path) -> bool:
    files = H5Files()
    found = "mask" in files[path]
    files.close()
    return found


def _with_mask(run: Run, mask: Path) -> Run:
    options = {**run.config.task.options, "sampling": {"kind": "file", "file": str(mask)}}
    part = run.config.task.model_copy(update={"options": options})
    return Run(run.model, part.create(), run.config, run.folder)


def _array(x: Tensor) -> np.ndarray:
    """(1, M, H, W) -> (H, W), modalities as root-sum-of-squares."""
    x = x[0].float()
    return np.asarray((x[0] if len(x) == 1 else x.square().sum(0).sqrt()).cpu().numpy())


# --- output -------------------------------------------------------------------------------------------------------


def _volume(scan: _Scan, case: str, rows: list[int], place: Place, on_slice: Callable[[int], None]) -> Volume:
    meters = (Meter(scan.run.task.protocol), Meter(scan.run.task.protocol))
    pictured = {rows[int(i)] for i in np.linspace(0, len(rows) - 1, PICTURED + 2)[1:-1].round()}
    kept: dict[int, Result] = {}
    shape: tuple[int, ...] = ()

    def results() -> Iterator[np.ndarray]:
        nonlocal shape
        for i, row in enumerate(rows):
            result = scan.result(row, meters)
            shape = shape or result.image.shape
            if result.image.shape != shape:
                raise ValueError(f"{case} slice {i}: {result.image.shape} differs from {shape}: a volume has one shape")
            if row in pictured:
                kept[i] = result
            on_slice(i + 1)
            yield result.image

    replaced = any(file.exists() for file in place.files)
    write(place, results())
    scores, reference = {}, {}
    if not scan.prospective:
        scores, reference = (next(iter(m.summary().per_case.values())) for m in meters)
    side_by_side(place.picture, case, kept)
    record = {
        "case": case,
        "slices": len(rows),
        "run": scan.run.folder.name,
        "sampling": scan.sampling,
        "protocol": scan.run.task.protocol.name,
        "meaning": scan.run.task.protocol.meaning,
        "scores": scores or None,
        "zero-filled": reference or None,
        "notes": scan.notes,
    }
    write_json(place.record, record)
    return Volume(case, place.files, place.picture, len(rows), replaced, scores, reference)


def as_json(outcome: Outcome) -> str:
    """The outcome as one JSON object."""
    return json.dumps(asdict(outcome), indent=2, default=str)
