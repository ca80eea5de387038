"""The contract of every mixer, and the slot that gives each one exactly one identity path."""

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from chasm.common.registry import Registry
from chasm.models import Pretrained


class Facts(NamedTuple):
    """Facts about a mixer for the comparison tables, taken from its paper and not measured."""

    response: str  # taxonomy of the paper's appendix: how the spectrum is acted on
    channel_mixing: str
    resolution: str  # effect of H, W other than the size it was built for
    shared_basis: str = "no"
    positive_gains: str = "no"
    paper_params: str = "-"  # the paper's Core Params column at C = 96
    note: str = ""  # why our count or construction differs, or which part is a reading


class Mixer(Pretrained):
    """Maps real (B, C, H, W) to the same shape, dtype and device, for any H and W.

    A subclass is constructed as ``cls(channels, *, size=None, <options>, device=None, dtype=None)``.
    One that contains an identity path sets ``owns_residual = True`` and takes ``residual=True``, so that a
    host which adds its own can switch it off. `save_pretrained`, `from_pretrained` and `push_to_hub` come with it.
    """

    owns_residual: ClassVar[bool] = False
    # Names of parameters (or of containers of them) that act on the spectrum: `chasm.param_groups` gives
    # them their own step size and no weight decay.
    spectral_parameters: ClassVar[tuple[str, ...]] = ()
    # The default of the constructor's argument `step_scale`, if there is one: see CHASM.
    default_step_scale: ClassVar[float | None] = None
    # Names of parameters stored as real pairs (trailing dimension 2): reports count them once and twice.
    complex_parameters: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[Facts] = Facts("-", "-", "-")


MIXERS = Mixer.registry = Registry("mixer", Mixer, "chasm.mixers")
register_mixer = MIXERS.register


class Residual(nn.Module):
    """x + mixer(x): the identity path that a slot adds to a mixer without one."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(x)


def create_mixer(name: str, channels: int, size: int | tuple[int, ...] | None = None, **options: Any) -> Mixer:
    """Build a mixer by name: the native block of its paper.

    Args:
        name: a registered name; `chasm.list_mixers()` lists them all.
        channels: the number of channels, C.
        size: spatial size of the maps, for mixers that store something per position or frequency.
        **options: further arguments of its class.

    Raises:
        ValueError: if the name or an option is unknown; the message suggests a near one.

    >>> type(create_mixer("gfnet", channels=8, size=(16, 16))).__name__
    'GFNet'
    """
    mixer: Mixer = MIXERS.create(name, channels=channels, size=size, **options)
    return mixer


def list_mixers(pattern: str = "*") -> list[str]:
    """Return the names of the registered mixers that match a shell-style pattern."""
    return MIXERS.list(pattern)


def create_slot(
    name: str,
    channels: int,
    size: int | tuple[int, ...] | None = None,
    *,
    host_residual: bool = False,
    **options: Any,
) -> nn.Module:
    """Build a mixer for a place in a network, with exactly one identity path in all.

    Args:
        name: a registered name.
        channels: the number of channels, C.
        size: see `create_mixer`.
        host_residual: whether the network already adds its input around this place, as a transformer block does.
        **options: further arguments of its class.
    """
    owns = MIXERS.get(name).owns_residual  # type: ignore[attr-defined]
    if owns:
        options.setdefault("residual", not host_residual)
    mixer = create_mixer(name, channels, size, **options)
    return mixer if owns or host_residual else Residual(mixer)
