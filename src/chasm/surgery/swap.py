"""Put a mixer into a network somebody else wrote.

>>> import torch, chasm
>>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
>>> x = torch.randn(2, 65, 16)  # a class token and an 8 x 8 grid
>>> model = chasm.swap(torch.nn.TransformerEncoder(layer, 2), torch.nn.MultiheadAttention, "gfnet", example=x)
>>> model(x).shape
torch.Size([2, 65, 16])
"""

import copy
from collections import Counter
from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chasm.mixers import create_slot
from chasm.surgery.probe import watch

Select = str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]
LAYOUTS = ("auto", "bchw", "bhwc", "tokens")


def swap(
    model: nn.Module,
    select: Select,
    mixer: str | Callable[[int, tuple[int, int] | None], nn.Module],
    *,
    example: Any = None,
    channels: int | None = None,
    size: tuple[int, int] | None = None,
    layout: str = "auto",
    prefix_tokens: int | None = None,
    host_residual: bool = True,
    ignore_extra: bool = False,
    inplace: bool = False,
    **options: Any,
) -> nn.Module:
    """Return a copy of a network with a mixer in place of every selected module.

    The mixer gets the device, dtype and train/eval mode of the module it replaces. A module that the network uses in
    two places becomes one mixer in two places. Of modules inside one another only the outermost is replaced.

    Args:
        model: the network.
        select: which modules to replace: a module type or a tuple of them, a shell-style pattern for module names
            ("blocks.*.attn"), or a function (name, module) -> bool.
        mixer: a registered name, built with `options`; or a function (channels, size) -> nn.Module, whose result is
            used as it is.
        example: an input of the network: a tensor, or a tuple of arguments. One forward pass on it finds channels, size
            and layout of every place, and refuses places that change the shape. Without it, give `channels`, and `size`
            if the mixer needs one.
        channels: of the mixer; overrides what the example shows.
        size: (H, W) the mixer is built for; overrides what the example shows. For tokens it is also the grid, at every
            call; without it the grid is a square.
        layout: "bchw", "bhwc" or "tokens" (B, N, C). "auto" takes 4 dimensions for bchw and 3 for tokens.
        prefix_tokens: how many tokens come before the grid (class token, registers). They pass unchanged: the mixer
            does not see them, and they do not see the image, so pool over the grid if you replace all attention.
            Default: what `size` leaves over, or else 1 if N - 1 is a square and N is not.
        host_residual: True if the network adds the input of this place to its output, as around attention in a
            transformer block: the mixer then comes without its identity path. False for a layer in a plain stack: an
            identity path is added if the mixer has none.
        ignore_extra: a mixer cannot use a mask, or a second input as in cross-attention. False makes a call with one an
            error, True ignores it.
        inplace: change `model` itself and return it.
        **options: of the named mixer.

    Returns:
        The network with its mixers.

    Raises:
        ValueError: with one line, when nothing is selected, a place cannot hold a mixer, or an option is wrong.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1))
        >>> net = swap(net, "1", "gfnet", example=torch.randn(1, 3, 16, 16), host_residual=False)
        >>> net(torch.randn(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: expected one of {', '.join(LAYOUTS)}")
    if not isinstance(mixer, str) and options:
        raise ValueError(f"options {sorted(options)} go with a mixer's name, not with a function that builds one")
    if not inplace:
        model = copy.deepcopy(model)
    chosen = _selected(model, select)
    seen = {} if example is None else _probe(model, chosen, example)
    built: dict[nn.Module, nn.Module] = {}
    for name, old in chosen.items():
        if old not in built:
            point = _swap_point(name, old, seen.get(old), channels, size, layout, prefix_tokens)
            if isinstance(mixer, str):
                new = create_slot(mixer, point.channels, point.size, host_residual=host_residual, **options)
            else:
                new = mixer(point.channels, point.size)
            like = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
            if like is not None:
                new = new.to(like.device, like.dtype)
            built[old] = Swapped(new, point, size, host_residual, ignore_extra).train(old.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, built[old])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors need the weights of the first attention
    return model


class SwapPoint(NamedTuple):
    """What is known about the place that a mixer goes to."""

    channels: int
    size: tuple[int, int] | None
    layout: str
    prefix: int | None  # tokens before the grid; None: determined at each call
    batch_first: bool
    results: int  # length of the tuple the module returns; 0 for a tensor


class Swapped(nn.Module):
    """A mixer for maps (B, C, H, W), behind the interface of the module it replaced.

    Args:
        mixer: maps (B, C, H, W) to the same shape.
        point: layout and shape of the place.
        grid: (H, W) of tokens at every call; None for a square.
        host_residual: whether the network adds the input of this place to its output.
        ignore_extra: whether masks and second inputs are ignored instead of refused.
    """

    # nn.TransformerEncoderLayer has a fast path that never calls its attention. These two attributes keep it off.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        mixer: nn.Module,
        point: SwapPoint,
        grid: tuple[int, int] | None = None,
        host_residual: bool = True,
        ignore_extra: bool = False,
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.layout, self.prefix, self.grid = point.layout, point.prefix, grid
        self.batch_first, self.results = point.batch_first, point.results
        self.host_residual, self.ignore_extra = host_residual, ignore_extra

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, extra = _input_of(args, kwargs)
        if extra and not self.ignore_extra:
            raise ValueError(
                f"this place is called with {', '.join(extra)}, which a mixer cannot use: "
                "select other modules, or drop them with swap(..., ignore_extra=True)"
            )
        if self.layout == "bchw":
            y = self.mixer(x)
        elif self.layout == "bhwc":
            y = self.mixer(x.movedim(-1, 1)).movedim(1, -1)
        else:
            y = self._tokens(x) if self.batch_first else self._tokens(x.transpose(0, 1)).transpose(0, 1)
        return (y, *(None,) * (self.results - 1)) if self.results else y

    def _tokens(self, x: Tensor) -> Tensor:
        prefix, grid = find_grid(x.shape[1], self.prefix, self.grid)
        z = x[:, prefix:].transpose(1, 2).unflatten(2, grid)  # (B, N, C) -> (B, C, H, W)
        z = self.mixer(z).flatten(2).transpose(1, 2)
        if not prefix:
            return z
        # If the network adds its input, an unchanged token is the input plus zero.
        head = torch.zeros_like(x[:, :prefix]) if self.host_residual else x[:, :prefix]
        return torch.cat((head.to(z.dtype), z), 1)

    def extra_repr(self) -> str:
        return f"layout={self.layout}, host_residual={self.host_residual}"


def find_grid(N: int, prefix: int | None, grid: tuple[int, int] | None) -> tuple[int, tuple[int, int]]:
    """Return (prefix, (H, W)): how many of N tokens come before the grid, and the grid.

    Args:
        N: the number of tokens.
        prefix: the tokens before the grid, if known; otherwise 0 or 1 is tried.
        grid: (H, W), if known; otherwise it is a square.

    Example:
        >>> find_grid(65, None, None), find_grid(12, None, (3, 4))
        ((1, (8, 8)), (0, (3, 4)))
    """
    if grid is not None:
        rest = N - grid[0] * grid[1]
        if rest == prefix or (prefix is None and rest >= 0):
            return rest, grid
        before = "" if prefix is None else f" after {prefix} prefix tokens"
        raise ValueError(
            f"expected a {grid[0]} x {grid[1]} grid{before}, got {N} tokens: check size= and prefix_tokens="
        )
    for p in (0, 1) if prefix is None else (prefix,):
        side = round(max(N - p, 0) ** 0.5)  # torch.compile can trace this with unknown N, but not isqrt
        if side and side * side == N - p:
            return p, (side, side)
    tried = "0 or 1" if prefix is None else f"{prefix}"
    raise ValueError(
        f"{N} tokens less {tried} before the grid are not a square: pass swap() size=(H, W) or prefix_tokens="
    )


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, list[str]]:
    """The tensor that a module mixes, and the names of other tensors and flags in the call."""
    named = {**{f"argument {i + 1}": a for i, a in enumerate(args)}, **kwargs}
    tensors = {k: v for k, v in named.items() if isinstance(v, Tensor)}
    if not tensors:
        raise ValueError(f"expected a tensor among the arguments, got {', '.join(named) or 'none'}")
    x = next(iter(tensors.values()))
    extra = [k for k, v in tensors.items() if v is not x]
    return x, [*extra, "is_causal=True"] if kwargs.get("is_causal") else extra


def _selected(model: nn.Module, select: Select) -> dict[str, nn.Module]:
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if isinstance(select, str):
            hit = fnmatchcase(name, select)
        elif isinstance(select, type | tuple):
            hit = isinstance(module, select)
        else:
            hit = select(name, module)
        if hit and not any(name.startswith(f"{outer}.") for outer in chosen):
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


def _first_few(words: list[str]) -> str:
    return (", ".join(words[:12]) + (", ..." if len(words) > 12 else "")) or "none"


Seen = tuple[torch.Size, Any]  # shape of the input, and the output


def _probe(model: nn.Module, chosen: dict[str, nn.Module], example: Any) -> dict[nn.Module, Seen]:
    """The input shape and the output of each chosen module, on an example."""
    seen: dict[nn.Module, Seen] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen.setdefault(module, (_input_of(args, kwargs)[0].shape, out))

    watch(model, [(module, note) for module in set(chosen.values())], example)
    for name, module in chosen.items():
        if module not in seen:
            raise ValueError(f"{name!r} is not called on the example: select only what is, or change the example")
    return seen


def _swap_point(
    name: str,
    old: nn.Module,
    seen: Seen | None,
    channels: int | None,
    size: tuple[int, int] | None,
    layout: str,
    prefix: int | None,
) -> SwapPoint:
    batch_first = bool(getattr(old, "batch_first", True))
    if seen is None:
        attention = isinstance(old, nn.MultiheadAttention)
        channels = channels or getattr(old, "embed_dim", None)
        if channels is None:
            raise ValueError(f"cannot tell the channels of {name!r}: give swap() an example= input, or channels=")
        if layout == "auto":
            layout = "tokens" if attention else "bchw"
        return SwapPoint(channels, size, layout, prefix, batch_first, 2 if attention else 0)
    shape, out = seen
    results = len(out) if isinstance(out, tuple) else 0
    y = out[0] if results else out
    if not isinstance(y, Tensor) or y.shape != shape:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"a mixer keeps its shape, but {name!r} maps {tuple(shape)} to {got}: select others")
    if layout == "auto":
        layout = "tokens" if len(shape) == 3 else "bchw"
    if len(shape) != (3 if layout == "tokens" else 4):
        wanted = "tokens (B, N, C)" if layout == "tokens" else "a map (B, C, H, W) or (B, H, W, C)"
        raise ValueError(f"expected {wanted} at {name!r}, got {tuple(shape)}: check layout=")
    if layout == "tokens":
        C = shape[2]
        prefix, grid = find_grid(shape[1 if batch_first else 0], prefix, size)
    else:
        C = shape[1 if layout == "bchw" else 3]
        grid = (shape[2], shape[3]) if layout == "bchw" else (shape[1], shape[2])
    return SwapPoint(channels or C, size or grid, layout, prefix, batch_first, results)
