"""What a loop tells its meter, its buffer of metrics and its progress line."""

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxaccel.train._meter import Meter
from jaxaccel.train._progress import ProgressLine
from jaxaccel.train._writers import MetricBuffer

# Calls under way, where no meter bounds them: the host must not run ahead of the
# device with batches and metrics in memory, and would notice late what time it is.
_IN_FLIGHT = 2
# Steps between two readings of the metrics, where no buffer says so.
_READ_EVERY = 50


class Watch:
    """Hands each call's metrics to whoever is there to get them.

    Args:
      stack: Closes what is made here.
      meter: None makes one if the progress line needs it.
      buffer: The same.
      progress: A line, the description of one, or None.
      total: Number of steps of the run.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        meter: Meter | None,
        buffer: MetricBuffer | None,
        progress: ProgressLine | str | None,
        total: int | None,
    ):
        if isinstance(progress, str):
            assert total is not None
            progress = stack.enter_context(ProgressLine(total, progress))
        if progress is not None:
            meter = stack.enter_context(Meter()) if meter is None else meter
            buffer = MetricBuffer(every=_READ_EVERY) if buffer is None else buffer
        self._meter, self._buffer, self._progress = meter, buffer, progress
        self._in_flight: collections.deque[Any] = collections.deque()

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Returns the iterator that the loop takes its batches from."""
        return iter(batches if self._meter is None else self._meter.watch(batches))

    def update(self, i: int, metrics: Any, batch: Any) -> None:
        """Notes a call that was dispatched.

        Args:
          i: Number of steps done.
          metrics: What the call returned.
          batch: What it was given.
        """
        stacked = stacked_steps(metrics)
        if self._meter is not None:
            examples = _examples(batch, 1 if stacked is None else 2)
            self._meter.update(metrics, examples=examples, steps=stacked or 1)
        else:
            self._in_flight.append(metrics)
            if len(self._in_flight) > _IN_FLIGHT:
                jax.block_until_ready(self._in_flight.popleft())
        if self._buffer is not None and self._buffer.append(
            i, metrics, stacked=stacked
        ):
            self.show(i, self._buffer.latest)

    def show(self, i: int, values: Mapping[str, float]) -> None:
        """Shows host scalars on the progress line."""
        if self._progress is not None and self._meter is not None:
            self._progress.update(i, self._meter.reading(), dict(values))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        with contextlib.nullcontext() if self._meter is None else self._meter.paused():
            yield


def stacked_steps(metrics: Any) -> int | None:
    """Returns the number of steps that metrics are stacked from, or None for one."""
    loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
    shape = getattr(loss, "shape", ())
    return shape[0] if shape else None


def _examples(batch: Any, axes: int) -> int:
    shape = next((np.shape(x) for x in jax.tree.leaves(batch)), ())
    return int(np.prod(shape[:axes]))
