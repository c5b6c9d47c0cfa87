"""Several steps in one call, and the stacks of batches that they take."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def scan_steps(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Any, count: int
) -> tuple[Any, Any]:
    """Runs a step over the leading axis of stacked batches.

    Args:
      step: `step(state, batch) -> (state, metrics)`.
      state: The first state.
      batches: Dict of arrays, `count` or one of them stacked.
      count: The steps of a call.

    Returns:
      The last state and the metrics, stacked.

    Raises:
      ValueError: If the leading axis is neither `count` nor 1.
    """
    lengths = {name: jnp.shape(x)[:1] for name, x in batches.items()}
    if len(set(lengths.values())) != 1 or {*lengths.values()} - {(count,), (1,)}:
        shapes = {name: jnp.shape(x) for name, x in batches.items()}
        raise ValueError(
            f"a step with steps_per_call={count} takes {count} batches stacked along a "
            f"new leading axis, or a stack of one; got {shapes}. jaxaccel.train."
            "stack_batches makes them"
        )
    return jax.lax.scan(step, state, batches)


def stack_batches(batches: Iterable[Mapping[str, Any]], count: int) -> "StackedBatches":
    """Stacks host batches for a step with `steps_per_call=count`.

    A stack never crosses the end of an epoch, where one usually evaluates: the rest
    of an epoch comes as stacks of one batch each, for which the step compiles a
    second time, once. Put it between the loader and the device:

        to_device(stack_batches(loader, 16), copy=False)

    Args:
      batches: A `Loader`, or any iterable of dicts of NumPy arrays. One that has no
        `steps_per_epoch` counts as a single epoch.
      count: Batches in a stack.

    Returns:
      An iterator over dicts of arrays `[count, batch, ...]`, fresh ones each time.
      `get_state` and `set_state` are the source's, whose position moves by whole
      stacks; `close` closes the source.

    Raises:
      ValueError: If `count < 1`.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import train
      >>> batches = [{"x": np.full(2, i)} for i in range(5)]
      >>> for stack in train.stack_batches(batches, 2):
      ...     print(stack["x"].tolist())
      [[0, 0], [1, 1]]
      [[2, 2], [3, 3]]
      [[4, 4]]
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 batch; got {count}")
    return StackedBatches(batches, count)


class StackedBatches:
    """Iterator over stacks; `stack_batches` describes it."""

    def __init__(self, batches: Iterable[Mapping[str, Any]], count: int):
        self._source: Any = batches
        self._iterator = iter(batches)
        self._count = count
        self._epoch = getattr(batches, "steps_per_epoch", None)
        # Of a source without epochs: what is left where its end came too soon.
        self._rest: list[Mapping[str, Any]] = []
        wanted: tuple[str, ...] = ("stats", "start_prefetch")
        if self._epoch is not None:
            # Elsewhere batches are read ahead, and the position would be wrong.
            wanted += ("get_state", "set_state")
        for name in wanted:
            if hasattr(batches, name):
                setattr(self, name, getattr(batches, name))

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._epoch is not None:
            step = self._source.get_state()["step"]
            fits = step % self._epoch + self._count <= self._epoch
            return _stack(self._take(self._count if fits else 1))
        if not self._rest:
            taken = self._take(self._count)
            if len(taken) == self._count:
                return _stack(taken)
            self._rest = taken
        if not self._rest:
            raise StopIteration
        return _stack([self._rest.pop(0)])

    def __enter__(self) -> "StackedBatches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the source."""
        if hasattr(self._source, "close"):
            self._source.close()

    def _take(self, count: int) -> list[Mapping[str, Any]]:
        taken = list(itertools.islice(self._iterator, count))
        if not taken and self._epoch is not None:
            raise StopIteration
        return taken


def _stack(batches: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    shapes = [{name: np.shape(x) for name, x in batch.items()} for batch in batches]
    if any(shape != shapes[0] for shape in shapes):
        different = next(shape for shape in shapes if shape != shapes[0])
        raise ValueError(
            f"batches of different shapes cannot be stacked: {shapes[0]} and "
            f"{different}; give all of them one size, with remainder='drop' or 'pad'"
        )
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
