"""How the fuzz tests damage files, and what they may see: success, or one line that says what is wrong.

`make test` draws a few examples of each, always the same ones. `make fuzz` draws new ones, a hundred times as many.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("CHASM_FUZZ_EXAMPLES", "0"))


def examples(number: int) -> settings:
    """Settings for this many examples, the same ones in every run; for CHASM_FUZZ_EXAMPLES times as many new ones."""
    return settings(
        max_examples=number * (EXAMPLES or 1),
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # damage is small as it is drawn, and to shrink it takes long
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """The content after one to three mutations: bits flipped, bytes replaced, cut out, doubled, or the end cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.one_of(st.integers(0, min(400, len(data))), st.integers(0, len(data))))  # headers twice as often
        length = draw(st.integers(1, 64))
        kind = draw(st.sampled_from(["flip", "replace", "cut out", "double", "end"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "replace":
            filling = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"A"]))
            data[at : at + length] = filling * len(data[at : at + length])
        elif kind == "cut out":
            del data[at : at + length]
        elif kind == "double":
            data[at:at] = data[at : at + length]
        else:
            del data[at:]
    return bytes(data)


# Values of every kind that JSON and YAML have, and numbers at their limits.
scalars = st.sampled_from(
    [None, True, 0, -1, 2**70, 1e308, 0.5, "", "x", "../x", "ü|`<b>", [], {}, [1], {"a": 1}, [[]]]
)
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)


@st.composite
def reshaped(draw: Any, value: Any) -> Any:
    """The JSON value with one part, anywhere in it, left out or replaced by something of another shape."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(documents)
    if isinstance(value, list):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(reshaped(value[at])), *value[at + 1 :]]
    key = draw(st.sampled_from(sorted(value)))
    if draw(st.integers(0, 4)) == 0:
        return {k: v for k, v in value.items() if k != key}
    return {**value, key: draw(reshaped(value[key]))}


class _NoRecords(logging.Handler):
    """Fail on what a library would print through logging."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(f"{record.name} says: {record.getMessage()}")


@contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Let the block succeed, or fail with a ValueError or OSError of one line. Libraries say nothing beside it."""
    handler, error = _NoRecords(logging.WARNING), None
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # a library that closes its file late prints nothing
        try:
            yield
        except (ValueError, OSError, *errors) as e:
            error = e
        finally:
            logging.getLogger().removeHandler(handler)
    if error is not None:
        assert type(error).__module__.split(".")[0] in ("builtins", "chasm"), repr(error)
        assert str(error).strip(), repr(error)
        assert "\n" not in str(error), str(error)
