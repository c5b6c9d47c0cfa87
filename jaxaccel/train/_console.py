"""A log that is read while it runs."""

import sys
from collections.abc import Mapping
from typing import Any

from jaxaccel.train._writers import flatten


class ConsoleWriter:
    """Prints one line a step, of at most every `every`-th step.

    Args:
      file: Where it is printed; None means standard error.
      every: Only steps that are multiples of it are printed.

    Raises:
      ValueError: If `every < 1`.

    Examples:
      >>> import sys
      >>> from jaxaccel import train
      >>> writer = train.ConsoleWriter(file=sys.stdout, every=10)
      >>> for step in (9, 10):
      ...     writer.scalars(step, {"loss": 0.123456, "examples_per_second": 51234.0})
      step 10: loss 0.1235, examples_per_second 5.123e+04
    """

    def __init__(self, *, file: Any = None, every: int = 1):
        if every < 1:
            raise ValueError(f"every must be at least 1 step; got {every}")
        self._file = sys.stderr if file is None else file
        self._every = every

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Prints host scalars; a nested dict gives names joined by a slash."""
        if step % self._every == 0:
            parts = [f"{name} {float(value):.4g}" for name, value in flatten(values)]
            print(f"step {step}: {', '.join(parts)}", file=self._file)

    def flush(self) -> None:
        """Writes everything out."""
        self._file.flush()

    def close(self) -> None:
        """Writes everything out; the file stays open."""
        self._file.flush()

    def __enter__(self) -> "ConsoleWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
