"""What a checkpoint holds beside its tensors, with named fields that are checked when a file is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from chasm.train.fingerprint import Fingerprint
from chasm.train.log import Row


@dataclass
class Best:
    """The step whose weights scored best on validation so far.

    Attributes:
        step: number of the step, or -1 before the first validation.
        score: its score, or None if that was not finite.
        values: all metrics of the step.
    """

    step: int = -1
    score: float | None = None
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass
class Record:
    """The state of a run that is not in tensors.

    Attributes:
        step: number of steps that were done.
        best: the best step so far.
        seconds: time that training took so far.
        log: rows of the log.
        fingerprint: config, data and code of the run; None in checkpoints from before these were recorded.
    """

    step: int
    best: Best
    seconds: float
    log: list[Row]
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the record that a JSON file holds.

        Args:
            content: the content of the file. Keys that are not fields are ignored.

        Raises:
            ValueError: with one line, if a field is missing or is not of its type.
        """
        try:
            record = TypeAdapter(cls).validate_python(dict(content))
        except ValidationError as e:
            problem = e.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{place}: {problem['msg']}, got {problem['input']!r:.80}") from None
        if not -1 <= record.best.step <= record.step:
            raise ValueError(f"best.step is {record.best.step}, after step {record.step}")
        return record
