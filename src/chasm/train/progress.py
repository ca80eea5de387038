"""What a person sees of a run: a bar with rate, loss, score and time left, on a terminal only, and notes."""

from chasm.common.progress import ProgressBar


class Progress:
    """`quiet`: no bar and no notes. A process that is not the main one says nothing at all."""

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
        self.steps = steps
        self.bar.update(step, steps)

    def step(self, step: int, loss: float) -> None:
        speed = self.bar.speed
        rate = f"{speed:.1f} steps/s " if speed else ""
        self.bar.update(step, self.steps, f"{rate}loss {loss:.4f} {self.score}")

    def validated(self, score: str) -> None:
        self.score = f"val {score}"

    def note(self, line: str) -> None:
        if not self.quiet:
            self.say(line)

    def say(self, line: str) -> None:
        """What nobody should miss."""
        if self.main:
            self.bar.say(line)
