"""`chasm reconstruct` on k-space: arrays, files without mask or header, what is taken as measured, what is refused."""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import as_trained, brains, call, columns, make_run, zero_filled

from chasm.data.filled import looks_like_kspace
from chasm.data.folder import Folder
from chasm.reconstruct import reconstruct
from chasm.reconstruct.inputs import ONE_COIL

SLICES = {"axes": "SHW"}  # what the dimensions of an array are


def test_kspace_is_told_from_images() -> None:
    x = brains(6)
    magnitude = np.abs(x).astype(np.complex64)
    for image in (*x, *magnitude, np.fft.fftshift(x[2])):
        assert not looks_like_kspace(torch.from_numpy(image))
        for k in (writers.centred_fft(image), np.fft.fft2(image), writers.centred_fft(image) * columns(40)):
            assert looks_like_kspace(torch.from_numpy(k.astype(np.complex64)))


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("size", [(48, 40), (45, 37)])
def test_arrays_of_kspace(tmp_path: Path, size: tuple[int, int]) -> None:
    """However k-space was shifted, the images are those it came from; and unless told, it is not taken for images."""
    x, run = brains(3, size), make_run(tmp_path / "run")
    np.save(tmp_path / "images.npy", x)
    told = reconstruct(tmp_path / "images.npy", run, tmp_path / "wanted.h5")
    assert (told.read_as, told.notes) == (f"complex images (3 slices, {size[0]} x {size[1]})", [])
    with h5py.File(tmp_path / "wanted.h5") as f:
        wanted = f["reconstruction"][()]
    centred = np.fft.fftshift(np.fft.fft2(x, norm="ortho"), axes=(-2, -1))
    for name, k in (("both", writers.centred_fft(x)), ("none", np.fft.fft2(x, norm="ortho")), ("k", centred)):
        np.save(tmp_path / f"{name}.npy", k.astype(np.complex64))
        told = reconstruct(tmp_path / f"{name}.npy", run, tmp_path / "out.h5", kind="kspace", options=SLICES)
        assert told.read_as == f"k-space, fully sampled (3 slices, {size[0]} x {size[1]})"
        assert told.notes == []
        with h5py.File(tmp_path / "out.h5") as f:
            np.testing.assert_allclose(f["reconstruction"][()], wanted, atol=1e-4 * wanted.max())
        with pytest.raises(ValueError, match=r"looks like k-space: say --as kspace -O axes=SHW .*, or --as image"):
            reconstruct(tmp_path / f"{name}.npy", run, tmp_path / "out.h5")
        assert reconstruct(tmp_path / f"{name}.npy", run, tmp_path / "out.h5", kind="image").notes == []


