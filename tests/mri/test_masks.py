import os
from pathlib import Path

import numpy as np
import pytest
import torch

from chasm.mri.masks import Sampling, create_mask, mask_from_array

# N, R, centre (first, end), lines at each offset: the fraction-adjusted rule worked out in exact fractions.
TABLE = [
    (256, 4, (118, 138), [64, 64, 64, 63, 64]),
    (256, 8, (123, 133), [32] * 9 + [31, 32]),
    (320, 4, (147, 173), [80] * 5),
    (320, 8, (154, 167), [41, 40, 40, 40, 40, 40, 39, 39, 40, 40, 40]),
    (240, 4, (111, 130), [60, 61, 60, 59, 59]),
]


@pytest.mark.parametrize(("n", "r", "center", "counts"), TABLE)
def test_equispaced_has_the_exact_line_counts(n: int, r: int, center: tuple[int, int], counts: list[int]) -> None:
    for offset, lines in enumerate(counts):
        mask = create_mask("equispaced", n, r, offset=offset)
        assert mask.lines == lines
        assert mask.center == center
        assert mask.acceleration == n / lines
        assert set(range(*center)) <= set(mask.columns)
        assert mask.columns[0] == offset
    with pytest.raises(ValueError, match=f"offset must be one of 0..{len(counts) - 1}"):
        create_mask("equispaced", n, r, offset=len(counts))


