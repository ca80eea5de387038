"""Reconstruct a scan with a trained run: k-space or magnitude images in, a volume and a side-by-side picture out.

What goes through the network is one slice at a time, and a volume is written as it is made: neither has to fit the GPU,
or memory (scores of the `fastmri` protocol need the whole volume, and keep it). Two kinds of input:

- fully sampled (CC359, fastMRI, images): undersampled by the run's mask, or by a mask file, exactly as in training; the
  full data is the target, and the scores are those of the run's protocol.
- undersampled k-space (fastMRI's test files): the lines there are, are all there is. Scores only where a reconstruction
  is stored beside it. The scale is the maximum of the zero-filled image (reading: training scales by the target).
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chasm.common.files import json_safe, write_json
from chasm.common.precision import tf32
from chasm.common.words import counted
from chasm.data.base import existing
from chasm.data.files import crop_or_pad
from chasm.mri import Operator, estimate_maps, fft2c, ifft2c, to_channels, to_complex
from chasm.reconstruct.inputs import Scan, open_scan
from chasm.reconstruct.outputs import Place, Result, names, plan, side_by_side, spare, suffix_of, write
from chasm.tasks import Meter
from chasm.tasks.metrics import FastMRI, Rows
from chasm.tasks.reconstruction import min_max
from chasm.train import Run, load_run

RUN_FILES = ("config.yaml", "environment.json", "metrics.json", "weights.safetensors")
UNKNOWN = "voxel sizes are unknown: 1 mm written"
PICTURED = 3  # slices of a volume in the side-by-side picture


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
    read_as: str  # what the input was taken for
    sampling: str
    notes: list[str]
    seconds: float


def reconstruct(
    source: str | Path,
    run: str | Path,
    out: str | Path | None = None,
    *,
    kind: str | None = None,
    mask: str | Path | None = None,
    device: torch.device | str = "cpu",
    on_slice: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Reconstruct every slice of `source` with a run, into `out` (HDF5, NIfTI or PNG by its suffix).

    `source` is a fastMRI .h5, a CC359 .npy or .h5, or a file or folder of images; `kind` says whether complex arrays
    are "image" (unless said) or "kspace". Several cases in a folder go to one file each, with the case's name added;
    PNG and TIFF slices right in it are one case. Beside the volume: a picture, and a JSON record with scores.
    """
    on_each = lambda _, done, total: on_slice(done, total)  # noqa: E731
    _, outcome = next(reconstruct_each([source], run, out, kind=kind, mask=mask, device=device, on_slice=on_each))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def reconstruct_each(
    sources: Sequence[str | Path],
    run: str | Path,
    out: str | Path | None = None,
    *,
    kind: str | None = None,
    mask: str | Path | None = None,
    device: torch.device | str = "cpu",
    on_slice: Callable[[Path, int, int], None] = lambda source, done, total: None,
) -> Iterator[tuple[Path, Outcome | ValueError | OSError]]:
    """The same for one source after the other. What fails comes as its error, and the others go on.

    Several sources go to files with their names added to `out`.
    """
    device = _usable(device)
    paths = list(dict.fromkeys(existing(source) for source in sources))
    if out is None:
        outs = [Path(f"{_name(path)}-reconstructed.h5") for path in paths]
    else:
        outs = [Path(out).expanduser()]
        if len(paths) > 1:
            outs = names(outs[0], {path: _name(path) for path in paths})
    for file, n in Counter(outs).items():
        suffix_of(file)  # before the work
        if n > 1:
            raise ValueError(f"{file}: the default name of {n} inputs: give --out, which then has their names added")
    trained = load_run(run, device)
    if trained.config.task.name != "reconstruction":
        raise ValueError(
            f"{trained.folder}: trained for {trained.config.task.name}: give a run of a reconstruction task"
        )
    inputs = [*(trained.folder / name for name in RUN_FILES), *(path for path in paths if path.is_file())]
    if mask is not None:
        inputs.append(existing(mask))
        trained = _with_mask(trained, inputs[-1])
    written: set[Path] = set()
    for path, file in zip(paths, outs, strict=True):
        try:
            scan = _open(path, trained, kind, mask)
            yield path, _reconstruct(scan, trained, path, file, device, inputs, written, partial(on_slice, path))
        except (ValueError, OSError) as e:
            yield path, e
        except (torch.OutOfMemoryError, MemoryError):
            yield path, OSError(f"{path}: out of memory on {device}: try --device cpu, or a machine with more")