@pytest.mark.usefixtures("no_picture")
def test_undersampled_arrays_of_kspace(tmp_path: Path) -> None:
    x, run = brains(3), make_run(tmp_path / "run")
    k = (writers.centred_fft(x) * columns(40)).astype(np.complex64)
    (tmp_path / "many").mkdir()
    for name, array in (("middle", k), ("corner", np.fft.ifftshift(k, axes=(-2, -1)))):
        np.save(tmp_path / "many" / f"{name}.npy", array)
        told = reconstruct(tmp_path / "many" / f"{name}.npy", run, tmp_path / "out.h5", kind="kspace", options=SLICES)
        assert told.read_as == "k-space, as measured (3 slices, 48 x 40)"
        assert "10 of 40 columns, really x4.00, centre 19-21" in told.sampling
        with h5py.File(tmp_path / "out.h5") as f:
            wanted = zero_filled(x, columns(40))
            np.testing.assert_allclose(f["reconstruction"][()], wanted, atol=1e-4 * wanted.max())
    other = np.roll(columns(40), 1)  # a file with columns of its own
    np.save(tmp_path / "many" / "middle.npy", writers.centred_fft(x) * other)
    told = reconstruct(tmp_path / "many", run, tmp_path / "both.h5", kind="kspace", options=SLICES)
    assert "other columns in other volumes" in told.sampling
    for name, mask in (("corner", columns(40)), ("middle", other)):
        with h5py.File(tmp_path / f"both-{name}.h5") as f:
            wanted = zero_filled(x, mask)
            np.testing.assert_allclose(f["reconstruction"][()], wanted, atol=1e-4 * wanted.max())


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.nii"])
def test_kspace_beside_other_files_is_not_taken_for_images(tmp_path: Path, name: str) -> None:
    import nibabel

    run = make_run(tmp_path / "run", complex=True, sampling={"kind": "equispaced", "acceleration": 2})
    k = writers.centred_fft(brains(3)).astype(np.complex64)
    folder = tmp_path / "scans"
    folder.mkdir()
    (folder / "._b.npy").write_bytes(b"what macOS leaves beside a file")
    if name == "a.npz":
        np.savez(folder / name, images=k)  # a key that says the opposite
    elif name == "a.nii":
        nibabel.save(nibabel.Nifti1Image(k, np.eye(4)), folder / name)
    else:
        np.save(folder / name, k)
    for path in (folder, folder / name):
        with pytest.raises(ValueError, match="looks like k-space"):
            reconstruct(path, run, tmp_path / "out.h5")
    (folder / name).unlink()
    np.save(folder / "b.npy", brains(3).astype(np.complex64))
    assert reconstruct(folder, run, tmp_path / "out.h5").read_as.startswith("complex images")


