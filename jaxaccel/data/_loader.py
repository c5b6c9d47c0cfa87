"""The host side of the input pipeline: whole batches, prefetched."""

import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxaccel.data import _guards
from jaxaccel.data._ahead import Budget, Inline, Prefetch, Source
from jaxaccel.data._batches import BatchMaker, BatchTransform, Made
from jaxaccel.data._checks import as_count, check_transform
from jaxaccel.data._plan import BatchPlan, Plan
from jaxaccel.data._state import LoaderState, make_state, read_state, sample_content
from jaxaccel.data._stats import LoaderStats
from jaxaccel.data._store import Store
from jaxaccel.data._workers import Workers

# Longest wait for a thread that a dropped loader, or the end of the program, ends.
_DROP_SECONDS = 5.0


class Loader:
    """Iterates over the batches of a plan.

    A batch is one gather, not one Python call for every example. It is a
    deterministic function of the plan's seed and the step, so that a loader resumes
    anywhere, bit for bit, with any number of workers.

    A loader is an iterator: leaving a `for` loop early and entering another one
    continues. When its plan ends it closes itself; a second pass needs a second
    loader (or a plan with more epochs). Close it with `with`.

    Its state is JSON-able. `grain.checkpoint.CheckpointSave(loader)` and
    `CheckpointRestore(loader)` put it into an orbax checkpoint, beside the train
    state. With `to_device`, ask the device batches for the state, and give them to
    orbax in the loader's place: the loader counts those under way, too.

    Args:
      store: Where the examples come from.
      plan: Which examples make up which batch.
      prefetch: Batches that a thread prepares ahead; 0 prepares each batch when it
        is asked for, without a thread. Every worker may have one more in hand.
      prefetch_bytes: Bound on the size of the batches prepared ahead, in bytes;
        one batch is always allowed. The default is 256 MiB.
      workers: Processes that prepare the batches; 0 uses this one. They only pay
        for a transform that is heavy on Python: stores decode in threads of their
        own. They start when the loader is built, import the main script anew, which
        must therefore guard its work with `if __name__ == "__main__":`, and see no
        accelerator.
      transform: Optional function `(batch, rng) -> batch` on NumPy arrays. `rng` is
        seeded with the plan's seed, its process index and the step alone, so that a
        resumed run repeats it. It gets the columns that the plan adds (`mask`) and
        must keep them. What it returns is copied, so it may reuse its buffers.
        With workers it must be picklable.

    Attributes:
      stats: What the loader has done so far, a `LoaderStats`.

    Raises:
      DataCorruptionError: If one of the few examples that are read at once, so that
        a state knows its data, is damaged.
      RuntimeError: If worker processes would start in a process that is itself
        being started, as without the guard.
      TypeError: If `store` is no `Store`, `plan` no `Plan`, `transform` no function,
        or workers could not be
        sent what they need.
      ValueError: If the plan is for another number of examples, the store has a
        column that the plan adds, or a number is out of range.

    Warns:
      DataWarning: If what the store holds costs more bytes than it must.

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
        plan: Plan,
        *,
        prefetch: int = 2,
        prefetch_bytes: int = 256 << 20,
        workers: int = 0,
        transform: BatchTransform | None = None,
    ):
        _check_kinds(store, plan)
        check_plan(len(store), store.spec, plan)
        check_transform(transform)
        prefetch = as_count("prefetch", prefetch, 0)
        prefetch_bytes = as_count("prefetch_bytes", prefetch_bytes, 1)
        workers = as_count("workers", workers, 0)
        self.store, self.plan, self.transform = store, plan, transform
        self.stats = LoaderStats(workers)
        # Now: saving a state must not fail because the data has been closed.
        self._content = sample_content(store)
        self._step = 0
        self._running = self._closed = self._exhausted = False
        _guards.check_store(store, plan.local_batch_size, stacklevel=3)
        maker = BatchMaker(store, plan, transform)
        budget = Budget(prefetch + workers, prefetch_bytes, maker.batch_bytes)
        self._source: Source
        if workers:
            self._source = Workers(maker, plan.num_steps, budget, workers)
            try:
                _guards.check_sent(self._source.sent_bytes, workers, stacklevel=3)
            except BaseException:
                # Warnings may be errors.
                self._source.close()
                raise
        elif prefetch:
            self._source = Prefetch(maker.make, plan.num_steps, budget)
        else:
            self._source = Inline(maker.make)
        # Also where the loader is dropped, and at exit.
        self._finalizer = weakref.finalize(self, self._source.close, _DROP_SECONDS)

    def __iter__(self) -> "Loader":
        self._require_open()
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._exhausted:
            raise StopIteration
        self._require_open()
        start = time.perf_counter()
        self.stats.begin(start)
        if self._step == self.plan.num_steps:
            self._exhausted = True
            self.close()
            raise StopIteration
        self.start_prefetch()
        try:
            made, depth = self._source.next()
        except BaseException:
            # The next call tries the same step again.
            self._running = False
            raise
        self._step += 1
        self._count(made, depth, start)
        return made.batch

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

    def start_prefetch(self) -> None:
        """Begins to prepare batches, which otherwise the first `next` does."""
        self._require_open()
        if not self._running and self._step != self.plan.num_steps:
            self._source.start(self._step)
            self._running = True

    def get_state(self) -> LoaderState:
        """Returns where the loader stands.

        Returns:
          `{"step": n, "fingerprint": {...}}`, a JSON-able dict. `n` counts the
          batches that were yielded, not those that were prefetched. The
          fingerprint tells the plan, the columns and, as `content`, checksums of a
          few examples: whole numbers, and encoded images as they are. Stores that
          are decoded in chunks give those of the first examples only, stores of
          your own none.
        """
        return make_state(self._step, self.plan, self.store.spec, self._content)

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Continues at the next batch that was not yet yielded.

        Args:
          state: What `get_state` returned, possibly through JSON, or that JSON
            itself. The number of epochs, of processes and of workers may have
            changed since, nothing else. Other data of the same shape is refused
            where both the state and the store have a `content`; data that was
            changed on purpose needs the state without that entry.

        Raises:
          ValueError: If the state belongs to another plan or store, or the loader
            is closed.
        """
        self._require_open()
        self._step = read_state(state, self.plan, self.store.spec, self._content)
        self._running = False

    def close(self) -> None:
        """Ends threads and processes; a closed loader yields nothing more.

        A batch that a thread is preparing is waited for.
        """
        self._closed = True
        self._finalizer.detach()
        self._source.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(
                f"the loader is closed (after {self._step} batches); build a new "
                "Loader for another pass, or give the plan more epochs"
            )

    def _count(self, made: Made, depth: int, start: float) -> None:
        batch = made.batch
        rows = len(next(iter(batch.values())))
        if self.plan.remainder == "pad":
            rows = int(np.count_nonzero(batch["mask"]))
        size = rows, sum(array.nbytes for array in batch.values())
        now = time.perf_counter()
        self.stats.end(now, now - start, depth, size, made.seconds)


def _check_kinds(store: Any, plan: Any) -> None:
    if not isinstance(store, Store):
        raise TypeError(
            f"a Loader reads a Store, got {type(store).__name__}; open_store "
            "makes one of arrays and files"
        )
    if not isinstance(plan, Plan):
        raise TypeError(
            f"a Loader follows a BatchPlan, got {type(plan).__name__}; write "
            "BatchPlan(len(store), batch_size, seed=..., epochs=...)"
        )


def check_plan(num_examples: int, columns: Collection[str], plan: Plan) -> None:
    """Checks that a plan was made for a store.

    Args:
      num_examples: Examples in the store.
      columns: Names of its columns.
      plan: The plan.

    Raises:
      ValueError: If the number of examples differs, or the plan would hide a column
        with one that it adds.
    """
    if num_examples != plan.num_examples:
        how = "for this store"
        if isinstance(plan, BatchPlan):
            how = "with BatchPlan(len(store), ...)"
        raise ValueError(
            f"the plan is for {plan.num_examples} examples, but the store holds "
            f"{num_examples}; build it {how}"
        )
    for name in plan.extra_columns:
        if name in columns:
            raise ValueError(
                f"the store has a column {name!r}, which the plan would hide with "
                "one that it adds; rename the column"
            )
