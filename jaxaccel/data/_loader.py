"""The host side of the input pipeline: whole batches, prefetched by a thread."""

import contextlib
import dataclasses
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import grain
import grain.experimental
import numpy as np

from jaxaccel.data._checks import as_count
from jaxaccel.data._plan import BatchPlan
from jaxaccel.data._state import make_state, read_state
from jaxaccel.data._store import Store

# A host-side function of a batch and a generator that belongs to its step.
BatchTransform = Callable[
    [dict[str, np.ndarray], np.random.Generator], dict[str, np.ndarray]
]


@dataclasses.dataclass(frozen=True)
class LoaderStats:
    """What a loader has done so far.

    Args:
      batches: Batches yielded.
      examples: Examples in them, without padding.
      bytes: Size of their arrays.
      wait_seconds: Time the consumer waited inside `next`. Its share of the wall
        time is the starvation.
    """

    batches: int = 0
    examples: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


class Loader:
    """Iterates over the batches of a plan.

    A Grain pipeline whose elements are whole batches: one gather for a batch
    instead of one Python call for an example. It is a deterministic function of
    the plan's seed and the step, so it resumes anywhere, bit for bit.

    A loader is an iterator: leaving a `for` loop early and entering another one
    continues. When its plan ends it closes itself; a second pass needs a second
    loader (or a plan with more epochs). Close it with `with`.

    Args:
      store: Where the examples come from.
      plan: Which examples make up which batch.
      prefetch: Batches that a thread prepares ahead; 0 prepares each batch when it
        is asked for, without a thread.
      transform: Optional function `(batch, rng) -> batch` on NumPy arrays, run
        by the thread. `rng` is seeded with the plan's seed, its process index
        and the step alone, so that a resumed run repeats it. It gets the `mask`
        of a padded batch and must keep it. What it returns is copied, so it may
        reuse its buffers.

    Raises:
      TypeError: If `store` is no `Store` or `plan` no `BatchPlan`.
      ValueError: If the plan is for another number of examples, the store has a
        column that the plan's mask would hide, or `prefetch` is negative.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore, BatchPlan, Loader
      >>> store = ArrayStore({"label": np.arange(6, dtype=np.uint8)})
      >>> plan = BatchPlan(6, 2, epochs=1, shuffle=False)
      >>> with Loader(store, plan) as loader:
      ...     first = next(loader)["label"].tolist()
      ...     state = loader.get_state()
      >>> with Loader(store, plan) as loader:
      ...     loader.set_state(state)
      ...     rest = [batch["label"].tolist() for batch in loader]
      >>> first, state["step"], rest
      ([0, 1], 1, [[2, 3], [4, 5]])
    """

    def __init__(
        self,
        store: Store,
        plan: BatchPlan,
        *,
        prefetch: int = 2,
        transform: BatchTransform | None = None,
    ):
        _check_kinds(store, plan)
        check_plan(len(store), store.spec, plan)
        prefetch = as_count("prefetch", prefetch, 0)
        self.store = store
        self.plan = plan
        self.transform = transform
        self._step = 0
        self._closed = self._exhausted = False
        self._stats = LoaderStats()
        batches = _Batches(store, plan, transform).to_iter_dataset(
            # Grain's default would hold 500 batches ahead.
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )
        if prefetch:
            batches = grain.experimental.ThreadPrefetchIterDataset(
                batches, prefetch_buffer_size=prefetch
            )
        # Emptied when the loader is closed, dropped, or at exit: Grain's iterator
        # must be gone before the interpreter takes its modules away.
        self._pipeline: list[Any] = [iter(batches)]
        self._finalizer = weakref.finalize(self, _close_quietly, self._pipeline)

    def __iter__(self) -> "Loader":
        self._require_open()
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._exhausted:
            raise StopIteration
        self._require_open()
        start = time.perf_counter()
        try:
            batch = next(self._pipeline[0])
        except StopIteration:
            self._exhausted = True
            self.close()
            raise
        self._count(batch, time.perf_counter() - start)
        self._step += 1
        return batch

    def __len__(self) -> int:
        """Batches in the whole plan, wherever the loader stands."""
        return len(self.plan)

    def __bool__(self) -> bool:
        # Without this, truth would ask for the length, which may not exist.
        return True

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.plan.steps_per_epoch

    @property
    def stats(self) -> LoaderStats:
        """What the loader has done so far."""
        return self._stats

    def get_state(self) -> dict[str, Any]:
        """Returns where the loader stands.

        Returns:
          `{"step": n, "fingerprint": {...}}`, JSON-able. `n` counts the batches
          that were yielded, not those that were prefetched.
        """
        return make_state(self._step, self.plan, self.store.spec)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at the next batch that was not yet yielded.

        Args:
          state: What `get_state` returned, possibly through JSON. The number of
            epochs and of processes may have changed since, nothing else.

        Raises:
          ValueError: If the state belongs to another plan or store, or the loader
            is closed.
        """
        self._require_open()
        step = read_state(state, self.plan, self.store.spec)
        self._pipeline[0].set_state({"next_index": step})
        self._step = step

    def close(self) -> None:
        """Ends the prefetch thread; a closed loader yields nothing more."""
        self._closed = True
        self._finalizer()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(
                f"the loader is closed (after {self._step} batches); build a new "
                "Loader for another pass, or give the plan more epochs"
            )

    def _count(self, batch: dict[str, np.ndarray], seconds: float) -> None:
        stats, rows = self._stats, len(next(iter(batch.values())))
        if self.plan.remainder == "pad":
            rows = int(np.count_nonzero(batch["mask"]))
        self._stats = LoaderStats(
            stats.batches + 1,
            stats.examples + rows,
            stats.bytes + sum(array.nbytes for array in batch.values()),
            stats.wait_seconds + seconds,
        )


def _check_kinds(store: Any, plan: Any) -> None:
    if not isinstance(store, Store):
        raise TypeError(
            f"a Loader reads a Store, got {type(store).__name__}; open_store "
            "makes one of arrays and files"
        )
    if not isinstance(plan, BatchPlan):
        raise TypeError(
            f"a Loader follows a BatchPlan, got {type(plan).__name__}; write "
            "BatchPlan(len(store), batch_size, seed=..., epochs=...)"
        )


def check_plan(num_examples: int, columns: Collection[str], plan: BatchPlan) -> None:
    """Checks that a plan was made for a store.

    Args:
      num_examples: Examples in the store.
      columns: Names of its columns.
      plan: The plan.

    Raises:
      ValueError: If the number of examples differs, or the plan's mask would hide
        a column.
    """
    if num_examples != plan.num_examples:
        raise ValueError(
            f"the plan is for {plan.num_examples} examples, but the store holds "
            f"{num_examples}; build it with BatchPlan(len(store), ...)"
        )
    if plan.remainder == "pad" and "mask" in columns:
        raise ValueError(
            "the store has a column 'mask', which the plan's padding mask would "
            "hide; rename the column, or use remainder='drop'"
        )


# A direct subclass gets the step itself as its index, in every epoch; a source
# wrapped by Grain would get it modulo the length.
class _Batches(grain.MapDataset):
    def __init__(self, store: Store, plan: BatchPlan, transform: BatchTransform | None):
        super().__init__()
        self._store, self._plan, self._transform = store, plan, transform

    def __len__(self) -> int:
        steps = self._plan.num_steps
        return sys.maxsize if steps is None else steps

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        try:
            return self._make(index)
        except StopIteration as error:
            # It would end the run as if the data had ended.
            raise RuntimeError(f"StopIteration in the batch of step {index}") from error
        except Exception as error:
            error.add_note(f"while preparing the batch of step {index}")
            raise
        except BaseException as error:
            # The thread would die silently, and the consumer wait for ever.
            raise RuntimeError(
                f"{type(error).__name__} in the batch of step {index}"
            ) from error

    def _make(self, step: int) -> dict[str, np.ndarray]:
        batch = self._store.take(self._plan.indices(step))
        if self._plan.remainder == "pad":
            batch["mask"] = self._plan.mask(step)
        if self._transform is None:
            return batch
        # The third word keeps these streams apart from the epochs' permutations,
        # and those of two processes from each other.
        words = [self._plan.seed, step, 1 + self._plan.process_index]
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
        result = self._transform(dict(batch), rng)
        _check_transformed(result, self._plan)
        # The thread runs ahead: a buffer that the transform writes again for the
        # next step would change batches that wait. Columns passed on are fresh.
        return {
            name: array if array is batch.get(name) else np.array(array)
            for name, array in result.items()
        }


def _check_transformed(batch: object, plan: BatchPlan) -> None:
    if not isinstance(batch, dict) or not batch:
        raise TypeError(
            f"transform must return a dict of arrays, got {type(batch).__name__}"
        )
    for name, array in batch.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise TypeError(
                f"transform must return NumPy arrays with a leading batch axis, but "
                f"column {name!r} is {type(array).__name__}"
            )
    lengths = {name: len(array) for name, array in batch.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"transform returned columns of different lengths: {lengths}; change all "
            "columns together"
        )
    if plan.remainder == "pad" and "mask" not in batch:
        raise ValueError(
            "transform dropped the 'mask' that marks padding; return it unchanged"
        )


def _close_quietly(pipeline: list[Any]) -> None:
    # Joining fails where the garbage collector runs this in that very thread.
    with contextlib.suppress(RuntimeError):
        pipeline.pop().close()
