"""Networks as folders of `config.json` and `model.safetensors`, on disk or on the Hugging Face Hub.

The files are those of `huggingface_hub.PyTorchModelHubMixin`. That class is not a base here, because importing it takes
longer than importing chasm, and chasm works without huggingface_hub.
"""

import inspect
import json
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from chasm.common.files import read_json, sha256, write_atomic, write_text
from chasm.common.registry import Registry
from chasm.common.text import first_line
from chasm.models.fits import check_fit
from chasm.models.hub import download, upload

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PLACEMENT = ("device", "dtype")  # of the parameters: where a network is loaded decides


class Pretrained(nn.Module):
    """Gives a network `save_pretrained`, `from_pretrained` and `push_to_hub`.

    The config holds the registered name of its class and what the constructor was called with. Only names of the
    registry are built, so loading runs no code of others, and weights are safetensors with a SHA-256 in the config.
    """

    registry: ClassVar[Registry]
    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep what the constructor is called with."""
        made = super().__new__(cls)
        parameters = list(inspect.signature(cls.__init__).parameters)[1:]
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        # Not by setattr, which nn.Module answers only after its own __init__.
        made.__dict__["_arguments"] = {k: v for k, v in given.items() if k not in PLACEMENT}
        return made

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the network into a folder.

        Args:
            folder: made if needed; files of the same names are replaced.

        Raises:
            ValueError: if its class is not registered, or an argument of its constructor is no plain value.
        """
        folder = Path(folder).expanduser()
        config = self._config()
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        write_atomic(folder / WEIGHTS, lambda p: save_file(state, p))
        config["sha256"] = sha256(folder / WEIGHTS)
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Load a network that `save_pretrained` or `push_to_hub` wrote.

        Args:
            name: a folder, or owner/name on the Hub.
            **options: arguments of the constructor instead of the stored ones: ``device="cuda"``.

        Returns:
            The network in eval mode.

        Raises:
            ValueError: if it is of another class, or its files are damaged.
            OSError: if there is no such folder or repository.
        """
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = download(str(name), (CONFIG, WEIGHTS))
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"{folder / CONFIG}: not there: give a folder that save_pretrained wrote")
        config = read_json(folder / CONFIG)
        kind, stored = cls.registry.kind, config.get("options")
        if config.get("kind") != kind or not isinstance(config.get("name"), str) or not isinstance(stored, dict):
            raise ValueError(f"{folder / CONFIG}: not the config of a {kind}")
        if not issubclass(cls.registry.get(config["name"]), cls):
            raise ValueError(f"{folder}: holds {kind} {config['name']!r}, not a {cls.__name__}")
        weights = folder / WEIGHTS
        if not weights.is_file() or sha256(weights) != config.get("sha256"):
            raise ValueError(f"{weights}: missing, or not what its SHA-256 in {CONFIG} says: get it again")
        chosen = {**stored, **options}
        anywhere = {k: v for k, v in chosen.items() if k != "device"}
        check_fit(lambda: cls.registry.create(config["name"], **anywhere), weights, folder / CONFIG)
        made: Self = cls.registry.create(config["name"], **chosen)
        try:
            made.load_state_dict(load_file(weights))
        except (RuntimeError, SafetensorError) as e:
            raise ValueError(f"{weights}: not the weights of {CONFIG} ({first_line(e)})") from None
        return made.eval()

    def push_to_hub(self, name: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the network to the Hugging Face Hub; the repository is made if needed.

        Args:
            name: ``"owner/name"``.
            private: whether a new repository is private.
            token: of the account; default: the one that ``hf auth login`` stored.

        Returns:
            The address of the commit.
        """
        return upload(name, self.save_pretrained, private=private, token=token)

    def _config(self) -> dict[str, Any]:
        config = {"kind": self.registry.kind, "name": self.registry.name_of(type(self)), "options": self._arguments}
        try:
            plain: dict[str, Any] = json.loads(json.dumps(config))
        except TypeError as e:
            raise ValueError(f"{type(self).__name__}: an argument of its constructor cannot be stored ({e})") from None
        return plain
