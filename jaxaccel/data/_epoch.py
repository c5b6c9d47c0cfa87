"""A whole epoch as one call: the steps become a scan over the plan's indices."""

from collections.abc import Callable
from typing import Any

import jax

from jaxaccel.data._checks import as_count
from jaxaccel.data._resident import DeviceDataset


def make_epoch_scan(
    step: Callable[[Any, dict[str, jax.Array]], tuple[Any, Any]],
    *,
    donate: bool = True,
    unroll: int = 1,
) -> jax.stages.Wrapped:
    """Makes a jitted function that runs many steps on resident data in one call.

    The steps become one `jax.lax.scan`; each gathers its batch on the device, and the
    host is not asked between them. It removes the cost of a dispatch for each step,
    which shows where steps are short, and takes the host out of the loop: no
    logging and no stopping within the call.

    Args:
      step: `step(state, batch) -> (state, metrics)`, as `make_train_step` makes one;
        the state must keep its structure, shapes and dtypes.
      donate: Whether the call may reuse the memory of the state it is given. Then a
        state is gone once it went into a call; keep the returned one.
      unroll: Steps that the compiler lays out one after the other in an iteration.

    Returns:
      `epoch(state, dataset, rows) -> (state, metrics)` with the rows from
      `DeviceDataset.rows`. Every metric gets a leading axis, one value a step.
      The data set is an argument, so that it never becomes part of the program;
      a number of steps that was not seen before compiles anew.

    Raises:
      TypeError: If `step` is not callable.
      ValueError: If `unroll` is less than 1.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import (
      ...     ArrayStore, BatchPlan, DeviceDataset, make_epoch_scan)
      >>> dataset = DeviceDataset(ArrayStore({"x": np.arange(6, dtype=np.int32)}))
      >>> def step(total, batch):
      ...     total = total + batch["x"].sum()
      ...     return total, {"total": total}
      >>> epoch = make_epoch_scan(step)
      >>> rows = dataset.rows(BatchPlan(6, 2, shuffle=False))
      >>> total, metrics = epoch(np.int32(0), dataset, rows)
      >>> int(total), metrics["total"].tolist()
      (15, [1, 6, 15])
    """
    if not callable(step):
        raise TypeError(f"step must be a function, got {type(step).__name__}")
    unroll = as_count("unroll", unroll, 1)

    def epoch(
        state: Any, dataset: DeviceDataset, rows: dict[str, jax.Array]
    ) -> tuple[Any, Any]:
        def body(state: Any, rows_of_a_step: dict[str, jax.Array]) -> tuple[Any, Any]:
            return step(state, dataset.batch(rows_of_a_step))

        return jax.lax.scan(body, state, rows, unroll=unroll)

    return jax.jit(epoch, donate_argnums=(0,) if donate else ())
