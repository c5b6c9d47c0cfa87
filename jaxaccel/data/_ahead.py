"""Batches made ahead of their use, in order, bounded in number and in bytes."""

import collections
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from jaxaccel.data._batches import Made


class Source(Protocol):
    """Gives the batches of consecutive steps."""

    def start(self, step: int) -> None:
        """Begins anew at a step, dropping what was under way."""
        ...

    def next(self) -> tuple[Made, int]:
        """Returns the next batch, and how many were ready; raises what it raised.

        After an exception, `start` must be called again.
        """
        ...

    def close(self, seconds: float | None = None) -> None:
        """Ends threads and processes; may be called from any thread, repeatedly.

        A thread cannot be ended from outside: its batch is waited for, for so many
        seconds at most.
        """
        ...


class ClosedError(RuntimeError):
    """Another thread has closed what was waited for."""

    def __init__(self) -> None:
        super().__init__("the loader was closed while a batch was waited for")


class Budget:
    """How many batches may exist ahead of the consumer.

    Args:
      count: At most so many.
      nbytes: At most so many bytes of them; one batch is always allowed.
      batch_bytes: Size of a batch as far as it is known.
    """

    def __init__(self, count: int, nbytes: int, batch_bytes: int):
        self._count, self._nbytes = count, nbytes
        self._expected, self._largest = batch_bytes, 0

    def observe(self, made: Made) -> None:
        """Learns the size of a batch: a transform may have changed it."""
        size = sum(array.nbytes for array in made.batch.values())
        self._largest = max(self._largest, size)

    @property
    def batches(self) -> int:
        """How many batches may exist, at least one."""
        size = max(1, self._largest or self._expected)
        return max(1, min(self._count, self._nbytes // size))


class Inline:
    """Makes each batch when it is asked for."""

    def __init__(self, make: Callable[[int], Made]):
        self._make, self._step = make, 0

    def start(self, step: int) -> None:
        """See `Source.start`."""
        self._step = step

    def next(self) -> tuple[Made, int]:
        """See `Source.next`."""
        made = self._make(self._step)
        self._step += 1
        return made, 0

    def close(self, seconds: float | None = None) -> None:
        """See `Source.close`."""


class Prefetch:
    """Makes batches in one thread, ahead of their use.

    Args:
      make: Makes the batch of a step.
      num_steps: Where to stop, or None.
      budget: How many batches may be ahead, the one being made included.
    """

    def __init__(
        self, make: Callable[[int], Made], num_steps: int | None, budget: Budget
    ):
        self._make, self._num_steps, self._budget = make, num_steps, budget
        self._run: _Run | None = None
        self._closed = False
        # Another thread may close what this one starts.
        self._lock = threading.RLock()

    def start(self, step: int) -> None:
        """See `Source.start`."""
        with self._lock:
            self._stop(None)
            if self._closed:
                raise ClosedError
            self._run = _Run(self._make, step, self._num_steps, self._budget)

    def next(self) -> tuple[Made, int]:
        """See `Source.next`."""
        run = self._run
        if run is None:
            raise ClosedError
        return run.next()

    def close(self, seconds: float | None = None) -> None:
        """See `Source.close`."""
        with self._lock:
            self._closed = True
            self._stop(seconds)

    def _stop(self, seconds: float | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.stop(seconds)


class _Run:
    def __init__(
        self,
        make: Callable[[int], Made],
        step: int,
        num_steps: int | None,
        budget: Budget,
    ):
        self._make, self._budget = make, budget
        self._steps = range(step, sys.maxsize if num_steps is None else num_steps)
        self._ready: collections.deque[Made] = collections.deque()
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._fill, name="jaxaccel-prefetch", daemon=True
        )
        self._thread.start()

    def next(self) -> tuple[Made, int]:
        with self._changed:
            depth = len(self._ready)
            self._changed.wait_for(lambda: self._ready or self._error or self._stopped)
            if self._ready:
                made = self._ready.popleft()
                self._changed.notify_all()
                return made, depth
            if self._error is None:
                raise ClosedError
            error, self._error = self._error, None
        raise error

    def stop(self, seconds: float | None) -> None:
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        # The garbage collector may run this in that very thread.
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _fill(self) -> None:
        try:
            for step in self._steps:
                if not self._wait_for_room():
                    return
                made = self._make(step)
                self._budget.observe(made)
                with self._changed:
                    if self._stopped:
                        return
                    self._ready.append(made)
                    # Or it would outlive its use until the next one is made.
                    del made
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or len(self._ready) < self._budget.batches
            )
            return not self._stopped
