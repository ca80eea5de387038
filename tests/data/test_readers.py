"""Readers of datasets: CC359, fastMRI, BraTS and the proxy bundle."""

from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
import torch
from writers import (
    centred_fft,
    write_brats,
    write_cc359,
    write_cc359_multi,
    write_fastmri,
    write_proxy,
    write_proxy_photos,
    write_proxy_raw,
)

from chasm.data import DataError, list_datasets, open_dataset
from chasm.data.splits import ranked_split


def test_all_formats_are_registered() -> None:
    assert {"cc359", "fastmri", "brats", "images", "folder", "proxy"} <= set(list_datasets())


def test_unknown_names_suggest_the_near_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'cc359'"):
        open_dataset("cc395", tmp_path)
    write_cc359(tmp_path / "Train" / "a.npy")
    with pytest.raises(ValueError, match="did you mean 'skip'"):
        open_dataset("cc359", tmp_path, skipp=2)
    with pytest.raises(ValueError, match="did you mean 'train'"):
        open_dataset("cc359", tmp_path, split="trian")


def test_cc359_slices_and_magnitudes(tmp_path: Path) -> None:
    images = write_cc359(tmp_path / "Train" / "e1.npy", slices=70)
    data = open_dataset("cc359", tmp_path, split="train")
    assert len(data) == 10  # 30 .. 39
    first, last = data[0], data[9]
    assert (first.index, last.index, first.case) == (30, 39, "e1")
    assert first.image.shape == (1, 16, 16)
    assert first.image.dtype == torch.float32
    # ortho transform of numpy's unscaled k-space: the image times sqrt(HW)
    np.testing.assert_allclose(first.image[0] / 16, images[30], atol=1e-5)


