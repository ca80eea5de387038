"""Words of messages that depend on a number."""


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    >>> counted(1, "case"), counted(1200, "slice")
    ('1 case', '1,200 slices')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
