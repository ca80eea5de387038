"""Loader workers, file handles, memory, resident tensors."""

import gc
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from writers import write_brats, write_cc359, write_cc359_multi, write_fastmri, write_photo, write_proxy

from chasm.data import Batch, DataError, Resident, Slice, SliceDataset, collate, open_dataset
from chasm.data import resident as resident_module


def open_h5_handles() -> int:
    here = Path("/proc/self/fd")
    if not here.is_dir():
        pytest.skip("needs /proc")
    return sum(os.readlink(f).endswith(".h5") for f in here.iterdir() if f.is_symlink() and f.exists())


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    for i in range(3):
        write_fastmri(tmp_path / "singlecoil_train" / f"v{i}.h5", seed=i)
    return tmp_path


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_read_what_the_main_process_reads(volumes: Path, start: str, workers: int) -> None:
    data = open_dataset("fastmri", volumes, slices=3)
    here = [data[i] for i in range(len(data))]  # opens handles that must not travel to the workers
    loader = DataLoader(data, batch_size=2, num_workers=workers, collate_fn=collate, multiprocessing_context=start)
    seen = list(loader)
    assert [c for batch in seen for c in batch.case] == [s.case for s in here]
    assert torch.equal(torch.cat([b.image for b in seen]), torch.stack([s.image for s in here]))


def test_an_error_in_a_worker_names_the_file(tmp_path: Path) -> None:
    write_cc359(tmp_path / "Train" / "a.npy")
    data = open_dataset("cc359", tmp_path)
    volume = np.load(tmp_path / "Train" / "a.npy")
    volume[31] = np.nan
    np.save(tmp_path / "Train" / "a.npy", volume)
    loader = DataLoader(data, batch_size=2, num_workers=1, collate_fn=collate)
    batches = iter(loader)
    with pytest.raises(DataError, match=r"a\.npy: kspace slice 31: 512 of 512 values are NaN"):
        next(batches)
    while next(batches, None) is not None:  # let the worker end by itself
        pass


@pytest.mark.parametrize("kind", ["cc359", "fastmri", "brats", "images", "folder", "proxy"])
def test_datasets_travel_by_pickle(kind: str, tmp_path: Path) -> None:
    make = {
        "cc359": lambda: write_cc359_multi(tmp_path / "Train" / "a.h5"),
        "fastmri": lambda: write_fastmri(tmp_path / "singlecoil_train" / "a.h5"),
        "brats": lambda: write_brats(tmp_path, "a"),
        "images": lambda: write_photo(tmp_path / "train" / "a.png"),
        "folder": lambda: np.save(tmp_path / "a.npy", np.eye(8)),
        "proxy": lambda: write_proxy(tmp_path),
    }
    make[kind]()
    data = open_dataset(kind, tmp_path, split="all")
    first = data[0]
    again = pickle.loads(pickle.dumps(data))[0]
    assert torch.equal(first.image, again.image)
    assert (first.case, first.index) == (again.case, again.index)


def test_few_handles_stay_open_and_all_are_closed(tmp_path: Path) -> None:
    for i in range(12):
        write_fastmri(tmp_path / "multicoil_train" / f"v{i}.h5", slices=2)
    gc.collect()  # errors that earlier tests caught may still hold a dataset
    before = open_h5_handles()
    data = open_dataset("fastmri", tmp_path, slices=1)
    for i in range(len(data)):
        data[i]
    assert 1 <= open_h5_handles() - before <= 8
    del data
    assert open_h5_handles() == before


@pytest.mark.parametrize("kind", ["cc359", "fastmri"])
def test_memory_is_flat_over_epochs(kind: str, tmp_path: Path) -> None:
    for i in range(2):
        if kind == "cc359":
            write_cc359(tmp_path / "Train" / f"v{i}.npy", size=64)  # 1.1 MB of slices used in each
        else:
            write_fastmri(tmp_path / "multicoil_train" / f"v{i}.h5", size=(64, 64), coils=4)
    data = open_dataset(kind, tmp_path)

    def epoch() -> int:
        for i in range(len(data)):
            data[i]
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        epoch()  # what libraries keep for good comes in the first two
        first = epoch()
        second = max(epoch() for _ in range(2))
    finally:
        tracemalloc.stop()
    assert second - first < 5_000  # a slice is 16 kB or more


