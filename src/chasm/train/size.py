"""Limit the size of a network while it is built, because a short recipe can ask for more than memory holds."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from chasm.common.building import watched_building
from chasm.data.limits import LIMIT_VARIABLE, max_bytes

MAX_MODULES = 10_000  # the default HiFi-MambaV2, the largest host, has 1,029


class NetworkTooLargeError(ValueError):
    """A network would have more weights or more modules than the limits allow."""


def build_within_limits(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network, after a trial on the meta device, where weights take no memory.

    Raises:
        NetworkTooLargeError: if the weights take more memory than `chasm.data.limits.max_bytes`, or if
            there are more than MAX_MODULES modules.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings(), _limits():
            warnings.simplefilter("ignore")  # the second time they are shown
            build()
    except NetworkTooLargeError:
        raise
    except Exception:  # a wrong option fails again below; a class that cannot be built on meta is limited there
        pass
    with _limits():
        return build()


def _limits() -> AbstractContextManager[None]:
    """Raise NetworkTooLargeError as soon as the network that is built in the block is too large."""
    limit, size, modules = max_bytes(), 0, 0

    def weigh(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal size
        size += 0 if tensor is None else tensor.nbytes
        if size > limit:
            raise NetworkTooLargeError(
                f"the network has more than {limit / 2**30:.3g} GiB of weights: choose smaller options of backbone and "
                f"mixer, or set {LIMIT_VARIABLE} higher"
            )

    def count(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MAX_MODULES:
            raise NetworkTooLargeError(
                f"the network has more than {MAX_MODULES} modules: choose smaller options of backbone and mixer"
            )

    return watched_building(weigh, count, weigh)
