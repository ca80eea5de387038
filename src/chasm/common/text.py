"""Short texts: words of messages, and what people write on a command line."""

import re

_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    >>> counted(1, "case"), counted(1200, "slice")
    ('1 case', '1,200 slices')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none.

    >>> first_line(ValueError("no such file\\ndetails")), first_line(KeyError())
    ('no such file', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def printable(text: str) -> str:
    """Return a text in one line: control characters and halves of characters, as names of files may have, are escaped.

    >>> print(printable("two\\nlines \\x1b[2J \\udcff"))
    two\\nlines \\x1b[2J \\udcff
    """
    return _NOT_PRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def parse_shape(text: str, *examples: str) -> tuple[int, ...]:
    """Return the positive whole numbers of a text, which an "x" or a comma divides, as many as one of the examples has.

    Raises:
        ValueError: if there are more or fewer numbers than in every example, or other things than numbers.

    >>> parse_shape("8,96,256,256", "1x1x1x1")
    (8, 96, 256, 256)
    """
    parts, *expected = (t.lower().replace("x", ",").split(",") for t in (text, *examples))
    if len(parts) not in map(len, expected) or not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"expected a size like {' or '.join(examples)}, got {text!r}")
    return tuple(map(int, parts))


def parse_size(text: str) -> tuple[int, int]:
    """Return height and width, from two numbers, or from one for a square.

    >>> parse_size("128x96"), parse_size("128")
    ((128, 96), (128, 128))
    """
    numbers = parse_shape(text, "128", "128x96")
    return numbers[0], numbers[-1]