def _open(path: Path, trained: Run, kind: str | None, mask: str | Path | None) -> Scan:
    magnitudes = not getattr(trained.task, "complex", False)
    target = trained.config.data.options.get("target", "rss")
    scan = open_scan(path, phase=not magnitudes, target=target, kind=kind, mask=existing(mask) if mask else None)
    if scan.measured is None and not magnitudes and not scan.data[len(scan.data) // 2].image.is_complex():
        raise ValueError(f"{path}: magnitudes, and the run was trained on complex images: give those, or another run")
    if scan.measured is not None and magnitudes:
        scan.notes.append(
            "the run was trained on magnitudes, whose phase is zero, and measured data has a phase: "
            "expect less than the scores of the run"
        )
    return scan


def _reconstruct(
    scan: Scan,
    trained: Run,
    path: Path,
    out: Path,
    device: torch.device,
    inputs: list[Path],
    written: set[Path],
    on_slice: Callable[[int, int], None],
) -> Outcome:
    """All cases of a scan. `inputs` are not to be written over, nor what was `written` for other scans."""
    started = time.monotonic()
    work = _Work(scan, trained, device)
    places = plan(out, {case: len(rows) for case, rows in scan.data.rows_by_case().items()})
    spare(places.values(), inputs + scan.data.files())
    ours = {file for place in places.values() for file in place.all}
    if ours & written:
        raise ValueError(f"{min(ours & written)}: holds another input of this call: give this one by itself")
    if path.is_dir() and out.parent.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"{out}: in the folder that is read, where it would be taken for a scan: give another --out")
    volumes: list[Volume] = []
    for case, rows in scan.data.rows_by_case().items():
        before = sum(v.slices for v in volumes)
        say = partial(_forward, on_slice, before, len(scan.data))
        try:
            volumes.append(_volume(work, case, rows, places[case], say))
        except (ValueError, OSError) as e:
            if not volumes:
                raise
            done = f"{counted(len(volumes), 'volume')} of {len(places)} written before"
            raise (OSError if isinstance(e, OSError) else ValueError)(f"{e} ({done})") from None
        finally:
            written |= {file for file in places[case].all if file.exists()}
    left = [file for place in places.values() for file in place.earlier if file not in ours | written]
    if left:
        scan.notes.append(f"still there from an earlier call: {counted(len(left), 'slice')}, first {left[0]}")
    return Outcome(
        volumes,
        trained.task.protocol.name,
        trained.task.protocol.meaning,
        scan.read_as,
        work.sampling,
        scan.notes,
        round(time.monotonic() - started, 2),
    )


def _usable(device: torch.device | str) -> torch.device:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:  # a name that torch does not know, or a device that is not there
        why = str(e).splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used here ({why}): choose cpu, or cuda on a GPU") from None
    return torch.device(device)


def _name(path: Path) -> str:
    """Without the suffix of its format; other dots belong to the name."""
    path = path.resolve()
    return path.name if path.is_dir() else path.name.removesuffix(".gz").rpartition(".")[0] or path.name


def _forward(on_slice: Callable[[int, int], None], before: int, total: int, i: int) -> None:
    on_slice(before + i, total)


class _Work:
    """A scan, and what a run makes of each of its slices."""

    def __init__(self, scan: Scan, run: Run, device: torch.device) -> None:
        self.scan, self.run, self.device = scan, run, device
        if scan.measured is not None:
            self.sampling = f"as measured: {scan.measured}"
        else:
            self.sampling = str(run.task.sampling.mask(scan.data[0].image.shape[-1]))  # type: ignore[attr-defined]

    @torch.no_grad()
    def result(self, row: int, meters: tuple[Meter, Meter]) -> Result:
        return self._simulated(row, meters) if self.scan.measured is None else self._measured(row, meters)

    def _simulated(self, row: int, meters: tuple[Meter, Meter]) -> Result:
        """Fully sampled: prepared, and scored, as in training."""
        task, s = self.run.task, self.scan.data[row]
        batch = task.prepare(s.image[None].to(self.device), None, [s.case])
        with tf32(self.run.config.train.tf32):
            output = self.run.model(batch.input, **batch.physics).float()
        meters[0].add(task.scores(output, batch), [s.case])
        meters[1].add(task.scores(batch.input, batch), [s.case])
        image, plain = (batch.in_units(to_complex(x).abs()) for x in (output, batch.input))
        return Result(_array(image), _array(plain), _array(batch.in_units(batch.target)))

    def _measured(self, row: int, meters: tuple[Meter, Meter]) -> Result:
        """The lines that were measured. The readout is cropped first: the mask is the same in every row."""
        raw, chosen = self.scan.raw(row), self.scan.measured
        assert chosen is not None
        H, W = (min(a, b) for a, b in zip(raw.size, raw.kspace.shape[-2:], strict=True))
        mask = chosen.tensor(self.device)
        coils = crop_or_pad(ifft2c(raw.kspace[None].to(self.device)), (H, raw.kspace.shape[-1]))
        y = mask * fft2c(coils)
        maps = estimate_maps(y, chosen.center) if y.shape[1] > 1 else None
        plain = Operator(mask, maps).adjoint(y)
        scale = plain.abs().amax()
        scale = torch.where(scale > 0, scale, 1)
        measured = None if maps is None else y / scale
        with tf32(self.run.config.train.tf32):
            output = self.run.model(to_channels(plain / scale), mask=mask, maps=maps, measured=measured).float()
        image, plain = (crop_or_pad(x, (H, W)) for x in (to_complex(output).abs() * scale, plain.abs()))
        if not self.scan.scored:
            return Result(_array(image), _array(plain))
        target = self.scan.data[row].image[None].to(self.device)
        for meter, x in zip(meters, (image, plain), strict=True):
            meter.add(self._rows(x, target), [raw.case])
        return Result(_array(image), _array(plain), _array(crop_or_pad(target, (H, W))))

    def _rows(self, image: Tensor, target: Tensor) -> Rows:
        """Scores of an image (1, 1, H, W) against a stored one, where both are, scaled as the protocol has it."""
        size = (min(image.shape[-2], target.shape[-2]), min(image.shape[-1], target.shape[-1]))
        image, target = crop_or_pad(image, size), crop_or_pad(target, size)
        task = self.run.task
        if not isinstance(task.protocol, FastMRI):  # that one speaks of the data's own units
            _, low, scale = min_max(target)
            if task.complex:  # type: ignore[attr-defined]
                low, scale = torch.zeros_like(low), low + scale  # from zero to the maximum
            image, target = (image - low) / scale, (target - low) / scale
        return task.protocol.rows(image, target)


