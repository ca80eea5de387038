"""Show the progress of a run: notes, and on a terminal a bar with rate, loss, score and time left."""

from chasm.common.progress import ProgressBar


class Progress:
    """Shows the progress of a run.

    Args:
        quiet: show no bar and no notes.
        main: False in processes other than the main one, which print nothing.
    """

    def __init__(self, quiet: bool, main: bool = True) -> None:
        self.quiet, self.main = quiet or not main, main
        self.bar = ProgressBar(enabled=not self.quiet)
        self.steps = 0
        self.score = ""

    def __enter__(self) -> "Progress":
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    def begin(self, step: int, steps: int) -> None:
        """Show the bar at a step."""
        self.steps = steps
        self.bar.update(step, steps)

    def step(self, step: int, loss: float) -> None:
        """Move the bar to a step."""
        speed = self.bar.speed
        rate = f"{speed:.1f} steps/s " if speed else ""
        self.bar.update(step, self.steps, f"{rate}loss {loss:.4f} {self.score}")

    def validated(self, score: str) -> None:
        """Show a validation score behind the bar from now on."""
        self.score = f"val {score}"

    def note(self, line: str) -> None:
        """Print a line, unless the run is quiet."""
        if not self.quiet:
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line, even if the run is quiet."""
        if self.main:
            self.bar.say(line)