def test_living_workers_see_the_epoch(tmp_path: Path) -> None:
    for i in range(4):
        write_photo(tmp_path / "train" / f"{i}.png", size=(16, 300), seed=i)
    data = open_dataset("images", tmp_path, size=16)
    loader = DataLoader(data, batch_size=4, num_workers=1, collate_fn=collate, persistent_workers=True)
    epochs = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        epochs.append(next(iter(loader)).image)
        assert torch.equal(epochs[-1], torch.stack([data[i].image for i in range(4)]))
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])


def test_resident_batches_equal_collated_slices(tmp_path: Path) -> None:
    write_proxy(tmp_path, "tumour_lgg_flair")
    data = open_dataset("proxy", tmp_path, part="tumour_lgg_flair")
    kept = data.to_memory()
    for rows in ([2, 0], torch.tensor([1])):
        batch, expected = kept.batch(rows), collate([data[int(i)] for i in rows])
        assert torch.equal(batch.image, expected.image)
        assert batch.label is not None
        assert torch.equal(batch.label, expected.label)
        assert batch.label.dtype == torch.int64
        assert (batch.case, batch.index, batch.source) == (expected.case, expected.index, expected.source)
    assert (len(kept), kept.cases, kept.split) == (len(data), data.cases, data.split)
    assert "proxy" in kept[0].source
    assert kept.to_memory(dtype=torch.float16).images.dtype == torch.float16


def test_resident_photographs_keep_their_values_in_8_bits(tmp_path: Path) -> None:
    write_photo(tmp_path / "train" / "a.png")
    data = open_dataset("images", tmp_path, size=16, augment=False)
    kept = data.to_memory(dtype=torch.uint8)
    assert kept.images.dtype == torch.uint8
    assert torch.equal(kept[0].image, data[0].image)
    assert torch.equal(kept.batch([0]).image[0], data[0].image)
    with pytest.raises(DataError, match="augment=False"):
        open_dataset("images", tmp_path).to_memory()


class Odd(SliceDataset):
    """Slices of two shapes."""

    split = "train"
    cases = ("a", "b")  # type: ignore[assignment]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Slice:
        return Slice(torch.zeros(1, 4 + i, 4), None, "ab"[i], i, "odd")


def test_a_set_that_does_not_fit_or_is_ragged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"case b slice 1: image: shape \(1, 5, 4\), expected \(1, 4, 4\)"):
        Resident(Odd())
    monkeypatch.setattr(resident_module, "free_bytes", lambda device: 100)
    with pytest.raises(DataError, match=r"2 slices\) needs 0\.0 GiB on cpu"):
        Odd().to_memory()


def test_free_memory_is_a_sensible_number() -> None:
    assert 10**8 < resident_module.free_bytes(torch.device("cpu")) < 10**14


def test_collate_and_batch_moves() -> None:
    slices = [Slice(torch.full((1, 2, 2), float(i)), torch.full((2, 2), i), f"c{i}", i, "s") for i in range(3)]
    batch = collate(slices)
    assert isinstance(batch, Batch)
    assert batch.image.shape == (3, 1, 2, 2)
    moved = batch.to("cpu")
    assert moved.label is not None
    assert moved.label[:, 0, 0].tolist() == [0, 1, 2]
    slices[1].label = None
    with pytest.raises(DataError, match="case c1 slice 1: label"):
        collate(slices)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_resident_on_the_gpu(tmp_path: Path) -> None:
    write_proxy(tmp_path)
    kept = open_dataset("proxy", tmp_path).to_memory("cuda")
    assert kept.batch([0, 1]).image.is_cuda


def test_a_batch_mirrors_each_slice_with_its_label() -> None:
    image = torch.arange(24.0).reshape(4, 1, 2, 3)
    got = Batch(image, image[:, 0].long(), list("abcd"), [0] * 4, "test").mirrored([0, 1, 2, 3])
    for i, dims in enumerate([(), (-1,), (-2,), (-1, -2)]):
        assert torch.equal(got.image[i], image[i].flip(dims))
        assert torch.equal(got.label[i], image[i, 0].flip(dims).long())
