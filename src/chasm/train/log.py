"""What a run logs: rows in memory (checkpoints keep them), and two files that grow with them and can be followed."""

import json
from pathlib import Path
from typing import Any

from chasm.common.files import json_safe, unwritable, write_text

Row = dict[str, Any]


class Log:
    """log.jsonl and log.csv of a run folder. A value that is not finite is null in the one and empty in the other."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self.writes = folder, writes
        self.rows: list[Row] = []
        self.columns: list[str] = []  # of the table as it is on disk

    def add(self, row: Row) -> None:
        row = json_safe(row)
        self.rows.append(row)
        if not self.writes:
            return
        if not set(row) <= set(self.columns):  # the first of its kind
            self.rewrite()
            return
        for name, line in (("log.jsonl", _line(row)), ("log.csv", self._values(row))):
            path = self.folder / name
            try:
                with open(path, "a") as f:
                    f.write(line)
            except OSError as e:
                raise unwritable(path, e) from None

    def rewrite(self) -> None:
        """Both files from the rows: without what a killed run had written beyond its last checkpoint."""
        if not self.writes:
            return
        self.columns = list(dict.fromkeys(k for row in self.rows for k in row))
        write_text(self.folder / "log.jsonl", "".join(map(_line, self.rows)))
        header = ",".join(self.columns) + "\n"
        write_text(self.folder / "log.csv", header + "".join(map(self._values, self.rows)))

    def _values(self, row: Row) -> str:
        return ",".join("" if row.get(c) is None else str(row[c]) for c in self.columns) + "\n"


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
