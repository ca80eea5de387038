"""Downloads from and uploads to the Hugging Face Hub: the files that are named, and no code."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chasm.common.text import first_line


def download(name: str, files: Iterable[str], **choices: Any) -> Path:
    """Return the folder of a Hub repository in the cache of huggingface_hub, and download files that are missing.

    Args:
        name: ``"owner/name"``.
        files: the files to get; others are left where they are.
        **choices: arguments of `huggingface_hub.snapshot_download`: ``revision="main"``.

    Raises:
        ValueError: if huggingface_hub is not installed.
        OSError: if the Hub does not have the repository, or cannot be reached.
    """
    hub = _hub(name)
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(files), **choices))
    except Exception as e:  # of the Hub, the network, or whichever HTTP library is in use
        raise OSError(f"{name}: no such folder, and the Hub does not give it ({first_line(e)})") from None


def upload(
    name: str,
    write: Callable[[Path], None],
    *,
    commit_message: str,
    private: bool | None,
    token: str | None,
    branch: str | None,
) -> str:
    """Upload files to a Hub repository, in one commit; repository and branch are made if needed.

    Args:
        name: ``"owner/name"``.
        write: writes the files into the folder it is called with.
        commit_message: first line of the commit.
        private: whether a new repository is private; None leaves it to the Hub.
        token: access token of the account.
        branch: branch to commit to; None for the main one.

    Returns:
        The address of the commit.

    Raises:
        ValueError: if huggingface_hub is not installed.
        OSError: if the Hub refuses, or cannot be reached.
    """
    hub = _hub(name)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        try:
            api = hub.HfApi(token=token)
            api.create_repo(name, private=private, exist_ok=True)
            if branch is not None:
                api.create_branch(name, branch=branch, exist_ok=True)
            return str(
                api.upload_folder(repo_id=name, folder_path=folder, commit_message=commit_message, revision=branch)
            )
        except Exception as e:  # of the Hub, the network, or whichever HTTP library is in use
            raise OSError(f"{name}: the Hub does not take it ({first_line(e)})") from None


def _hub(name: str) -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise ValueError(f"{name}: the Hub needs huggingface_hub: pip install 'chasm-mixer[hub]'") from None
    return huggingface_hub
