"""One line that says how training is doing."""

import sys
import time
from typing import Any

from jaxaccel.train._meter import MeterReading

# Lines are fewer where they stay, in a file, than where they replace each other.
_SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """Shows steps, examples/s, time left, starvation and metrics; a context manager.

    On a terminal it is one live line; elsewhere a plain line every ten seconds and
    one at the end.

    Args:
      total_steps: Number of steps of the run.
      description: What runs.
      file: Where it is written; None means standard error.

    Raises:
      ImportError: If rich is not installed.

    Examples:
      >>> import sys
      >>> from jaxaccel import train
      >>> reading = train.MeterReading(steps=9, examples=900, seconds=3.0,
      ...     examples_per_second=300.0, step_seconds=0.3, starvation=0.021)
      >>> with train.ProgressLine(30, "baseline", file=sys.stdout) as progress:
      ...     progress.update(10, reading, {"loss": 0.5})
      baseline 10/30 steps, 300 examples/s, 6.7 s left, 2.1% starved, loss 0.500
    """

    def __init__(self, total_steps: int, description: str, *, file: Any = None):
        try:
            from rich import console, progress
        except ImportError as error:
            raise ImportError(
                "the progress line needs rich: pip install 'jaxaccel[examples]'"
            ) from error
        self._total = total_steps
        self._description = description
        self._file = sys.stderr if file is None else file
        screen = console.Console(file=self._file)
        self._live = screen.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.fields[status]}"),
            console=screen,
            disable=not self._live,
        )
        self._task = self._bar.add_task(description, total=total_steps, status="")
        self._next_line = 0.0
        self._unwritten = ""

    def update(
        self, step: int, reading: MeterReading, metrics: dict[str, float] | None = None
    ) -> None:
        """Shows a new state of the run.

        Args:
          step: Number of steps done.
          reading: From `Meter.reading()`.
          metrics: Host scalars to show, such as `MetricBuffer.latest`.
        """
        status = _status(step, self._total, reading, metrics or {})
        self._bar.update(self._task, completed=step, status=status)
        if self._live:
            return
        self._unwritten = f"{self._description} {status}"
        if time.monotonic() >= self._next_line:
            self._write_line()

    def close(self) -> None:
        """Ends the line."""
        if self._unwritten:
            self._write_line()
        self._bar.stop()

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _write_line(self) -> None:
        print(self._unwritten, file=self._file, flush=True)
        self._unwritten = ""
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES


def _status(
    step: int, total: int, reading: MeterReading, metrics: dict[str, float]
) -> str:
    parts = [f"{step}/{total} steps", f"{reading.examples_per_second:,.0f} examples/s"]
    if reading.steps:
        left = max(0, total - step) * reading.seconds / reading.steps
        parts.append(f"{left:.1f} s left" if left < 60 else f"{left / 60:.1f} min left")
    parts.append(f"{reading.starvation:.1%} starved")
    parts += [f"{name} {value:.3f}" for name, value in metrics.items()]
    return ", ".join(parts)
