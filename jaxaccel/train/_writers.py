"""Where metrics go, and a buffer that reads the device now and then."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np


@runtime_checkable
class Writer(Protocol):
    """What a log has to be able to do.

    `TensorBoardWriter`, `JsonLinesWriter`, `ConsoleWriter`, `WandbWriter` and
    `PrometheusWriter` are such logs, and so is any object of yours with these three
    methods. A log that can show more has `histograms(step, values)`,
    `images(step, name, images)`, `figure(step, name, figure)`,
    `text(step, name, text)` and `hparams(values, metrics)` as well.
    """

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes host scalars; a nested dict gives names joined by a slash."""
        ...

    def flush(self) -> None:
        """Writes everything out."""
        ...

    def close(self) -> None:
        """Writes everything out and ends the log."""
        ...


class Writers:
    """Hands everything on to several logs; a context manager that closes them.

    Histograms, images, figures, texts and hyperparameters go to those that can
    show them.

    Args:
      *writers: The logs.

    Raises:
      TypeError: If one is no `Writer`.

    Examples:
      >>> import sys
      >>> from jaxaccel import train
      >>> console = train.ConsoleWriter(file=sys.stdout)
      >>> with train.Writers(console, console) as writers:
      ...     writers.scalars(3, {"loss": 0.5})
      ...     writers.text(3, "note", "a console shows no texts")
      step 3: loss 0.5
      step 3: loss 0.5
    """

    def __init__(self, *writers: Any):
        for writer in writers:
            check_writer(writer)
        self._writers = writers

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes host scalars."""
        self._call("scalars", step, values)

    def histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the distributions of arrays."""
        self._call("histograms", step, values)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Writes uint8 images of shape `[batch, height, width, channels]`."""
        self._call("images", step, name, images)

    def figure(self, step: int, name: str, figure: Any) -> None:
        """Writes a matplotlib figure."""
        self._call("figure", step, name, figure)

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text, in Markdown."""
        self._call("text", step, name, text)

    def hparams(
        self, values: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Writes the hyperparameters of a run and its results."""
        self._call("hparams", values, metrics)

    def flush(self) -> None:
        """Writes everything out."""
        self._call("flush")

    def close(self) -> None:
        """Closes all of them, also if one fails."""
        failures = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _call(self, method: str, *args: Any) -> None:
        for writer in self._writers:
            if hasattr(writer, method):
                getattr(writer, method)(*args)


class MetricBuffer:
    """Keeps metrics on the device and reads them every `every` steps, all at once.

    Reading a metric makes the host wait for the device. The buffer does it once for
    many steps, with one transfer, and no step's metrics are lost. Metrics that are
    arrays, such as probes, become histograms where the writer has `histograms`.

    Args:
      writer: Where they go, anything with `scalars(step, values)`; None keeps only
        the latest.
      every: Number of steps between two readings.

    Attributes:
      latest: The scalar metrics of the last step that was read, as floats; {} at
        first.

    Raises:
      TypeError: If `writer` has no `scalars`.
      ValueError: If `every < 1`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxaccel import train
      >>> buffer = train.MetricBuffer(every=2)
      >>> buffer.append(1, {"loss": jnp.array(0.5)})
      False
      >>> buffer.append(2, {"loss": jnp.array(0.25)})
      True
      >>> buffer.latest
      {'loss': 0.25}
    """

    def __init__(self, writer: Any = None, *, every: int = 50):
        if every < 1:
            raise ValueError(f"every must be at least 1 step; got {every}")
        if writer is not None and not hasattr(writer, "scalars"):
            raise TypeError(
                "writer needs a method scalars(step, values), see "
                f"jaxaccel.train.Writer; got {type(writer).__name__}"
            )
        self.latest: dict[str, float] = {}
        self._writer = writer
        self._every = every
        self._steps = 0
        self._pending: list[tuple[int, int | None, Mapping[str, Any]]] = []

    def append(
        self, step: int, metrics: Mapping[str, Any], *, stacked: int | None = None
    ) -> bool:
        """Keeps metrics.

        Args:
          step: The number of the step, the last one of several.
          metrics: A dict of arrays on the device, nested or flat.
          stacked: None for one step's metrics; `k` for those of `k` steps of one
            call, stacked along a leading axis.

        Returns:
          Whether this call read the device.

        Raises:
          ValueError: When they are read: if a metric's leading axis is not
            `stacked`.
        """
        self._pending.append((step, stacked, metrics))
        self._steps += 1 if stacked is None else stacked
        if self._steps < self._every:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Reads and writes what is kept."""
        pending, self._pending, self._steps = self._pending, [], 0
        values = jax.device_get([metrics for *_, metrics in pending])
        for (step, stacked, _), metrics in zip(pending, values, strict=True):
            for number, row in _rows(step, stacked, dict(flatten(metrics))):
                self._write(number, row)

    def __enter__(self) -> "MetricBuffer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.flush()

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        arrays = {name: x for name, x in values.items() if np.size(x) != 1}
        # float() of an array with axes is deprecated by NumPy.
        self.latest = {
            name: float(np.reshape(x, ()))
            for name, x in values.items()
            if name not in arrays
        }
        if self._writer is not None:
            self._writer.scalars(step, self.latest)
            if arrays and hasattr(self._writer, "histograms"):
                self._writer.histograms(step, arrays)


def _rows(
    step: int, stacked: int | None, values: Mapping[str, Any]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if stacked is None:
        yield step, values
        return
    for name, x in values.items():
        if np.shape(x)[:1] != (stacked,):
            raise ValueError(
                f"metric {name!r} of shape {np.shape(x)} is not stacked from {stacked} "
                "steps; hand on what the step returned"
            )
    for i in range(stacked):
        yield step - stacked + 1 + i, {name: x[i] for name, x in values.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts, by names joined by a slash."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def check_writer(writer: Any) -> None:
    """Raises unless an object is a `Writer`."""
    if not isinstance(writer, Writer):
        raise TypeError(
            "a writer needs the methods scalars(step, values), flush() and close(), "
            f"see jaxaccel.train.Writer; got {type(writer).__name__}"
        )
