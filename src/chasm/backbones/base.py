"""The contract of every host, and the slots in which the hosts of a study differ.

    y = model(x, mask)                                # any host, single coil
    y = model(x, mask, maps, kspace)                  # any host, multi-coil
    y, aux = model(x, mask, return_aux=True)          # aux: the host's own loss (V2's balance), else 0

`x` is (B, in_channels, H, W), for MRI the zero-filled image as real and imaginary channels. The measurement follows by
position or by keyword (mask, maps, measured). HiFi-Mamba uses it for data consistency, and U-Net and ViT do if
`data_consistency` is set. `chasm.interop.deepinv` makes a host a deepinv model, called as model(y, physics).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from chasm.backbones.measurement import Measurement
from chasm.common.registry import Registry, is_count
from chasm.mixers import create_slot
from chasm.models import Pretrained

Size = tuple[int, int]


class Backbone(Pretrained):
    """A host: maps (B, in_channels, H, W) to (B, out_channels, H, W) for any H and W.

    A subclass writes `run`. Everything that a mixer brings sits in `self.slots`, built last by `make_slots`:
    with one seed, all other weights are the same whatever the mixer, its options and its places.
    `save_pretrained`, `from_pretrained` and `push_to_hub` come with it.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
    """

    slots: nn.ModuleDict
    measurement: type[Measurement] = Measurement  # `RealMeasurement` where a runtime has no complex numbers

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels

    def run(
        self, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the host's own loss (a scalar, 0 for most hosts). Subclasses write this.

        Args:
            x: input (B, in_channels, H, W).
            mask: sampling mask, as `forward` takes it.
            maps: coil sensitivities.
            measured: k-space of every coil.
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        maps: Tensor | None = None,
        measured: Tensor | None = None,
        *,
        return_aux: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output (B, out_channels, H, W).

        Args:
            x: input (B, in_channels, H, W); for MRI the zero-filled image as real and imaginary channels.
            mask: nonzero where k-space was measured, broadcastable to (B, 1, H, W).
            maps: coil sensitivities, complex (B, coils, H, W). They need `measured`.
            measured: k-space of every coil, complex (B, coils, H, W). Without it, that of x.
            return_aux: also return the host's own loss, which training adds.

        Raises:
            ValueError: when x has other channels, or the mask is no tensor.
        """
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__} expects (B, {self.in_channels}, H, W), got {tuple(x.shape)}: "
                "reshape the input or build with another in_channels"
            )
        if mask is not None and not isinstance(mask, Tensor):
            raise ValueError(
                f"{type(self).__name__} expects a mask tensor after x, got {type(mask).__name__}: for deepinv's "
                "model(y, physics) and denoiser(x, sigma) wrap the host with chasm.interop.deepinv"
            )
        y, aux = self.run(x, mask, maps, measured)
        return (y, aux) if return_aux else y

    def _require_complex_images(self) -> None:
        if (self.in_channels, self.out_channels) != (2, 2):
            raise ValueError(
                f"{type(self).__name__} maps a complex image to one (2 -> 2 channels), got {self.in_channels} -> "
                f"{self.out_channels}: use the unet or vit backbone"
            )


BACKBONES = Backbone.registry = Registry("backbone", Backbone, "chasm.backbones")
register_backbone = BACKBONES.register


