"""Networks as folders of `config.json` and `model.safetensors`, on disk or on the Hugging Face Hub.

The files and the arguments of the methods are those of `huggingface_hub.PyTorchModelHubMixin`. That class is not a base
here, because chasm works without huggingface_hub, and importing it takes longer than importing chasm.
"""

import inspect
import json
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from chasm.common.files import expanded, read_json, sha256, write_atomic, write_text
from chasm.common.registry import Registry
from chasm.common.text import first_line
from chasm.models.fits import check_fit
from chasm.models.hub import download, upload

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PLACEMENT = ("device", "dtype")  # chosen when a network is loaded


class Pretrained(nn.Module):
    """Gives a network `save_pretrained`, `from_pretrained` and `push_to_hub`.

    The config holds the registered name of its class and the arguments of the constructor. Only names of the registry
    are built, so loading runs no code of others, and weights are safetensors with a SHA-256 in the config.
    """

    registry: ClassVar[Registry]
    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments of the constructor."""
        module = super().__new__(cls)
        parameters = list(inspect.signature(cls.__init__).parameters)[1:]
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        # Not by setattr, which nn.Module answers only after its own __init__.
        module.__dict__["_arguments"] = {k: v for k, v in arguments.items() if k not in PLACEMENT}
        return module

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the network into a folder.

        Args:
            save_directory: made if needed; files of the same names are replaced.

        Raises:
            ValueError: if its class is not registered, or an argument of its constructor is no plain value.
        """
        folder = expanded(save_directory)
        config = self._config()
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        write_atomic(folder / WEIGHTS, lambda p: save_file(state, p))
        config["sha256"] = sha256(folder / WEIGHTS)
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        token: str | bool | None = None,
        **options: Any,
    ) -> Self:
        """Load a network that `save_pretrained` or `push_to_hub` wrote.

        Args:
            pretrained_model_name_or_path: a folder, or owner/name on the Hub.
            revision: branch, tag or commit on the Hub; default: the main branch.
            cache_dir: where downloads are kept; default: the cache of huggingface_hub.
            local_files_only: take what was downloaded before, and do not ask the Hub.
            force_download: download again what is there already.
            token: of the account; default: the one that ``hf auth login`` stored.
            **options: arguments of the constructor instead of the stored ones: ``device="cuda"``.

        Returns:
            The network in eval mode.

        Raises:
            ValueError: if it is of another class, or its files are damaged.
            OSError: if there is no such folder or repository.
        """
        folder = expanded(pretrained_model_name_or_path)
        if not folder.is_dir():
            folder = download(
                str(pretrained_model_name_or_path),
                (CONFIG, WEIGHTS),
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                force_download=force_download,
                token=token,
            )
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
        module: Self = cls.registry.create(config["name"], **chosen)
        try:
            module.load_state_dict(load_file(weights))
        except (RuntimeError, SafetensorError) as e:
            raise ValueError(f"{weights}: not the weights of {CONFIG} ({first_line(e)})") from None
        return module.eval()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload with chasm",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        card: str | Path | None = None,
    ) -> str:
        """Upload the network to the Hugging Face Hub; repository and branch are made if needed.

        Args:
            repo_id: ``"owner/name"``.
            commit_message: first line of the commit.
            private: whether a new repository is private; default: as the Hub does for the owner.
            token: access token of the account; default: the one that ``hf auth login`` stored.
            branch: branch to commit to; default: the main one.
            card: a Markdown file that becomes the README.md of the repository.

        Returns:
            The address of the commit.
        """

        def write(folder: Path) -> None:
            self.save_pretrained(folder)
            if card is not None:
                write_text(folder / "README.md", expanded(card).read_text(encoding="utf-8"))

        return upload(repo_id, write, commit_message=commit_message, private=private, token=token, branch=branch)

    def _config(self) -> dict[str, Any]:
        config = {"kind": self.registry.kind, "name": self.registry.name_of(type(self)), "options": self._arguments}
        try:
            plain: dict[str, Any] = json.loads(json.dumps(config))
        except TypeError as e:
            raise ValueError(f"{type(self).__name__}: an argument of its constructor cannot be stored ({e})") from None
        return plain
