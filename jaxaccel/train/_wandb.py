"""Logs for Weights & Biases."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxaccel.train._tensorboard import check_writable, figure_pixels
from jaxaccel.train._writers import flatten


class WandbWriter:
    """Writes a run of Weights & Biases, by default without a network.

    Args:
      logdir: The folder of the run's files; made if it is missing.
      project: Name of the project.
      mode: `"offline"` writes files only, which `wandb sync` sends later;
        `"online"` sends them while it runs; `"disabled"` does nothing.
      **options: Further arguments of `wandb.init`, such as `name` or `config`.

    Raises:
      ImportError: If wandb is not installed.
      ValueError: If the folder cannot be made or written.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        project: str,
        mode: str = "offline",
        **options: Any,
    ):
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError(
                "WandbWriter needs wandb: pip install 'jaxaccel[wandb]'"
            ) from error
        check_writable(logdir)
        self._wandb = wandb
        self._run: Any = wandb.init(
            project=project, dir=os.fspath(logdir), mode=mode, **options
        )
        # Steps of a log may come in any order; wandb's own must only grow.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes host scalars; a nested dict gives names joined by a slash."""
        self._log(step, {name: float(x) for name, x in flatten(values)})

    def histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the distributions of arrays; values that are not finite are left out.

        Args:
          step: The number of the step.
          values: Arrays by name, nested or flat.
        """
        found = {}
        for name, value in flatten(values):
            array = np.asarray(jax.device_get(value)).astype(np.float64).ravel()
            finite = array[np.isfinite(array)]
            if len(finite) < len(array):
                found[f"{name}/non_finite"] = float(len(array) - len(finite))
            if len(finite):
                found[name] = self._wandb.Histogram(finite)
        self._log(step, found)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Writes uint8 images of shape `[batch, height, width, channels]`."""
        squeezed = [x[..., 0] if x.shape[-1] == 1 else x for x in np.asarray(images)]
        self._log(step, {name: [self._wandb.Image(x) for x in squeezed]})

    def figure(self, step: int, name: str, figure: Any) -> None:
        """Writes a matplotlib figure as an image; the caller closes it."""
        self._log(step, {name: self._wandb.Image(figure_pixels(figure))})

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text."""
        self._log(step, {name: text})

    def hparams(
        self, values: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Writes the hyperparameters of the run and its results.

        Args:
          values: Anything that JSON holds, by name.
          metrics: Final results by name.
        """
        self._run.config.update(dict(values))
        self._run.summary.update({k: float(x) for k, x in (metrics or {}).items()})

    def flush(self) -> None:
        """Does nothing: wandb's own process writes everything out."""

    def close(self) -> None:
        """Writes everything out and ends the run."""
        self._run.finish()

    def __enter__(self) -> "WandbWriter":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "step": int(step)})
