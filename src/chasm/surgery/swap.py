"""Put a mixer into an existing network.

>>> import torch, chasm
>>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
>>> x = torch.randn(2, 65, 16)  # a class token and an 8 x 8 grid
>>> encoder = torch.nn.TransformerEncoder(layer, 2)
>>> model = chasm.swap(encoder, torch.nn.MultiheadAttention, "gfnet", example=x, size=(8, 8))
>>> model(x).shape
torch.Size([2, 65, 16])
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from chasm.common.registry import is_count
from chasm.mixers import MIXERS, Mixer, create_slot
from chasm.surgery.grids import (
    CallGrid,
    FixedGrid,
    Grid,
    MapGrid,
    SequenceGrid,
    grid_from_maps,
    grid_in_call,
    split_tokens,
)
from chasm.surgery.probe import call, evaluating
from chasm.surgery.swapped import ExampleCall, Swapped, SwapPoint, call_names, first_calls

Select = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
LAYOUTS = ("auto", "channels_first", "channels_last", "tokens")
# Layers that show the layout of the module that contains them.
_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm)


def swap(
    model: nn.Module,
    select: Select,
    mixer: str | type[Mixer] | Callable[[int, Grid | None], nn.Module],
    *,
    example: Any = None,
    channels: int | None = None,
    size: int | Grid | None = None,
    ndim: int | None = None,
    layout: str = "auto",
    prefix_tokens: int | None = None,
    host_residual: bool = True,
    ignore_extra: bool = False,
    inplace: bool = False,
    **options: Any,
) -> nn.Module:
    """Return a copy of a network with a mixer in place of every selected module.

    The mixer gets the device, dtype and train/eval mode of the module it replaces. A module that the network uses in
    two places becomes one mixer in two places. Of nested modules only the outermost is replaced.

    The grid of tokens is never guessed. It is `size`; or else numbers in the call (SegFormer and PVT pass height and
    width); or else the size of the map that the tokens were made from, which the convolution that makes it reports at
    every call. The example shows which of these applies. If none does, `swap` asks for `size`.

    Args:
        model: the network.
        select: the modules to replace: a module type, a shell-style pattern for module names ("blocks.*.attn"), a
            list of these, or a function (name, module) -> bool.
        mixer: a registered name or a class of mixers, built with `options`; or a function (channels, size) ->
            nn.Module, whose result is used as it is.
        example: an input of the network: a tensor, a tuple of arguments, or a dictionary of keyword arguments. One
            forward pass on it finds channels, size and layout of every place, and refuses places that a mixer cannot
            take: where the shape changes, or where a mask or a second input must be honoured. Without it, give
            `channels`, and `size` if the mixer or tokens need one.
        channels: channels of the mixer; overrides what the example shows.
        size: (H, W) the mixer is built for, one number for a square; overrides what the example shows. For tokens it is
            also the grid, at every call.
        ndim: the number of spatial axes, 1, 2 or 3, where neither `size` nor the example shows it: 1 makes a sequence
            of tokens one axis. Only CHASM has other than two.
        layout: "channels_first" (B, C, H, W), "channels_last" (B, H, W, C) or "tokens" (B, N, C). "auto" goes by the
            layers inside the module: linear ones have channels last, convolutions first. Without either, three
            dimensions are tokens, and more are channels first.
        prefix_tokens: number of tokens before the grid (class token, registers). They pass unchanged: the mixer
            does not see them, and they do not see the image, so pool over the grid if you replace all attention; a
            warning says so if the output no longer depends on the example.
            Default: the tokens that the grid does not cover, up to 16.
        host_residual: True if the network adds the input of this place to its output, as around attention in a
            transformer block: the mixer then comes without its identity path. False for a layer in a plain stack: an
            identity path is added if the mixer has none.
        ignore_extra: a mixer cannot use a mask that hides something, or a second input as in cross-attention. False
            makes a call with one an error, True ignores it. Masks that hide nothing, positions and single numbers
            are always ignored.
        inplace: change `model` itself and return it.
        **options: options of the named mixer.

    Returns:
        The network with its mixers.

    Raises:
        ValueError: if nothing is selected, a place cannot hold a mixer, or an option is wrong.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1))
        >>> net = swap(net, "1", "gfnet", example=torch.randn(1, 3, 16, 16), host_residual=False)
        >>> net(torch.randn(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: expected one of {', '.join(LAYOUTS)}")
    if ndim not in (None, 1, 2, 3):
        raise ValueError(f"ndim={ndim!r}: expected 1, 2 or 3 spatial axes")
    if isinstance(mixer, nn.Module):
        problem = f"got one {type(mixer).__name__}, and every place needs its own"
        raise ValueError(f"mixer: {problem}: give a name and its options")
    if not isinstance(mixer, str) and not callable(mixer):
        raise ValueError(f"mixer: expected a name, a class or a function (channels, size) -> module, got {mixer!r}")
    if isinstance(mixer, type) and issubclass(mixer, Mixer):
        mixer = MIXERS.name_of(mixer)
    if not isinstance(mixer, str) and options:
        raise ValueError(f"options {sorted(options)} go with a mixer's name, not with a function that builds one")
    if not inplace:
        model = copy.deepcopy(model)
    chosen = _selected(model, select)
    calls = {} if example is None else first_calls(model, chosen, example, ignore_extra)
    request = _Request(channels, size, ndim, layout, prefix_tokens)
    sources: dict[nn.Module, MapGrid] = {}
    built: dict[nn.Module, nn.Module] = {}
    for name, old in chosen.items():
        if old not in built:
            point = request.point_in_example(name, old, calls[old], sources) if calls else request.point(name, old)
            new = _build(mixer, point, host_residual, options, name)
            like = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
            if like is not None:
                new = new.to(like.device, like.dtype)
            built[old] = Swapped(new, point, host_residual, ignore_extra).train(old.training)
        model.set_submodule(name, built[old])
    for convolution, source in sources.items():
        source.attach(convolution, model)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors need the weights of the first attention
    if example is not None and any(isinstance(m, Swapped) and m.prefix for m in model.modules()):
        _warn_if_blind(model, example)
    return model


def _warn_if_blind(model: nn.Module, example: Any) -> None:
    """Warn if the output no longer depends on the input: a class token that no attention connects with the image."""
    other = tree_map(lambda t: -t if isinstance(t, Tensor) and t.is_floating_point() else t, example)
    with torch.no_grad(), evaluating(model):
        pairs = list(zip(*(tree_leaves(call(model, value)) for value in (example, other)), strict=True))
    if pairs and all(isinstance(a, Tensor) and torch.equal(a, b) for a, b in pairs):
        warnings.warn(
            "the output of the swapped network does not depend on its input: it is read from a class token, which only "
            "attention connected with the image: pool over the other tokens instead, or leave some attention in place",
            stacklevel=3,
        )


def _build(mixer: Any, point: SwapPoint, host_residual: bool, options: dict[str, Any], name: str) -> nn.Module:
    """Return the mixer for one place."""
    if not isinstance(mixer, str):
        new = mixer(point.channels, point.size)
        if not isinstance(new, nn.Module):
            raise ValueError(f"mixer: the function returned {type(new).__name__} for {name!r}: return a module")
        return new
    if "ndim" in MIXERS.options(mixer):
        options = {"ndim": point.ndim, **options}
    elif point.ndim != 2:
        raise ValueError(f"{name!r} has {point.ndim} spatial axes and {mixer!r} mixes two: use 'chasm'")
    return create_slot(mixer, point.channels, point.size, host_residual=host_residual, **options)


@dataclass(frozen=True)
class _Request:
    """What the caller of `swap` says about every place; None where the example is to show it."""

    channels: int | None
    size: int | Grid | None
    ndim: int | None
    layout: str
    prefix: int | None

    def sides(self, ndim: int | None) -> Grid | None:
        """Return (60,) for size=60 and one axis, (60, 60) for size=60 and two or an unknown number, None for None."""
        if self.size is None:
            return None
        values = tuple(self.size) if isinstance(self.size, Iterable) else (self.size,) * (ndim or 2)
        if not all(map(is_count, values)) or len(values) != (ndim or len(values)) or not 1 <= len(values) <= 3:
            wanted = f"{ndim} of them" if ndim else "(H, W)"
            raise ValueError(f"size={self.size!r}: expected a positive whole number, or {wanted}")
        return tuple(map(int, values))

    def point(self, name: str, old: nn.Module) -> SwapPoint:
        """Return what is known about the place of a module without an example."""
        is_attention = isinstance(old, nn.MultiheadAttention)
        channels = self.channels or getattr(old, "embed_dim", None)
        if channels is None:
            raise ValueError(f"cannot tell the channels of {name!r}: give swap() an example= input, or channels=")
        layout = self.layout if self.layout != "auto" else "tokens" if is_attention else "channels_first"
        sides, grid = self.sides(self.ndim), None
        if layout == "tokens":
            if sides is None and self.ndim != 1:
                problem = f"cannot tell the grid of the tokens at {name!r}"
                raise ValueError(f"{problem}: pass size=(H, W) or (D, H, W), or an example=")
            grid = FixedGrid(sides) if sides else SequenceGrid()
        ndim, results = len(sides) if sides else self.ndim or 2, 2 if is_attention else 0
        return SwapPoint(
            channels, sides, ndim, layout, self.prefix, grid, _is_batch_first(old), results, call_names(old)
        )

    def point_in_example(
        self, name: str, old: nn.Module, call: ExampleCall, sources: dict[nn.Module, MapGrid]
    ) -> SwapPoint:
        """Return what is known about the place of a module from its call; convolutions to watch go into `sources`."""
        shape, results = call.shape, len(call.out) if isinstance(call.out, tuple) else 0
        y = call.out[0] if results else call.out
        if not isinstance(y, Tensor) or y.shape != shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"a mixer keeps its shape, but {name!r} maps {tuple(shape)} to {got}: select others")
        layout = _layout_of(old, shape) if self.layout == "auto" else self.layout
        if not (len(shape) == 3 if layout == "tokens" else 3 <= len(shape) <= 5):
            wanted = "tokens (B, N, C)" if layout == "tokens" else "a map (B, C, H, W) or (B, H, W, C)"
            raise ValueError(f"expected {wanted} at {name!r}, got {tuple(shape)}: check layout=")
        batch_first, prefix, grid = _is_batch_first(old), self.prefix, None
        if layout == "tokens":
            N, batch = (shape[1], shape[0]) if batch_first else (shape[0], shape[1])
            grid, spatial = self._grid(name, call, N, batch, sources)
            prefix = N - math.prod(spatial)
        else:
            spatial = tuple(shape[2:] if layout == "channels_first" else shape[1:-1])
            if self.ndim not in (None, len(spatial)):
                got = f"{len(spatial)} spatial axes, got ndim={self.ndim}"
                raise ValueError(f"{name!r} has {got}: check layout= and ndim=")
            spatial = self.sides(len(spatial)) or spatial
        channels = self.channels or shape[1 if layout == "channels_first" else -1]
        return SwapPoint(channels, spatial, len(spatial), layout, prefix, grid, batch_first, results, call_names(old))

    def _grid(
        self, name: str, call: ExampleCall, N: int, batch: int, sources: dict[nn.Module, MapGrid]
    ) -> tuple[FixedGrid, Grid]:
        """Return the rule for the grid of N tokens at every call, and the grid in the example."""
        sides = self.sides(self.ndim)
        if sides:
            split_tokens(N, self.prefix, sides)
            return FixedGrid(sides), sides
        if self.ndim == 1:
            return SequenceGrid(), (N - (self.prefix or 0),)
        named = grid_in_call(call.named, N, self.prefix)
        if named:
            return CallGrid(len(named)), named
        maps = [(convolution, tuple(shape[2:])) for convolution, shape in call.maps if shape[0] == batch]
        match = grid_from_maps([m for m in maps if self.ndim in (None, len(m[1]))], N, self.prefix)
        if match is None:
            problem = f"cannot tell the grid of the {N} tokens at {name!r}"
            raise ValueError(f"{problem}: pass size=(H, W) or (D, H, W) to swap(), or ndim=1 for a sequence")
        return sources.setdefault(match[0], MapGrid()), match[1]


def _is_batch_first(module: nn.Module) -> bool:
    return bool(getattr(module, "batch_first", True))


def _layout_of(old: nn.Module, shape: Sequence[int]) -> str:
    """Return the layout of a module by its first layer that shows it."""
    for module in old.modules():
        if isinstance(module, nn.Conv1d if len(shape) == 3 else _CHANNELS_FIRST):
            return "channels_first"
        if isinstance(module, _CHANNELS_LAST) and len(shape) > 3:
            return "channels_last"
    return "tokens" if len(shape) == 3 else "channels_first"


def _selected(model: nn.Module, select: Select) -> dict[str, nn.Module]:
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if _is_selected(select, name, module) and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = module
    if not chosen:
        close = get_close_matches(select, modules, n=3, cutoff=0.5) if isinstance(select, str) else []
        names = f"did you mean {' or '.join(map(repr, close))}?" if close else f"names: {_first_few(list(modules))}"
        types = [f"{t} ({n})" for t, n in Counter(type(m).__name__ for m in modules.values()).most_common()]
        raise ValueError(f"nothing in the model matches {select!r}: {names}; types: {_first_few(types)}")
    for name, module in chosen.items():
        if isinstance(module, nn.TransformerEncoderLayer):
            raise ValueError(f"{name!r} is a whole transformer layer: select its attention, '{name}.self_attn'")
    return chosen


def _is_selected(select: Select, name: str, module: nn.Module) -> bool:
    """Return True if a module is one of those to replace."""
    if isinstance(select, str):
        return fnmatchcase(name, select)
    if isinstance(select, type):
        return isinstance(module, select)
    if isinstance(select, list | tuple):
        return any(_is_selected(one, name, module) for one in select)
    if isinstance(select, nn.Module) or not callable(select):
        raise ValueError(f"select: expected a pattern of names, a type or a list of these, got {type(select).__name__}")
    return select(name, module)


def _first_few(names: list[str]) -> str:
    return (", ".join(names[:12]) + (", ..." if len(names) > 12 else "")) or "none"
