"""Write the log of a run: rows in memory, which checkpoints save, and two files that grow row by row."""

import json
from pathlib import Path
from typing import Any

from chasm.common.files import json_safe, unwritable, write_text

Row = dict[str, Any]


class Log:
    """Writes log.jsonl and log.csv of a run folder. A value that is not finite is null in JSON and empty in CSV.

    Args:
        folder: folder of the run.
        writes: False in processes other than the main one, which only hold the rows in memory.
    """

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self.writes = folder, writes
        self.rows: list[Row] = []
        self.columns: list[str] = []  # columns of log.csv on disk

    def add(self, row: Row) -> None:
        """Add a row to both files.

        Args:
            row: values by column. A new column rewrites the files.

        Raises:
            OSError: if a file cannot be written.
        """
        row = json_safe(row)
        self.rows.append(row)
        if not self.writes:
            return
        if not set(row) <= set(self.columns):  # a new column
            self.rewrite()
            return
        for name, line in (("log.jsonl", _line(row)), ("log.csv", self._values(row))):
            path = self.folder / name
            try:
                with open(path, "a", encoding="utf-8", newline="\n") as f:
                    f.write(line)
            except OSError as e:
                raise unwritable(path, e) from None

    def rewrite(self) -> None:
        """Write both files from the rows, which drops rows that a killed run logged after its last checkpoint."""
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
