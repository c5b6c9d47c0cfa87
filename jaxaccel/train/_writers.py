"""Logs: a TensorBoard writer, and a buffer that reads the device now and then."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


class TensorBoardWriter:
    """Writes scalars, images and text for TensorBoard; a context manager.

    Leaving the context, also by an exception or Ctrl-C, writes everything out.

    Args:
      logdir: The folder; made if it is missing.

    Raises:
      ValueError: If the folder cannot be made or written.

    Examples:
      >>> import tempfile
      >>> from jaxaccel import train
      >>> with tempfile.TemporaryDirectory() as logdir:
      ...     with train.TensorBoardWriter(logdir) as writer:
      ...         writer.scalars(0, {"loss": 2.3})
      ...     print(len(list(os.scandir(logdir))))
      1
    """

    def __init__(self, logdir: str | os.PathLike[str]):
        _check_writable(logdir)
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(os.fspath(logdir), flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes host scalars; a nested dict gives names joined by a slash."""
        for name, value in _flatten(values):
            self._writer.add_scalar(name, float(value), step)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Writes uint8 images of shape `[batch, height, width, channels]`."""
        images = np.asarray(images)
        if (
            images.dtype != np.uint8
            or images.ndim != 4
            or images.shape[-1]
            not in {
                1,
                3,
            }
        ):
            raise ValueError(
                "images must be uint8 [batch, height, width, 1 or 3]; got "
                f"{images.dtype} {images.shape}"
            )
        self._writer.add_images(name, images, step, dataformats="NHWC")

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text, in Markdown."""
        self._writer.add_text(name, text, step)

    def flush(self) -> None:
        """Writes everything out."""
        self._writer.flush()

    def close(self) -> None:
        """Writes everything out and closes the file."""
        self._writer.close()

    def __enter__(self) -> "TensorBoardWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class MetricBuffer:
    """Keeps metrics on the device and reads them every `every` steps, all at once.

    Reading a metric makes the host wait for the device. The buffer does it once for
    many steps, with one transfer, and no step's metrics are lost.

    Args:
      writer: Where they go, anything with `scalars(step, values)`; None keeps only
        the latest.
      every: Number of steps between two readings.

    Attributes:
      latest: The metrics of the last step that was read, as floats; {} at first.

    Raises:
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
        self.latest: dict[str, float] = {}
        self._writer = writer
        self._every = every
        self._pending: list[tuple[int, Mapping[str, Any]]] = []

    def append(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Keeps one step's metrics; returns whether this call read the device."""
        self._pending.append((step, metrics))
        if len(self._pending) < self._every:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Reads and writes what is kept."""
        steps = [step for step, _ in self._pending]
        values = jax.device_get([metrics for _, metrics in self._pending])
        self._pending.clear()
        for step, metrics in zip(steps, values, strict=True):
            self.latest = {name: float(x) for name, x in _flatten(metrics)}
            if self._writer is not None:
                self._writer.scalars(step, self.latest)

    def __enter__(self) -> "MetricBuffer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.flush()


def _flatten(values: Mapping[str, Any], prefix: str = ""):
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _check_writable(logdir: str | os.PathLike[str]) -> None:
    try:
        os.makedirs(logdir, exist_ok=True)
        with tempfile.TemporaryFile(dir=logdir):
            return
    except OSError as error:
        raise ValueError(
            f"the log folder {os.fspath(logdir)!r} cannot be written "
            f"({error.strerror}); choose another one"
        ) from error
