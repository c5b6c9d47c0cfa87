"""The batches of a plan as a Grain dataset, for pipelines built with Grain."""

import functools
import sys
from typing import TYPE_CHECKING, Any

from jaxaccel.data._batches import BatchMaker, BatchTransform
from jaxaccel.data._checks import check_transform
from jaxaccel.data._loader import check_plan
from jaxaccel.data._plan import Plan
from jaxaccel.data._store import Store

if TYPE_CHECKING:
    import grain


def as_grain(
    store: Store, plan: Plan, *, transform: BatchTransform | None = None
) -> "grain.MapDataset":
    """Returns the batches of a plan as a `grain.MapDataset`, one element a step.

    The same batches as `Loader`'s, for whoever wants to go on with Grain's own
    transformations, mixing, processes and checkpoints. Its elements are whole
    batches: Grain's usual pipeline of single examples costs a Python call for each
    of them. `to_iter_dataset` buffers 500 elements by default, here 500 batches, so
    give it `grain.ReadOptions` of a few. The plan has the epochs: no `repeat` is
    needed, and a plan with `epochs=None` has `sys.maxsize` elements.

    Args:
      store: Where the examples come from.
      plan: Which examples make up which batch.
      transform: As in `Loader`.

    Returns:
      The dataset. Its elements are dicts of NumPy arrays.

    Raises:
      TypeError: If `transform` is no function.
      ValueError: If the plan is for another number of examples, or the store has a
        column that the plan adds.

    Examples:
      >>> import grain
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore, BatchPlan, as_grain
      >>> store = ArrayStore({"label": np.arange(6, dtype=np.uint8)})
      >>> plan = BatchPlan(6, 2, epochs=1, shuffle=False)
      >>> dataset = as_grain(store, plan).map(lambda batch: batch["label"] + 1)
      >>> options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
      >>> [labels.tolist() for labels in dataset.to_iter_dataset(options)]
      [[1, 2], [3, 4], [5, 6]]
    """
    check_plan(len(store), store.spec, plan)
    check_transform(transform)
    return _dataset_class()(BatchMaker(store, plan, transform))


# Importing Grain takes a second, which who does not use it should not wait.
@functools.cache
def _dataset_class() -> Any:
    import grain

    # A direct subclass gets the step itself as its index; a source wrapped by Grain
    # would get it modulo the length.
    class Batches(grain.MapDataset):
        def __init__(self, maker: BatchMaker):
            super().__init__()
            self._maker = maker

        def __len__(self) -> int:
            steps = self._maker.plan.num_steps
            return sys.maxsize if steps is None else steps

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                return self.slice(index)
            return self._maker.make(index).batch

        def __reduce__(self):
            return _rebuild, (self._maker,)

    return Batches


def _rebuild(maker: BatchMaker) -> "grain.MapDataset":
    return _dataset_class()(maker)