@pytest.mark.parametrize("size", [(12, 10), (11, 9)])
def test_cc359_raw_slices_are_centred_and_keep_their_zeros(tmp_path: Path, size: tuple[int, int]) -> None:
    images = write_cc359_multi(tmp_path / "a.h5", slices=3, size=size)
    with h5py.File(tmp_path / "a.h5", "r+") as f:
        f["kspace"][:, :, 2] = 0  # a column that was not measured
    data = open_dataset("cc359", tmp_path / "a.h5", split="all", skip=0, combine="coils")
    raw = data.raw_slice(1)
    assert (raw.case, raw.index, raw.size, raw.mask) == ("a", 1, size, None)
    wanted = centred_fft(images[1]) * np.sqrt(size[0] * size[1])  # the file holds numpy's unscaled k-space
    empty = (2 + size[1] // 2) % size[1]
    wanted[..., empty] = 0
    np.testing.assert_allclose(raw.kspace, wanted, atol=1e-5 * np.abs(wanted).max())
    assert (raw.kspace[..., empty] == 0).all()
    assert (raw.kspace != 0).any(0).any(0).sum() == size[1] - 1


def test_rows_are_known_without_reading(tmp_path: Path) -> None:
    for name in "ab":
        write_cc359(tmp_path / "Train" / f"{name}.npy", slices=62)
    data = open_dataset("cc359", tmp_path)
    assert data.rows_by_case() == {"a": [0, 1], "b": [2, 3]}
    case, k = data.locate(3)
    assert (case.name, k, case.files) == ("b", 31, (tmp_path / "Train" / "b.npy",))
    assert data.files() == [tmp_path / "Train" / f"{name}.npy" for name in "ab"]
    assert data.geometry("a") is None


def test_cc359_validation_is_halved_only_without_a_test_folder(tmp_path: Path) -> None:
    for name in "abcde":
        write_cc359(tmp_path / "Val" / f"{name}.npy", slices=62)
    write_cc359(tmp_path / "Train" / "t.npy", slices=62)
    assert open_dataset("cc359", tmp_path, split="val").cases == ["a", "c", "e"]
    assert open_dataset("cc359", tmp_path, split="test").cases == ["b", "d"]
    write_cc359(tmp_path / "Test" / "z.npy", slices=62)
    assert open_dataset("cc359", tmp_path, split="val").cases == ["a", "b", "c", "d", "e"]
    assert open_dataset("cc359", tmp_path, split="test").cases == ["z"]


def test_cc359_multi_channel(tmp_path: Path) -> None:
    coils = write_cc359_multi(tmp_path / "Train" / "m.h5", slices=66)
    rss = open_dataset("cc359", tmp_path)[1]
    expected = np.sqrt((np.abs(coils[31]) ** 2).sum(0)) * np.sqrt(120)
    np.testing.assert_allclose(rss.image[0], expected, atol=1e-4)
    maps = open_dataset("cc359", tmp_path, combine="coils")[1]
    np.testing.assert_allclose(maps.image.numpy(), coils[31] * np.sqrt(120), rtol=1e-3, atol=1e-3)


def test_fastmri_defaults_are_fat_suppressed_central_rss(tmp_path: Path) -> None:
    images = write_fastmri(tmp_path / "singlecoil_train" / "pdfs.h5", slices=25)
    write_fastmri(tmp_path / "singlecoil_train" / "pd.h5", acquisition="CORPD_FBK")
    data = open_dataset("fastmri", tmp_path)
    assert data.cases == ["pdfs"]
    assert [data[0].index, data[len(data) - 1].index, len(data)] == [2, 21, 20]  # start = int(25 / 2 - 10)
    np.testing.assert_allclose(data[0].image[0], np.abs(images[2, 6:18, 1:13]), rtol=1e-5)
    everything = open_dataset("fastmri", tmp_path, acquisition=None, slices=None)
    assert (everything.cases, len(everything)) == (["pd", "pdfs"], 24 + 25)


def test_fastmri_kspace_gives_the_stored_reconstruction(tmp_path: Path) -> None:
    write_fastmri(tmp_path / "multicoil_val" / "a.h5", coils=3)
    rss = open_dataset("fastmri", tmp_path, split="val")[4].image
    maps = open_dataset("fastmri", tmp_path, split="val", target="kspace")[4].image
    assert maps.shape == (3, 12, 12)
    torch.testing.assert_close(maps.abs().square().sum(0, keepdim=True).sqrt(), rss, rtol=1e-4, atol=1e-5)


def test_fastmri_raw_slice_and_header(tmp_path: Path) -> None:
    images = write_fastmri(tmp_path / "singlecoil_train" / "a.h5")
    data = open_dataset("fastmri", tmp_path, target="esc")
    raw = data.raw_slice(0)
    assert raw.kspace.shape == (1, 24, 14)
    np.testing.assert_allclose(raw.kspace[0], centred_fft(images[2]), atol=1e-5)
    assert raw.mask is None
    header = data.header_of(data.locate(0)[0])
    assert (header.encoded, header.recon, raw.size) == ((24, 14), (12, 12), (12, 12))
    assert header.padding == (7 - 6, 7 - 6 + 11 + 1)  # enc_y // 2 - center, + maximum + 1


def test_fastmri_without_a_header_can_be_read_when_asked(tmp_path: Path) -> None:
    write_fastmri(tmp_path / "a.h5", coils=2, fov=(24, 36, 5))
    geometry = open_dataset("fastmri", tmp_path / "a.h5", split="all").geometry("a")
    assert geometry.affine.diagonal().tolist() == [3, 2, 5, 1]
    with h5py.File(tmp_path / "a.h5", "r+") as f:
        del f["ismrmrd_header"]
    with pytest.raises(DataError, match="ismrmrd_header: missing"):
        open_dataset("fastmri", tmp_path / "a.h5", split="all").raw_slice(0)
    data = open_dataset("fastmri", tmp_path / "a.h5", split="all", target="kspace", header=False)
    assert data.raw_slice(0).size == (12, 12)  # of the stored reconstruction
    assert data[0].image.shape == (2, 12, 12)
    assert data.geometry("a") is None


def test_fastmri_challenge_files_bring_their_mask(tmp_path: Path) -> None:
    write_fastmri(tmp_path / "singlecoil_test" / "a.h5", test=True)
    with pytest.raises(DataError, match=r"a\.h5: reconstruction_rss: .*target='kspace'"):
        open_dataset("fastmri", tmp_path, split="challenge")
    data = open_dataset("fastmri", tmp_path, split="challenge", target="kspace")
    raw = data.raw_slice(0)
    assert raw.mask is not None
    assert raw.mask.tolist() == [True, False] * 7
    assert raw.kspace[..., ~raw.mask].abs().max() == 0


def test_fastmri_halves_the_validation_folder_by_patient(tmp_path: Path) -> None:
    for name, patient in (("v1", "p"), ("v2", "p"), ("v3", "q"), ("v4", "p")):
        write_fastmri(tmp_path / "singlecoil_val" / f"{name}.h5", patient=patient)
    assert open_dataset("fastmri", tmp_path, split="val").cases == ["v1", "v2", "v4"]
    assert open_dataset("fastmri", tmp_path, split="test").cases == ["v3"]


def test_fastmri_says_which_acquisitions_there_are(tmp_path: Path) -> None:
    write_fastmri(tmp_path / "multicoil_train" / "a.h5", acquisition="AXT2")
    with pytest.raises(DataError, match=r"AXT2 1\): set the option acquisition=null"):
        open_dataset("fastmri", tmp_path)


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("2021", [f"BraTS2021_0000{i}" for i in range(4)]),
        ("2023", [f"BraTS-GLI-0000{i}-000" for i in range(4)]),
    ],
)
def test_brats_both_naming_schemes(tmp_path: Path, scheme: str, names: list[str]) -> None:
    stored = {name: write_brats(tmp_path, name, scheme) for name in names}
    data = open_dataset("brats", tmp_path, split="all")
    assert data.cases == names
    assert len(data) == 4 * 7  # brain in slices 1 .. 7
    sample = data[3]
    assert (sample.index, sample.image.shape) == (4, (4, 20, 16))
    assert sample.label is not None
    seg = stored[names[0]][..., 4].T
    classes = np.where(seg == 4, 3, seg)
    np.testing.assert_array_equal(sample.label, classes)
    assert (sample.image.min(), sample.image.max()) == (0, 1)


