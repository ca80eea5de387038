"""The options of a CHASM mixer: tables, counts, step scale, what is saved, and what is refused."""

import copy
import math
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from chasm_cases import GAINS, features, moved, relative
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import chasm
from chasm import CHASM


@pytest.mark.parametrize(
    ("options", "bins"),
    [
        ({}, (64, 64)),
        ({"size": 128}, (65, 65)),
        ({"size": (128, 128)}, (65, 65)),
        ({"size": (7, 10)}, (4, 6)),
        ({"bins": 9}, (9, 9)),
        ({"bins": (3, 8)}, (3, 8)),
        ({"bins": 9, "size": (128, 64)}, (9, 9)),
        ({"size": [12, 1]}, (7, 1)),
    ],
)
def test_bins_follow_size_unless_given(options: dict[str, Any], bins: tuple[int, int]) -> None:
    mixer = CHASM(2, **options)
    assert {a: tuple(t.shape) for a, t in mixer.gain_table.items()} == {"ch": (bins[0], 2), "cw": (bins[1], 2)}
    untied = CHASM(3, basis="untied", **options)
    assert {a: tuple(t.shape) for a, t in untied.theta.items()} == {"ch": (bins[0], 3), "cw": (bins[1], 3)}


def test_bins_of_one_and_three_axes() -> None:
    assert CHASM(2, ndim=1, size=9).gain_table["cl"].shape == (5, 2)
    volume = CHASM(2, ndim=3, bins=(2, 3, 4), axes="cw>cd")
    assert {a: t.shape[0] for a, t in volume.gain_table.items()} == {"cw": 4, "cd": 2}


@pytest.mark.parametrize("C", [1, 2, 7, 96])
def test_parameter_counts(C: int) -> None:
    BH, BW = 5, 9

    def count(**options: Any) -> int:
        return sum(p.numel() for p in CHASM(C, bins=(BH, BW), **options).parameters())

    core = C * (C - 1) + (BH + BW) * C  # the paper's count
    wrapper = 9 * C + C + C * C + C  # depthwise 3x3 and 1x1, with biases
    assert count(local=False) == core
    assert count() == core + wrapper
    assert count(basis=None) == wrapper
    assert count(basis="identity", local=False) == (BH + BW) * C
    assert count(basis="untied", local=False) == (BH + BW) * (C * (C - 1) // 2 + C)
    assert count(gain="signed", local=False) == core
    assert count(gain="complex", local=False) == core + (BH + BW) * C
    assert count(axes="ch", local=False) == C * (C - 1) // 2 + BH * C
    assert count(axes="cw", local=False) == C * (C - 1) // 2 + BW * C
    assert count(axes="ch+cw", local=False) == count(axes="cw>ch", local=False) == core


def test_the_size_it_was_built_for_reads_the_table_directly() -> None:
    mixer = moved(CHASM(3, size=(12, 9), gain="signed"))
    ops = mixer.operators(12, 9)
    for axis in ("ch", "cw"):
        assert torch.equal(ops[axis].gains, mixer.axis_parameters(axis).gain_table)
    assert mixer.operators(30, 31)["ch"].gains.shape == (16, 3)


def test_state_dict_names_and_round_trips(tmp_path: Any) -> None:
    mixer = moved(CHASM(3, size=(6, 5), gain="complex")).eval()
    assert set(mixer.state_dict()) == {
        *(f"{part}.{axis}" for part in ("theta", "gain_table", "phase_table") for axis in ("ch", "cw")),
        *(f"{part}.{kind}" for part in ("refine", "fuse") for kind in ("weight", "bias")),
        "stored_step_scale",
    }
    x = features(2, 3, 6, 5)
    with torch.no_grad():
        want = mixer(x)
        save_file(mixer.state_dict(), tmp_path / "mixer.safetensors")
        other = CHASM(3, size=(6, 5), gain="complex").eval()
        other.load_state_dict(load_file(tmp_path / "mixer.safetensors"))
        assert torch.equal(other(x), want)
        assert torch.equal(pickle.loads(pickle.dumps(mixer))(x), want)
        assert torch.equal(copy.deepcopy(mixer)(x), want)
        sizes = [len(pickle.dumps(m)) for m in (mixer, CHASM(3, size=(6, 5), gain="complex"))]
        assert abs(sizes[0] - sizes[1]) < 200  # the cache does not travel


def test_device_and_dtype() -> None:
    meta = CHASM(3, size=(6, 5), device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.float64)}
    x = torch.empty(2, 3, 8, 9, device="meta", dtype=torch.float64)
    assert meta(x).shape == meta.eval()(x).shape == x.shape


