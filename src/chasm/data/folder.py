"""Your own folder of magnitude images, without writing code: .npy, .npz, .png, .tif, .nii(.gz) or DICOM.

A file is a case, and so is each volume of a DICOM series (`chasm.data.dicom`). Other files in a sub-folder together are
one case (a stack of PNGs), in the order of the numbers in their names. All cases of a patient share a split: the
patient is the PatientID of DICOM or of the JSON file beside NIfTI, the sub-LABEL of a BIDS name, or else the first
sub-folder. Splits come from folders named train, val and test; or from a text file with a case and its split on each
line; or else they are 70/10/20 by hash. Arrays are (H, W) or (slices, H, W), real or complex. An .npz holds `image`
and may hold `label`.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from chasm.data.base import FileDataset, register_dataset
from chasm.data.dicom import SeriesFile, geometry_of_frames, header_or_none, read_header, split_volumes
from chasm.data.files import crop_or_pad, require_single
from chasm.data.formats import (
    FORMATS,
    FileImages,
    ReadOptions,
    count_images,
    format_of,
    is_readable,
    is_single_image,
    load_images,
    sorted_by_numbers,
)
from chasm.data.nifti import open_nifti, patient_of_nifti
from chasm.data.records import Case, CaseFacts, Geometry, Slice, fault
from chasm.data.splits import SINGLE_FILE, assign_splits, role_folders, splits_from_list
from chasm.data.survey import SliceSurvey


@register_dataset("folder")
class Folder(FileDataset):
    """Images (1, H, W) as stored, with labels (H, W) if the files have any.

    Args:
        path: the folder, or one file.
        split: "train", "val", "test" or "all".
        splits: a text file with a case and its split on each line.
        size: (H, W) to crop or zero-pad every slice to.
        seed: seed of the split by hash.
        stack: True if the PNG and TIFF pictures directly in the folder are the slices of one volume.
        plane: plane to cut NIfTI in: "axial", "coronal" or "sagittal"; default: the plane they were acquired in,
            that of the two finest axes.
        volume: number of the volume in 4-D NIfTI files, from 0.
    """

    # the names that images may have in an .npz, first choice first
    arrays: ClassVar[tuple[str, ...]] = ("image", "images", "data", "arr_0")
    summary: ClassVar[str] = "your own folder: .npy .npz .png .tif .nii.gz or DICOM magnitude images"

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        splits: str | Path | None = None,
        size: tuple[int, int] | None = None,
        seed: int = 0,
        stack: bool = False,
        plane: str | None = None,
        volume: int | None = None,
    ) -> None:
        super().__init__(path, split, splits=splits, seed=seed, stack=stack)
        self.size = None if size is None else (int(size[0]), int(size[1]))
        self._options = ReadOptions(self.arrays, plane, volume)
        self._frames = {case.name: case.frames or self._all_frames(case) for case in self._cases}
        self.list_slices(lambda case: range(len(self._frames[case.name])))

    def _all_frames(self, case: Case) -> list[tuple[int, int]]:
        return [(i, k) for i, file in enumerate(case.files) for k in range(count_images(file, self._options))]

    @classmethod
    def find(
        cls, path: Path, splits: str | Path | None = None, seed: int = 0, stack: bool = False
    ) -> tuple[list[Case], str]:
        if path.is_file():
            if not format_of(path):
                raise fault(path, "format", f"expected {FORMATS}")
            headers = {path: read_header(path)} if format_of(path) == ".dcm" else {}
            volumes = _volumes([path], headers).items()
            names = {volume: f"{path.name}/{volume}" if volume else path.name for volume, _ in volumes}
            return [Case(names[v], "train", files, path.name, frames) for v, (files, frames) in volumes], SINGLE_FILE
        cases = []
        for role, folder in role_folders(path):
            cases += _cases_in(folder, role)
        if splits is not None:
            cases, rule = splits_from_list(cases, splits)
        else:
            cases, rule = assign_splits(cases, seed, by="patient, or of the case if no patient is known")
        return _stacked(cases, path) if stack else cases, rule

    def read(self, case: Case, k: int) -> Slice:
        number, frame = self._frames[case.name][k]
        file = case.files[number]
        loaded = self._load(file)
        array = np.array(loaded.images[frame])
        image, label = torch.from_numpy(require_single(array, file, f"image {frame}"))[None], None
        if loaded.labels is not None:
            label = torch.from_numpy(loaded.labels[frame].astype(np.int64))
        if self.size is not None:
            image = crop_or_pad(image, self.size)
            label = None if label is None else crop_or_pad(label, self.size)
        source = ", ".join(filter(None, (f"folder {self.root.name}", loaded.note)))
        return Slice(image, label, case.name, k, source)

    def how_cut(self, i: int) -> str:
        """Return how the slices of the file of row i were cut, in words; "" if the file leaves no choice."""
        case, k = self.locate(i)
        return self._load(case.files[self._frames[case.name][k][0]]).note

    def _load(self, file: Path) -> FileImages:
        return self.keep_last(file, lambda: load_images(file, self._options))

    def geometry(self, case: str) -> Geometry | None:
        return _geometry(self.case(case), self._options)

    @classmethod
    def probe(cls, case: Case, plane: str | None = None, volume: int | None = None) -> CaseFacts:
        shapes, survey, kinds = set(), SliceSurvey(), set()
        options = ReadOptions(cls.arrays, plane, volume)
        for i, file in enumerate(case.files):
            loaded = load_images(file, options)
            images = loaded.images
            if case.frames:
                images = images[[number for which, number in case.frames if which == i]]
            for number, image in enumerate(images):
                require_single(np.asarray(image), file, f"image {number}")
                survey.add(np.asarray(image))
            shapes.add(images.shape[1:])
            kinds.add(str(images.dtype))
            if len(shapes) > 1:
                raise fault(file, "image", f"shape {images.shape[1:]} differs from others of the case: {shapes}")
        if survey.low == survey.high:
            raise fault(case.files[0], "image", f"every value is {survey.low:g}")
        _geometry(case, options)  # refuses a gap between slices
        return survey.facts((1, *shapes.pop()), "/".join(sorted(kinds)), kind=loaded.note)


def _geometry(case: Case, options: ReadOptions) -> Geometry | None:
    if format_of(case.files[0]) == ".nii" and len(case.files) == 1:
        return open_nifti(case.files[0], options.plane, options.volume).geometry
    if not case.frames:
        return None
    frames = [read_header(file).frames for file in case.files]
    return geometry_of_frames([frames[file][number] for file, number in case.frames])


def _cases_in(folder: Path, role: str) -> list[Case]:
    groups: dict[tuple[str, str], list[Path]] = {}  # (sub-folder, DICOM series or name of a file by itself) -> files
    headers: dict[Path, SeriesFile] = {}
    for file in sorted_by_numbers([file for file in folder.rglob("*") if is_readable(file)]):
        parent = file.parent.relative_to(folder).as_posix()
        by_itself = file.name if parent == "." else ""
        header = header_or_none(file) if format_of(file) == ".dcm" else None
        if header is None:
            groups.setdefault((parent, by_itself), []).append(file)
        elif header.frames:
            headers[file] = header
            groups.setdefault((parent, header.series or by_itself), []).append(file)
    prefix, cases = f"{folder.name}/" if role else "", []
    for (parent, _), files in groups.items():
        volumes = _volumes(files, headers)
        first = volumes[min(volumes)][0][0]
        shared = sum(parent == other for other, _ in groups) > 1
        name = first.name if parent == "." else f"{parent}/{first.name}" if shared else parent
        patient = headers[first].patient if first in headers else ""
        if format_of(first) == ".nii":
            patient = patient_of_nifti(first)
        for volume, (own, frames) in volumes.items():
            whole = f"{prefix}{name}/{volume}" if volume else prefix + name
            cases.append(Case(whole, role, own, patient or prefix + name.split("/")[0], frames))
    return sorted(cases, key=lambda case: case.name)


def _volumes(
    files: list[Path], headers: dict[Path, SeriesFile]
) -> dict[str, tuple[tuple[Path, ...], tuple[tuple[int, int], ...]]]:
    """Return the files and frames of each volume in files that belong together, by a name for the volume."""
    if not all(file in headers for file in files):
        return {"": (tuple(files), ())}
    volumes = {}
    for name, frames in split_volumes(frame for file in files for frame in headers[file].frames).items():
        own = tuple(dict.fromkeys(frame.file for frame in frames))
        volumes[name] = own, tuple((own.index(frame.file), frame.number) for frame in frames)
    return volumes


def _stacked(cases: list[Case], path: Path) -> list[Case]:
    """Return the cases, with the pictures directly in the folder as one case."""
    pictures = [case for case in cases if case.files[0].parent == path and is_single_image(case.files[0])]
    if len(pictures) < 2:
        return cases
    volume = Case(path.resolve().name, "train", tuple(sorted_by_numbers([case.files[0] for case in pictures])))
    return [volume, *(case for case in cases if case not in pictures)]
