"""The batch of a step: read, marked, transformed. A pure function of the step."""

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._plan import Plan
from jaxaccel.data._store import Store

# A host-side function of a batch and a generator that belongs to its step.
BatchTransform = Callable[
    [dict[str, np.ndarray], np.random.Generator], dict[str, np.ndarray]
]


class Made(NamedTuple):
    """A batch, and the seconds that each stage took to make it."""

    batch: dict[str, np.ndarray]
    seconds: dict[str, float]


class BatchMaker:
    """Makes the batch of any step; picklable where its parts are.

    Args:
      store: Where the examples come from.
      plan: Which examples make up which batch.
      transform: Function of the batch, or None.
    """

    def __init__(self, store: Store, plan: Plan, transform: BatchTransform | None):
        self.store, self.plan, self.transform = store, plan, transform

    @property
    def batch_bytes(self) -> int:
        """Size of a batch before the transform."""
        row = sum(
            spec.dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))
            for spec in self.store.spec.values()
        )
        return self.plan.local_batch_size * (row + len(self.plan.extra_columns))

    def make(self, step: int) -> Made:
        """Makes the batch of a step.

        Args:
          step: The step.

        Returns:
          The batch, in arrays that nothing else refers to.

        Raises:
          Exception: What reading or the transform raises, with a note of the step;
            what would end a loop or a thread silently becomes a `RuntimeError`.
        """
        try:
            return self._make(step)
        except StopIteration as error:
            # It would end the run as if the data had ended.
            raise RuntimeError(f"StopIteration in the batch of step {step}") from error
        except Exception as error:
            error.add_note(f"while preparing the batch of step {step}")
            raise
        except BaseException as error:
            # The thread would die silently, and the consumer wait for ever.
            raise RuntimeError(
                f"{type(error).__name__} in the batch of step {step}"
            ) from error

    def _make(self, step: int) -> Made:
        batch, seconds = self._read(step)
        if self.transform is None:
            return Made(batch, seconds)
        start = time.perf_counter()
        result = self.transform(dict(batch), _generator(self.plan, step))
        check_transformed(result, self.plan.extra_columns)
        # Batches are made ahead: a buffer that the transform writes again for the
        # next step would change batches that wait. Columns passed on are fresh.
        result = {
            name: array if array is batch.get(name) else np.array(array)
            for name, array in result.items()
        }
        seconds["transform"] = time.perf_counter() - start
        return Made(result, seconds)

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        before = _stage_seconds(self.store)
        start = time.perf_counter()
        batch = self.store.take(self.plan.indices(step))
        batch.update(self.plan.extras(step))
        total = time.perf_counter() - start
        after = _stage_seconds(self.store)
        seconds = {
            stage: s - before.get(stage, 0.0)
            for stage, s in after.items()
            if s > before.get(stage, 0.0)
        }
        stage = "gather" if isinstance(self.store, ArrayStore) else "read"
        rest = max(0.0, total - sum(seconds.values()))
        return batch, seconds | {stage: seconds.get(stage, 0.0) + rest}


def check_transformed(batch: object, extra_columns: Collection[str]) -> None:
    """Checks what a transform returned.

    Args:
      batch: The result.
      extra_columns: What it must have kept.

    Raises:
      TypeError: If it is no dict of arrays.
      ValueError: If columns differ in length, or one is missing.
    """
    if not isinstance(batch, dict) or not batch:
        found = "an empty one" if batch == {} else type(batch).__name__
        raise TypeError(f"transform must return a dict of arrays, got {found}")
    for name, array in batch.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise TypeError(
                f"transform must return NumPy arrays with a leading batch axis, but "
                f"column {name!r} is {type(array).__name__}"
            )
        if array.dtype.kind in "OSUMmT" or array.dtype.type is np.void:
            raise TypeError(
                f"transform must return numbers, but column {name!r} has dtype "
                f"{array.dtype}; encode it as numbers, such as the row in a table"
            )
    lengths = {name: len(array) for name, array in batch.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"transform returned columns of different lengths: {lengths}; change all "
            "columns together"
        )
    for name in extra_columns:
        if name not in batch:
            raise ValueError(
                f"transform dropped the {name!r} that the plan adds; return it "
                "unchanged"
            )


def _generator(plan: Plan, step: int) -> np.random.Generator:
    # The third word keeps these streams apart from the epochs' permutations, and
    # those of two processes from each other.
    words = [plan.seed, step, 1 + plan.process_index]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def _stage_seconds(store: Any) -> dict[str, float]:
    # A store may tell the seconds it has spent so far, by stage.
    hook = getattr(store, "stage_seconds", None)
    return dict(hook()) if hook else {}
