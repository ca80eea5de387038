"""One small registry: names to classes, with errors that suggest the near name.

>>> shapes = Registry("shape")
>>> @shapes.register("square")
... class Square:
...     def __init__(self, side: int): self.side = side
>>> shapes.create("square", side=2).side
2
"""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatch
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
# What an option annotated so may be; other annotations are left to the class.
_PLAIN: dict[Any, type] = {int: Integral, float: Real, bool: bool, str: str}
# The end of an error about a name that can be registered.
OWN = "(in a file of your own: chasm --with FILE.py)"


def near(word: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown word: the close ones, or all there are."""
    names = sorted(known)
    close = get_close_matches(word, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(repr(c) for c in close)}?" if close else f"known: {', '.join(names)}"


class Registry:
    def __init__(self, kind: str, base: type = object) -> None:
        self.kind, self.base = kind, base
        self._classes: dict[str, type] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator; the name must be new, and the class one of the registry's base."""

        def add(cls: T) -> T:
            if not (isinstance(cls, type) and issubclass(cls, self.base)):
                wanted = f"{self.base.__module__}.{self.base.__name__}"
                raise ValueError(f"{self.kind} {name!r}: expected a class derived from {wanted}, got {cls!r}")
            if name in self._classes and self._classes[name] is not cls:
                raise ValueError(f"a {self.kind} named {name!r} is already registered: choose another name")
            self._classes[name] = cls
            return cls

        return add

    def get(self, name: str) -> type:
        if name not in self._classes:
            raise ValueError(f"unknown {self.kind} {name!r}: {near(name, self._classes)} {OWN}")
        return self._classes[name]

    def list(self, pattern: str = "*") -> list[str]:
        """Registered names that match a shell-style pattern, sorted."""
        return sorted(n for n in self._classes if fnmatch(n, pattern))

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """What the class can be constructed with."""
        return dict(inspect.signature(self.get(name)).parameters)

    def create(self, name: str, /, **options: Any) -> Any:
        known = self.options(name)
        for option, value in options.items():
            if option not in known:
                raise ValueError(f"{self.kind} {name!r} has no option {option!r}: {near(option, known)}")
            wanted = _PLAIN.get(known[option].annotation)
            if wanted is not None and not isinstance(value, wanted):
                kind = known[option].annotation.__name__
                raise ValueError(f"{self.kind} {name!r}: option {option!r}: expected {kind}, got {value!r}")
        try:
            return self.get(name)(**options)
        except Exception as e:
            if type(e) not in (TypeError, AttributeError, RuntimeError, ZeroDivisionError):
                raise  # ours say what is wrong; these come from whatever met the option first
            given = ", ".join(f"{k}={v!r}" for k, v in options.items())
            raise ValueError(" ".join(f"{self.kind} {name!r} with {given}: {e}".split())) from e
