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
    """A copy of ``model`` (itself, if ``inplace``) with a mixer in place of every selected module.

    select: a module type or a tuple of them, a shell-style pattern for module names ("blocks.*.attn"), or a
        function (name, module) -> bool. Of modules inside one another the outermost is replaced.
    mixer: a registered name, built with ``options``; or a function (channels, size) -> nn.Module, whose
        result is used as it is.
    example: what the model takes: a tensor, or a tuple of arguments. One forward pass on it finds channels,
        size and layout of every place, and refuses places that change the shape. Without it, give
        ``channels``, and ``size`` where the mixer wants one. Given both, these overrule what was found.
    layout: "bchw", "bhwc" or "tokens" (B, N, C). "auto" takes 4 dimensions for bchw and 3 for tokens.
    size: (H, W) the mixer is built for. For tokens it is the grid too, at every call; without it the grid
        is a square.
    prefix_tokens: tokens before the grid (class, registers). They pass the place unchanged: the mixer does
        not see them, nor do they see the image, so pool over the grid where you swap all attention. None:
        what ``size`` leaves over, or else 1 where N - 1 is a square and N is not.
    host_residual: True (attention, or a token mixer, in a residual block) says that the network adds its
        input around this place, so the mixer comes without its identity path. False (a layer in a plain
        stack): the slot adds an identity path where the mixer has none.
    ignore_extra: a mixer cannot honour a mask, nor a second source (cross-attention): a place called with
        one raises an error. True drops them.

    Device, dtype and train/eval mode are those of the replaced module. One module in two places becomes one
    mixer in two places.
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
            place = _place(name, old, seen.get(old), channels, size, layout, prefix_tokens)
            if isinstance(mixer, str):
                new = create_slot(mixer, place.channels, place.size, host_residual=host_residual, **options)
            else:
                new = mixer(place.channels, place.size)
            like = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
            if like is not None:
                new = new.to(like.device, like.dtype)
            built[old] = Swapped(new, place, size, host_residual, ignore_extra).train(old.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, built[old])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # that path reads the weights of the first layer's attention
    return model


class Place(NamedTuple):
    """Where a mixer goes."""

    channels: int
    size: tuple[int, int] | None
    layout: str
    prefix: int | None  # tokens before the grid; None: found at each call
    batch_first: bool
    results: int  # length of the tuple the module returns; 0 for a tensor


class Swapped(nn.Module):
    """A mixer (B, C, H, W) -> same, behind the interface of the module it replaced."""

    # nn.TransformerEncoderLayer has a fast path that never calls its attention. These two keep it off.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        mixer: nn.Module,
        place: Place,
        grid: tuple[int, int] | None = None,
        host_residual: bool = True,
        ignore_extra: bool = False,
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.layout, self.prefix, self.grid = place.layout, place.prefix, grid
        self.batch_first, self.results = place.batch_first, place.results
        self.host_residual, self.ignore_extra = host_residual, ignore_extra

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, extra = _input_of(args, kwargs)
        if extra and not self.ignore_extra:
            raise ValueError(
                f"this place is called with {', '.join(extra)}, which a mixer cannot honour: "
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
        # What the network adds to this is the whole of an unchanged token already.
        head = torch.zeros_like(x[:, :prefix]) if self.host_residual else x[:, :prefix]
        return torch.cat((head.to(z.dtype), z), 1)

    def extra_repr(self) -> str:
        return f"layout={self.layout}, host_residual={self.host_residual}"


def find_grid(N: int, prefix: int | None, grid: tuple[int, int] | None) -> tuple[int, tuple[int, int]]:
    """(prefix, (H, W)) of N tokens, from what is known of either."""
    if grid is not None:
        rest = N - grid[0] * grid[1]
        if rest == prefix or (prefix is None and rest >= 0):
            return rest, grid
        before = "" if prefix is None else f" after {prefix} prefix tokens"
        raise ValueError(
            f"expected a {grid[0]} x {grid[1]} grid{before}, got {N} tokens: check size= and prefix_tokens="
        )
    for p in (0, 1) if prefix is None else (prefix,):
        side = round(max(N - p, 0) ** 0.5)  # torch.compile traces this with N unknown, and not isqrt
        if side and side * side == N - p:
            return p, (side, side)
    tried = "0 or 1" if prefix is None else f"{prefix}"
    raise ValueError(
        f"{N} tokens less {tried} before the grid are no square: pass swap() size=(H, W) or prefix_tokens="
    )


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, list[str]]:
    """The tensor a module mixes, and the names of other tensors and flags it was given."""
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
        names = f"did you mean {' or '.join(map(repr, close))}?" if close else f"names: {_some(list(modules))}"
        types = [f"{t} ({n})" for t, n in Counter(type(m).__name__ for m in modules.values()).most_common()]
        raise ValueError(f"nothing in the model matches {select!r}: {names}; types: {_some(types)}")
    for name, module in chosen.items():
        if isinstance(module, nn.TransformerEncoderLayer):
            raise ValueError(f"{name!r} is a whole transformer layer: select its attention, '{name}.self_attn'")
    return chosen


def _some(words: list[str]) -> str:
    return (", ".join(words[:12]) + (", ..." if len(words) > 12 else "")) or "none"


Seen = tuple[torch.Size, Any]  # shape of the input, and the output


def _probe(model: nn.Module, chosen: dict[str, nn.Module], example: Any) -> dict[nn.Module, Seen]:
    """What goes into and comes out of the chosen modules on an example."""
    seen: dict[nn.Module, Seen] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen.setdefault(module, (_input_of(args, kwargs)[0].shape, out))

    watch(model, [(module, note) for module in set(chosen.values())], example)
    for name, module in chosen.items():
        if module not in seen:
            raise ValueError(f"{name!r} is not called on the example: select only what is, or change the example")
    return seen


def _place(
    name: str,
    old: nn.Module,
    seen: Seen | None,
    channels: int | None,
    size: tuple[int, int] | None,
    layout: str,
    prefix: int | None,
) -> Place:
    batch_first = bool(getattr(old, "batch_first", True))
    if seen is None:
        attention = isinstance(old, nn.MultiheadAttention)
        channels = channels or getattr(old, "embed_dim", None)
        if channels is None:
            raise ValueError(f"cannot tell the channels of {name!r}: give swap() an example= input, or channels=")
        if layout == "auto":
            layout = "tokens" if attention else "bchw"
        return Place(channels, size, layout, prefix, batch_first, 2 if attention else 0)
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
        prefix, found = find_grid(shape[1 if batch_first else 0], prefix, size)
    else:
        C = shape[1 if layout == "bchw" else 3]
        found = (shape[2], shape[3]) if layout == "bchw" else (shape[1], shape[2])
    return Place(channels or C, size or found, layout, prefix, batch_first, results)
