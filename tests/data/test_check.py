"""What `chasm data check` finds beyond unreadable files: leaks, odd shapes, changed files; and its manifest."""

import json
import os
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from writers import (
    write_brats,
    write_cc359,
    write_cc359_multi,
    write_dicom,
    write_fastmri,
    write_photo,
    write_proxy,
)

from chasm.data import DataError, open_dataset
from chasm.data.check import check, verify, write_manifest
from chasm.data.folder import Folder


@pytest.fixture
def cc359(tmp_path: Path) -> Path:
    root = tmp_path / "cc359"
    for i, folder in enumerate(("Train", "Train", "Val", "Val")):
        write_cc359(root / folder / f"e{i}.npy", slices=62, seed=i)
    return root


def test_counts_shapes_and_ranges(cc359: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = check(cc359, "cc359", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert report.ok
    assert report.cases == {"train": ["e0", "e1"], "val": ["e2"], "test": ["e3"]}
    assert report.slices == {"train": 124, "val": 62, "test": 62}
    assert dict(report.shapes) == {"single-channel (1, 16, 16) float32 pairs": 4}
    low, high = report.ranges["single-channel"]
    assert 0 <= low < 1
    assert 16 < high < 1.31 * 16  # images of 1 .. 1.3, transformed without and with the factor 1 / 16
    assert any("25 training and 10 validation" in note for note in report.notes)
    assert report.files["Train/e0.npy"]["size"] == (cc359 / "Train" / "e0.npy").stat().st_size


def test_sound_sets_of_every_kind(tmp_path: Path) -> None:
    for i in range(3):
        write_fastmri(tmp_path / "fastmri" / "singlecoil_train" / f"{i}.h5", seed=i)
        write_brats(tmp_path / "brats", f"case{'x' * i}")
        write_photo(tmp_path / "images" / "train" / f"{i}.png", size=(20 + i, 20), seed=i)
        write_cc359_multi(tmp_path / "cc359" / "Train" / f"{i}.h5", coils=2 + i)
        (tmp_path / "folder").mkdir(exist_ok=True)
        np.save(tmp_path / "folder" / f"{i}.npy", np.eye(8) * (i + 1))
    write_fastmri(tmp_path / "fastmri" / "singlecoil_test" / "t.h5", test=True)
    write_proxy(tmp_path / "proxy")
    for kind in ("fastmri", "brats", "images", "cc359", "folder", "proxy"):
        report = check(tmp_path / kind, kind)
        assert report.findings == [], kind
        assert report.slices["train"] > 0


def test_odd_shape(cc359: Path) -> None:
    write_cc359(cc359 / "Train" / "odd.npy", slices=62, size=20)
    (finding,) = check(cc359, "cc359").findings
    assert "odd.npy: shape: (1, 20, 20), most have (1, 16, 16)" in finding


def test_one_case_in_two_splits(cc359: Path) -> None:
    write_cc359(cc359 / "Val" / "e0.npy", slices=62, seed=9)  # the name of a training case, other content
    (finding,) = check(cc359, "cc359").findings
    assert "split: 'e0' is in train and val" in finding


def test_one_patient_in_two_splits(tmp_path: Path) -> None:
    write_fastmri(tmp_path / "singlecoil_train" / "a.h5", patient="p7")
    write_fastmri(tmp_path / "singlecoil_val" / "b.h5", patient="p7", seed=1)
    (finding,) = check(tmp_path, "fastmri").findings
    assert "a.h5: split: 'p7' is in train and val" in finding
    assert "b.h5" in finding


def test_identical_files_in_two_splits(tmp_path: Path) -> None:
    write_photo(tmp_path / "train" / "a.png")
    shutil.copy(tmp_path / "train" / "a.png", tmp_path / "train" / "copy.png")
    report = check(tmp_path, "images")
    assert report.ok
    assert any("identical" in note for note in report.notes)
    (tmp_path / "val").mkdir()
    shutil.copy(tmp_path / "train" / "a.png", tmp_path / "val" / "b.png")
    (finding,) = check(tmp_path, "images").findings
    assert "identical file" in finding
    assert "train and val" in finding


@pytest.mark.parametrize("chosen", ["single", "multi"])
def test_single_and_multi_coil_folders_are_not_mixed(tmp_path: Path, chosen: str) -> None:
    """Both hold the same cases: they were merged into one."""
    for coils in ("single", "multi"):
        for split in ("train", "val", "test"):
            file = tmp_path / f"{coils}coil_{split}" / f"{split}.h5"
            write_fastmri(file, coils=None if coils == "single" else 3, test=split == "test", seed=len(split))
    (finding,) = check(tmp_path, "fastmri").findings
    assert "singlecoil and multicoil folders: choose with coils=single or coils=multi" in finding
    with pytest.raises(DataError, match="choose with coils=single"):
        open_dataset("fastmri", tmp_path)
    data = open_dataset("fastmri", tmp_path, split="all", coils=chosen, slices=1, target="kspace", acquisition=None)
    assert data.cases == ["train", "val", "test"]
    assert len(data[0].image) == (1 if chosen == "single" else 3)
    assert check(tmp_path, "fastmri", coils=chosen).ok
    assert check(tmp_path / "multicoil_train", "fastmri").ok
    with pytest.raises(ValueError, match="unknown coils 'mult': did you mean 'multi'"):
        open_dataset("fastmri", tmp_path, coils="mult")


def exams(root: Path, patients: dict[str, str]) -> None:
    """One DICOM series in a folder for each exam, of exam name -> patient."""
    for i, (exam, patient) in enumerate(patients.items()):
        for k in range(2):
            pixels = np.random.default_rng([i, k]).integers(1, 4000, (16, 16))
            write_dicom(root / exam / f"{k}.dcm", pixels, k, PatientID=patient, SeriesInstanceUID=f"1.2.{i}")


def test_the_exams_of_a_patient_share_a_split(tmp_path: Path) -> None:
    exams(tmp_path, {f"exam{i}": f"patient{i % 5}" for i in range(20)})
    report = check(tmp_path, "folder")
    assert report.findings == []
    split = {int(exam.removeprefix("exam")): name for name, names in report.cases.items() for exam in names}
    assert set(split.values()) == {"train", "val", "test"}
    assert all(split[i] == split[i % 5] for i in range(20))
    assert "patient" in report.split_rule


def test_ten_exams_of_one_patient_are_one_patient(tmp_path: Path) -> None:
    """They were called sound and split 7/1/2."""
    exams(tmp_path, {f"exam{i}": "one and the same" for i in range(10)})
    report = check(tmp_path, "folder")
    assert list(report.cases) == ["train"]
    assert any("all 10 cases are of one patient" in note for note in report.notes)
    assert not any("one and the same" in line for line in report.notes + report.findings)  # a report names nobody


@pytest.mark.parametrize("known_by", ["name", "sidecar", "clinical trial"])
def test_subjects_are_known_by_more_than_a_patient_id(tmp_path: Path, known_by: str) -> None:
    """Four scans of each of five: by BIDS names, the JSON file beside NIfTI, or DICOM's ClinicalTrialSubjectID."""
    for i in range(20):
        pixels = np.random.default_rng(i).integers(1, 4000, (1, 16, 16))
        if known_by == "clinical trial":
            subject = {"PatientID": "", "ClinicalTrialSubjectID": f"s{i % 5}", "SeriesInstanceUID": f"1.2.{i}"}
            write_dicom(tmp_path / f"{i}" / "0.dcm", pixels[0], 0, **subject)
            continue
        name = f"sub-{i % 5}_ses-{i}_T1w" if known_by == "name" else f"scan{i}"
        nibabel.save(nibabel.Nifti1Image(pixels.astype(np.float32), np.eye(4)), tmp_path / f"{name}.nii.gz")
        if known_by == "sidecar":
            (tmp_path / f"{name}.json").write_text(json.dumps({"EchoTime": 0.1, "SubjectID": i % 5 + 1}))
    cases = Folder.find(tmp_path)[0]
    subjects = {case.group: {c.split for c in cases if c.group == case.group} for case in cases}
    assert len(subjects) == 5
    assert all(len(splits) == 1 for splits in subjects.values())
    assert check(tmp_path, "folder", plane="axial" if known_by != "clinical trial" else None).findings == []


def test_one_dicom_patient_in_two_folders(tmp_path: Path) -> None:
    exams(tmp_path, {"train/a": "p1", "train/b": "p2", "test/c": "p1", "val/d": "p3"})
    (finding,) = check(tmp_path, "folder").findings
    assert "is in test and train" in finding
    assert "train/a/0.dcm" in finding
    assert "test/c/0.dcm" in finding


def test_equal_pixels_in_two_splits(tmp_path: Path) -> None:
    """Other files, other number formats, other names, and some slices only: the pixels are those of the test set."""
    rng = np.random.default_rng(0)
    volume = rng.integers(0, 4000, (5, 16, 16)).astype(np.float64)
    volume[0] = 0
    for split in ("train", "val", "test"):
        (tmp_path / split).mkdir()
        np.save(tmp_path / split / f"{split}.npy", np.insert(rng.random((3, 16, 16)), 1, 0, axis=0))
    np.savez(tmp_path / "train" / "copy.npz", image=volume[:3].astype(np.uint16))
    np.save(tmp_path / "test" / "scan.npy", volume)
    (finding,) = check(tmp_path, "folder").findings  # blank slices are equal everywhere, and no leak
    assert "pixels: 2 of 5 slices" in finding
    assert "scan.npy" in finding
    assert "copy.npz" in finding
    assert "test and train" in finding
    np.save(tmp_path / "test" / "again.npy", volume + 0.0)  # in one split it is worth a note
    report = check(tmp_path, "folder")
    assert any("again.npy" in note and "scan.npy" in note for note in report.notes)


def test_equal_pixels_of_every_format(tmp_path: Path) -> None:
    """Another file with the same slices, of another patient by its name."""
    write_cc359(tmp_path / "cc359" / "Train" / "a.npy", slices=3)
    (tmp_path / "cc359" / "Val").mkdir()
    np.save(tmp_path / "cc359" / "Val" / "b.npy", np.load(tmp_path / "cc359" / "Train" / "a.npy")[:2])
    for folder in ("train", "val"):
        write_fastmri(tmp_path / "fastmri" / f"singlecoil_{folder}" / f"{folder}.h5")
    write_photo(tmp_path / "images" / "train" / "a.png")
    (tmp_path / "images" / "val").mkdir()
    with Image.open(tmp_path / "images" / "train" / "a.png") as photo:
        photo.save(tmp_path / "images" / "val" / "b.bmp")
    for kind in ("cc359", "fastmri", "images"):
        (finding,) = check(tmp_path / kind, kind).findings
        assert "pixels: " in finding
        assert "together in train and val" in finding


def test_blank_slices_are_named(tmp_path: Path) -> None:
    volume = np.random.default_rng(0).random((6, 16, 16))
    volume[[0, 4, 5]] = 0
    np.save(tmp_path / "scan.npy", volume)
    report = check(tmp_path, "folder")
    assert report.ok
    assert any("scan.npy: 3 of 6 slices are blank (0, 4, 5): they are not scored" in note for note in report.notes)


def test_blank_and_unfinished_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((8, 8)))
    (tmp_path / "b.npy.part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    report = check(tmp_path, "folder")
    assert any("a.npy: image: every value is 0" in f for f in report.findings)
    assert any("b.npy.part: file: an unfinished download" in f for f in report.findings)
    assert any("1 .txt" in n for n in report.notes)


def test_all_missing_modalities_in_one_line(tmp_path: Path) -> None:
    write_brats(tmp_path, "c1")
    for word in ("t2", "seg"):
        (tmp_path / "c1" / f"c1_{word}.nii.gz").unlink()
    (finding,) = check(tmp_path, "brats").findings
    assert "c1: modality: missing c1_t2.nii.gz, c1_seg.nii.gz" in finding


def test_published_sums_are_compared(tmp_path: Path) -> None:
    write_proxy(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  brain_siat_t2.npz\n{'0' * 64} *gone.npz\n")
    wrong, gone = check(tmp_path, "proxy").findings
    assert "brain_siat_t2.npz: sha256: differs from SHA256SUMS" in wrong
    assert "gone.npz: file: missing" in gone


@pytest.mark.parametrize("content", [b"a hash without a name\n\nword\n", b"\xff\xfe\0"])
def test_sums_that_cannot_be_read_are_a_finding(content: bytes, tmp_path: Path) -> None:
    write_proxy(tmp_path)
    (tmp_path / "SHA256SUMS").write_bytes(content)
    (finding,) = check(tmp_path, "proxy").findings
    assert finding.startswith(f"{tmp_path / 'SHA256SUMS'}: sums: ")
    os.truncate(tmp_path / "SHA256SUMS", 2**40)
    (finding,) = check(tmp_path, "proxy").findings
    assert "SHA256SUMS: file: 1,024.000 GiB long" in finding


def test_manifest_round_trip_and_changes(cc359: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    write_manifest(check(cc359, "cc359"), file)
    stored = json.loads(file.read_text())
    assert stored["cases"]["test"] == ["e3"]
    assert len(stored["files"]["Val/e3.npy"]["sha256"]) == 64
    assert str(tmp_path) not in file.read_text()

    same = check(cc359, "cc359")
    verify(same, file)
    assert same.ok

    write_cc359(cc359 / "Train" / "e0.npy", slices=62, seed=7)  # changed
    (cc359 / "Train" / "e1.npy").unlink()  # gone
    write_cc359(cc359 / "Val" / "e25.npy", slices=62, seed=8)  # new, and it moves e3 from test to val
    changed = check(cc359, "cc359")
    assert changed.ok
    verify(changed, file)
    text = "\n".join(changed.findings)
    assert "e0.npy: sha256: differs from m.json" in text
    assert "e1.npy: file: missing, but listed in m.json" in text
    assert "e25.npy: file: not listed in m.json" in text
    assert "e3: split: val, but test in m.json" in text
    assert len(changed.findings) == 4


def test_a_failed_write_leaves_the_old_manifest(cc359: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.json"
    report = check(cc359, "cc359")
    write_manifest(report, file)
    before = file.read_text()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(report, file)
    assert file.read_text() == before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["m.json"]


def test_what_is_no_manifest_is_refused(cc359: Path, tmp_path: Path) -> None:
    cases = (f'{{"files": {{}}, "format": "chasm-manifest-1", "cases": {c}}}' for c in ("null", "[]", '{"a": 1}'))
    for text in ("not json", "{}", '{"files": {}, "format": "other"}', "[]", *cases):
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(DataError, match=r"m\.json: manifest: not one written by"):
            verify(check(cc359, "cc359"), tmp_path / "m.json")


def test_unknown_names_and_options(cc359: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'cc359'"):
        check(cc359, "cc35")
    with pytest.raises(ValueError, match=r"no option 'sed': did you mean 'seed'"):
        check(cc359, "cc359", sed=1)
