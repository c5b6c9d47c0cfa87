"""How a store gets onto the device: block by block, within a limit of memory."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data._device import check_column, check_rank, layout_error
from jaxaccel.data._store import Store

# Where the device does not tell its memory, as the CPU does not.
_DEFAULT_MAX_BYTES = 2 << 30
# What the host holds at a time, besides the store itself.
_BLOCK_BYTES = 64 << 20


def load_columns(
    store: Store, sharding: jax.sharding.Sharding | None
) -> dict[str, jax.Array]:
    """Reads a store into device memory, once, in order, and in blocks.

    Args:
      store: The store.
      sharding: Where each column goes; None leaves them uncommitted on the default
        device. Each process reads the rows of its own devices.

    Returns:
      The columns by name.

    Raises:
      TypeError: If jax would silently narrow a column.
      ValueError: If the sharding does not fit a column.
    """
    shapes = {name: (len(store), *spec.shape) for name, spec in store.spec.items()}
    for name, spec in store.spec.items():
        check_column(name, np.empty((0, *spec.shape), spec.dtype))
    shards = {
        name: _shards(name, shape, store.spec[name].dtype, sharding)
        for name, shape in shapes.items()
    }
    every = [shard for parts in shards.values() for shard in parts]
    first = min(shard.rows.start for shard in every)
    last = max(shard.rows.stop for shard in every)
    size = sum(
        math.prod(spec.shape) * spec.dtype.itemsize for spec in store.spec.values()
    )
    part = store if last - first == len(store) else store[first:last]
    for block in part.scan(max(1, _BLOCK_BYTES // max(size, 1))):
        for name, array in block.items():
            for shard in shards[name]:
                shard.write(first, array)
        first += len(next(iter(block.values())))
        # Otherwise all blocks could be under way, and in memory, at once.
        jax.block_until_ready([shard.buffer for shard in every])
    return {
        name: _join(shapes[name], [shard.buffer for shard in parts], sharding)
        for name, parts in shards.items()
    }


class _Shard:
    """What one device holds of a column; `buffer` fills up."""

    def __init__(
        self,
        device: Any,
        index: tuple[slice, ...],
        shape: tuple[int, ...],
        dtype: np.dtype,
    ):
        ranges = [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
        self.rows = ranges[0]
        self.buffer: jax.Array | None = None
        self._rest = tuple(slice(r.start, r.stop) for r in ranges[1:])
        self._shape = tuple(map(len, ranges))
        self._device, self._dtype = device, dtype

    def write(self, start: int, block: np.ndarray) -> None:
        """Copies what is its own of a block that begins at a row of the store."""
        low, high = max(start, self.rows.start), min(start + len(block), self.rows.stop)
        if low >= high:
            return
        part = jax.device_put(
            block[(slice(low - start, high - start), *self._rest)], self._device
        )
        if high - low == len(self.rows):
            self.buffer = part
            return
        if self.buffer is None:
            self.buffer = jnp.zeros(self._shape, self._dtype, device=self._device)
        self.buffer = _update(self.buffer, part, np.int32(low - self.rows.start))


def _shards(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
) -> list[_Shard]:
    if sharding is None:
        return [_Shard(None, (slice(None),) * len(shape), shape, dtype)]
    check_rank(name, shape, sharding)
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise layout_error(name, shape, sharding) from error
    places = sharding.addressable_devices_indices_map(shape)
    return [
        _Shard(device, index or (slice(None),) * len(shape), shape, dtype)
        for device, index in places.items()
    ]


# The buffer is donated, so that it is written to instead of copied.
@jax.jit(donate_argnums=0)
def _update(buffer: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, part, start, axis=0)


def _join(
    shape: tuple[int, ...],
    buffers: list[jax.Array | None],
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    filled = [buffer for buffer in buffers if buffer is not None]
    assert len(filled) == len(buffers)
    if sharding is None:
        return filled[0]
    return jax.make_array_from_single_device_arrays(shape, sharding, filled)


def check_memory(
    store: Store,
    sharding: jax.sharding.Sharding | None,
    max_fraction: float,
    max_bytes: int | None,
) -> None:
    """Refuses a store that is too large for the device.

    Args:
      store: The store.
      sharding: Where its columns go.
      max_fraction: Largest share of a device's memory.
      max_bytes: Largest size on a device, instead of the share.

    Raises:
      ValueError: If it is larger.
    """
    size = sum(
        _bytes_on_a_device((len(store), *spec.shape), spec.dtype, sharding)
        for spec in store.spec.values()
    )
    if max_bytes is not None:
        limit, why = max_bytes, "max_bytes"
    else:
        limit, why = _memory_limit(sharding, max_fraction)
    if size > limit:
        raise ValueError(
            f"the data set takes {size} bytes on a device, more than {limit} ({why}); "
            "ship batches with Loader and to_device, shard it over more devices, or "
            "raise the limit with max_bytes"
        )


def _bytes_on_a_device(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> int:
    if sharding is not None:
        try:
            shape = sharding.shard_shape(shape)
        except (ValueError, IndexError):
            # Placing it will fail, too, with the column's name.
            pass
    return math.prod(shape) * dtype.itemsize


def _memory_limit(
    sharding: jax.sharding.Sharding | None, max_fraction: float
) -> tuple[int, str]:
    if sharding is None:
        device = jax.local_devices()[0]
    else:
        device = min(sharding.addressable_devices, key=lambda d: d.id)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return _DEFAULT_MAX_BYTES, f"the default for {device.platform}"
    total = stats["bytes_limit"]
    free = total - stats.get("bytes_in_use", 0)
    why = f"max_fraction={max_fraction} of {total} bytes, of which {free} are free"
    return min(int(max_fraction * total), free), why
