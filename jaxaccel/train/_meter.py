"""Throughput, step time and starvation of a training loop."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class MeterReading:
    """What a `Meter` has seen so far, without the steps it skips.

    Attributes:
      steps: Number of finished steps.
      examples: Number of their examples.
      seconds: Wall time from the first to the last of them, without pauses.
      examples_per_second: `examples / seconds`.
      step_seconds: Mean time that a step kept the device busy.
      starvation: Share of the time that the device was idle since the next batch
        was not there yet, 0 to 1.
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    examples_per_second: float = 0.0
    step_seconds: float = 0.0
    starvation: float = 0.0


@dataclasses.dataclass
class _Step:
    examples: int
    fetched: float
    """When its batch had arrived."""
    paused: float
    """Length of the pauses between the step before and this one."""
    dispatched: float = 0.0
    outputs: Any = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


class Meter:
    """Measures a loop of asynchronous steps, from the outside.

    Calls of a jitted function return before the device is done, so timing them
    says little. A thread of the meter waits for each step's outputs and notes when
    they are there; a step is starved for the time between the end of the step
    before and the arrival of its batch. The loop itself never waits, except that it
    runs at most `max_in_flight` steps ahead of the device.

    Use it as a context manager, wrap the batches in `watch`, and hand each step's
    metrics (never its state, whose memory is donated) to `update`.

    Args:
      max_in_flight: How many steps may be dispatched and unfinished.
      skip: Number of first steps left out, those that compile.

    Raises:
      ValueError: If `max_in_flight < 1` or `skip < 0`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxaccel import train
      >>> with train.Meter(skip=1) as meter:
      ...     for batch in meter.watch([jnp.ones((8, 2))] * 5):
      ...         meter.update(batch.sum(), examples=8)
      >>> reading = meter.reading()
      >>> print(reading.steps, reading.examples)
      4 32
    """

    def __init__(self, *, max_in_flight: int = 2, skip: int = 1):
        if max_in_flight < 1 or skip < 0:
            raise ValueError(
                "max_in_flight must be at least 1 and skip at least 0; got "
                f"{max_in_flight} and {skip}"
            )
        self._max_in_flight = max_in_flight
        self._skip = skip
        self._clock: Callable[[], float] = time.perf_counter
        self._queue: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._in_flight: list[_Step] = []
        self._lock = threading.Lock()
        self._totals = MeterReading()
        self._busy = self._idle = 0.0
        self._seen = 0
        self._last_done: float | None = None
        self._fetched = self._paused = 0.0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Meter":
        self._thread = threading.Thread(target=self._wait_for_steps, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches and notes when each arrived."""
        for batch in batches:
            self._fetched = self._clock()
            yield batch

    def update(self, outputs: Any, *, examples: int) -> None:
        """Notes a dispatched step.

        Args:
          outputs: Arrays that the step returned and nobody donates: its metrics.
          examples: Number of examples of the step.

        Raises:
          RuntimeError: Outside of the meter's context.
        """
        if self._thread is None:
            raise RuntimeError("a Meter measures inside its context: `with Meter() as`")
        step = _Step(examples, self._fetched, self._paused)
        step.dispatched, step.outputs = self._clock(), outputs
        self._paused = 0.0
        self._in_flight.append(step)
        self._queue.put(step)
        while len(self._in_flight) > self._max_in_flight:
            self._in_flight.pop(0).done.wait()
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside, such as an evaluation."""
        self.drain()
        start = self._clock()
        yield
        self._paused += self._clock() - start

    def drain(self) -> None:
        """Waits until every dispatched step is done."""
        while self._in_flight:
            self._in_flight.pop(0).done.wait()

    def reading(self) -> MeterReading:
        """Returns the figures of the steps that are done."""
        with self._lock:
            return self._totals

    def _wait_for_steps(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                jax.block_until_ready(step.outputs)
            except BaseException as error:  # raised again by the loop's next update
                self._failure = error
            step.outputs = None
            self._add(step, self._clock())
            step.done.set()

    def _add(self, step: _Step, done: float) -> None:
        before, self._last_done = self._last_done, done
        self._seen += 1
        if self._seen <= self._skip or before is None:
            return
        # A pause is no waiting: count as if the step before had ended after it.
        before += step.paused
        idle = max(0.0, step.fetched - before)
        busy = done - max(before, min(step.dispatched, done))
        with self._lock:
            self._idle += idle
            self._busy += busy
            steps = self._totals.steps + 1
            examples = self._totals.examples + step.examples
            seconds = self._totals.seconds + done - before
            self._totals = MeterReading(
                steps=steps,
                examples=examples,
                seconds=seconds,
                examples_per_second=examples / seconds if seconds else 0.0,
                step_seconds=self._busy / steps,
                starvation=min(1.0, self._idle / seconds) if seconds else 0.0,
            )
