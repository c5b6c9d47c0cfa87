"""Checkpoints of a run: asynchronous, atomic, checked when they are restored."""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, Literal

import jax

from jaxaccel.train._checkpoint_files import make_checkpointer, read_host, write
from jaxaccel.train._checkpoint_parts import (
    as_json,
    check_position,
    check_writable,
    metrics_as_floats,
    part_state,
    restore_from,
)
from jaxaccel.train._trees import PyTree, differences

STEP = re.compile(r"step_(\d+)")
# Left by a process that died while it saved, or while it removed.
_LEFT_OVER = re.compile(r"step_\d+\.(orbax-checkpoint-tmp.*|removing)|\.run-.*")
_RUN_FILE = "run.json"


class Checkpoints:
    """The checkpoints of one run, in one folder; a context manager.

    `save` copies the arrays to the host and returns; a thread writes them. Until all
    is written the checkpoint has another name, and an older one goes only after a
    newer one is complete: a process that dies at any moment leaves the last complete
    checkpoint as it was. The context waits for the thread when it ends.

    A checkpoint holds the whole state, typed PRNG keys and optimizer included, the
    metrics, and the state of every part named in `save`: objects with `get_state()`
    and `set_state(state)`, such as the batches of `jaxaccel.data.to_device` or a
    `Meter`. Everything that a step depends on is then restored, and a resumed run
    computes the bits of one that was never interrupted.

    A folder belongs to one run: what another one has saved is neither mixed with new
    checkpoints nor overwritten.

    Args:
      folder: A local folder; made if it is missing.
      keep_last: Number of newest checkpoints that are kept.
      keep_best: Number of best ones that are kept besides, where `best` is given.
      best: Name of the metric that ranks them; None ranks none.
      mode: Whether `best` is better when smaller (`"min"`) or larger (`"max"`).
      run: JSON-able settings that tell this run from others (model, seed, data).
        They are saved with the first checkpoint; None compares nothing.

    Raises:
      ValueError: If a number is out of range, the folder cannot be written, holds
        the checkpoints of a run with other settings, or others' checkpoints.
      TypeError: If `run` is not JSON-able.

    Examples:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxaccel import train
      >>> tx = optax.sgd(0.1)
      >>> def fresh_state():
      ...     params = {"w": jnp.zeros(3)}
      ...     return train.TrainState.create(params, tx, key=jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with train.Checkpoints(folder, best="loss") as checkpoints:
      ...         for step in (10, 20, 30, 40):
      ...             state = fresh_state().replace(step=jnp.int32(step))
      ...             _ = checkpoints.save(state, metrics={"loss": abs(step - 19.0)})
      ...     with train.Checkpoints(folder) as checkpoints:
      ...         steps = checkpoints.steps
      ...         state = checkpoints.restore(fresh_state(), step=20)
      >>> print(steps, state.step)
      [20, 30, 40] 20
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        run: Mapping[str, Any] | None = None,
    ):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                "keep_last must be at least 1 and keep_best at least 0; got "
                f"{keep_last} and {keep_best}"
            )
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; got {mode!r}")
        self._folder = os.path.abspath(folder)
        self._keep_last, self._keep_best = keep_last, keep_best
        self._best, self._sign = best, 1.0 if mode == "min" else -1.0
        self._settings = as_json("run", run)
        check_writable(self._folder)
        self._check_run()
        self._checkpointer = make_checkpointer()
        self._newest: int | None = None
        """The step that this object has saved or restored last."""
        self._writing: int | None = None
        self._claimed = False
        self._metrics: dict[int, dict[str, float]] = {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @property
    def folder(self) -> str:
        """The absolute path of the folder."""
        return self._folder

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        found = map(STEP.fullmatch, os.listdir(self._folder))
        return sorted(int(match[1]) for match in found if match)

    @property
    def latest_step(self) -> int | None:
        """The last of them; None if there is none."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The one with the best metric; None if none has it."""
        return min(self._ranked(), default=(0.0, None))[1]

    @property
    def current_step(self) -> int | None:
        """The step that this object has saved or restored last; None at first."""
        return self._newest

    def save(
        self, state: PyTree, *, metrics: Mapping[str, Any] | None = None, **parts: Any
    ) -> bool:
        """Saves a state that has done its step, and before it goes into the next.

        Args:
          state: A pytree of arrays with an attribute `step`.
          metrics: Scalars to keep with it, such as those of an evaluation.
          **parts: What to save besides, by name: objects with `get_state()`, which
            returns a JSON-able dict. The part `loader` must have handed out as many
            batches as the state has done steps.

        Returns:
          Whether it was saved: not if it is the step that was saved or restored
          last.

        Raises:
          TypeError: If a leaf is no array, or a part or a metric cannot be saved.
          ValueError: If the loader stands elsewhere than the state, the metric
            `best` is missing, the folder holds checkpoints of another run or later
            ones, or the one before could not be written.
        """
        step = int(jax.device_get(state.step))
        if step == self._newest:
            return False
        host = {
            "step": step,
            "metrics": self._check_metrics(metrics),
            "parts": {name: part_state(name, x) for name, x in parts.items()},
        }
        check_position(step, host["parts"].get("loader"))
        self.wait()
        if self._newest is None or max(self.steps, default=-1) >= step:
            self._check_own_folder(step)
        if not self._claimed:
            self._claim()
        write(self._checkpointer, self._step_path(step), state, host)
        self._newest = self._writing = step
        self._metrics[step] = host["metrics"]
        return True

    def restore(self, like: PyTree, *, step: int | None = None, **parts: Any) -> PyTree:
        """Restores a state.

        Args:
          like: A state of the same structure, shapes and dtypes, such as the initial
            one: it is not changed. Its arrays may be abstract. Those that are
            committed to devices say where the restored ones go.
          step: Which checkpoint; None takes the latest.
          **parts: Objects with `set_state(state)` that continue where those saved
            under the same names were.

        Returns:
          The state.

        Raises:
          ValueError: If there is no such checkpoint, it is damaged, does not fit
            (naming what is missing, superfluous or of another shape or dtype), lacks
            a part, or a part refuses its state.
        """
        self.wait()
        step = self.latest_step if step is None else step
        if step is None or step not in self.steps:
            raise ValueError(
                f"there is no checkpoint {'' if step is None else f'of step {step} '}"
                f"in {self._folder}; it has {self.steps or 'none'}"
            )
        state = restore_from(self._checkpointer, self._step_path(step), like, parts)
        self._newest = step
        return state

    def resume(self, state: PyTree, **parts: Any) -> PyTree:
        """Restores the latest checkpoint, or returns the state if there is none.

        Args:
          state: As `like` of `restore`, the state that a new run starts with.
          **parts: As for `restore`.

        Returns:
          The state to go on with.

        Raises:
          ValueError: As `restore`.
        """
        if self.latest_step is None and self._writing is None:
            return state
        return self.restore(state, **parts)

    def saved_parts(self, step: int) -> dict[str, Any]:
        """Returns the states of the parts that were saved with a step, by name."""
        self.wait()
        return read_host(self._checkpointer, self._step_path(step))["parts"]

    def wait(self) -> None:
        """Waits until what was saved is complete, and removes what need not stay.

        Raises:
          ValueError: If it could not be written.
        """
        step, self._writing = self._writing, None
        if step is None:
            return
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            self._newest = self.latest_step
            raise ValueError(
                f"the checkpoint of step {step} could not be written to "
                f"{self._folder} ({error}); the ones before it are as they were"
            ) from error
        if jax.process_index() == 0:
            self._prune()

    def close(self) -> None:
        """Waits, then ends the thread."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _step_path(self, step: int) -> str:
        return self._path(f"step_{step:08d}")

    def _check_metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        values = metrics_as_floats(metrics)
        if metrics is not None and self._best not in (None, *values):
            raise ValueError(
                f"the metrics lack {self._best!r}, which ranks the checkpoints; they "
                f"are {sorted(values)}"
            )
        return values

    def _ranked(self) -> list[tuple[float, int]]:
        """Pairs of metric and step, the smaller the better; ties go to the first."""
        ranked = []
        for step in self.steps if self._best is not None else []:
            if step not in self._metrics:
                host = read_host(self._checkpointer, self._step_path(step))
                self._metrics[step] = host["metrics"]
            value = self._metrics[step].get(str(self._best), math.nan)
            if not math.isnan(value):
                ranked.append((self._sign * value, step))
        return sorted(ranked)

    def _prune(self) -> None:
        steps = self.steps
        kept = {step for _, step in self._ranked()[: self._keep_best]}
        kept.update(steps[-self._keep_last :])
        for step in steps:
            if step not in kept:
                # Renamed first: half of a checkpoint must never look like one.
                path = self._step_path(step)
                os.rename(path, path + ".removing")
                shutil.rmtree(path + ".removing")

    def _check_run(self) -> None:
        path = self._path(_RUN_FILE)
        if not os.path.exists(path):
            if self.steps:
                raise ValueError(
                    f"{self._folder} holds checkpoints of step {self.steps}, but no "
                    f"{_RUN_FILE}: jaxaccel has not written them. Choose another "
                    "folder"
                )
            return
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)["settings"]
        if self._settings is not None and self._settings != saved:
            before, now = (
                {f"run[{name!r}]": repr(x) for name, x in (settings or {}).items()}
                for settings in (saved, self._settings)
            )
            raise ValueError(
                f"{self._folder} belongs to another run:\n"
                f"{differences(before, now, 'saved')}\nChoose another folder"
            )

    def _check_own_folder(self, step: int) -> None:
        if self._newest is None and self.steps:
            raise ValueError(
                f"{self._folder} holds the checkpoints {self.steps} of an earlier run; "
                "`resume` or `restore` continues it, a new run needs another folder"
            )
        if max(self.steps, default=-1) >= step:
            raise ValueError(
                f"{self._folder} holds checkpoints up to step {self.latest_step}, and "
                f"this is step {step}: they would be mixed with another branch of the "
                "run. Save to another folder, or remove the later ones"
            )

    def _claim(self) -> None:
        """Marks the folder as this run's, and clears what a dead process left."""
        self._claimed = True
        if jax.process_index():
            return
        for name in os.listdir(self._folder):
            if _LEFT_OVER.fullmatch(name):
                path = self._path(name)
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        if os.path.exists(self._path(_RUN_FILE)):
            return
        # Written beside and renamed, so that it is never there by half.
        handle, path = tempfile.mkstemp(dir=self._folder, prefix=".run-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"settings": self._settings}, file)
        os.replace(path, self._path(_RUN_FILE))
