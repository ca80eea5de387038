"""Models from the Hugging Face Hub: the files of a model folder and no others."""

from pathlib import Path

from chasm.models.folders import MODEL_FILES


def download(name: str) -> Path:
    """Return the folder of a Hub repository in the cache of huggingface_hub; downloads what is not there.

    Args:
        name: ``"owner/name"``.

    Raises:
        ValueError: if huggingface_hub is not installed.
        OSError: with one line, if the Hub does not have the repository, or cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise ValueError(f"{name}: a model of the Hub needs huggingface_hub: pip install 'chasm-mixer[hub]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        why = " ".join(str(e).split("\n")[0].split())
        raise OSError(f"{name}: no such folder, and the Hub does not give it ({why})") from None
