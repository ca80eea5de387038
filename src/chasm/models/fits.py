"""Check that a config and a file of weights belong together, before any memory is taken for the network."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from chasm.common.building import watched_building
from chasm.common.text import first_line

MODULES_PER_TENSOR = 8  # a network has fewer modules, with or without parameters, than this times its tensors
MIN_MODULES = 1000


def check_fit(build: Callable[[], nn.Module], weights: Path, config: Path) -> None:
    """Compare the network that a config describes with a file of weights: names and shapes, not values.

    The network is built without storage, and building stops as soon as it has more parts than the file can fill. A
    config from elsewhere that asks for a network of any size is therefore refused at once.

    Args:
        build: makes the network. Tensors that it makes have shapes only.
        weights: safetensors, of which only the header is read.
        config: the file that describes the network, for messages.

    Raises:
        ValueError: if they do not belong together, or the file cannot be read.
    """
    try:
        with safe_open(weights, "pt") as f:
            stored = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{weights}: cannot be read ({first_line(e)}): get it again") from None
    try:
        with torch.device("meta"), _at_most(len(stored)):
            state = build().state_dict()
    except _TooLargeError:
        raise ValueError(
            f"{weights}: not the weights of {config} (that network has more than these {len(stored)} tensors)"
        ) from None
    except (RuntimeError, TypeError, OverflowError, MemoryError) as e:  # sizes that no tensor can have
        raise ValueError(f"{config}: describes a network that cannot be built ({first_line(e)})") from None
    wanted = {name: tuple(value.shape) for name, value in state.items()}
    for name in dict.fromkeys((*wanted, *stored)):
        a, b = (str(of[name]) if name in of else "missing" for of in (wanted, stored))
        if a != b:
            raise ValueError(f"{weights}: not the weights of {config} ({name}: {a} in the network, {b} in the file)")


class _TooLargeError(Exception):
    """Stops the building of a network."""


def _at_most(tensors: int) -> AbstractContextManager[None]:
    """Stop the building of networks with more parameters than this, or very many more modules."""
    counts = {"parameters": 0, "modules": 0}
    limits = {"parameters": tensors, "modules": max(MIN_MODULES, MODULES_PER_TENSOR * tensors)}

    def count(kind: str) -> Callable[..., None]:
        def registered(*of: Any) -> None:
            counts[kind] += 1
            if counts[kind] > limits[kind]:
                raise _TooLargeError

        return registered

    return watched_building(count("parameters"), count("modules"))
