"""`chasm mixers check` finds what is wrong with a mixer, and nothing wrong with those that come with the package."""

from collections.abc import Iterator

import pytest
import torch
from registry_cases import NAMES
from torch import Tensor, nn
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.mixers import MIXERS, Mixer, check_mixer, register_mixer


class Sound(Mixer):
    """Gains per channel, and what the faulty ones change."""

    def __init__(self, channels, *, size=None, device=None, dtype=None):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x.roll(1, -1)


class HalvesWidth(Sound):
    def forward(self, x):
        return super().forward(x)[..., : max(x.shape[-1] // 2, 1)]


class OneSizeOnly(Sound):
    def __init__(self, channels, *, size=None, device=None, dtype=None):
        super().__init__(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.ones(8, 8, device=device, dtype=dtype))

    def forward(self, x):
        return super().forward(x) * self.weight


class AlwaysFloat32(Sound):
    def forward(self, x):
        return super().forward(x).float()


class PlainConvolution(Sound):
    def __init__(self, channels, *, size=None, device=None, dtype=None):
        super().__init__(channels, device=device, dtype=dtype)
        self.mix = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)

    def forward(self, x):
        return self.mix(super().forward(x))


class ReadsMemory(Sound):
    def forward(self, x):
        return torch.as_strided(x, x.shape, x.new_empty(x.shape).stride()) * self.gain


class MixesTheBatch(Sound):
    def forward(self, x):
        return super().forward(x) + (x.mean(0, keepdim=True) if len(x) else x)


class LosesAGradient(Sound):
    def forward(self, x):
        return self.gain.detach() * x


class WrongGradient(Sound):
    def forward(self, x):
        return super().forward(x) + (x.square() - x.square().detach()) + 0 * x


class Noisy(Sound):
    def forward(self, x):
        return super().forward(x) + 0.01 * torch.rand_like(x)


class KeepsWeightsOutside(Sound):
    def __init__(self, channels, *, size=None, device=None, dtype=None):
        super().__init__(channels, device=device, dtype=dtype)
        self.hidden = [torch.rand(1).item()]

    def forward(self, x):
        return super().forward(x) * self.hidden[0]


class DeclaresNothing(Sound):
    spectral_parameters = ("filter",)


class ChangesItsInput(Sound):
    def forward(self, x):
        return x.mul_(self.gain)


class IgnoresResidual(Sound):
    owns_residual = True

    def __init__(self, channels, *, size=None, residual=True, device=None, dtype=None):
        super().__init__(channels, device=device, dtype=dtype)


class BreaksTheGraph(Sound):
    def forward(self, x):
        return super().forward(x) * (2 if float(x.sum()) > 1e9 else 1)


class KeepsTheDefaultDevice(Sound):
    def __init__(self, channels, *, size=None, device=None, dtype=None):
        super().__init__(channels)


@pytest.fixture
def registered() -> Iterator[None]:
    yield
    for name in [name for name in MIXERS._classes if name.startswith("of-the-test")]:
        MIXERS._classes.pop(name)


FAULTY = [
    (Sound, set()),
    (HalvesWidth, {"shape, dtype and device", "other and odd sizes"}),
    (OneSizeOnly, {"other and odd sizes"}),
    (AlwaysFloat32, {"precision"}),
    (ReadsMemory, {"memory formats"}),
    (MixesTheBatch, {"batch"}),
    (LosesAGradient, {"gradient"}),
    (WrongGradient, {"gradient"}),
    (Noisy, {"same result twice"}),
    (KeepsWeightsOutside, {"state dict"}),
    (DeclaresNothing, {"declared parameters"}),
    (ChangesItsInput, {"shape, dtype and device"}),
    (IgnoresResidual, {"identity path"}),
    (BreaksTheGraph, {"compile"}),
    (KeepsTheDefaultDevice, {"construction"}),
]


@pytest.mark.parametrize(("cls", "broken"), FAULTY, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.usefixtures("registered")
def test_faults_are_found(cls, broken, monkeypatch):
    register_mixer("of-the-test")(cls)
    if "compile" not in broken:
        monkeypatch.setattr("chasm.mixers.contract._compile", lambda make, channels: None)  # it takes a second
    found = {check.name: check.problem for check in check_mixer("of-the-test", channels=4)}
    failed = {name for name, problem in found.items() if problem}
    assert broken <= failed, found
    if not broken:
        assert not failed
    assert not any("\n" in problem for problem in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_mixers_of_the_package_keep_the_contract(name, monkeypatch):
    monkeypatch.setattr("chasm.mixers.contract._compile", lambda make, channels: None)  # test_compile_export has it
    assert not [check for check in check_mixer(name) if check.problem]


@pytest.mark.usefixtures("registered")
def test_a_layer_that_autocast_converts_is_told_what_to_return(monkeypatch):
    monkeypatch.setattr("chasm.mixers.contract._compile", lambda make, channels: None)  # it takes a second
    register_mixer("of-the-test")(PlainConvolution)
    problems = [check.problem for check in check_mixer("of-the-test", channels=4) if check.problem]
    assert problems == ["under autocast torch.float32 came back as torch.bfloat16: return y.to(x.dtype)"]


@pytest.mark.usefixtures("registered")
def test_the_command_prints_each_promise_and_fails_when_one_is_broken():
    register_mixer("of-the-test")(HalvesWidth)
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["mixers", "check", "of-the-test", "--channels", "4"])
    assert found.exit_code == 3
    assert "ok      construction" in found.stdout
    assert "FAILED  shape, dtype and device: (2, 4, 8, 8) came back as (2, 4, 8, 4)" in found.stdout
    assert found.stderr.startswith("error: of-the-test: ")
