"""Means over a whole data set, exact for any batch size."""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxaccel.train._state import TrainState

# Results are read this many batches late: the device never waits for the host,
# and the host never runs far ahead with batches in memory.
_IN_FLIGHT = 4


def evaluate(
    eval_step: Callable[[TrainState, Any], dict[str, jax.Array]],
    state: TrainState,
    batches: Iterable[Mapping[str, Any]],
    *,
    ema: bool = False,
) -> dict[str, float]:
    r"""Averages loss and metrics over all examples of an iterable of batches.

    .. math:: \sum_b w_b m_b / \sum_b w_b

    where :math:`w_b` counts the examples of batch :math:`b` with `mask == 1`.
    A batch smaller than the first is padded to its size and masked, so that the
    step compiles once and no example is lost or counted twice.

    Args:
      eval_step: From `make_eval_step`. Build it once and call `evaluate` after
        every epoch.
      state: The state to evaluate.
      batches: Dicts of arrays, with or without `mask`; host or device arrays. Host
        arrays are copied, so the iterable may reuse its buffers.
      ema: Whether to evaluate the averaged parameters instead of the latest ones;
        see `TrainState.with_average` for what becomes of batch statistics. Both
        ways share one compiled step.

    Returns:
      The mean of `"loss"` and of every metric, as Python floats.

    Raises:
      TypeError: If a batch is not a dict of arrays, or the state keeps no average.
      ValueError: If there are no batches, no example counts, or a batch is
        larger than the first one.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> from jaxaccel import train
      >>> def loss_fn(params, model_state, batch, key):
      ...     return train.masked_mean(batch["x"], batch), (model_state, {})
      >>> state = train.TrainState.create(
      ...     jnp.array(1.0), optax.sgd(0.1), key=jax.random.key(0))
      >>> x = np.arange(5, dtype=np.float32)
      >>> print(train.evaluate(
      ...     train.make_eval_step(loss_fn), state, [{"x": x[:3]}, {"x": x[3:]}]))
      {'loss': 2.0}
    """
    check_batches(batches)
    state = state.with_average() if ema else state
    totals: dict[str, float] = collections.defaultdict(float)
    pending: collections.deque = collections.deque()

    def collect() -> None:
        for name, value in jax.device_get(pending.popleft()).items():
            totals[name] += float(value)

    size = None
    for batch in batches:
        size = size or _length(batch)
        # Put by name: `jax.transfer_guard("disallow")` refuses what a call puts.
        sums = eval_step(state, jax.device_put(_pad(batch, size)))
        if not isinstance(sums, Mapping) or "weight" not in sums:
            raise TypeError(
                "eval_step must return sums and their weight: build it by "
                "make_eval_step(task.eval_loss)"
            )
        pending.append(sums)
        if len(pending) > _IN_FLIGHT:
            collect()
    while pending:
        collect()
    if size is None:
        raise ValueError("there are no batches to evaluate: is the loader used up?")
    weight = totals.pop("weight")
    if weight == 0:
        raise ValueError("every example is masked: there is nothing to average")
    return {name: total / weight for name, total in totals.items()}


def check_batches(batches: Any) -> None:
    """Raises unless batches can be iterated over, and are not a single one."""
    if isinstance(batches, Mapping) or not hasattr(batches, "__iter__"):
        raise TypeError(
            "batches must be an iterable of batches, such as a Loader, "
            f"store.scan(256) or [batch]; got {type(batches).__name__}"
        )


def _length(batch: Mapping[str, Any]) -> int:
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(
            "evaluate takes batches that are dicts of arrays, {'image': ..., 'label': "
            f"...}}; got {type(batch).__name__}"
        )
    for name, x in batch.items():
        if not hasattr(x, "shape") or not x.shape:
            raise TypeError(
                f"batch[{name!r}] is a {type(x).__name__} without a batch axis; "
                "write np.asarray(x)"
            )
    return next(iter(batch.values())).shape[0]


def _pad(batch: Mapping[str, Any], size: int) -> dict[str, Any]:
    length = _length(batch)
    if length > size:
        raise ValueError(
            f"a batch of {length} examples follows a first one of {size}; only "
            "smaller ones can be padded. Send the largest batch first"
        )
    padded = dict(batch)
    padded.setdefault("mask", np.ones(length, bool))
    if length == size:
        # The step reads host arrays after this call has returned.
        return {
            name: np.array(x) if isinstance(x, np.ndarray) else x
            for name, x in padded.items()
        }
    # Zeros, not repeats: a wrong mask would show up at once.
    return {
        name: np.concatenate([x, np.zeros((size - length, *x.shape[1:]), x.dtype)])
        for name, x in jax.device_get(padded).items()
    }
