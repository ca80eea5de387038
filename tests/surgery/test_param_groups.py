"""Optimiser groups: what gets its own step size, what decays, and each parameter exactly once."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import chasm
from chasm import CHASM, param_groups


def by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Group name -> names of its parameters (all the names of a shared one)."""
    names: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), set()).add(name)
    return {g["name"]: set().union(*(names[id(p)] for p in g["params"])) for g in groups}


def once(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    found = [id(p) for g in groups for p in g["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "options",
    [{}, {"basis": "untied"}, {"basis": "identity"}, {"gain": "complex"}, {"axes": "ch+cw"}, {"local": False}],
)
def test_theta_and_tables_are_spectral(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), CHASM(4, bins=3, **options), nn.Linear(4, 2))
    groups = param_groups(model, lr=1e-3, weight_decay=0.1, spectral_lr=1e-2)
    once(model, groups)
    names = by_name(model, groups)
    all_names = {n for n, _ in model.named_parameters()}
    assert names["spectral"] == {n for n in all_names if n.split(".")[1] in ("theta", "gain_table", "phase_table")}
    assert {"0.weight", "3.weight"} <= names["decay"]
    assert {"0.bias", "1.weight", "1.bias", "3.bias"} <= names["plain"]
    settings = {g["name"]: (g["lr"], g["weight_decay"]) for g in groups}
    assert settings == {"decay": (1e-3, 0.1), "plain": (1e-3, 0.0), "spectral": (1e-2, 0.0)}


@pytest.mark.parametrize("name", chasm.list_mixers())
def test_spectral_weights_of_every_mixer(name: str) -> None:
    """What a mixer lists in spectral_parameters, and nothing else, gets spectral_lr."""
    model = nn.ModuleDict({"slot": chasm.create_slot(name, 16, (8, 8)), "head": nn.Conv2d(16, 1, 1)})
    groups = param_groups(model, lr=1e-3, spectral_lr=1e-2)
    once(model, groups)
    listed = {
        id(p)
        for module in model.modules()
        for own in getattr(module, "spectral_parameters", ())
        for item in [getattr(module, own)]
        if item is not None
        for p in (item.parameters() if isinstance(item, nn.Module) else [item])
    }
    got = {id(p) for g in groups if g["name"] == "spectral" for p in g["params"]}
    assert got == listed
    if name in ("gfnet", "afno", "ffc", "fno-d", "difffno", "fsel", "spectformer", "chasm"):
        assert got
    assert all(p.ndim > 1 for g in groups if g["weight_decay"] > 0 for p in g["params"])


def test_spectral_lr_defaults_to_lr() -> None:
    groups = param_groups(CHASM(4, bins=3), lr=3e-4)
    assert {g["lr"] for g in groups} == {3e-4}
    assert {g["name"]: g["weight_decay"] > 0 for g in groups} == {"decay": True, "plain": False, "spectral": False}


def test_empty_groups_are_left_out() -> None:
    assert [g["name"] for g in param_groups(CHASM(4, bins=3, local=False), lr=1)] == ["spectral"]
    assert [g["name"] for g in param_groups(nn.Linear(2, 2, bias=False), lr=1)] == ["decay"]
    assert param_groups(nn.ReLU(), lr=1) == []


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(CHASM(4, bins=3), nn.Linear(4, 4))
    model[0].theta.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    groups = param_groups(model, lr=1e-3)
    once(model, groups)
    names = by_name(model, groups)
    assert names["spectral"] == {"0.gain_table.ch", "0.gain_table.cw"}
    assert "1.bias" not in set().union(*names.values())


def test_shared_modules_and_parameters_appear_once() -> None:
    mixer = CHASM(4, bins=3)
    model = nn.ModuleDict({"a": mixer, "b": mixer, "c": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    model["d"].weight = model["c"].weight
    groups = param_groups(model, lr=1e-3)
    once(model, groups)


class TiedFirst(nn.Module):
    """A spectral table that is registered under a plain name before the mixer that owns it."""

    def __init__(self) -> None:
        super().__init__()
        mixer = CHASM(4, bins=3)
        self.table = mixer.gain_table["ch"]
        self.mixer = mixer


def test_a_spectral_parameter_with_a_second_name_stays_spectral() -> None:
    model = TiedFirst()
    groups = param_groups(model, lr=1e-3)
    once(model, groups)
    assert "table" in by_name(model, groups)["spectral"]


class Prefix(nn.Module):
    """Names that begin alike must not be taken for one another."""

    spectral_parameters: ClassVar = ("filter",)
    no_decay_parameters: ClassVar = ("position",)

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(2, 2))
        self.filter_bank = nn.Parameter(torch.zeros(2, 2))
        self.position = nn.Parameter(torch.zeros(2, 2))


def test_names_are_matched_whole() -> None:
    for model, prefix in ((Prefix(), ""), (nn.Sequential(Prefix()), "0.")):
        assert by_name(model, param_groups(model, lr=1e-3)) == {
            "spectral": {f"{prefix}filter"},
            "decay": {f"{prefix}filter_bank"},
            "plain": {f"{prefix}position"},
        }


def test_listed_options_that_are_absent_do_not_matter() -> None:
    model = CHASM(4, bins=3, basis=None)
    groups = param_groups(model, lr=1e-3, spectral_lr=1.0)
    once(model, groups)
    assert {g["name"] for g in groups} == {"decay", "plain"}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_any_optimiser_takes_the_groups(make: Any) -> None:
    """Under Adam a gain moves by about its own step size."""
    torch.manual_seed(0)
    model = CHASM(4, bins=3)
    optimiser = make(param_groups(model, lr=1e-4, weight_decay=0.1, spectral_lr=1e-2))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(torch.randn(2, 4, 6, 5)).square().mean().backward()
    optimiser.step()
    if make is torch.optim.AdamW:
        step = {n: (p.detach() - before[n]).abs().max().item() for n, p in model.named_parameters()}
        assert step["gain_table.ch"] == pytest.approx(1e-2, rel=1e-2)
        assert step["fuse.bias"] == pytest.approx(1e-4, rel=1e-2)
    state = optimiser.state_dict()
    assert [g["name"] for g in state["param_groups"]] == ["decay", "plain", "spectral"]
    optimiser.load_state_dict(state)
