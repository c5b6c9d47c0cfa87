"""Traces of a few steps of a loop."""

import contextlib
import ctypes
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxaccel.train._op_table import OpTable, op_table
from jaxaccel.train._tensorboard import check_writable
from jaxaccel.train._timeline import draw_timeline
from jaxaccel.train._trace_events import STEP


class profile:  # noqa: N801 - read as a verb, like a function
    """Traces some steps of a loop; a context manager.

    Call `update` at the end of every step. The trace begins once `skip` steps are
    done, and ends `steps` later; what comes after costs nothing. The folder can be
    opened with xprof or TensorBoard (`xprof --logdir`) and its `.trace.json.gz` with
    Perfetto. Batches that `jaxaccel.data.to_device` puts are rows of their own.

    Name parts of a model with `jax.named_scope`; flax modules of linen are named
    already.

    Args:
      steps: Number of steps to trace.
      logdir: The folder; made if it is missing.
      skip: Number of steps before, so that compilation is no part of it.
      python: Whether to trace Python's calls as well, which slows them down and
        makes the files large.

    Attributes:
      traced: Number of steps that were traced.

    Raises:
      ValueError: If `steps < 1`, `skip < 0`, or the folder cannot be written.

    Examples:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import train
      >>> @jax.jit
      ... def step(x):
      ...     with jax.named_scope("square"):
      ...         return x @ x / 64
      >>> x = jnp.ones((64, 64))
      >>> with tempfile.TemporaryDirectory() as logdir:
      ...     with train.profile(2, logdir) as profile:
      ...         for _ in range(4):
      ...             x = step(x)
      ...             profile.update(x)
      ...     table = profile.table()
      >>> table.steps, max(row.scope for row in table.rows)
      (2, 'square')
    """

    def __init__(
        self,
        steps: int,
        logdir: str | os.PathLike[str],
        *,
        skip: int = 1,
        python: bool = False,
    ):
        if steps < 1 or skip < 0:
            raise ValueError(
                f"steps must be at least 1 and skip at least 0; got {steps} and {skip}"
            )
        check_writable(logdir)
        self.traced = 0
        self._logdir = pathlib.Path(logdir)
        self._steps, self._skip, self._python = steps, skip, python
        self._seen = 0
        self._annotation: Any = None
        self._active = False

    def __enter__(self) -> "profile":
        if self._skip == 0:
            self._start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stop()

    def update(self, outputs: Any) -> None:
        """Notes the end of a step.

        Args:
          outputs: What the step returned and nobody donates: its metrics. They are
            waited for where the trace begins and ends, and nowhere else.
        """
        self._seen += 1
        if self._active:
            if self.traced + 1 == self._steps:
                jax.block_until_ready(outputs)
            self._end_step()
            self.traced += 1
            if self.traced == self._steps:
                self._stop()
            else:
                self._begin_step()
        elif self._seen == self._skip:
            jax.block_until_ready(outputs)
            self._start()

    def table(self) -> OpTable:
        """Returns where the time of the traced steps went; ends the trace.

        Raises:
          ValueError: If no step was traced.
        """
        self._stop()
        if not self.traced:
            raise ValueError(
                f"no step was traced: the loop had {self._seen} steps, of which "
                f"{self._skip} are skipped. Call update() after every step"
            )
        return self._table

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Draws what ran when.

        Args:
          path: The picture, in a format that its suffix names, such as `.png`.

        Raises:
          ImportError: If matplotlib is not installed.
          ValueError: If no step was traced.
        """
        draw_timeline(self.table(), path)

    @functools.cached_property
    def _table(self) -> OpTable:
        return op_table(self._logdir)

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._python)
        jax.profiler.start_trace(os.fspath(self._logdir), profiler_options=options)
        self._active = True
        self._begin_step()

    def _stop(self) -> None:
        if self._active:
            self._active = False
            self._end_step()
            jax.profiler.stop_trace()

    def _begin_step(self) -> None:
        number = self._seen
        self._annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=number)
        self._annotation.__enter__()

    def _end_step(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None


@contextlib.contextmanager
def capture_range() -> Iterator[None]:
    """Lets NVIDIA's Nsight tools record only what runs inside.

    For `nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop` and
    `ncu --profile-from-start off`. XLA marks its programs and operations as NVTX
    ranges, with their named scopes. Wait for the device before and inside at the
    end (`jax.block_until_ready`), since steps are asynchronous.

    Raises:
      RuntimeError: If CUDA's runtime library is not there, or refuses.
    """
    cuda = _cuda_runtime()
    _call(cuda.cudaProfilerStart)
    try:
        yield
    finally:
        _call(cuda.cudaProfilerStop)


def _cuda_runtime() -> Any:
    # By the names under which jax's own packages have loaded it.
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(
        "capture_range needs CUDA's runtime library (libcudart), which is not loaded; "
        "run a step on the GPU first, with pip install 'jaxaccel[cuda]'"
    )


def _call(function: Any) -> None:
    code = function()
    if code != 0:
        raise RuntimeError(f"{function.__name__} failed with CUDA's error {code}")
