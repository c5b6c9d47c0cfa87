"""Throughput, step time and starvation of a training loop."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxaccel.train._compiles import CompileCounter
from jaxaccel.train._flops import Peak

_SCALARS = (
    "steps_per_second",
    "examples_per_second",
    "ms_per_step",
    "starvation",
    "flops_per_second",
    "model_flops_utilization",
    "compiles",
    "compile_seconds",
)


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
      compiles: Number of programs that XLA compiled, those of skipped steps and
        pauses included; reads from a persistent cache do not count.
      compile_seconds: Time that this took, with the reads from the cache.
      flops_per_step: Operations of one step, as the meter was told; None if not.
      peak: What the devices could do at most; None if nobody said.
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    examples_per_second: float = 0.0
    step_seconds: float = 0.0
    starvation: float = 0.0
    compiles: int = 0
    compile_seconds: float = 0.0
    flops_per_step: float | None = None
    peak: Peak | None = None

    @property
    def steps_per_second(self) -> float:
        """Finished steps in a second of wall time."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def ms_per_step(self) -> float:
        """Wall time of a step, waiting for its batch included, in milliseconds."""
        return 1e3 * self.seconds / self.steps if self.steps else 0.0

    @property
    def flops_per_second(self) -> float | None:
        """`flops_per_step * steps_per_second`."""
        if self.flops_per_step is None:
            return None
        return self.flops_per_step * self.steps_per_second

    @property
    def model_flops_utilization(self) -> float | None:
        """`flops_per_second` as a share of the peak, 0 to 1."""
        if self.flops_per_second is None or self.peak is None:
            return None
        return self.flops_per_second / self.peak.flops_per_second

    def scalars(self) -> dict[str, float]:
        """Returns the figures by name, for a writer.

        Returns:
          Those that are known, as floats.

        Examples:
          >>> from jaxaccel import train
          >>> reading = train.MeterReading(steps=4, seconds=2.0, starvation=0.25)
          >>> reading.scalars()["ms_per_step"], reading.scalars()["starvation"]
          (500.0, 0.25)
        """
        values = {name: getattr(self, name) for name in _SCALARS}
        return {name: float(x) for name, x in values.items() if x is not None}


@dataclasses.dataclass
class _Step:
    steps: int
    examples: int
    fetched: float
    """When its batch had arrived."""
    paused: float
    """Length of the pauses between the step before and this one."""
    dispatched: float = 0.0
    outputs: Any = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


@dataclasses.dataclass(frozen=True)
class _Totals:
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    compiles: int = 0
    compile_seconds: float = 0.0


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
      skip: Number of first calls left out, those that compile; also after
        `set_state`, since a new process compiles again.
      flops_per_step: Operations of one step, from `count_flops`.
      peak: From `data_sheet_peak` or `measure_peak`. With both, a reading has
        `model_flops_utilization`.

    Raises:
      ValueError: If `max_in_flight < 1`, `skip < 0`, or there is a `peak` and no
        `flops_per_step`.

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

    def __init__(
        self,
        *,
        max_in_flight: int = 2,
        skip: int = 1,
        flops_per_step: float | None = None,
        peak: Peak | None = None,
    ):
        if max_in_flight < 1 or skip < 0:
            raise ValueError(
                "max_in_flight must be at least 1 and skip at least 0; got "
                f"{max_in_flight} and {skip}"
            )
        if flops_per_step is None and peak is not None:
            raise ValueError(
                "a peak says nothing without the operations of a step; pass "
                "flops_per_step=count_flops(train_step, state, batch) as well"
            )
        self._max_in_flight = max_in_flight
        self._skip = skip
        self._clock: Callable[[], float] = time.perf_counter
        self._queue: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._in_flight: list[_Step] = []
        self._lock = threading.Lock()
        self._flops_per_step, self._peak = flops_per_step, peak
        self._totals = _Totals()
        self._compiles = CompileCounter()
        self._seen = 0
        self._last_done: float | None = None
        self._fetched = self._paused = 0.0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Meter":
        self._compiles.__enter__()
        self._thread = threading.Thread(target=self._wait_for_steps, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._compiles.__exit__()

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches and notes when each arrived."""
        for batch in batches:
            self._fetched = self._clock()
            yield batch

    def update(self, outputs: Any, *, examples: int, steps: int = 1) -> None:
        """Notes a dispatched step, or several of one call.

        Args:
          outputs: Arrays that the step returned and nobody donates: its metrics.
          examples: Number of examples of the call.
          steps: Number of its steps.

        Raises:
          RuntimeError: Outside of the meter's context.
        """
        if self._thread is None:
            raise RuntimeError("a Meter measures inside its context: `with Meter() as`")
        step = _Step(steps, examples, self._fetched, self._paused)
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
            totals = self._with_compiles()
        seconds, steps = totals.seconds, totals.steps
        return MeterReading(
            steps=steps,
            examples=totals.examples,
            seconds=seconds,
            examples_per_second=totals.examples / seconds if seconds else 0.0,
            step_seconds=totals.busy / steps if steps else 0.0,
            starvation=min(1.0, totals.idle / seconds) if seconds else 0.0,
            compiles=totals.compiles,
            compile_seconds=totals.compile_seconds,
            flops_per_step=self._flops_per_step,
            peak=self._peak,
        )

    def get_state(self) -> dict[str, int | float]:
        """Waits for the steps under way and returns the sums, for a checkpoint.

        Returns:
          A dict of numbers that JSON can hold.

        Examples:
          >>> from jaxaccel import train
          >>> meter = train.Meter()
          >>> meter.set_state({**meter.get_state(), "steps": 10, "seconds": 2.0})
          >>> meter.reading().steps_per_second
          5.0
        """
        self.drain()
        with self._lock:
            return dataclasses.asdict(self._with_compiles())

    def set_state(self, state: Mapping[str, int | float]) -> None:
        """Goes on from the sums of an earlier run.

        The time between the two runs does not count, nor do the first `skip` calls
        of this one.

        Args:
          state: From `get_state`.

        Raises:
          ValueError: If it is not such a dict.
        """
        names = {field.name for field in dataclasses.fields(_Totals)}
        if set(state) != names:
            raise ValueError(
                f"the state of a Meter has the keys {sorted(names)}; got "
                f"{sorted(state)}. Restore what get_state returned"
            )
        self.drain()
        with self._lock:
            self._totals = _Totals(**state)  # type: ignore[arg-type]
            self._seen, self._last_done, self._paused = 0, None, 0.0
            # What compiled in this process before is no part of the earlier run.
            self._compiles.reset()

    def _with_compiles(self) -> "_Totals":
        compiles, seconds = self._compiles.totals()
        return dataclasses.replace(
            self._totals,
            compiles=self._totals.compiles + compiles,
            compile_seconds=self._totals.compile_seconds + seconds,
        )

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
            self._totals = dataclasses.replace(
                self._totals,
                steps=self._totals.steps + step.steps,
                examples=self._totals.examples + step.examples,
                seconds=self._totals.seconds + done - before,
                busy=self._totals.busy + busy,
                idle=self._totals.idle + idle,
            )
