"""How far a long piece of work is."""

import contextlib
import importlib
import sys
import time
from typing import Any

# Lines stay where they are written; they come more rarely than a bar moves.
_SECONDS_BETWEEN_LINES = 10.0


class Bar:
    """A bar on a terminal, plain lines elsewhere; a context manager.

    On a terminal it needs rich, and without it writes lines there, too. The first
    line comes after ten seconds: what is quick says nothing.

    Args:
      total: What `update` will reach.
      description: What is being done.
      enabled: False shows nothing.
      file: Where to; None means standard error.
    """

    def __init__(
        self, total: int, description: str, *, enabled: bool = True, file: Any = None
    ):
        self._total, self._description = total, description
        self._enabled = enabled
        self._file = sys.stderr if file is None else file
        self._start = time.monotonic()
        self._next_line = self._start + _SECONDS_BETWEEN_LINES
        self._live = self._make_live() if enabled else None

    def update(self, done: int, note: str = "") -> None:
        """Shows how much is done."""
        if self._live is not None:
            bar, task = self._live
            bar.update(task, completed=done, note=note)
        elif self._enabled and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            text = self._text(done, note)
            print(text, file=self._file, flush=True)

    def __enter__(self) -> "Bar":
        if self._live is not None:
            self._live[0].start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live[0].stop()

    def _text(self, done: int, note: str) -> str:
        share = done / self._total if self._total else 1.0
        text = f"{self._description}: {share:.0%}"
        if note:
            text += f", {note}"
        if 0 < share < 1:
            left = (time.monotonic() - self._start) * (1 - share) / share
            text += (
                f", {left:.0f} s left" if left < 60 else f", {left / 60:.1f} min left"
            )
        return text

    def _make_live(self) -> tuple[Any, Any] | None:
        if not getattr(self._file, "isatty", lambda: False)():
            return None
        with contextlib.suppress(ImportError):
            console = importlib.import_module("rich.console")
            progress = importlib.import_module("rich.progress")
            bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeRemainingColumn(),
                console=console.Console(file=self._file),
            )
            return bar, bar.add_task(self._description, total=self._total, note="")
        return None
