"""A log as lines of JSON, and reading it."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxaccel.train._tensorboard import check_writable
from jaxaccel.train._writers import flatten

NAME = "metrics.jsonl"


class JsonLinesWriter:
    """Appends one JSON object a step to `<logdir>/metrics.jsonl`.

    Each has `"step"`, `"time"` (seconds since 1970) and the scalars. Values that
    JSON lacks are the texts `"nan"`, `"inf"` and `"-inf"`. A log that exists is
    continued, without the half line that a killed run may have left.

    Args:
      logdir: The folder; made if it is missing.

    Raises:
      ValueError: If the folder cannot be made or written.

    Examples:
      >>> import tempfile
      >>> from jaxaccel import train
      >>> with tempfile.TemporaryDirectory() as logdir:
      ...     with train.JsonLinesWriter(logdir) as writer:
      ...         writer.scalars(2, {"loss": 0.5, "norm": {"w": 3.0}})
      ...     [row] = train.read_json_lines(logdir)
      >>> row["step"], row["loss"], row["norm/w"]
      (2, 0.5, 3.0)
    """

    def __init__(self, logdir: str | os.PathLike[str]):
        check_writable(logdir)
        path = os.path.join(logdir, NAME)
        if os.path.exists(path):
            _cut_half_line(path)
        self._file = open(path, "a", encoding="utf-8")

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes host scalars; a nested dict gives names joined by a slash."""
        row: dict[str, Any] = {"step": int(step), "time": time.time()}
        for name, value in flatten(values):
            number = float(value)
            row[name] = number if math.isfinite(number) else str(number)
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text, as the string of its name."""
        row = {"step": int(step), "time": time.time(), name: text}
        self._file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Writes everything out and closes the file."""
        self._file.close()

    def __enter__(self) -> "JsonLinesWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def read_json_lines(logdir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Reads what a `JsonLinesWriter` wrote.

    A half line at the end, of a run that was killed or still writes, is left out.

    Args:
      logdir: The folder of the log.

    Yields:
      The rows in the order of writing; numbers are numbers again, NaN included.

    Raises:
      ValueError: If a line is no JSON object, with its number.
    """
    path = os.path.join(logdir, NAME)
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
                yield {name: _number(value) for name, value in row.items()}
            except (AttributeError, json.JSONDecodeError) as error:
                raise ValueError(
                    f"line {number} of {path!r} is no JSON object ({error}); remove it"
                ) from error


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _cut_half_line(path: str) -> None:
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
