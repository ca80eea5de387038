"""Reconstruct scans with a trained run, or without training, from k-space or images to a volume and a picture.

One slice at a time goes through the network, and a volume is written as it is made, so neither has to fit into memory.
(Scores of the `fastmri` protocol need the whole volume, and keep it.) There are two kinds of input:

- Fully sampled data (CC359, fastMRI, images) is undersampled by the run's mask, or by a mask file, exactly as in
  training. The full data is the target, and the scores are those of the run's protocol. A method without training has
  no mask. It reconstructs fully sampled k-space as it is, unless a mask or an acceleration is asked for.
- Undersampled k-space (fastMRI's test files) has only the measured columns. It is scored only if the file also stores a
  reconstruction. The scale is the maximum of the zero-filled image (a reading: training scales by the target).
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from chasm.common.devices import usable_device
from chasm.common.files import expanded, json_safe
from chasm.common.text import counted
from chasm.data.base import existing
from chasm.reconstruct.cases import WrittenVolume, write_case
from chasm.reconstruct.coils import CoilModel
from chasm.reconstruct.enlarge import Enlarged
from chasm.reconstruct.ensemble import combine
from chasm.reconstruct.inputs import Scan, open_scan, reader_options
from chasm.reconstruct.likeness import unlike_training
from chasm.reconstruct.outputs import name_outputs, plan_outputs, plan_pages, refuse_to_overwrite, suffix_of
from chasm.reconstruct.settings import Settings, is_method, load_run_or_method, with_task
from chasm.reconstruct.slices import Reconstructor
from chasm.train import Run

RUN_INPUTS = ("config.yaml", "environment.json", "metrics.json", "weights.safetensors")


@dataclass
class Outcome:
    """The result of one input.

    Attributes:
        volumes: one for each case.
        protocol: name of the metric protocol.
        meaning: what that protocol measures.
        read_as: the kind of input, in words.
        sampling: the columns that were used.
        notes: lines for the user.
        seconds: time that it took.
    """

    volumes: list[WrittenVolume]
    protocol: str
    meaning: str
    read_as: str
    sampling: str
    notes: list[str]
    seconds: float


Runs = str | Path | Sequence[str | Path]  # several are an ensemble


def reconstruct(
    source: str | Path,
    run: Runs,
    out: str | Path | None = None,
    *,
    device: torch.device | str = "cpu",
    force: bool = False,
    on_slice: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> Outcome:
    """Reconstruct every slice of a scan with a trained run, or with a method that needs no training.

    A picture and a JSON record with the scores and the data consistency are written beside the volume.

    Args:
        source: k-space in a format of `chasm.data.kspace`, or a file or folder of images. Several cases go to one file
            each, with the name of the case added. PNG and TIFF slices directly in a folder are one case.
        run: the run folder, the name of a shipped model, or owner/name on the Hugging Face Hub; or "tv", "sense" or
            "zero-filled". Several runs are an ensemble: the volume is their mean, and an uncertainty map is written.
        out: the file to write. The suffix sets the format: HDF5, NIfTI, NumPy, DICOM or PNG. Default:
            NAME-reconstructed.h5.
        device: where the model runs.
        force: whether files that no reconstruction wrote may be replaced.
        on_slice: called after every slice with (slices done, slices in all).
        settings: attributes of `Settings`.

    Raises:
        ValueError: if an argument or the data is wrong.
        OSError: if a file cannot be read or written, or memory does not suffice.
    """
    on_each = lambda _, done, total: on_slice(done, total)  # noqa: E731
    _, outcome = next(
        reconstruct_each([source], run, out, Settings(**settings), device=device, force=force, on_slice=on_each)
    )
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def reconstruct_each(
    sources: Sequence[str | Path],
    run: Runs,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    device: torch.device | str = "cpu",
    force: bool = False,
    on_slice: Callable[[Path, int, int], None] = lambda source, done, total: None,
) -> Iterator[tuple[Path, Outcome | ValueError | OSError]]:
    """Reconstruct several scans, one after the other. A scan that fails does not stop the others.

    Args:
        sources: the scans, each as for `reconstruct`.
        run: as for `reconstruct`; it is loaded once.
        out: with several sources, the name of each is added to it.
        settings: what the user chose.
        device: as for `reconstruct`.
        force: as for `reconstruct`.
        on_slice: called after every slice with (source, slices done, slices in all).

    Yields:
        Each source with its outcome, or with its error.
    """
    device, settings = usable_device(device), settings or Settings()
    paths = list(dict.fromkeys(existing(source) for source in sources))
    if out is None:
        outs = [Path(f"{_name(path)}-reconstructed.h5") for path in paths]
    else:
        outs = [expanded(out)]
        if len(paths) > 1:
            outs = name_outputs(outs[0], {path: _name(path) for path in paths})
    for file, n in Counter(outs).items():
        suffix = suffix_of(file)  # refuses an unknown format before the work begins
        if settings.complex and suffix.lower() in (".png", ".dcm"):
            raise ValueError(f"{file}: this format stores no complex values: choose .nii.gz, .h5 or .npy")
        if n > 1:
            raise ValueError(f"{file}: the default name of {n} inputs: give --out, which then has their names added")
    names = [run] if isinstance(run, str | Path) else list(run)
    runs = [load_run_or_method(name, settings, device) for name in names]
    loaded = combine(runs)
    if settings.uncertainty and len(runs) > 1:
        raise ValueError("several runs always make an uncertainty map: leave out --uncertainty")
    if settings.uncertainty and getattr(loaded.model, "name", "") == "zero-filled":
        raise ValueError("zero-filled does not estimate unmeasured columns, so it has no uncertainty: use another run")
    coils = CoilModel(settings.maps, settings.map_sets, settings.compress)
    if coils.sets > 1 and not is_method(loaded):
        raise ValueError(f"{loaded.folder}: a trained run takes one set of maps: use tv or sense for {coils.sets}")
    inputs = [path for path in paths if path.is_file()] + [file for file in (settings.mask_file, coils.path) if file]
    inputs += [one.folder / name for one in runs if not is_method(one) for name in RUN_INPUTS]
    written: set[Path] = set()
    for path, file in zip(paths, outs, strict=True):
        try:
            scan, fitting = _open(path, loaded, settings)
            unlike = {unlike_training(scan, one): None for one in runs if not is_method(one)}
            scan.notes += [note for note in unlike if note]
            request = InputRequest(path, file, settings, coils, device, force, len(paths) > 1, inputs, written)
            yield path, _reconstruct(scan, fitting, request, partial(on_slice, path))
        except (ValueError, OSError) as e:
            yield path, e
        except (torch.OutOfMemoryError, MemoryError):
            yield path, OSError(f"{path}: out of memory on {device}: try --device cpu, or a machine with more memory")


def _open(path: Path, run: Run, settings: Settings) -> tuple[Scan, Run]:
    """Open a scan, and return it with the run, made for magnitudes if a method without training needs that."""
    magnitudes = not getattr(run.task, "complex", False)
    trained_on = reader_options(run)
    scan = open_scan(
        path,
        phase=not magnitudes,
        target=trained_on["target"],
        kind=settings.kind,
        mask=settings.mask_file,
        options=settings.options,
        images={name: trained_on[name] for name in ("plane", "volume") if trained_on[name] is not None},
        whole=is_method(run) and settings.mask is None and settings.acceleration is None,
    )
    if scan.measured is not None and settings.acceleration is not None:
        raise ValueError(f"{path}: undersampled as it was measured: leave out --acceleration")
    if scan.measured is None and not magnitudes and not scan.data[len(scan.data) // 2].image.is_complex():
        if is_method(run):
            return scan, with_task(run, complex=False)
        if not trained_on["phase"]:  # with drawn phases, training leaves some slices at phase zero
            raise ValueError(
                f"{path}: magnitudes, and the run was trained on complex images: give those, or another run"
            )
        scan.notes.append("magnitudes are read as complex images whose phase is zero")
    if scan.measured is not None and magnitudes:
        scan.notes.append(
            "the run was trained on magnitudes, whose phase is zero, and measured data has a phase: "
            "expect lower scores than those of the run"
        )
    return scan, run


@dataclass(frozen=True)
class InputRequest:
    """The request for one of several inputs.

    Attributes:
        path: the input.
        out: name of the volume.
        settings: what the user chose.
        coils: how coils are combined.
        device: where the model runs.
        force: whether files that no reconstruction wrote may be replaced.
        several: whether there are other inputs.
        inputs: files that must not be replaced.
        written: files that were written for other inputs; those of this one are added.
    """

    path: Path
    out: Path
    settings: Settings
    coils: CoilModel
    device: torch.device
    force: bool
    several: bool
    inputs: list[Path]
    written: set[Path]


def _reconstruct(scan: Scan, run: Run, request: InputRequest, on_slice: Callable[[int, int], None]) -> Outcome:
    """Reconstruct all cases of a scan."""
    started = time.monotonic()
    path, out, written = request.path, request.out, request.written
    work = Reconstructor(scan, run, request.device, request.coils, request.settings.uncertainty)
    rows_by_case = scan.data.rows_by_case()
    outputs = plan_outputs(out, {case: len(rows) for case, rows in rows_by_case.items()})
    if work.map_made_of:
        outputs = {case: replace(files, has_map=True) for case, files in outputs.items()}
    if request.settings.report is not None:
        outputs = plan_pages(expanded(request.settings.report), outputs, request.several)
    refuse_to_overwrite(outputs.values(), request.inputs + scan.data.files(), request.force)
    ours = {file for files in outputs.values() for file in files.all}
    if ours & written:
        raise ValueError(f"{min(ours & written)}: was written for another input of this call: give this input alone")
    if path.is_dir() and out.parent.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"{out}: in the folder that is read, where it would be taken for a scan: give another --out")
    volumes: list[WrittenVolume] = []
    for case, rows in rows_by_case.items():
        before = sum(v.slices for v in volumes)
        on_case = lambda done, before=before: on_slice(before + done, len(scan.data))  # noqa: E731
        try:
            volumes.append(write_case(work, case, rows, outputs[case], on_case, request.settings.complex))
        except (ValueError, OSError) as e:
            if not volumes:
                raise
            done = f"{counted(len(volumes), 'volume')} of {len(outputs)} written before"
            raise (OSError if isinstance(e, OSError) else ValueError)(f"{e} ({done})") from None
        finally:
            written |= {file for file in outputs[case].all if file.exists()}
    left = [file for files in outputs.values() for file in files.from_earlier_calls() if file not in ours | written]
    if left:
        scan.notes.append(f"still there from an earlier call: {counted(len(left), 'slice')}, first {left[0]}")
    return Outcome(
        volumes,
        run.task.protocol.name,
        run.task.protocol.meaning,
        scan.read_as,
        work.sampling,
        scan.notes,
        round(time.monotonic() - started, 2),
    )


def _name(path: Path) -> str:
    """Return the name of an input without the suffix of its format. Other dots belong to the name."""
    path = path.resolve()
    return path.name if path.is_dir() else path.name.removesuffix(".gz").rpartition(".")[0] or path.name


def as_json(outcomes: dict[Path, Outcome | Enlarged | ValueError | OSError]) -> str:
    """Return outcomes as JSON: an object, or for several inputs a list with "input" and, for one that failed, "error".

    Args:
        outcomes: what `reconstruct_each` or `enlarge_each` yielded.
    """
    records = [{"error": str(o)} if isinstance(o, Exception) else json_safe(asdict(o)) for o in outcomes.values()]
    if len(records) == 1:
        return json.dumps(records[0], indent=2, default=str)
    each = [{"input": path, **record} for path, record in zip(outcomes, records, strict=True)]
    return json.dumps(each, indent=2, default=str)
