"""One progress bar, on standard error, where that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ProgressBar:
    """A bar with the number done, a text and the time left, on a terminal only. It disappears at the end.

    Example:
        >>> with ProgressBar(total=2) as bar:
        ...     bar.advance("the first")
        ...     bar.update(2, text="the last")
    """

    def __init__(self, total: int | None = None, *, enabled: bool = True) -> None:
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "ProgressBar":
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def speed(self) -> float | None:
        """Number of things done per second; None without a bar, or at the beginning."""
        return None if self._bar is None else self._bar.tasks[0].speed

    def advance(self, text: str = "") -> None:
        """Say that one more thing is done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)

    def update(self, done: int, total: int | None = None, text: str = "") -> None:
        """Say how far the work is.

        Args:
            done: the number of things that are done.
            total: the number of things to do, if it was not known or has changed.
            text: shown beside the bar.
        """
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar away while something is printed to standard output, which it would overwrite."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def say(self, line: str) -> None:
        """Print a line to standard error, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)
