"""The numbers of the paper: what they add up to in its text, and what they must have to do with each other."""

import pytest

from chasm.studies import STUDIES, paper


def test_sums_over_the_tables():
    """Sums read off the paper's source by another way than the strings here."""
    cc359 = [
        q for hosts in paper.CC359.values() for mixers in hosts.values() for m in mixers.values() for q in m.values()
    ]
    assert len(cc359) == 2 * 3 * 9 * 2
    assert sum(q.mean for q in cc359) == pytest.approx(1583.363)
    assert sum(q.spread for q in cc359) == pytest.approx(35.353)
    cross = [q.mean for mixers in paper.CROSS_DOMAIN.values() for m in mixers.values() for q in m.values()]
    assert (len(cross), sum(cross)) == (6 * 9 * 2, pytest.approx(1119.329))
    assert {h: round(sum(v.values()), 2) for h, v in paper.FLOPS.items()} == {
        "hifi-mamba": 239.38, "unet": 116.60, "vit": 101.45,
    }  # fmt: skip
    assert sum(paper.CORE_PARAMETERS.values()) == pytest.approx(11.66)
    assert sum(q.mean for m in paper.BASIS.values() for q in m.values()) == pytest.approx(142.04 + 4.167)
    assert sum(q.mean for m in paper.AXES.values() for q in m.values()) == pytest.approx(142.28 + 4.172)


@pytest.mark.parametrize("setting", ["cc359-x4", "cc359-x8", "fastmri-x4", "fastmri-x8"])
def test_tables_agree_where_they_repeat_each_other(setting):
    main = paper.CC359[int(setting[-1])]["hifi-mamba"] if setting[0] == "c" else paper.CROSS_DOMAIN[setting]
    rival, chasm = paper.SEEDS[setting]
    gain = main[chasm]["psnr"].mean - main[rival]["psnr"].mean
    assert rival == max((m for m in main if m != "chasm"), key=lambda m: main[m]["psnr"].mean)
    for arm, metrics in paper.SEEDS[setting].items():
        assert {k: q.mean for k, q in metrics.items()} == {k: q.mean for k, q in main[arm].items()}
    row = paper.FALSIFICATION[setting]
    assert gain == pytest.approx(row["structured"]) == pytest.approx(paper.SEEDS_GAIN[setting])
    assert 100 * (1 - row["random"] / row["structured"]) == pytest.approx(row["drop"], abs=0.05)


def test_the_mean_row_of_the_falsification_table():
    rows = [row for name, row in paper.FALSIFICATION.items() if name != "mean"]
    for column, digits in (("structured", 2), ("random", 2), ("drop", 1)):
        mean = sum(row[column] for row in rows) / len(rows)
        assert mean == pytest.approx(paper.FALSIFICATION["mean"][column], abs=0.51 * 10**-digits)


def test_ablations_end_in_the_main_result():
    main = paper.CC359[8]["hifi-mamba"]["chasm"]
    for table in (paper.BASIS, paper.AXES, paper.SEEDS_BASIS):
        assert {k: q.mean for k, q in table["chasm"].items()} == {k: q.mean for k, q in main.items()}
    assert paper.SEEDS_BASIS["chasm-untied"]["psnr"].mean == paper.BASIS["chasm-untied"]["psnr"].mean


def test_every_table_is_a_study_with_its_numbers():
    sizes = {name: len(study.quotes) for name, study in STUDIES.items()}
    assert sizes == {
        "cc359": 54, "fastmri": 18, "ade20k": 9, "imagenet": 9, "brats": 18, "random-mask": 36, "basis": 5, "axes": 5,
        "seeds": 8, "seeds-basis": 2, "flops": 27, "parameters": 9, "wrapper": 27, "budget": 27, "evidence": 0,
        "hifi": 0, "hifi-random": 0, "bins": 0, "hosts": 0, "health": 0, "noise": 0, "readings": 0, "sampling": 0,
        "resolution": 0, "volume": 0,
    }  # fmt: skip