def test_brats_normalises_by_percentiles_of_the_brain(tmp_path: Path) -> None:
    write_brats(tmp_path, "a")
    volume = np.asarray(nibabel.load(tmp_path / "a" / "a_t2.nii.gz").dataobj).astype(float)
    low, high = np.percentile(volume[volume > 0], (0.5, 99.5))
    data = open_dataset("brats", tmp_path, split="all")
    expected = np.clip((volume[..., 1] - low) / (high - low), 0, 1).T
    np.testing.assert_allclose(data[0].image[2], expected, atol=1e-6)


def test_brats_visits_of_a_patient_share_a_split(tmp_path: Path) -> None:
    for patient in range(10):
        for visit in range(2):
            (tmp_path / f"B-{patient:05}-{visit:03}").mkdir()
            (tmp_path / f"B-{patient:05}-{visit:03}" / f"B-{patient:05}-{visit:03}-seg.nii.gz").touch()
    from chasm.data.brats import BraTS

    cases, rule = BraTS.find(tmp_path)
    split = {}
    for case in cases:
        assert split.setdefault(case.group, case.split) == case.split
    counts = {s: list(split.values()).count(s) for s in ("train", "val", "test")}
    assert counts == {"train": 7, "val": 1, "test": 2}
    assert "patient" in rule


def test_brats_tumour_share_and_step(tmp_path: Path) -> None:
    write_brats(tmp_path, "a")
    tumour = open_dataset("brats", tmp_path, split="all", min_tumour=0.01)
    assert [tumour[i].index for i in range(len(tumour))] == [3, 4, 5]
    assert len(open_dataset("brats", tmp_path, split="all", step=3)) == 3