def test_repr_names_the_variant() -> None:
    text = repr(CHASM(3, bins=4, axes="ch+cw", gain="signed"))
    assert "axes='ch+cw'" in text
    assert "gain='signed'" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, r"expected .*channel.*, got channels=0"),
        ({"channels": -3}, r"expected .*channel.*, got channels=-3"),
        ({"channels": 2.5}, r"expected .*channel.*, got channels=2.5"),
        ({"channels": "8"}, r"expected .*channel.*, got channels='8'"),
        ({"axes": "ch>cz"}, r"axes='ch>cz' .*'ch>cw'"),
        ({"axes": "ch>ch"}, r"axes='ch>ch' .*each axis at most once"),
        ({"axes": ""}, r"axes=''"),
        ({"axes": "ch>cw+ch"}, r"axes="),
        ({"axes": "cd", "ndim": 2}, r"axes='cd' is not a composition of ch, cw"),
        ({"axes": "ch", "ndim": 1}, r"axes='ch' is not a composition of cl"),
        ({"axes": 5}, r"axes=5"),
        ({"basis": "shard"}, r"unknown basis='shard': did you mean 'shared'\?"),
        ({"basis": "None"}, r"basis='None' is text: write None in Python, null in YAML"),
        ({"gain": "positve"}, r"unknown gain='positve': did you mean 'positive'\?"),
        ({"form": "tritton"}, r"unknown form='tritton': did you mean 'triton'\?"),
        ({"ndim": 4}, r"unknown ndim=4: known: 1, 2, 3"),
        ({"bins": 0}, r"bins=0: expected a positive whole number, or 2"),
        ({"bins": (4,)}, r"bins=\(4,\): expected"),
        ({"bins": (4, 2.5)}, r"bins=\(4, 2.5\): expected"),
        ({"size": (8, 8, 8)}, r"size=\(8, 8, 8\): expected"),
        ({"size": -1}, r"size=-1: expected"),
        ({"size": 2.5}, r"size=2.5: expected"),
        ({"size": "8"}, r"size='8': expected"),
        ({"bins": True}, r"bins=True: expected"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        CHASM(**{"channels": 4, **options})
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("ndim", "x", "message"),
    [
        (2, torch.zeros(4, 6, 5), r"expected features \(B, 4, H, W\), got \(4, 6, 5\): pass ndim="),
        (2, torch.zeros(1, 4, 6, 5, 3), r"expected features \(B, 4, H, W\), got \(1, 4, 6, 5, 3\): pass ndim="),
        (2, torch.zeros(1, 6, 5, 4), r"expected features \(B, 4, H, W\), got \(1, 6, 5, 4\): set channels"),
        (1, torch.zeros(1, 4, 6, 5), r"expected features \(B, 4, L\), got \(1, 4, 6, 5\)"),
        (3, torch.zeros(1, 4, 6, 5), r"expected features \(B, 4, D, H, W\), got \(1, 4, 6, 5\)"),
        (2, torch.zeros(1, 4, 6, 5, dtype=torch.int64), r"expected real floating-point .*got torch.int64"),
        (2, torch.zeros(1, 4, 6, 5, dtype=torch.bool), r"expected real floating-point .*got torch.bool"),
        (2, torch.zeros(1, 4, 6, 5, dtype=torch.complex64), r"got torch.complex64: .*stack re and im"),
        (2, torch.zeros(1, 4, 0, 5), r"expected .*length 1 or more, got \(1, 4, 0, 5\)"),
        (2, torch.zeros(0, 4, 3, 0), r"expected .*length 1 or more, got \(0, 4, 3, 0\)"),
    ],
)
def test_bad_input_is_one_line(ndim: int, x: Tensor, message: str) -> None:
    for options in ({}, {"basis": None}, {"local": False}):
        mixer = CHASM(4, bins=3, ndim=ndim, **options)
        for call in (mixer, mixer.explain):
            with pytest.raises(ValueError, match=message) as info:
                call(x)
            assert "\n" not in str(info.value)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    mixer = CHASM(np.int64(4), size=(np.int32(8), np.int64(6)))
    assert mixer(torch.zeros(1, 4, 8, 6)).shape == (1, 4, 8, 6)
    assert CHASM(4, bins=np.int64(3)).gain_table["ch"].shape == (3, 4)


