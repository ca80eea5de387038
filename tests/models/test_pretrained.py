"""Networks to folders and the Hub, and back: the same weights, no code, damage found."""

import copy
import inspect
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import chasm
from chasm.backbones.base import Backbone

sys.path.insert(0, str(Path(__file__).parent))
from fake_hub import fake_hub

UNET = {"mixer": "chasm", "mixer_options": {"gain": "signed"}, "width": 4, "depth": 1, "levels": (0,), "size": (16, 16)}


def moved(network: Any) -> Any:
    """The network in eval mode, with other weights than a new one has."""
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return network.eval()


@pytest.fixture
def unet() -> Any:
    return moved(chasm.create_backbone("unet", **UNET))


@pytest.mark.parametrize("name", chasm.list_mixers())
def test_every_mixer_comes_back(name: str, tmp_path: Path) -> None:
    mixer, x = moved(chasm.create_mixer(name, 16, (8, 8))), torch.randn(1, 16, 8, 8)
    mixer.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    for cls in (chasm.Mixer, type(mixer)):
        assert torch.equal(cls.from_pretrained(tmp_path)(x), mixer(x))


def test_a_backbone_comes_back_from_a_copy_and_in_another_dtype(unet: Any, tmp_path: Path) -> None:
    copy.deepcopy(unet).save_pretrained(tmp_path)
    x = torch.randn(1, 2, 16, 16)
    assert torch.equal(Backbone.from_pretrained(tmp_path)(x), unet(x))
    mixer = moved(chasm.CHASM(4, size=8, device="cpu", dtype=torch.float64))
    mixer.save_pretrained(tmp_path / "mixer")
    assert chasm.CHASM.from_pretrained(tmp_path / "mixer").gain_table["ch"].dtype == torch.float32
    loaded = chasm.CHASM.from_pretrained(tmp_path / "mixer", dtype=torch.float64)
    assert torch.equal(loaded.gain_table["ch"], mixer.gain_table["ch"])


def test_the_files_are_those_of_the_mixin_of_huggingface_hub(unet: Any, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class Theirs(torch.nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, options: dict[str, Any], **others: Any) -> None:
            super().__init__()
            self.unet = chasm.create_backbone("unet", **options)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.unet.load_state_dict(*args, **kwargs)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.unet.state_dict(*args, **kwargs)

    unet.save_pretrained(tmp_path)
    theirs = Theirs.from_pretrained(str(tmp_path))
    x = torch.randn(1, 2, 16, 16)
    assert torch.equal(theirs.unet.eval()(x), unet(x))


def test_wrong_and_damaged_folders_are_one_line(unet: Any, tmp_path: Path) -> None:
    unet.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not the config of a mixer"):
        chasm.Mixer.from_pretrained(tmp_path)
    chasm.CHASM(4, size=8).save_pretrained(tmp_path / "chasm")
    with pytest.raises(ValueError, match="holds mixer 'chasm', not a GFNet"):
        type(chasm.create_mixer("gfnet", 4, (8, 8))).from_pretrained(tmp_path / "chasm")
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not what its SHA-256"):
        Backbone.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "chasm" / "config.json").read_text())
    (tmp_path / "chasm" / "config.json").write_text(json.dumps(config | {"name": "os.system"}))
    with pytest.raises(ValueError, match=r"unknown mixer 'os\.system'"):
        chasm.Mixer.from_pretrained(tmp_path / "chasm")


def test_the_methods_take_what_the_mixin_takes() -> None:
    hub = pytest.importorskip("huggingface_hub")
    load = ["pretrained_model_name_or_path", "force_download", "token", "cache_dir", "local_files_only", "revision"]
    wanted = {
        "save_pretrained": ["save_directory"],
        "from_pretrained": load,
        "push_to_hub": ["repo_id", "commit_message", "private", "token", "branch"],
    }
    for name, names in wanted.items():
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (Backbone, hub.PyTorchModelHubMixin))
        for parameter in names:
            assert ours.parameters[parameter].kind == theirs.parameters[parameter].kind


