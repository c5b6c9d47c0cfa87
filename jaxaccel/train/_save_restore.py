"""A single checkpoint, written and read by two functions."""

import os
from collections.abc import Mapping
from typing import Any

from jaxaccel.train._checkpoint import STEP
from jaxaccel.train._checkpoint_files import make_checkpointer, write
from jaxaccel.train._checkpoint_parts import (
    check_writable,
    metrics_as_floats,
    part_state,
    restore_from,
)
from jaxaccel.train._trees import PyTree


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    metrics: Mapping[str, Any] | None = None,
    **parts: Any,
) -> None:
    """Writes a single checkpoint and waits for it.

    Args:
      path: A local path that is not there yet; it appears when all is written.
      state: As for `Checkpoints.save`.
      metrics: As for `Checkpoints.save`.
      **parts: As for `Checkpoints.save`.

    Raises:
      TypeError: As `Checkpoints.save`.
      ValueError: If the path is there already or cannot be written.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from jaxaccel import train
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     train.save(folder + "/weights", {"w": jnp.array([1.0, 2.0])})
      ...     print(train.restore(folder + "/weights", {"w": jnp.zeros(2)})["w"])
      [1. 2.]
    """
    path = os.path.abspath(path)
    if os.path.exists(path):
        raise ValueError(f"{path} is there already, and is not overwritten")
    check_writable(os.path.dirname(path))
    host = {
        "metrics": metrics_as_floats(metrics),
        "parts": {name: part_state(name, x) for name, x in parts.items()},
    }
    with make_checkpointer() as checkpointer:
        write(checkpointer, path, state, host)
        checkpointer.wait_until_finished()


def restore(path: str | os.PathLike[str], like: PyTree, **parts: Any) -> PyTree:
    """Reads a checkpoint, or the latest one of a folder of `Checkpoints`.

    It only reads: the folder may belong to a run that is still going on.

    Args:
      path: The checkpoint or the folder.
      like: As for `Checkpoints.restore`.
      **parts: As for `Checkpoints.restore`.

    Returns:
      The state.

    Raises:
      ValueError: As `Checkpoints.restore`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxaccel import train
      >>> train.restore("nowhere", {"w": jnp.zeros(2)})
      Traceback (most recent call last):
      ValueError: there is no checkpoint at 'nowhere'
    """
    folder = os.path.abspath(path)
    if not os.path.isdir(folder):
        raise ValueError(f"there is no checkpoint at {os.fspath(path)!r}")
    names = [name for name in os.listdir(folder) if STEP.fullmatch(name)]
    if names:
        folder = os.path.join(folder, max(names))
    with make_checkpointer() as checkpointer:
        return restore_from(checkpointer, folder, like, parts)
