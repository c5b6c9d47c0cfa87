"""Several runs side by side, from what their logs hold."""

import dataclasses
import math
import os
import pathlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxaccel.train._jsonl import NAME, read_json_lines

# name of the metric -> (steps, values)
Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]

# Of these the largest value is the best one, of all others the smallest.
_LARGER_IS_BETTER = ("accuracy", "per_second", "utilization", "f1", "auc", "score")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The scalars of several runs; `str` of it is a table.

    Attributes:
      runs: Of each run, by name, its metrics: the steps in order, and the values.
    """

    runs: Mapping[str, Curves]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, in the order of the runs."""
        return tuple(dict.fromkeys(name for run in self.runs.values() for name in run))

    def __str__(self) -> str:
        return self.table()

    def table(self, metrics: Sequence[str] | None = None) -> str:
        """Writes a table: a row a metric, a column a run.

        Args:
          metrics: The rows; None means all.

        Returns:
          The last value and, in brackets where it is another, the best one: the
          largest of accuracies and rates, the smallest of all others.

        Raises:
          ValueError: If no run has one of the metrics.
        """
        names = self._chosen(metrics)
        rows = [["", *self.runs]]
        for name in names:
            cells = [_cell(name, run.get(name)) for run in self.runs.values()]
            rows.append([name, *cells])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)]
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)

    def plot(
        self, path: str | os.PathLike[str], metrics: Sequence[str] | None = None
    ) -> None:
        """Draws each metric over the steps, one line a run.

        Args:
          path: The picture, in a format that its suffix names.
          metrics: Which ones; None means all.

        Raises:
          ImportError: If matplotlib is not installed.
          ValueError: If no run has one of the metrics.
        """
        names = self._chosen(metrics)
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "the plots need matplotlib: pip install 'jaxaccel[monitor]'"
            ) from error
        columns = min(3, len(names))
        rows = math.ceil(len(names) / columns)
        figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, name in zip(grid, names, strict=False):
            for label, run in self.runs.items():
                steps, values = run.get(name, ((), ()))
                # One step is no line.
                marker = "o" if len(steps) == 1 else None
                axes.plot(steps, values, label=label, marker=marker)
            axes.set(title=name, xlabel="step")
        for axes in grid[len(names) :]:
            axes.set_axis_off()
        grid[0].legend()
        figure.savefig(path, dpi=120)

    def _chosen(self, metrics: Sequence[str] | None) -> tuple[str, ...]:
        names = self.metrics if metrics is None else tuple(metrics)
        missing = sorted(set(names) - set(self.metrics))
        if missing or not names:
            raise ValueError(
                f"no run has {missing or 'any metric'}; there are {self.metrics}"
            )
        return names


def compare(logdirs: Iterable[str | os.PathLike[str]]) -> Comparison:
    """Reads the scalars of several runs from their log folders.

    Both `JsonLinesWriter`'s and `TensorBoardWriter`'s files are read; where a folder
    holds both, the former counts. Of steps that were written twice, as by a run
    that was resumed, the later one counts.

    Args:
      logdirs: The folders, one a run.

    Returns:
      The runs, named by what differs in their paths.

    Raises:
      ValueError: If there are no folders, one is named twice, holds no log, or its
        log is damaged.

    Examples:
      >>> import os, tempfile
      >>> from jaxaccel import train
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name, losses in {"adam": [2.0, 0.5], "sgd": [2.0, 1.0, 1.5]}.items():
      ...         with train.JsonLinesWriter(os.path.join(folder, name)) as log:
      ...             for step, loss in enumerate(losses):
      ...                 log.scalars(step, {"loss": loss})
      ...     print(train.compare(os.path.join(folder, x) for x in ("adam", "sgd")))
            adam      sgd
      loss   0.5  1.5 (1)
    """
    paths = [pathlib.Path(logdir) for logdir in logdirs]
    if not paths:
        raise ValueError("there are no runs to compare; pass their log folders")
    if len(set(map(os.path.abspath, paths))) < len(paths):
        raise ValueError(f"each run must be named once; got {[*map(str, paths)]}")
    names = _names(paths)
    return Comparison({name: _read(p) for name, p in zip(names, paths, strict=True)})


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
    absolute = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(absolute)
    if common in absolute:
        common = os.path.dirname(common)
    return [os.path.relpath(path, common) for path in absolute]


def _read(logdir: pathlib.Path) -> Curves:
    events = sorted(logdir.glob("events.out.tfevents.*"))
    if (logdir / NAME).exists():
        rows = (
            (row["step"], name, value)
            for row in read_json_lines(logdir)
            for name, value in row.items()
            if name not in ("step", "time") and isinstance(value, (int, float))
        )
    elif events:
        rows = (row for path in events for row in _event_scalars(path))
    else:
        raise ValueError(
            f"{os.fspath(logdir)!r} holds no log: neither {NAME} nor TensorBoard's "
            "events.out.tfevents.*"
        )
    found: dict[str, dict[int, float]] = {}
    for step, name, value in rows:
        found.setdefault(name, {})[step] = value
    return {
        name: (np.array(sorted(x)), np.array([x[i] for i in sorted(x)], np.float64))
        for name, x in found.items()
    }


def _event_scalars(path: pathlib.Path) -> Iterator[tuple[int, str, float]]:
    """Yields the scalars of an event file: records of length, checksum, event."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]

    with open(path, "rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            if length > os.path.getsize(path):
                raise ValueError(
                    f"{os.fspath(path)!r} is damaged before byte {file.tell()}; "
                    "remove it"
                )
            data = file.read(length)
            if len(file.read(4)) < 4:
                return  # the run was killed, or still writes
            try:
                event = Event.FromString(data)
            except DecodeError as error:
                raise ValueError(
                    f"{os.fspath(path)!r} is damaged before byte {file.tell()} "
                    f"({error}); remove it"
                ) from error
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    yield event.step, value.tag, value.simple_value


def _cell(name: str, curve: tuple[np.ndarray, np.ndarray] | None) -> str:
    if curve is None:
        return "-"
    values = curve[1]
    last = f"{values[-1]:.4g}"
    finite = values[np.isfinite(values)]
    if not len(finite):
        return last
    larger = any(word in name for word in _LARGER_IS_BETTER)
    best = f"{finite.max() if larger else finite.min():.4g}"
    return last if best == last else f"{last} ({best})"
