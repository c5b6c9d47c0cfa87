"""Logs for TensorBoard, through tensorboardX."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxaccel.train._graph import graph_of
from jaxaccel.train._writers import flatten


class TensorBoardWriter:
    """Writes scalars, histograms, images, figures, texts and graphs for TensorBoard.

    A context manager: leaving it, also by an exception or Ctrl-C, writes everything
    out.

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
        check_writable(logdir)
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(os.fspath(logdir), flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes host scalars; a nested dict gives names joined by a slash."""
        for name, value in flatten(values):
            self._writer.add_scalar(name, float(value), step)

    def histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the distributions of arrays, of any shape and real dtype.

        Values that are not finite are left out and counted, as the scalar
        `<name>/non_finite`.

        Args:
          step: The number of the step.
          values: Arrays by name, nested or flat.
        """
        for name, value in flatten(values):
            # No NumPy routine knows bfloat16.
            array = np.asarray(jax.device_get(value)).astype(np.float64).ravel()
            finite = array[np.isfinite(array)]
            if len(finite) < len(array):
                self.scalars(step, {f"{name}/non_finite": len(array) - len(finite)})
            if len(finite):
                self._writer.add_histogram(name, finite, step)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Writes uint8 images of shape `[batch, height, width, channels]`."""
        images = np.asarray(images)
        channels = images.shape[-1] if images.ndim == 4 else None
        if images.dtype != np.uint8 or channels not in {1, 3}:
            raise ValueError(
                "images must be uint8 [batch, height, width, 1 or 3]; got "
                f"{images.dtype} {images.shape}"
            )
        self._writer.add_images(name, images, step, dataformats="NHWC")

    def figure(self, step: int, name: str, figure: Any) -> None:
        """Writes a matplotlib figure as an image; the caller closes it."""
        self.images(step, name, figure_pixels(figure)[None])

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text, in Markdown."""
        self._writer.add_text(name, text, step)

    def hparams(
        self, values: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Writes the hyperparameters of the run and its results, side by side.

        Args:
          values: Numbers, texts or truth values by name; anything else is written
            as its text.
          metrics: Final results by name, other names than those of the scalars.
        """
        plain = {
            name: x if isinstance(x, (bool, int, float, str)) else str(x)
            for name, x in flatten(values)
        }
        results = {name: float(x) for name, x in (metrics or {}).items()}
        self._writer.add_hparams(plain, results, name="hparams")

    def graph(self, function: Any, *args: Any) -> None:
        """Writes the computational graph of a function, grouped by named scopes.

        Args:
          function: A function of jax, jitted or not, such as the train step.
          *args: Its arguments, arrays or `jax.ShapeDtypeStruct`s.
        """
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]

        event = Event(graph_def=graph_of(function, *args).SerializeToString())
        self._writer.file_writer.add_event(event)  # type: ignore[union-attr]

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


def figure_pixels(figure: Any) -> np.ndarray:
    """Draws a matplotlib figure.

    Args:
      figure: The figure, from pyplot or not.

    Returns:
      Its pixels, uint8 `[height, width, 3]`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    before = figure.canvas
    canvas = FigureCanvasAgg(figure)
    try:
        canvas.draw()
        return np.array(canvas.buffer_rgba())[..., :3]
    finally:
        # A figure on a screen keeps its window.
        figure.set_canvas(before)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Makes a log folder, or says why it cannot be used."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise ValueError(
            f"the log folder {os.fspath(folder)!r} cannot be written "
            f"({error.strerror}); choose another one"
        ) from error