@pytest.mark.parametrize(("seed", "test"), [(0, ["case3", "case9"]), (1, ["case2", "case3"])])
def test_hash_split_is_fixed_for_ever(seed: int, test: list[str]) -> None:
    split = ranked_split([f"case{i}" for i in range(10)], seed)
    assert sorted(k for k, v in split.items() if v == "test") == test


def test_a_reader_passes_its_seed_to_the_split(tmp_path: Path) -> None:
    for i in range(10):
        np.save(tmp_path / f"case{i}.npy", np.random.default_rng(i).random((1, 8, 8)))
    for seed in (0, 1):
        expected = ranked_split([f"case{i}.npy" for i in range(10)], seed)
        data = open_dataset("folder", tmp_path, split="test", seed=seed)
        assert sorted(data.cases) == sorted(name for name, split in expected.items() if split == "test")


def test_proxy_undoes_its_coding_and_says_proxy(tmp_path: Path) -> None:
    images = write_proxy(tmp_path)
    for split, cases in (("train", 2), ("val", 1), ("test", 2)):
        data = open_dataset("proxy", tmp_path, split=split)
        got = torch.stack([data[i].image[0] for i in range(len(data))])
        np.testing.assert_array_equal((got * 255).round(), images[split])
        assert len(data.cases) == cases
        assert "proxy" in data.name
        assert "proxy" in data[0].source


def test_proxy_masks(tmp_path: Path) -> None:
    images = write_proxy(tmp_path, "tumour_lgg_flair")
    data = open_dataset("proxy", tmp_path, part="tumour_lgg_flair")
    labels = [data[i].label for i in range(3)]
    np.testing.assert_array_equal(np.stack(labels), images["train_masks"])
    assert labels[0].dtype == torch.int64


def test_several_proxy_parts_are_one_dataset_without_masks(tmp_path: Path) -> None:
    write_proxy(tmp_path, "brain_ixi_pd")
    images = write_proxy(tmp_path, "tumour_lgg_flair")
    data = open_dataset("proxy", tmp_path, part=["brain_ixi_pd", "tumour_lgg_flair"])
    assert data.cases == ["brain_ixi_pd/1", "brain_ixi_pd/2", "tumour_lgg_flair/P1", "tumour_lgg_flair/P2"]
    np.testing.assert_array_equal((data[3].image[0] * 255).round(), images["train"][0])
    assert [data[i].label for i in range(6)] == [None] * 6
    assert {data[i].source for i in range(6)} == {"proxy:brain_ixi_pd", "proxy:tumour_lgg_flair"}
    with pytest.raises(ValueError, match="no 'knee'"):
        open_dataset("proxy", tmp_path, part=["brain_ixi_pd", "knee"])
    write_proxy_photos(tmp_path)
    with pytest.raises(ValueError, match="give parts of one kind"):
        open_dataset("proxy", tmp_path, "test", part=["brain_ixi_pd", "natural_kodak_test"])


def test_parts_for_training_only_are_in_no_other_split(tmp_path: Path) -> None:
    write_proxy(tmp_path, "brain_ixi_pd")
    images = write_proxy(tmp_path, "knee_stanford_pdfs")
    photos = write_proxy_photos(tmp_path, "natural_imagenet", splits=("train", "val", "test"))
    also = ["knee_stanford_pdfs", "natural_imagenet"]
    data = open_dataset("proxy", tmp_path, part="brain_ixi_pd", also=also)
    assert {case.split("/")[0] for case in data.cases} == {"brain_ixi_pd", *also}
    np.testing.assert_array_equal((data[3].image[0] * 255).round(), images["train"][0])
    grey = (photos[0] * [0.299, 0.587, 0.114]).sum(-1) / 255
    np.testing.assert_allclose(data[6].image, grey[None], atol=1e-5)
    for split in ("val", "test"):
        alone = open_dataset("proxy", tmp_path, split, part="brain_ixi_pd")
        assert open_dataset("proxy", tmp_path, split, part="brain_ixi_pd", also=also).cases == alone.cases
    with pytest.raises(ValueError, match=r"also: .*give parts of one kind"):
        open_dataset("proxy", tmp_path, part="natural_imagenet", also=["brain_ixi_pd"])


