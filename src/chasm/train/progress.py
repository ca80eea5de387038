"""What a person sees of a run: one line with rate, loss, score and time left, on a terminal only."""

import sys
from typing import Any


class Progress:
    """`quiet`: no bar and no notes. A process that is not the main one says nothing at all."""

    def __init__(self, quiet: bool, main: bool = True) -> None:
        self.quiet, self.main = quiet or not main, main
        self.bar: Any = None
        self.task: Any = None
        self.score = ""

    def __enter__(self) -> "Progress":
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]} {task.fields[loss]} {task.fields[score]}"),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def begin(self, step: int, steps: int) -> None:
        if self.bar is not None:
            self.task = self.bar.add_task("train", total=steps, completed=step, rate="", loss="", score="")

    def step(self, step: int, loss: float) -> None:
        if self.bar is not None:
            speed = self.bar.tasks[self.task].speed
            rate = f"{speed:.1f} steps/s" if speed else ""
            self.bar.update(self.task, completed=step, rate=rate, loss=f"loss {loss:.4f}", score=self.score)

    def validated(self, score: str) -> None:
        self.score = f"val {score}"

    def note(self, line: str) -> None:
        if not self.quiet:
            self.say(line)

    def say(self, line: str) -> None:
        """What nobody should miss."""
        if self.bar is not None:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self.main:
            print(line, file=sys.stderr, flush=True)
