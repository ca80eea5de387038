"""A mixer behind the interface of the module it replaced, and checks of the arguments of its calls."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from chasm.surgery.grids import FixedGrid, Grid, split_tokens
from chasm.surgery.probe import watch

# Parts of the names of arguments that a mixer may ignore: it knows positions, and counts are for losses.
_IGNORABLE = ("position", "rope", "rotary", "num_items")


class SwapPoint(NamedTuple):
    """What is known about the place that a mixer goes to."""

    channels: int
    size: Grid | None  # the mixer is built for
    ndim: int
    layout: str
    prefix: int | None  # tokens before the grid; None: what the grid leaves over at each call
    grid: FixedGrid | None  # for tokens: finds the grid of a call
    batch_first: bool
    results: int  # length of the tuple the module returns; 0 for a tensor
    names: tuple[str, ...]  # names of the positional arguments


class Swapped(nn.Module):
    """A mixer for maps (B, C, H, W), behind the interface of the module it replaced.

    Args:
        mixer: maps (B, C, H, W) to the same shape.
        point: layout and shape of the place.
        host_residual: whether the network adds the input of this place to its output.
        ignore_extra: whether masks and second inputs are ignored instead of refused.
    """

    # nn.TransformerEncoderLayer has a fast path that never calls its attention. These two attributes keep it off.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self, mixer: nn.Module, point: SwapPoint, host_residual: bool = True, ignore_extra: bool = False
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.layout, self.prefix, self.grid = point.layout, point.prefix, point.grid
        self.batch_first, self.results, self.names = point.batch_first, point.results, point.names
        self.host_residual, self.ignore_extra = host_residual, ignore_extra

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mixer's output for the first tensor, in the form that the replaced module returned."""
        named = _name_arguments(self.names, args, kwargs)
        x = _input_of(named)
        if not self.ignore_extra:
            _refuse_extra(named)
        if self.layout == "channels_first":
            y = self.mixer(x)
        elif self.layout == "channels_last":
            y = self.mixer(x.movedim(-1, 1)).movedim(1, -1)
        else:
            y = self._tokens(x, named) if self.batch_first else self._tokens(x.transpose(0, 1), named).transpose(0, 1)
        return (y, *(None,) * (self.results - 1)) if self.results else y

    def _tokens(self, x: Tensor, named: dict[str, Any]) -> Tensor:
        assert self.grid is not None
        N = x.shape[1]
        grid = self.grid.find(named, N, self.prefix)
        prefix = split_tokens(N, self.prefix, grid)
        z = x[:, prefix:].transpose(1, 2).unflatten(2, grid)  # (B, N, C) -> (B, C, H, W)
        z = self.mixer(z).flatten(2).transpose(1, 2)
        if not prefix:
            return z
        # If the network adds its input, an unchanged token is the input plus zero.
        head = torch.zeros_like(x[:, :prefix]) if self.host_residual else x[:, :prefix]
        return torch.cat((head.to(z.dtype), z), 1)

    def extra_repr(self) -> str:
        return f"layout={self.layout}, host_residual={self.host_residual}"


class ExampleCall(NamedTuple):
    """An example call of a module that is to be replaced."""

    shape: torch.Size  # shape of its input
    named: dict[str, Any]  # the arguments
    out: Any
    maps: list[tuple[_ConvNd, torch.Size]]  # convolutions that ran before, with the shapes of their results


def first_calls(
    model: nn.Module, chosen: dict[str, nn.Module], example: Any, ignore_extra: bool
) -> dict[nn.Module, ExampleCall]:
    """Return the first call of each chosen module when the network runs on an example.

    Args:
        model: the network.
        chosen: modules by name.
        example: see `chasm.swap`.
        ignore_extra: whether masks and second inputs are ignored instead of refused.
    """
    calls: dict[nn.Module, ExampleCall] = {}
    maps: list[tuple[_ConvNd, torch.Size]] = []
    replaced = {module for old in chosen.values() for module in old.modules()}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        named = _name_arguments(call_names(module), args, kwargs)
        calls.setdefault(module, ExampleCall(_input_of(named).shape, named, out, list(maps)))

    def note_map(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        assert isinstance(module, _ConvNd)
        maps.append((module, out.shape))

    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd) and m not in replaced]
    watch(model, [*((m, note) for m in set(chosen.values())), *((m, note_map) for m in convolutions)], example)
    for name, module in chosen.items():
        if module not in calls:
            raise ValueError(f"{name!r} is not called on the example: select only what is, or change the example")
        if not ignore_extra:
            _refuse_extra(calls[module].named, repr(name))
    return calls


def call_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a module, as far as its `forward` gives them names."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(p.name for p in parameters if p.kind in kinds)


def _name_arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name. Positional ones beyond `names` are numbered."""
    named = {names[i] if i < len(names) else f"argument {i + 1}": a for i, a in enumerate(args)}
    return {**named, **kwargs}


def _input_of(named: dict[str, Any]) -> Tensor:
    """Return the tensor that a module mixes: the first of its arguments that is one."""
    for value in named.values():
        if isinstance(value, Tensor):
            return value
    raise ValueError(f"expected a tensor among the arguments, got {', '.join(named) or 'none'}")


def _refuse_extra(named: dict[str, Any], place: str = "this place") -> None:
    """Raise a ValueError if a call has an argument that a mixer cannot honour: a mask, or a second input."""
    x = _input_of(named)
    extra = [name for name, value in named.items() if isinstance(value, Tensor) and _must_be_honoured(name, value, x)]
    extra += ["is_causal=True"] if named.get("is_causal") else []
    if extra:
        problem = f"{place} is called with {', '.join(extra)}, which a mixer cannot use"
        raise ValueError(f"{problem}: select other modules, or drop them with swap(..., ignore_extra=True)")


def _must_be_honoured(name: str, value: Tensor, x: Tensor) -> bool:
    if value is x or value.ndim == 0 or any(part in name for part in _IGNORABLE):
        return False
    return not (value.dtype == torch.bool or "mask" in name) or _hides_something(value)


def _hides_something(mask: Tensor) -> bool:
    """Return True if a mask treats positions differently. A mask with one value everywhere changes no attention.

    While a network is traced the values are not known yet, so the traced program checks them when it runs.
    """
    uniform = (mask == mask.flatten()[:1]).all()
    if not torch.compiler.is_compiling():
        return not bool(uniform)
    torch._assert_async(uniform, "a mixer cannot honour a mask that hides something")
    return False