class ImageBackbone(Backbone):
    """A network from image to image. A subclass writes `net` and sets `multiple` and `smallest`.

    Sizes that `multiple` does not divide, or below `smallest`, are padded at the bottom and right, and cropped back.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        global_residual: add the input to the output. None adds it if input and output channels agree.
        data_consistency: replace the k-space of the output where it was measured. Input and output are then complex
            images as pairs of channels.
    """

    multiple: int
    smallest: int

    def __init__(
        self, in_channels: int, out_channels: int, global_residual: bool | None, data_consistency: bool
    ) -> None:
        super().__init__(in_channels, out_channels)
        self.global_residual = in_channels == out_channels if global_residual is None else global_residual
        if self.global_residual and in_channels != out_channels:
            raise ValueError(
                f"a global residual needs equal channels, got in_channels={in_channels} and "
                f"out_channels={out_channels}: pass global_residual=False"
            )
        self.data_consistency = data_consistency
        if data_consistency and (in_channels != out_channels or in_channels % 2):
            raise ValueError(
                "data consistency needs complex images in and out, two channels each, got "
                f"in_channels={in_channels} and out_channels={out_channels}: pass data_consistency=False"
            )

    def net(self, x: Tensor) -> Tensor:
        """Return the output for an x whose size is a multiple of `multiple` and at least `smallest`."""
        raise NotImplementedError

    def run(
        self, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        H, W = x.shape[-2:]
        y = self.net(pad_to_multiple(x, self.multiple, self.smallest))[..., :H, :W]
        y = x + y if self.global_residual else y
        if self.data_consistency:
            y = self.measurement.of(x, mask, maps, measured).enforce(y)
        return y, x.new_zeros(())


def padded_size(size: Sequence[int], multiple: int, smallest: int) -> Size:
    """Return the next size that `multiple` divides, and at least `smallest`, per axis.

    Args:
        size: (H, W).
        multiple: divides the result.
        smallest: the least H and W.

    >>> padded_size((20, 3), multiple=8, smallest=16)
    (24, 16)
    """
    H, W = (_at_least((n + multiple - 1) // multiple * multiple, smallest) for n in size)
    return H, W


def _at_least(n: int, smallest: int) -> int:
    """Return the larger number. A free size in torch.export stays a plain expression if its range says it is larger."""
    if isinstance(n, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return n if statically_known_true(n >= smallest) else torch.sym_max(n, smallest)
    return max(n, smallest)


def pad_to_multiple(x: Tensor, multiple: int, smallest: int) -> Tensor:
    """Return (B, C, H, W) extended at the bottom and right to `padded_size`; x itself if it has that size.

    Args:
        x: the map.
        multiple: divides the new height and width.
        smallest: the least new height and width.
    """
    H, W = x.shape[-2:]
    bottom, right = (n - m for n, m in zip(padded_size((H, W), multiple, smallest), (H, W), strict=True))
    return extend(extend(x, -2, 0, bottom), -1, 0, right)


def extend(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Return x with one axis padded by reflection, or by its border where the axis is too short to reflect.

    It is done by indexing, because torch's own reflection padding has no deterministic backward on CUDA.

    Args:
        x: any tensor.
        dim: the axis.
        before: positions to add in front.
        after: positions to add behind.

    >>> extend(torch.tensor([1, 2, 3]), 0, before=1, after=2)
    tensor([2, 1, 2, 3, 2, 1])
    """
    n = x.shape[dim]
    has_free_size = isinstance(n, torch.SymInt)  # in torch.export, where a branch would fix the size
    if not has_free_size and before == after == 0:
        return x
    index = torch.arange(-before, n + after, device=x.device)
    if has_free_size or max(before, after) < n:
        index = (n - 1) - ((n - 1) - index.abs()).abs()
    return x.index_select(dim, index.clamp(0, n - 1))


def make_slots(
    mixer: str | None,
    options: Mapping[str, Any] | None,
    places: Mapping[int, tuple[int, tuple[int, ...]]],
) -> nn.ModuleDict:
    """Return one mixer for each place of a host, by the name of the place.

    One rule holds for all mixers and hosts: the host normalises the features, and adds the output of the mixer to the
    features before normalisation. A mixer with an identity path inside runs without it.

    The host's random stream gives one number, whatever the mixer and however many places, and each slot draws from
    its own stream. So the host's weights, and the random state after building it, depend on neither.

    Args:
        mixer: a name of `chasm.list_mixers()`. None and "identity" leave every place empty.
        options: options of the mixer.
        places: place -> channels and size (H, W) of the features there.
    """
    seed = int(torch.randint(2**62, (1,), device="cpu"))
    slots = nn.ModuleDict()
    if mixer not in (None, "identity"):
        for place, (channels, size) in places.items():
            with _random_stream(seed + place):
                slots[str(place)] = create_slot(mixer, channels, size, host_residual=True, **(options or {}))
    return slots


@contextmanager
def _random_stream(seed: int) -> Iterator[None]:
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed, which would also seed CUDA later, when it starts.
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed)
        yield


def create_backbone(
    name: str,
    mixer: str | None = "identity",
    mixer_options: Mapping[str, Any] | None = None,
    in_channels: int = 2,
    out_channels: int = 2,
    size: int | Size = (256, 256),
    **options: Any,
) -> Backbone:
    """Return a host with a mixer in its slots. To build on another device, use ``with torch.device(...)``.

    Args:
        name: a name of ``chasm.list_backbones()``.
        mixer: a name of ``chasm.list_mixers()``. None and "identity" leave the slots empty: the Baseline.
        mixer_options: options of the mixer.
        in_channels: channels of the input; 2 for a complex image.
        out_channels: channels of the output.
        size: image size the tables of the mixers are made for, one number for a square. The host runs at any other.
        **options: options of the host, such as `width` and `depth` of the U-Net.

    Raises:
        ValueError: if a name or an option is unknown.

    Example:
        >>> host = create_backbone("unet", mixer="chasm", size=32, width=4, depth=2, levels=(0, 1))
        >>> host(torch.zeros(1, 2, 30, 17)).shape
        torch.Size([1, 2, 30, 17])
    """
    pair = tuple(size) if isinstance(size, Iterable) else (size, size)
    if len(pair) != 2 or not all(map(is_count, pair)):
        raise ValueError(f"size={size!r}: expected a positive whole number, or (H, W)")
    backbone: Backbone = BACKBONES.create(
        name,
        mixer=mixer,
        mixer_options=mixer_options,
        in_channels=in_channels,
        out_channels=out_channels,
        size=pair,
        **options,
    )
    return backbone


def list_backbones(pattern: str = "*") -> list[str]:
    """Return the names of the registered hosts that match a shell-style pattern.

    >>> list_backbones("hifi*")
    ['hifi-mamba', 'hifi-mamba-v1', 'hifi-mamba-v2']
    """
    return BACKBONES.list(pattern)