def _with_mask(run: Run, mask: Path) -> Run:
    options = {**run.config.task.options, "sampling": {"kind": "file", "file": str(mask)}}
    part = run.config.task.model_copy(update={"options": options})
    return Run(run.model, part.create(), run.config, run.folder)


def _array(x: Tensor) -> np.ndarray:
    """(1, M, H, W) -> (H, W), modalities as root-sum-of-squares."""
    x = x[0].float()
    return np.asarray((x[0] if len(x) == 1 else x.square().sum(0).sqrt()).cpu().numpy())


# --- output -------------------------------------------------------------------------------------------------------


def _volume(work: _Work, case: str, rows: list[int], place: Place, on_slice: Callable[[int], None]) -> Volume:
    scan, protocol = work.scan, work.run.task.protocol
    meters = (Meter(protocol), Meter(protocol))
    pictured = {rows[int(i)] for i in np.linspace(0, len(rows) - 1, PICTURED + 2)[1:-1].round()}
    kept: dict[int, Result] = {}
    shape: tuple[int, ...] = ()

    def results() -> Iterator[np.ndarray]:
        nonlocal shape
        for i, row in enumerate(rows):
            result = work.result(row, meters)
            shape = shape or result.image.shape
            if result.image.shape != shape:
                differs = f"{case} slice {i}: {result.image.shape} differs from {shape}"
                raise ValueError(f"{differs}: a volume has one shape: give such files one at a time")
            if row in pictured:
                kept[i] = result
            on_slice(i + 1)
            yield result.image

    replaced = any(file.exists() for file in place.files)
    affine = scan.data.affine(case) if place.nifti else None
    if place.nifti and affine is None and UNKNOWN not in scan.notes:
        scan.notes.append(UNKNOWN)
    write(place, results(), affine)
    scores, reference = {}, {}
    if scan.scored:
        scores, reference = (next(iter(m.summary().per_case.values())) for m in meters)
    side_by_side(place.picture, case, kept)
    record = {
        "case": case,
        "slices": len(rows),
        "run": work.run.folder.name,
        "read as": scan.read_as,
        "sampling": work.sampling,
        "protocol": protocol.name,
        "meaning": protocol.meaning,
        "scores": scores or None,
        "zero-filled": reference or None,
        "notes": scan.notes,
    }
    write_json(place.record, record)
    return Volume(case, place.files, place.picture, len(rows), replaced, scores, reference)


def as_json(outcomes: dict[Path, Outcome | ValueError | OSError]) -> str:
    """One outcome as a JSON object; of several inputs, a list, with "input" and, where one failed, "error"."""
    found = [{"error": str(o)} if isinstance(o, Exception) else json_safe(asdict(o)) for o in outcomes.values()]
    if len(found) == 1:
        return json.dumps(found[0], indent=2, default=str)
    each = [{"input": path, **o} for path, o in zip(outcomes, found, strict=True)]
    return json.dumps(each, indent=2, default=str)