def test_a_drawn_phase_leaves_the_magnitude_and_is_the_same_every_time(tmp_path: Path) -> None:
    write_proxy(tmp_path)
    plain, drawn, again = (open_dataset("proxy", tmp_path, "all", phase=phase) for phase in (False, True, True))
    slices = [drawn[i].image for i in range(len(drawn))]
    for i, image in enumerate(slices):
        assert image.dtype == torch.complex64
        torch.testing.assert_close(image.abs(), plain[i].image)
        assert torch.equal(image, again[i].image)
    has_phase = [bool(image.imag.abs().max() > 0.01) for image in slices]
    assert any(has_phase)
    assert not all(has_phase)  # some slices keep phase zero


def test_proxy_photographs(tmp_path: Path) -> None:
    photos = write_proxy_photos(tmp_path)
    data = open_dataset("proxy", tmp_path, split="test", part="natural_kodak_test")
    np.testing.assert_array_equal((data[1].image * 255).round().permute(1, 2, 0), photos[1])
    assert data.cases == [f"natural_kodak_test/{c}.png" for c in "abc"]
    assert data.domain == "photo"


def test_proxy_raw_data(tmp_path: Path) -> None:
    slices, kspace = write_proxy_raw(tmp_path)
    data = open_dataset("proxy", tmp_path, split="val", part="raw_complex")
    np.testing.assert_allclose(data[0].image[0], slices[2], atol=1e-6)
    coils = open_dataset("proxy", tmp_path, split="test", part="raw_8ch")[0].image
    np.testing.assert_allclose(centred_fft(coils.numpy()), kspace, atol=1e-4)


def test_proxy_unknown_part(tmp_path: Path) -> None:
    write_proxy(tmp_path)
    with pytest.raises(DataError, match="did you mean 'brain_siat_t2'"):
        open_dataset("proxy", tmp_path, part="brain_siat")


def test_proxy_crops_in_kspace(tmp_path: Path) -> None:
    """A cropped image has the low frequencies of the full one, its mean, and labels where its pixels are."""
    write_proxy(tmp_path, part="tumour_lgg_flair")
    full, small = (open_dataset("proxy", tmp_path, part="tumour_lgg_flair", crop=crop) for crop in (None, 8))
    assert small[0].image.shape == (1, 8, 8)
    assert small[0].image.mean() == pytest.approx(full[0].image.mean().item(), rel=0.05)
    assert full[0].label is not None
    assert torch.equal(small[0].label, full[0].label[::2, ::2])
    large = open_dataset("proxy", tmp_path, part="tumour_lgg_flair", crop=40)[0]
    assert large.image.shape == (1, 40, 40)
    assert large.label.shape == (40, 40)
    assert torch.equal(large.label[::5, ::5], full[0].label[::2, ::2])
    with pytest.raises(ValueError, match="expected a positive height and width, got 0"):
        open_dataset("proxy", tmp_path, part="tumour_lgg_flair", crop=0)[0]


def test_fastmri_images_are_resized_in_kspace(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_fastmri(tmp_path / f"singlecoil_{split}" / f"{split}.h5")
    images = [open_dataset("fastmri", tmp_path, crop=crop)[0].image for crop in (None, 8, 40)]
    assert [tuple(image.shape) for image in images[1:]] == [(1, 8, 8), (1, 40, 40)]
    for image in images[1:]:
        assert float(image.mean()) == pytest.approx(float(images[0].mean()), rel=0.1)


def test_cc359_is_cropped_in_kspace(tmp_path):
    for split in ("Train", "Val", "Test"):
        write_cc359(tmp_path / split / "a.npy", slices=4)
    whole, small = (open_dataset("cc359", tmp_path, skip=1, crop=crop)[0].image for crop in (None, 8))
    assert small.shape == (1, 8, 8)
    assert float(small.mean()) == pytest.approx(float(whole.mean()), rel=0.3)  # the same field of view and intensity