def test_operators_take_a_size_as_numbers_or_as_a_tuple() -> None:
    mixer = CHASM(4, size=8)
    x = torch.zeros(1, 4, 8, 6)
    for given in ((8, 6), ((8, 6),), (x.shape[2:],), (np.int64(8), 6)):
        assert mixer.operators(*given)["cw"].gains.shape == (4, 4)
    for wrong in ((8,), (8, 6, 4), ((8, 6), 4), (8, 0), ("8x6",)):
        with pytest.raises(ValueError, match="expected 2 positive whole numbers"):
            mixer.operators(*wrong)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="axis"):
        CHASM(4, axis="ch")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no option 'axis': did you mean 'axes'"):
        chasm.create_mixer("chasm", channels=4, axis="ch")


@pytest.mark.parametrize("gain", GAINS)
def test_a_step_moves_basis_and_gains_by_the_step_scale(gain: Any) -> None:
    """One step of Adam moves every entry of theta, Gamma and phi by lr * s; one of SGD by lr * s * gradient."""
    x, weight = features(2, 3, 6, 5), features(2, 3, 6, 5)

    def stepped_by(optimiser: Any, s: float) -> dict[str, Tensor]:
        mixer = moved(CHASM(3, size=(6, 5), gain=gain, step_scale=s).double())
        before = torch.cat([t.flatten() for a in ("ch", "cw") for t in mixer.axis_parameters(a) if t is not None])
        step = optimiser(mixer.parameters())
        (mixer(x.double()) * weight).sum().backward()
        step.step()
        after = torch.cat([t.flatten() for a in ("ch", "cw") for t in mixer.axis_parameters(a) if t is not None])
        return (after - before).detach()

    adam, sgd = partial(torch.optim.Adam, lr=1e-3), partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    moves = stepped_by(adam, 30.0)
    assert torch.allclose(moves.abs()[moves != 0], torch.tensor(0.03).double(), rtol=1e-3)
    torch.testing.assert_close(stepped_by(sgd, 30.0), 30 * stepped_by(sgd, 1.0))


def test_weight_decay_pulls_to_the_identity() -> None:
    mixer = moved(CHASM(3, size=(6, 5), local=False).double())
    with torch.no_grad():
        for p in mixer.parameters():
            p.zero_()
    x = features(2, 3, 6, 5).double()
    torch.testing.assert_close(mixer(x), x)


def test_weights_of_another_step_scale_load_as_the_same_operator() -> None:
    written = moved(CHASM(3, size=(6, 5), gain="complex", step_scale=7.3)).eval()
    read = nn.ModuleList([CHASM(3, size=(6, 5), gain="complex", step_scale=100)]).eval()
    state = {f"0.{k}": v for k, v in written.state_dict().items()}
    kept = {k: v.clone() for k, v in state.items()}
    read.load_state_dict(state)
    x = features(2, 3, 6, 5)
    with torch.no_grad():
        assert relative(read[0](x), written(x)) <= 1e-6
    assert read[0].step_scale == read.state_dict()["0.stored_step_scale"] == 100
    assert all(torch.equal(state[k], v) for k, v in kept.items())  # the caller's dict is left alone
    del state["0.stored_step_scale"]
    with pytest.raises(RuntimeError, match="stored_step_scale"):
        read.load_state_dict(state)


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, "30", None])
def test_a_step_scale_must_be_a_positive_number(scale: Any) -> None:
    with pytest.raises(ValueError, match="positive step_scale"):
        CHASM(3, step_scale=scale)
