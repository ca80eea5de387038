"""A recipe of a few words can ask for a network that no memory holds: it is refused in one line, at once."""

import resource
import time
from typing import Any

import pytest
import torch
from torch import nn

from chasm.backbones.base import BACKBONES
from chasm.data import open_dataset
from chasm.train import RunConfig, load_recipe
from chasm.train.config import MAX_OPTION
from chasm.train.run import build_model
from chasm.train.size import NetworkTooLargeError, build_within_limits

MEMORY = 2**29  # bytes beyond what the process has mapped: half of what the weights may take


def recipe(host: str, mixer: str = "chasm", **options: Any) -> RunConfig:
    return load_recipe(
        {
            "backbone": {"name": host, "options": options},
            "mixer": {"name": mixer},
            "train": {"steps": 1},
        }
    )


def build(config: RunConfig) -> nn.Module:
    return build_model(config, config.task.create(), (1, 64, 64))


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("unet", {"width": MAX_OPTION}),
        ("unet", {"depth": 16}),
        ("unet-3d", {"depth": 16}),
        ("vit", {"depth": MAX_OPTION}),
        ("vit", {"width": MAX_OPTION, "heads": 1}),
        ("varnet", {"cascades": MAX_OPTION}),
        ("hifi-mamba", {"width": MAX_OPTION}),
        ("hifi-mamba-v1", {"state": MAX_OPTION}),
        ("hifi-mamba-v2", {"groups": MAX_OPTION, "blocks": MAX_OPTION}),
    ],
)
def test_a_huge_network_is_refused_before_memory_is_taken(host: str, options: dict[str, int]) -> None:
    config, before = recipe(host, **options), resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        mapped = int(f.read().split()[0]) * resource.getpagesize()
    started = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, before[1]))
    try:
        with pytest.raises(NetworkTooLargeError, match=r"more than (1 GiB of weights|10000 modules): choose smaller"):
            build(config)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - started < 20  # seconds


@pytest.mark.parametrize("options", [{"depth": 10**9}, {"levels": [0, 10**18]}, {"width": MAX_OPTION + 1}])
def test_numbers_that_no_network_has_are_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=rf"backbone: option '{next(iter(options))}': a network has at most {MAX_OPTION}$"
    ):
        recipe("unet", **options)


@pytest.mark.parametrize("change", ["train.batch=1000000000", "train.workers=100000", "train.epochs=1e308"])
def test_so_are_numbers_that_no_training_has(change: str) -> None:
    key = change.partition("=")[0]
    with pytest.raises(ValueError, match=f"recipe: {key}: Input should be less than or equal to"):
        load_recipe({"train": {"epochs": 1}}, [change])


def test_the_limit_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe("unet", width=8, depth=1, levels=[0])
    build(config)
    monkeypatch.setenv("CHASM_MAX_GIB", "0.00001")
    with pytest.raises(NetworkTooLargeError, match="or set CHASM_MAX_GIB higher"):
        build(config)


@pytest.mark.parametrize("host", ["unet", "vit", "hifi-mamba"])
def test_the_trial_changes_no_weight(host: str) -> None:
    config = recipe(host)
    into, out = config.task.create().channels(1)
    torch.manual_seed(config.seed)
    residual = {"global_residual": True} if "global_residual" in BACKBONES.options(host) else {}
    alone = BACKBONES.create(
        host, mixer="chasm", mixer_options={}, in_channels=into, out_channels=out, size=(64, 64), **residual
    ).state_dict()
    built = build(config).state_dict()
    assert built.keys() == alone.keys()
    assert all(torch.equal(built[name], alone[name]) for name in alone)


def test_a_class_that_cannot_be_built_without_values_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_values() -> nn.Module:
        return nn.Linear(int(torch.tensor(500).item()), 500)

    assert isinstance(build_within_limits(needs_values), nn.Linear)
    monkeypatch.setenv("CHASM_MAX_GIB", "0.0001")
    with pytest.raises(NetworkTooLargeError):
        build_within_limits(needs_values)
    assert nn.Linear(500, 500).in_features == 500  # the limit has gone


@pytest.mark.parametrize("options", [{"size": 10**9}, {"cases": 10**9}, {"slices": 10**9}])
def test_drawn_data_have_limits(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"expected .*(2048 pixels|at most 100000 slices)"):
        open_dataset("embedded", split="all", **options)