def test_equispaced_columns_round_half_to_even() -> None:
    # 256, x4: R' = 59/11, so columns are round(59 i / 11); computed in whole numbers here.
    expected = {(2 * 59 * i + 11) // 22 for i in range(48) if 59 * i < 255 * 11} | set(range(118, 138))
    assert set(create_mask("equispaced", 256, 4).columns) == expected
    # N = 10, R = 2.5 and no centre: columns 0, 2.5, 5, 7.5, where halves go to the even column.
    assert create_mask("equispaced", 10, 2.5, center_fraction=0).columns == (0, 2, 5, 8)


def test_plain_equispaced_overshoots_and_says_so() -> None:
    mask = create_mask("equispaced-plain", 256, 4)
    assert mask.lines == 79
    assert mask.nominal == 4
    assert mask.acceleration == pytest.approx(3.24, abs=0.01)
    assert "really x3.24 (nominal x4)" in str(mask)


@pytest.mark.parametrize(("n", "r"), [(256, 4), (256, 8), (320, 4), (320, 8), (240, 8)])
def test_random_keeps_centre_and_line_count(n: int, r: int) -> None:
    wanted = create_mask("equispaced", n, r)
    drawn = {create_mask("random", n, r, seed=s) for s in range(12)}
    assert len(drawn) == 12  # every seed another mask
    for mask in drawn:
        assert mask.lines == wanted.lines
        assert mask.center == wanted.center
        assert set(range(*wanted.center)) <= set(mask.columns)
    assert create_mask("random", n, r, seed=3) == create_mask("random", n, r, seed=3)


def test_random_plain_is_the_fastmri_draw() -> None:
    mask = create_mask("random-plain", 256, 4, seed=(102, 105))
    low = np.random.RandomState((102, 105)).uniform(size=256) < (64 - 20) / (256 - 20)
    low[118:138] = True
    assert mask.columns == tuple(np.flatnonzero(low))
    assert mask.seed == (102, 105)
    mean = np.mean([create_mask("random-plain", 256, 4, seed=s).lines for s in range(200)])
    assert abs(mean - 64) < 1.5  # on budget on average only


def test_random_differs_from_its_plain_draw_only_by_what_the_count_needs() -> None:
    for seed in range(6):
        plain = set(create_mask("random-plain", 256, 4, seed=seed).columns)
        forced = set(create_mask("random", 256, 4, seed=seed).columns)
        assert len(plain ^ forced) == abs(len(plain) - 64)


def test_report_names_what_made_it() -> None:
    equi = create_mask("equispaced", 320, 8)
    assert equi.report() == {
        "kind": "equispaced",
        "columns": 320,
        "lines": 41,
        "acceleration": 7.8049,
        "coherence": round(equi.coherence, 4),
        "nominal": 8,
        "center_lines": 13,
        "center_first": 154,
        "offset": 0,
    }
    assert create_mask("random", 256, 4, seed=9).report()["seed"] == 9


def test_coherence_is_the_largest_side_lobe() -> None:
    every_fourth = create_mask("equispaced-plain", 64, 4, center_fraction=0)
    assert every_fourth.coherence == pytest.approx(1)  # copies of the image, as strong as itself
    structured = create_mask("equispaced", 256, 8)
    spread = np.abs(np.fft.fft(structured.tensor().flatten().numpy())) / structured.lines
    fold = round(256 / np.diff(structured.columns).max())
    assert structured.coherence == pytest.approx(spread[fold - 2 : fold + 3].max())
    drawn = [create_mask("random", 256, 8, seed=seed).coherence for seed in range(5)]
    assert max(drawn) < structured.coherence
    assert create_mask("equispaced", 8, 2, center_fraction=0.4).coherence >= 0


@pytest.mark.parametrize("seed", [0, 1])
def test_gaussian_masks_lean_to_the_centre(seed: int) -> None:
    mask = create_mask("gaussian", 256, 8, seed=seed)
    assert mask.lines == create_mask("equispaced", 256, 8).lines
    assert set(range(*mask.center)) <= set(mask.columns)
    near, far = (np.abs(np.array(m.columns) - 128).mean() for m in (mask, create_mask("random", 256, 8, seed=seed)))
    assert near < far
    assert mask == create_mask("gaussian", 256, 8, seed=seed)
    assert mask.report()["seed"] == seed


def test_a_seed_moves_the_offset_unless_one_is_given() -> None:
    for kind in ("equispaced", "equispaced-plain"):
        assert len({create_mask(kind, 256, 8, seed=seed).offset for seed in range(20)}) > 4
        mask = create_mask(kind, 256, 8, seed=3)
        assert mask == create_mask(kind, 256, 8, offset=mask.offset)
        assert create_mask(kind, 256, 8, offset=2, seed=3).offset == 2
        assert create_mask(kind, 256, 8).offset == 0
    assert Sampling(seed=3).mask(64) == Sampling(seed=3).mask(64)
    assert len({create_mask("random", 256, 8, seed=seed).lines for seed in range(20)}) == 1


def test_tensor_broadcasts_and_is_shared() -> None:
    mask = create_mask("equispaced", 256, 4)
    with torch.inference_mode():
        t = mask.tensor()
    assert t.shape == (1, 1, 1, 256)
    assert t.sum() == 64
    assert mask.tensor() is t
    assert mask.tensor(dtype=torch.float64).dtype == torch.float64
    x = torch.ones(1, 1, 2, 256, requires_grad=True)
    (x * t).sum().backward()  # made in inference mode, still fit for training
    assert torch.equal(x.grad[0, 0, 0], t[0, 0, 0])  # type: ignore[index]


def test_from_file_and_array(tmp_path: Path) -> None:
    made = create_mask("equispaced", 64, 4)
    full = np.zeros((1, 16, 64), np.float32)
    full[..., list(made.columns)] = 1
    np.save(tmp_path / "mask_0_64_af4.npy", full)
    read = create_mask("file", 64, file=tmp_path / "mask_0_64_af4.npy")
    assert read.columns == made.columns
    assert read.center[0] <= made.center[0] < made.center[1] <= read.center[1]
    assert read.report()["file"] == "mask_0_64_af4.npy"
    assert "nominal" not in read.report()
    np.savetxt(tmp_path / "m.txt", full[0, 0])
    assert create_mask("file", 64, file=tmp_path / "m.txt").columns == made.columns
    assert mask_from_array(full[0, 0].astype(bool), 64).columns == made.columns
    assert Sampling("file", file=str(tmp_path / "m.txt")).mask(64).columns == made.columns

    with pytest.raises(ValueError, match="has 64 columns, the data 128"):
        create_mask("file", 128, file=tmp_path / "m.txt")
    with pytest.raises(ValueError, match="varies along rows"):
        mask_from_array(full[0].T)
    with pytest.raises(ValueError, match=r"expected zeros and ones, found other values too: 0.5, 2.0"):
        mask_from_array(np.array([0, 1, 0.5, 2, 1]))
    with pytest.raises(ValueError, match=r"found other values too: nan"):
        mask_from_array(np.array([0, 1, np.nan]))
    with pytest.raises(ValueError, match="keeps no column"):
        mask_from_array(np.zeros(8))
    with pytest.raises(ValueError, match=r"expected zeros and ones of shape \(..., W\)"):
        mask_from_array(np.zeros((0, 4)))
    (tmp_path / "bad.npy").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"bad.npy: not a mask"):
        create_mask("file", 64, file=tmp_path / "bad.npy")
    with pytest.raises(FileNotFoundError, match=r"none.npy: no such mask file"):
        create_mask("file", 64, file=tmp_path / "none.npy")
    with pytest.raises(ValueError, match="needs the file"):
        create_mask("file", 64)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="unknown mask kind 'equspaced': did you mean"):
        create_mask("equspaced", 256)
    with pytest.raises(ValueError, match="lower center_fraction"):
        create_mask("equispaced", 256, 4, center_fraction=0.25)
    with pytest.raises(ValueError, match="must be whole"):
        create_mask("equispaced-plain", 256, 4.5)
    with pytest.raises(ValueError, match="acceleration > 1"):
        create_mask("equispaced", 256, 1)
    with pytest.raises(ValueError, match="at most 1000000, got 256 and 1e"):
        create_mask("equispaced", 256, 1e308)
    with pytest.raises(ValueError, match=r"center_fraction must lie in \[0, 1\]"):
        create_mask("equispaced", 256, 4, center_fraction=1.5)


def test_sampling_makes_the_mask_of_any_width() -> None:
    s = Sampling(acceleration=8)
    assert s.mask(256) == create_mask("equispaced", 256, 8)
    assert s.mask(320).lines == 41
    assert s.mask(256) is s.mask(256)


def test_a_mask_file_that_claims_too_much_is_one_line(tmp_path: Path) -> None:
    with open(tmp_path / "m.npy", "wb") as f:
        header = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
        np.lib.format.write_array_header_1_0(f, header)
    with pytest.raises(ValueError, match=r"m\.npy: not a mask"):
        create_mask("file", 64, file=tmp_path / "m.npy")
    (tmp_path / "n.npy").touch()
    os.truncate(tmp_path / "n.npy", 2**40)
    with pytest.raises(ValueError, match=r"n\.npy: 1099511627776 bytes: a mask has one number"):
        create_mask("file", 64, file=tmp_path / "n.npy")
