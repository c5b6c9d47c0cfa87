"""The largest batch whose compiled step fits into the memory."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# For fragmentation, and what else lives on the device.
_USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """What `find_batch_size` found.

    Attributes:
      batch_size: The largest size that was found to fit.
      bytes: What it needs on each device, batches ahead included.
      limit: What it may need.
      measured: The bytes of every size that was compiled.
    """

    batch_size: int
    bytes: int
    limit: int
    measured: Mapping[int, int]


def find_batch_size(
    step: jax.stages.Wrapped,
    state: Any,
    batch: Mapping[str, Any],
    *,
    memory_bytes: int | None = None,
    batches_ahead: int = 2,
    multiple_of: int = 1,
    max_batch_size: int = 1 << 16,
    max_compilations: int = 8,
) -> BatchSize:
    """Finds how many examples fit, by compiling the step and running nothing.

    XLA plans the memory of a program before it runs: a step needs its arguments, its
    outputs and its temporaries, less what outputs share with donated arguments. The
    bytes grow almost linearly with the batch, so that a straight line through two
    sizes leads close to the limit, and a few compilations more to a size that is
    known to fit. A larger one may fit, too, if `max_compilations` ended the search.

    Largest is not best: look at examples per second, and at the learning rate, which
    another batch size moves.

    Args:
      step: From `make_train_step`, with one step a call, or any jitted function of
        state and batch.
      state: Its state; only shapes, dtypes and shardings count.
      batch: A batch to begin with: arrays, or `jax.ShapeDtypeStruct`. Its length is
        the first size tried, and its shardings are kept.
      memory_bytes: Bytes of each device that may be used; None takes 90 % of what
        the device says it has.
      batches_ahead: Batches that wait on the device meanwhile, the `depth` of
        `jaxaccel.data.to_device`.
      multiple_of: The size is a multiple of it: the number of devices that share the
        batch, or of `accumulate`'s micro-batches, times each other.
      max_batch_size: Larger ones are not tried.
      max_compilations: Number of sizes that are tried.

    Returns:
      The size, and what was measured.

    Raises:
      TypeError: If the step is not jitted, or the batch is no dict of arrays.
      ValueError: If no size fits, a number is out of range, or the device does not
        say how much memory it has (CPU) and `memory_bytes` is None.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxaccel import train
      >>> def loss_fn(params, model_state, batch, key):
      ...     return jnp.mean((batch["x"] @ params["w"]) ** 2), (model_state, {})
      >>> tx = optax.sgd(0.1)
      >>> params = {"w": jnp.zeros((256, 4))}
      >>> state = train.TrainState.create(params, tx, key=jax.random.key(0))
      >>> found = train.find_batch_size(
      ...     train.make_train_step(loss_fn, tx), state, {"x": jnp.zeros((32, 256))},
      ...     memory_bytes=10**6, batches_ahead=0, multiple_of=32)
      >>> found.batch_size, found.bytes <= 10**6
      (928, True)
    """
    _check(step, batch, batches_ahead, multiple_of, max_batch_size, max_compilations)
    limit = _device_limit(state) if memory_bytes is None else memory_bytes
    measured: dict[int, int] = {}
    size = _rounded(_length(batch), multiple_of, max_batch_size)
    while size is not None and len(measured) < max_compilations:
        resized = {name: _resized(x, size) for name, x in batch.items()}
        waiting = batches_ahead * sum(map(_bytes, resized.values()))
        measured[size] = _program_bytes(step, state, resized) + waiting
        size = _next_size(measured, limit, multiple_of, max_batch_size)
    fitting = [n for n in measured if measured[n] <= limit]
    if not fitting:
        smallest = min(measured)
        raise ValueError(
            f"a batch of {smallest} needs {measured[smallest]:,} bytes, and "
            f"{limit:,} are there; shard the state, use `rematerialize`, or a smaller "
            "multiple_of"
        )
    best = max(fitting)
    return BatchSize(best, measured[best], limit, measured)


def _next_size(
    measured: Mapping[int, int], limit: int, multiple: int, largest: int
) -> int | None:
    """Returns the size to try next; None if the answer is known."""
    low = max((n for n in measured if measured[n] <= limit), default=0)
    high = min((n for n in measured if measured[n] > limit), default=None)
    top = largest // multiple * multiple
    if high is not None:
        top = high - multiple
    if low >= top:
        return None
    if len(measured) == 1:
        guess = 2 * low if low else top // 2
    else:
        guess = _on_the_line(measured, limit, top)
    if not low:
        # Far from anything that fits, a line says little.
        guess = min(guess, top // 2)
    return _rounded(min(max(guess, low + multiple), top), multiple, top)


def _on_the_line(measured: Mapping[int, int], limit: int, top: int) -> int:
    """Returns where the line through the two sizes nearest to the limit meets it."""
    (n, bytes_n), (m, bytes_m) = sorted(
        measured.items(), key=lambda item: abs(item[1] - limit)
    )[:2]
    slope = (bytes_m - bytes_n) / (m - n)
    return int(n + (limit - bytes_n) / slope) if slope > 0 else top


def _rounded(size: int, multiple: int, largest: int) -> int:
    return max(min(size, largest) // multiple, 1) * multiple


def _program_bytes(step: Any, state: Any, batch: Mapping[str, Any]) -> int:
    needed = step.lower(state, batch).compile().memory_analysis()
    if needed is None:
        raise ValueError("this backend does not say how much memory a program needs")
    return (
        needed.argument_size_in_bytes
        + needed.output_size_in_bytes
        + needed.temp_size_in_bytes
        + needed.generated_code_size_in_bytes
        - needed.alias_size_in_bytes
    )


def _resized(array: Any, size: int) -> jax.ShapeDtypeStruct:
    sharding = array.sharding if isinstance(array, jax.ShapeDtypeStruct) else None
    if isinstance(array, jax.Array) and array.committed:
        sharding = array.sharding
    shape = (size, *array.shape[1:])
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each device."""
    sharding = array.sharding
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return int(np.prod(shape)) * array.dtype.itemsize


def _device_limit(state: Any) -> int:
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    device = min(arrays[0].devices(), key=lambda d: d.id) if arrays else None
    device = jax.local_devices()[0] if device is None else device
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit:
        raise ValueError(
            f"{device} does not say how much memory it has; give memory_bytes"
        )
    return int(_USABLE * limit)


def _length(batch: Mapping[str, Any]) -> int:
    return next(iter(batch.values())).shape[0]


def _check(
    step: Any,
    batch: Any,
    batches_ahead: int,
    multiple_of: int,
    max_batch_size: int,
    max_compilations: int,
) -> None:
    if not hasattr(step, "lower"):
        raise TypeError(
            f"step must be jitted, as make_train_step returns it; got "
            f"{type(step).__name__}"
        )
    if not (
        isinstance(batch, Mapping)
        and batch
        and all(getattr(x, "shape", ()) for x in batch.values())
    ):
        raise TypeError(
            "batch must be a dict of arrays with a leading batch axis; got "
            f"{type(batch).__name__}"
        )
    if batches_ahead < 0 or max_compilations < 1:
        raise ValueError(
            "batches_ahead must be at least 0 and max_compilations at least 1; got "
            f"{batches_ahead} and {max_compilations}"
        )
    if not 1 <= multiple_of <= max_batch_size:
        raise ValueError(
            "multiple_of must be at least 1 and at most max_batch_size; got "
            f"{multiple_of} and {max_batch_size}"
        )