@pytest.mark.usefixtures("no_picture")
def test_the_axes_of_an_array_are_asked_for(tmp_path: Path) -> None:
    """Eight coils of one slice were read as eight slices."""
    run = make_run(tmp_path / "run", complex=True, sampling={"kind": "equispaced", "acceleration": 2})
    coils = brains(1) * np.random.default_rng(0).random((8, 1, 1))
    np.save(tmp_path / "scan.npy", writers.centred_fft(coils).astype(np.complex64))
    words = (tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.h5")
    for more, expected in (
        ((), "looks like k-space: say --as kspace -O axes=SHW (slices), axes=CHW (coils)"),
        (("--as", "kspace"), "3 dimensions (8, 48, 40): say what they are: -O axes=CHW (coils) or axes=SHW (slices)"),
        (("--as", "kspace", "-O", "axes=HW"), "'HW' names 2 dimensions, but the array has (8, 48, 40)"),
        (("--as", "kspace", "-O", "axes=HHW"), "axes 'HHW': expected one letter for each dimension"),
    ):
        refused = call(*words, *more)
        assert refused.exit_code == 3
        assert expected in refused.output
    found = call(*words, "--as", "kspace", "-O", "axes=CHW")
    assert "read as: array k-space of 8 coils, fully sampled (1 slice, 48 x 40)" in found.output
    np.save(tmp_path / "scan.npy", np.load(tmp_path / "scan.npy").transpose(2, 0, 1)[..., None])
    again = call(*words, "-O", "axes=wchs")  # only k-space has axes
    assert again.output.replace("; replaced an earlier file", "") == found.output
    with h5py.File(tmp_path / "scan.h5", "w") as f:
        f["data"] = np.load(tmp_path / "scan.npy")
    refused = call(tmp_path / "scan.h5", *words[1:])
    assert "missing; the file has data (name the axes of an array: -O axes=SCHW)" in refused.output
    again = call(tmp_path / "scan.h5", *words[1:], "-O", "axes=WCHS")
    assert again.output.replace("; replaced an earlier file", "") == found.output.replace("scan.npy", "scan.h5")


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("protocol", ["hifi", "fastmri"])
@pytest.mark.parametrize("phase", [False, True])
def test_undersampled_with_a_reconstruction_is_scored(tmp_path: Path, protocol: str, phase: bool) -> None:
    file = tmp_path / "file2.h5"
    images = writers.write_fastmri(file, slices=3, size=(24, 20), recon=16, test=True)
    target = np.abs(images[:, 4:20, 2:18]).astype(np.float32) + 0.1
    with h5py.File(file, "a") as f:
        f["reconstruction_esc"] = target
    run = make_run(tmp_path / "run", protocol=protocol, complex=phase)
    outcome = reconstruct(file, run, tmp_path / "out.h5")
    assert "scored by reconstruction_esc" in outcome.read_as
    with h5py.File(tmp_path / "out.h5") as g:
        found = g["reconstruction"][()]
    if protocol == "hifi":
        low, high = (f(target, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
        low = 0 * low if phase else low
        a, b = ((x - low) / (high - low) for x in (found, target))
        psnr = (10 * np.log10(1 / ((a.clip(0, 1) - b) ** 2).mean((1, 2)))).mean()
    else:
        psnr = 10 * np.log10(target.max() ** 2 / ((found - target) ** 2).mean())
    (volume,) = outcome.volumes
    assert volume.scores["psnr"] == pytest.approx(psnr, abs=1e-3)
    assert volume.scores == pytest.approx(volume.reference)  # zero weights add nothing
    assert json.loads((tmp_path / "out.json").read_text())["scores"] == volume.scores


@pytest.mark.usefixtures("no_picture")
def test_undersampled_without_a_mask_in_the_file(tmp_path: Path) -> None:
    file, run = tmp_path / "file2.h5", make_run(tmp_path / "run")
    images = writers.write_fastmri(file, slices=4, size=(24, 20), recon=16, test=True)
    mask = (np.arange(20) % 2 == 0).astype(float)
    with h5py.File(file, "a") as f:
        del f["mask"]
    outcome = reconstruct(file, run, tmp_path / "out.h5")
    assert any("no mask in the file" in note for note in outcome.notes)
    assert "10 of 20 columns" in outcome.sampling
    np.savetxt(tmp_path / "mask.txt", mask * (np.arange(20) != 4))  # a line less than there are
    given = reconstruct(file, run, tmp_path / "given.h5", mask=tmp_path / "mask.txt")
    assert "9 of 20 columns" in given.sampling
    for name, kept in (("out.h5", mask), ("given.h5", mask * (np.arange(20) != 4))):
        with h5py.File(tmp_path / name) as g:
            wanted = zero_filled(images, kept)[:, 4:20, 2:18]
            np.testing.assert_allclose(g["reconstruction"][()], wanted, rtol=1e-4, atol=1e-5)
    np.savetxt(tmp_path / "other.txt", np.ones(20))
    with pytest.raises(ValueError, match=r"other.txt: keeps columns that are empty in the data \(9, first 1\)"):
        reconstruct(file, run, tmp_path / "out.h5", mask=tmp_path / "other.txt")


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(("coils", "stored"), [(None, "nothing"), (3, "nothing"), (None, "reconstruction_esc")])
def test_fully_sampled_kspace_alone(tmp_path: Path, coils: int | None, stored: str) -> None:
    """Without a stored reconstruction the target is the root-sum-of-squares; empty edges are no undersampling."""
    file = tmp_path / "file1.h5"
    images = writers.write_fastmri(file, slices=3, size=(16, 16), recon=16, coils=coils)
    with h5py.File(file, "a") as f:
        f["kspace"][..., :2] = 0
        f["kspace"][..., 15] = 0
        images = np.fft.fftshift(
            np.fft.ifft2(np.fft.ifftshift(f["kspace"][()], axes=(-2, -1)), norm="ortho"), axes=(-2, -1)
        )
        target = np.abs(images) if coils is None else np.sqrt((np.abs(images) ** 2).sum(1))
        for key in {"reconstruction_rss", "reconstruction_esc", "ismrmrd_header"} & set(f):
            del f[key]
        if stored != "nothing":
            target = target + 1
            f[stored] = target
    outcome = reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5")
    used = "k-space" if stored == "nothing" else stored
    assert outcome.read_as == f"fastMRI {'multi' if coils else 'single'}-coil {used}, fully sampled (3 slices, 16 x 16)"
    assert any("no ismrmrd_header: the image is 16 x 16" in n for n in outcome.notes) == (stored == "nothing")
    assert outcome.volumes[0].scores["psnr"] > 0
    assert (ONE_COIL in outcome.notes) == (coils is not None)  # it is the image that is undersampled, not the coils
    with h5py.File(tmp_path / "out.h5") as g:
        np.testing.assert_allclose(g["reconstruction"][()], as_trained(target, columns(16)), atol=1e-4)
    np.savetxt(tmp_path / "mask.txt", np.arange(16) % 5 != 0)
    phase = make_run(tmp_path / "phase", complex=True, sampling={"kind": "file", "file": str(tmp_path / "mask.txt")})
    assert ONE_COIL not in reconstruct(file, phase, tmp_path / "out.h5").notes


@pytest.mark.usefixtures("no_picture")
def test_undersampled_without_a_header(tmp_path: Path) -> None:
    file = tmp_path / "file2.h5"
    images = writers.write_fastmri(file, slices=3, size=(24, 20), recon=16, test=True)
    with h5py.File(file, "a") as f:
        del f["ismrmrd_header"]
    outcome = reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5")
    assert "no ismrmrd_header: the image is 24 x 20, as the k-space is" in outcome.notes
    with h5py.File(tmp_path / "out.h5") as g:
        wanted = zero_filled(images, np.arange(20) % 2 == 0)
        np.testing.assert_allclose(g["reconstruction"][()], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_picture")
def test_undersampled_cc359_is_reconstructed_as_measured(tmp_path: Path) -> None:
    """It was taken for a full scan: undersampled once more, and scored by its own aliases."""
    mask, run = np.ones(16), make_run(tmp_path / "run")
    mask[1::2] = 0
    mask[6:10] = 1
    images = writers.write_cc359(tmp_path / "one.npy", slices=3, size=16)
    np.save(tmp_path / "one.npy", np.load(tmp_path / "one.npy") * np.fft.ifftshift(mask)[:, None].astype(np.float32))
    found = reconstruct(tmp_path / "one.npy", run, tmp_path / "out.h5")
    assert found.read_as.startswith("CC359 k-space, as measured")
    assert found.sampling.startswith("as measured: 10 of 16 columns")
    assert found.volumes[0].scores == {}
    with h5py.File(tmp_path / "out.h5") as f:  # stored unscaled, read orthonormally
        np.testing.assert_allclose(f["reconstruction"], 16 * zero_filled(images, mask), atol=1e-3)
    several = writers.write_cc359_multi(tmp_path / "many.h5", slices=3, size=(16, 16))
    with h5py.File(tmp_path / "many.h5", "a") as f:
        f["kspace"][:] = f["kspace"][:] * np.fft.ifftshift(mask)[:, None]
    found = reconstruct(tmp_path / "many.h5", run, tmp_path / "out.h5")
    assert found.read_as.startswith("CC359 k-space, as measured")
    with h5py.File(tmp_path / "out.h5") as f:
        assert f["reconstruction"].shape == (3, *several.shape[-2:])


@pytest.mark.parametrize("lacking", ["rows", "points", "everything"])
@pytest.mark.parametrize("form", ["array", "fastmri", "cc359"])
def test_kspace_that_lacks_other_things_than_columns_is_refused(tmp_path: Path, lacking: str, form: str) -> None:
    rng = np.random.default_rng(0)
    mask = np.ones((24, 20))
    if lacking == "rows":
        mask[::3] = 0
    elif lacking == "points":
        mask = (rng.random((24, 20)) < 0.5).astype(float)
    else:
        mask[:] = 0
    k = (writers.centred_fft(writers.blob(rng, 3, 24, 20)) * mask).astype(np.complex64)
    file, kind = tmp_path / "scan.h5", None
    if form == "array":
        file, kind = tmp_path / "scan.npy", "kspace"
        np.save(file, k)
    elif form == "fastmri":
        with h5py.File(file, "w") as f:
            f["kspace"] = k
    else:
        k = np.fft.ifftshift(k, axes=(-2, -1))
        with h5py.File(file, "w") as f:
            f["kspace"] = np.stack([k.real, k.imag], axis=-1)
    expected = {
        "rows": r"not in whole columns .*: rows are empty, turn",
        "points": "not in whole columns [^:]*$",
        "everything": "every value of the middle slice is zero",
    }
    with pytest.raises(ValueError, match=expected[lacking]):
        reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5", kind=kind, options=SLICES if kind else None)


def test_undersampled_arrays_among_full_ones(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 16, 16))
    for name in "abc":
        np.save(tmp_path / "in" / f"{name}.npy", k)
    last = Folder(tmp_path / "in", "all").cases[-1]
    np.save(tmp_path / "in" / last, k * (np.arange(16) % 2))
    with pytest.raises(ValueError, match=rf"{last}: kspace: some volumes are undersampled and others are not: give"):
        reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out.h5", kind="kspace", options=SLICES)


@pytest.mark.usefixtures("no_picture")
def test_a_round_or_padded_kspace_is_a_full_one(tmp_path: Path) -> None:
    y, x = np.mgrid[-12:12, -10:10]
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 24, 20)) * (y**2 / 100 + x**2 / 80 < 1)
    k[1, 12, 12] = 0  # a value that happens to be zero
    np.save(tmp_path / "scan.npy", k)
    found = reconstruct(
        tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / "out.h5", kind="kspace", options=SLICES
    )
    assert found.read_as.startswith("k-space, fully sampled")


def test_every_slice_must_hold_what_the_mask_keeps(tmp_path: Path) -> None:
    mask = np.zeros(20)
    mask[::3], mask[8:12] = 1, 1
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 24, 20)) * mask
    k[0] = 0  # an empty slice is none of another mask
    run = make_run(tmp_path / "run")
    np.save(tmp_path / "scan.npy", k)
    reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5", kind="kspace", options=SLICES)
    for spoilt, advice in ((np.roll(mask, 1), "file of their own"), (np.ones(20), "file of their own")):
        k[2] = writers.centred_fft(writers.blob(np.random.default_rng(1), 24, 20)) * spoilt
        np.save(tmp_path / "scan.npy", k)
        with pytest.raises(ValueError, match=rf"scan.npy: kspace slice 2: does not hold .* columns?, first .*{advice}"):
            reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5", kind="kspace", options=SLICES)
    with h5py.File(tmp_path / "scan.h5", "w") as f:  # a mask of its own, which keeps what was not measured
        f["kspace"] = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 24, 20)) * mask
        f["mask"] = 1 - mask
    with pytest.raises(ValueError, match=r"scan.h5: kspace slice 0: does not hold .*: check the mask"):
        reconstruct(tmp_path / "scan.h5", run, tmp_path / "out.h5")


@pytest.mark.usefixtures("no_picture")
def test_an_npz_may_call_its_kspace_so(tmp_path: Path) -> None:
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 2, 16, 16)).astype(np.complex64)
    np.savez(tmp_path / "scan.npz", kspace=k, image=np.ones((3, 8, 8)))
    found = reconstruct(
        tmp_path / "scan.npz", make_run(tmp_path / "run"), tmp_path / "out.h5", kind="kspace", options=SLICES
    )
    assert found.read_as == "k-space, fully sampled (2 slices, 16 x 16)"


def test_several_coils_without_a_centre(tmp_path: Path) -> None:
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 2, 3, 24, 20)).astype(np.complex64)
    mask = np.zeros(20, np.uint8)
    mask[2::5] = 1
    with h5py.File(tmp_path / "scan.h5", "w") as f:
        f["kspace"], f["mask"] = k * mask, mask
    with pytest.raises(ValueError, match=r"2 or more centre columns, fully sampled: got none"):
        reconstruct(tmp_path / "scan.h5", make_run(tmp_path / "run"), tmp_path / "out.h5")
