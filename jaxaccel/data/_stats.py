"""What a loader has done so far, and which stage is the slow one."""

import collections
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Batches that rates and percentiles look back on: enough for a 95th percentile, few
# enough to forget the first steps, which compile.
WINDOW = 512

_ADVICE = {
    "read": "keep the files on a local disk, or convert them to an uncompressed, "
    "memory-mapped format with convert()",
    "decode": "decode once: convert() to a memory-mapped format at the training "
    "resolution, or give open_store more num_threads",
    "gather": "ship uint8 instead of floats, smaller images, or use DeviceDataset "
    "where the data fits the device",
    "transform": "move it into the jitted step, write it for whole batches, or give "
    "the Loader workers",
    "receive": "use fewer workers; the transform is too cheap to pay for the way "
    "between processes",
    "put": "ship uint8 instead of floats and normalize inside the jitted step, or "
    "raise to_device's depth",
}


class _Visit(NamedTuple):
    wait: float
    put: float
    step: float
    depth: int
    examples: int


class LoaderStats:
    """What a loader has done so far; it goes on counting.

    Seconds are those of the host's clock. The times of the steps are those between
    two calls of `next`: where steps are dispatched ahead of the device instead of
    waited for, read them over many steps that end in a wait. Rates, percentiles,
    `starvation` and `queue_depth` look back on the last 512 batches.

    Attributes:
      batches: Batches handed out.
      examples: Examples in them, without padding.
      bytes: Size of their arrays.
      wait_seconds: Time that the consumer waited inside `next`.
      step_seconds: Time that it spent between two calls, without `put`.
      first_batch_seconds: Its first wait, which the rates leave out; None before.
      seconds: Time spent in each stage, by name: `read`, `decode`, `gather` (what
        of these the store tells apart), `transform`, `receive` (from workers), `put`.
        Of several workers, the sum.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore, BatchPlan, Loader
      >>> store = ArrayStore({"label": np.arange(6, dtype=np.uint8)})
      >>> with Loader(store, BatchPlan(6, 2, epochs=1)) as loader:
      ...     batches = list(loader)
      >>> loader.stats.batches, loader.stats.examples, loader.stats.bytes
      (3, 6, 6)
    """

    def __init__(self, workers: int = 0):
        self.batches = self.examples = self.bytes = 0
        self.wait_seconds = self.step_seconds = 0.0
        self.first_batch_seconds: float | None = None
        self.seconds: dict[str, float] = {}
        self._workers = max(1, workers)
        self._host: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._visits: collections.deque[_Visit] = collections.deque(maxlen=WINDOW)
        # The visit whose step is under way, and the time put into it so far.
        self._open: _Visit | None = None
        self._left = 0.0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"LoaderStats({self.bottleneck()})"

    @property
    def examples_per_second(self) -> float:
        """Examples handed out in a second of waiting, putting and stepping."""
        visits = self._recent()
        total = sum(v.wait + v.put + v.step for v in visits)
        return sum(v.examples for v in visits) / total if total else 0.0

    @property
    def host_ms_p50(self) -> float:
        """Median time in which the host makes a batch, in milliseconds."""
        return self._host_ms(50)

    @property
    def host_ms_p95(self) -> float:
        """95th percentile of the time in which the host makes a batch, in ms."""
        return self._host_ms(95)

    @property
    def wait_ms(self) -> float:
        """Mean wait inside `next`, in milliseconds."""
        return 1e3 * _mean([v.wait for v in self._recent()])

    @property
    def step_ms(self) -> float:
        """Mean time between two calls of `next`, without `put`, in milliseconds."""
        return 1e3 * _mean([v.step for v in self._recent()])

    @property
    def starvation(self) -> float:
        """Share of the time in which no step ran: `(wait + put) / (... + step)`."""
        visits = self._recent()
        idle = sum(v.wait + v.put for v in visits)
        total = idle + sum(v.step for v in visits)
        return idle / total if total else 0.0

    @property
    def queue_depth(self) -> float:
        """Mean number of batches that were ready when one was asked for."""
        return _mean([v.depth for v in self._recent()])

    def add(self, stage: str, seconds: float) -> None:
        """Adds time spent in a stage that the loader cannot see, such as `put`.

        Args:
          stage: Its name.
          seconds: The time. That of `put` is taken from the step in which it falls.
        """
        with self._lock:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            if stage == "put" and self._open is not None:
                self._open = self._open._replace(put=self._open.put + seconds)

    def summary(self) -> dict[str, float]:
        """All figures as one flat dict, as metric writers take it."""
        names = ("batches", "examples", "bytes", "wait_seconds", "step_seconds")
        names += ("examples_per_second", "host_ms_p50", "host_ms_p95", "wait_ms")
        names += ("step_ms", "starvation", "queue_depth")
        figures = {name: float(getattr(self, name)) for name in names}
        figures["first_batch_seconds"] = self.first_batch_seconds or 0.0
        with self._lock:
            stages = {f"{name}_seconds": s for name, s in self.seconds.items()}
        return figures | stages

    def bottleneck(self) -> str:
        """One line that names the slow stage, with figures and advice."""
        if not self._recent():
            return "nothing to say before the second batch"
        costs = self._costs()
        host = sum(costs.values()) - costs.get("put", 0.0)
        step = f"a step takes {self.step_ms:.1f} ms"
        starved = f"starvation {100 * self.starvation:.0f} %"
        if self.starvation < 0.05:
            return (
                f"step: {step}, a batch {host:.1f} ms on the host, ahead of it "
                f"({starved}); faster data would change nothing"
            )
        slow = max(costs, key=lambda stage: costs[stage])
        advice = _ADVICE.get(slow, "make it cheaper")
        return (
            f"{slow}: {costs[slow]:.1f} of {sum(costs.values()):.1f} ms a batch, while "
            f"{step} ({starved}); {advice}"
        )

    def begin(self, now: float) -> None:
        """The consumer asks for a batch; its step has ended. For loaders."""
        with self._lock:
            if self._open is None:
                return
            step = max(0.0, now - self._left - self._open.put)
            self.step_seconds += step
            self._visits.append(self._open._replace(step=step))
            self._open = None

    def end(
        self,
        now: float,
        wait: float,
        depth: int,
        size: tuple[int, int],
        stages: Mapping[str, float],
    ) -> None:
        """The consumer gets a batch of (examples, bytes). For loaders."""
        with self._lock:
            if self.first_batch_seconds is None:
                self.first_batch_seconds, steady = wait, 0.0
            else:
                steady = wait
            self.batches += 1
            self.examples += size[0]
            self.bytes += size[1]
            self.wait_seconds += wait
            for stage, seconds in stages.items():
                self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            self._host.append(sum(stages.values()))
            self._open = _Visit(steady, 0.0, 0.0, depth, size[0])
            self._left = now

    def _recent(self) -> list[_Visit]:
        with self._lock:
            return list(self._visits)

    def _host_ms(self, percent: int) -> float:
        with self._lock:
            values = list(self._host)
        return 1e3 * float(np.percentile(values, percent)) if values else 0.0

    def _costs(self) -> dict[str, float]:
        # Milliseconds a batch; what workers do, they do side by side.
        with self._lock:
            return {
                stage: 1e3 * s / max(1, self.batches) / self._share(stage)
                for stage, s in self.seconds.items()
            }

    def _share(self, stage: str) -> int:
        return 1 if stage in ("receive", "put") else self._workers


def _mean(values: list[float] | list[int]) -> float:
    return float(np.mean(values)) if values else 0.0