def test_a_class_that_is_not_registered_cannot_be_saved(tmp_path: Path) -> None:
    class Own(chasm.CHASM):
        pass

    with pytest.raises(ValueError, match="Own"):
        Own(4).save_pretrained(tmp_path)


HUB = """
import sys, torch, chasm
from chasm.backbones.base import Backbone
torch.manual_seed(0)
network = chasm.create_backbone("unet", mixer="chasm", width=4, depth=1, levels=(0,), size=(16, 16)).eval()
print(network.push_to_hub("someone/small"))
x = torch.randn(1, 2, 16, 16)
print(torch.equal(Backbone.from_pretrained("someone/small")(x), network(x)))
with torch.no_grad():
    [p.add_(1) for p in network.parameters()]
open("card.md", "w").write("# a card")
network.push_to_hub(
    "someone/small", commit_message="moved", private=True, token="mine", branch="moved", card="card.md"
)
loads = [dict(), dict(revision="moved"), dict(revision="moved", local_files_only=True, token="t", force_download=False)]
print([torch.equal(next(Backbone.from_pretrained("someone/small", cache_dir="kept", **how).parameters()),
                   next(network.parameters())) for how in loads])
try:
    Backbone.from_pretrained("someone/small", cache_dir="none", local_files_only=True)
except OSError as e:
    print(e)
run = chasm.load_model("someone/run")
print(sum(p.numel() for p in run.parameters()))
try:
    Backbone.from_pretrained("someone/nothing")
except OSError as e:
    print(e)
import huggingface_hub.constants
huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9"
try:
    network.push_to_hub("someone/small")
except OSError as e:
    print(e)
"""


def test_the_hub_over_a_loopback_server(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads the address of the Hub when it is imported."""
    pytest.importorskip("huggingface_hub")
    sys.path.insert(0, str(Path(__file__).parents[1] / "reconstruct"))
    from runs import make_run

    run = make_run(tmp_path / "run")
    files = {p.name: p.read_bytes() for p in run.iterdir()}
    with fake_hub({"someone/run": {**files, "evil.py": b"raise SystemExit"}}) as server:
        environment = {**os.environ, "HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "t"}
        environment["HF_HUB_DISABLE_XET"] = "1"
        command = [sys.executable, "-c", HUB]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert set(server.repositories["someone/small"]) == {"config.json", "model.safetensors"}
        assert server.repositories["someone/small@moved"]["README.md"] == b"# a card"
        assert server.commits == [
            ("someone/small", "Upload with chasm", "Bearer t"),
            ("someone/small@moved", "moved", "Bearer mine"),
        ]
        assert not any("evil.py" in path for path in server.asked)
    address, same, moved, absent, parameters, missing, unreachable = done.stdout.splitlines()
    assert moved == "[False, True, True]"
    assert absent.startswith("someone/small: no such folder, and the Hub does not give it (")
    assert address.startswith(server.address)
    assert same == "True"
    assert int(parameters) > 0
    assert missing.startswith("someone/nothing: no such folder, and the Hub does not give it (")
    assert unreachable.startswith("someone/small: the Hub does not take it (")


HUGE: list[dict[str, Any]] = [
    {"width": 10**6},
    {"width": 2**40},
    {"depth": 10**6},
    {"size": [10**9, 10**9]},
    {"levels": [0, 1], "width": 10**5, "size": [2**20, 2**20]},
]


@pytest.mark.parametrize("change", HUGE, ids=str)
def test_a_config_that_asks_for_a_huge_network_is_refused_before_memory_is_taken(
    change: dict[str, Any], unet: Any, tmp_path: Path
) -> None:
    unet.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["options"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"not the weights of|overflowed|depth 0 to 16") as error:
        Backbone.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # kB
