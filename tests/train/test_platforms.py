"""Windows and macOS, as far as they can be had on another machine: what is missing there is taken away here.

These are mocks. They show that nothing is imported or called that Windows does not have, and that no tensor on an Apple
GPU is float64; they do not show that torch itself works there.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from apple import AppleGPU, to_apple

import chasm
from chasm.backbones import create_backbone
from chasm.common import locks
from chasm.common.locks import BusyError, is_locked, locked
from chasm.mri import Sampling
from chasm.tasks import create_task
from chasm.train.snapshot import restore, snapshot

# Modules, constants and functions of POSIX that Windows does not have, as far as chasm could use them. Those that torch
# and Python themselves need here are taken away after they are imported.
WINDOWS = """
import os, signal, sys
import torch, accelerate, asyncio, subprocess
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "sysconf", "getuid", "setsid", "killpg", "mkfifo"):
    delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "SIGKILL", "pthread_sigmask"):
    delattr(signal, name)
"""

USE = """
import pathlib
import chasm.cli.app, chasm.common.locks, chasm.data, chasm.reconstruct, chasm.studies.runner
from chasm.studies import make_plan
from chasm.studies.state import state, working_on
from chasm.train import load_recipe, train
folder = pathlib.Path(sys.argv[1])
config = load_recipe({
    "data": {"name": "embedded", "options": {"size": 16, "cases": 10, "slices": 1}},
    "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
    "mixer": {"name": "chasm"},
    "train": {"steps": 1, "batch": 2},
})
with working_on(folder):
    assert state(folder, config)[0] == "running"
    train(config, folder, quiet=True)
assert state(folder, config)[0] == "done"
assert chasm.common.locks.fcntl is None
"""


def test_training_and_studies_do_without_what_windows_lacks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WINDOWS + USE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_locks_without_record_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    file = tmp_path / "new" / "lock"
    assert not is_locked(file)
    assert not file.exists()
    with locked(file) as lock:
        lock.require_place()
        assert is_locked(file)
        with pytest.raises(BusyError), locked(file):
            pass
        monkeypatch.setattr(locks, "_held", set())  # as another process sees it
        assert is_locked(file)
        with pytest.raises(BusyError), locked(file):
            pass
    assert not is_locked(file)
    with locked(file):
        pass


def test_the_mock_of_an_apple_gpu_refuses_float64() -> None:
    with AppleGPU():
        x = torch.ones(2, device="mps")
        assert (x + 1).device.type == "mps"
        assert x.cpu().double().dtype == torch.float64
        for wide in (lambda: x.double(), lambda: torch.ones(2, device=x.device, dtype=torch.float64)):
            with pytest.raises(TypeError, match="float64"):
                wide()


def test_train_score_and_fold_on_a_device_without_float64() -> None:
    torch.manual_seed(0)
    model = create_backbone(
        "unet", mixer="chasm", in_channels=2, out_channels=2, size=(16, 16), width=8, depth=1, levels=[0]
    )
    on_cpu = copy.deepcopy(model)
    task = create_task("reconstruction", sampling=Sampling(kind="equispaced", acceleration=4))
    image = torch.rand(2, 1, 16, 16)
    losses = []
    for device, network in (("cpu", on_cpu), ("mps", model)):
        with AppleGPU():
            network = to_apple(network) if device == "mps" else network
            optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
            for _ in range(2):
                optimiser.zero_grad()
                batch = task.prepare(image.to(device), None, ["a", "b"])
                loss = task.loss(network(batch.input, **batch.physics), batch)
                loss.backward()
                optimiser.step()
            assert {p.device.type for p in network.parameters()} == {device}
            network.eval()
            with torch.no_grad():
                output = network(batch.input, **batch.physics)
                scores = task.scores(output, batch)
                folded = chasm.fold(network, example={"x": batch.input, **batch.physics})
                same = folded(batch.input, **batch.physics)
            assert output.device.type == device
            assert torch.allclose(same.cpu(), output.cpu(), atol=1e-5)
            losses.append([float(loss.detach()), float(scores["psnr"][0])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_random_state_of_an_apple_gpu_is_part_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.arange(8, dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", stored.append)
    model = torch.nn.Linear(2, 2)
    optimiser = torch.optim.AdamW(model.parameters())
    for device in ("cpu", "mps"):
        tensors = snapshot(model, optimiser, None, torch.device(device))
        assert ("rng.mps" in tensors) == (device == "mps")
        restore(tensors, model, optimiser, None, torch.device(device))
    assert [state.tolist() for state in stored] == [list(range(8))]
