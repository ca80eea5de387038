"""One small registry: names to classes, with errors that suggest similar names.

>>> shapes = Registry("shape")
>>> @shapes.register("square")
... class Square:
...     def __init__(self, side: int): self.side = side
>>> shapes.create("square", side=2).side
2
>>> shapes.create("sqare", side=2)
Traceback (most recent call last):
ValueError: unknown shape 'sqare': did you mean 'square'? (for your own: chasm --with FILE.py)
"""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatch
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args

from chasm.common.extensions import load_plugin, plugin_names

T = TypeVar("T", bound=type)
# The types an option with this annotation may have. Options with other annotations are left to the class.
_PLAIN: dict[Any, type] = {int: Integral, float: Real, bool: bool, str: str, NoneType: NoneType}
# Errors that come from the first line that meets a bad value, without naming the option. A subclass names it.
_VAGUE = (TypeError, AttributeError, RuntimeError, ZeroDivisionError)
# The end of an error about an unknown name that users can register themselves.
OWN_NAME_HINT = "(for your own: chasm --with FILE.py)"


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: similar known words, or all of them.

    >>> suggest("gfnt", ["gfnet", "ffc"]), suggest("x", ["gfnet", "ffc"])
    ("did you mean 'gfnet'?", 'known: ffc, gfnet')
    """
    names = sorted(known)
    similar = get_close_matches(word, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, similar))}?" if similar else f"known: {', '.join(names)}"


def is_count(value: Any) -> bool:
    """Return True for a whole number of 1 or more, of Python or NumPy.

    >>> is_count(3), is_count(0), is_count(2.0), is_count(True)
    (True, False, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_of(annotation: Any, value: Any) -> bool:
    """Return True if an option with this annotation may have the value. True and False are no numbers."""
    either = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = [_PLAIN.get(kind) for kind in either]
    if None in kinds:
        return True
    return any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind in kinds if kind)


class Registry:
    """Classes of one kind by name: those registered here, and those that installed packages bring.

    Args:
        kind: word for the classes in messages, such as "mixer".
        base: the class that all of them derive from.
        group: the entry-point group in which installed packages announce theirs: "chasm.mixers". An entry point has the
            name of a class and leads to the module that registers it, which is imported when the name is first used.
    """

    def __init__(self, kind: str, base: type = object, group: str | None = None) -> None:
        self.kind, self.base, self.group = kind, base, group
        self._classes: dict[str, type] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a class decorator that registers a class under a new name.

        Raises:
            ValueError: when the name is taken, or the class does not derive from the registry's base.
        """

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
        """Return the class of this name; imports the package that brings it, if it is not here yet.

        Raises:
            ValueError: when the name is unknown, or the package that brings it is broken.
        """
        if name not in self._classes and self.group is not None:
            load_plugin(self.group, name, lambda: name in self._classes)
        if name not in self._classes:
            raise ValueError(f"unknown {self.kind} {name!r}: {suggest(name, self.list())} {OWN_NAME_HINT}")
        return self._classes[name]

    def name_of(self, cls: type) -> str:
        """Return the name that a class is registered under.

        Raises:
            ValueError: when it is not registered.
        """
        for name, registered in self._classes.items():
            if registered is cls:
                return name
        raise ValueError(f"{cls.__name__} is not a registered {self.kind}: register it, or pass a function")

    def list(self, pattern: str = "*") -> list[str]:
        """Return the names that match a shell-style pattern, sorted. Imports nothing."""
        names = {*self._classes, *(plugin_names(self.group) if self.group else ())}
        return sorted(n for n in names if fnmatch(n, pattern))

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters that the class of this name is constructed with."""
        return dict(inspect.signature(self.get(name)).parameters)

    def create(self, name: str, /, **options: Any) -> Any:
        """Construct the class of this name.

        Raises:
            ValueError: if the name or an option is unknown, or a value is refused.
        """
        known = self.options(name)
        for option, value in options.items():
            if option not in known:
                raise ValueError(f"{self.kind} {name!r} has no option {option!r}: {suggest(option, known)}")
            if not _is_of(known[option].annotation, value):
                wanted = inspect.formatannotation(known[option].annotation).replace(" | ", " or ")
                raise ValueError(f"{self.kind} {name!r}: option {option!r}: expected {wanted}, got {value!r}")
        try:
            return self.get(name)(**options)
        except Exception as e:
            if type(e) not in _VAGUE:
                raise
            passed = ", ".join(f"{k}={v!r}" for k, v in options.items())
            raise ValueError(" ".join(f"{self.kind} {name!r} with {passed}: {e}".split())) from e
