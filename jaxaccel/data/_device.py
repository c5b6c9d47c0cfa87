"""From host batches to device batches, ahead of the step that needs them."""

import collections
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxaccel.data._checks import as_count
from jaxaccel.data._loader import Loader
from jaxaccel.data._stats import LoaderStats
from jaxaccel.data._store import Store


def to_device(
    batches: Iterable[Mapping[str, Any]],
    *,
    sharding: jax.sharding.Sharding | None = None,
    depth: int = 2,
    copy: bool | None = None,
) -> "DeviceBatches":
    """Moves batches to the device, a few ahead of their use.

    Transfers are asynchronous: while the device works on one batch, the next
    ones are already under way. Batches keep their dtype, so uint8 images take a
    quarter of the bytes of float32 ones; widen them inside the jitted step.

    Args:
      batches: Host batches: dicts of arrays with a leading batch axis.
      sharding: Where all columns go. None uses the default device and leaves
        the arrays uncommitted, like any array that jax makes. With several
        processes each passes its own rows of the global batch.
      depth: Batches under way ahead of the one handed out; 0 moves each batch
        only when it is asked for.
      copy: Whether to copy every host array first. The CPU backend adopts an
        aligned NumPy buffer instead of copying it, and would show later writes
        to it. None copies unless the batches come straight from a `Loader`,
        whose buffers nobody else holds. False is a promise never to write to a
        batch again.

    Returns:
      An iterator over device batches, with `bytes_put`, `stats`, `get_state`,
      `set_state` and `close`. Its state is that of the batches it has handed
      out, not of those under way; `grain.checkpoint` saves and restores it like
      that of a `Loader`. Closing it closes the source as well.

    Raises:
      ValueError: If `depth` is negative; while iterating, if the sharding does not
        divide a batch.
      TypeError: If `batches` is no iterable of batches, or `sharding` none; while
        iterating, if a batch is no dict of arrays, or jax would
        silently narrow a column (64-bit types without `jax_enable_x64`).

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore, BatchPlan, Loader, to_device
      >>> store = ArrayStore({"image": np.zeros((64, 8, 8, 1), np.uint8)})
      >>> loader = Loader(store, BatchPlan(64, 16, epochs=1))
      >>> with to_device(loader) as batches:
      ...     shapes = {batch["image"].shape for batch in batches}
      >>> shapes, batches.bytes_put
      ({(16, 8, 8, 1)}, 4096)
    """
    _check_source(batches)
    check_sharding(sharding)
    depth = as_count("depth", depth, 0)
    if copy is None:
        copy = not isinstance(batches, Loader)
    return DeviceBatches(batches, sharding, depth, copy)


class DeviceBatches:
    """Iterator over device batches; `to_device` describes it.

    Attributes:
      bytes_put: Size of all host arrays handed to the device so far, those under
        way included.
    """

    def __init__(
        self,
        batches: Iterable[Mapping[str, Any]],
        sharding: jax.sharding.Sharding | None,
        depth: int,
        copy: bool,
    ):
        self.bytes_put = 0
        self._source: Any = batches
        self._iterator: Iterator[Mapping[str, Any]] = iter(batches)
        self._sharding, self._depth, self._copy = sharding, depth, copy
        # Each batch with the source's state right after it.
        self._ahead: collections.deque[tuple[dict[str, jax.Array], Any]] = (
            collections.deque()
        )
        self._stop: Exception | None = None
        self._closed = self._exhausted = False
        self._add_seconds = getattr(getattr(batches, "stats", None), "add", None)
        self._has_state = hasattr(batches, "get_state")
        self._state: Any = self._source.get_state() if self._has_state else None

    def __iter__(self) -> "DeviceBatches":
        self._require_open()
        return self

    def __next__(self) -> dict[str, jax.Array]:
        if self._exhausted:
            raise StopIteration
        self._require_open()
        while len(self._ahead) <= self._depth and self._stop is None:
            self._advance()
        if self._ahead:
            batch, self._state = self._ahead.popleft()
            return batch
        if isinstance(self._stop, StopIteration):
            self._exhausted = True
            self.close()
        # An error stays: going on would skip the batch that failed. set_state
        # with the last state tries that batch again.
        assert self._stop is not None
        raise self._stop

    def __len__(self) -> int:
        """The source's length, where it has one."""
        return len(self._source)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> "DeviceBatches":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def stats(self) -> LoaderStats:
        """The source's statistics; batches under way are counted.

        The time spent in `device_put`, copies included, is their stage `put`.
        """
        return self._source.stats

    def get_state(self) -> dict[str, Any]:
        """Returns the source's state after the batch that was handed out last."""
        self._require_state()
        return self._state

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Drops the batches under way and continues at a saved state."""
        self._require_state()
        self._require_open()
        self._source.set_state(state)
        self._ahead.clear()
        self._stop = None
        self._state = self._source.get_state()

    def start_prefetch(self) -> None:
        """Lets the source prepare batches, which otherwise the first `next` does."""
        self._require_open()
        # Grain's handler calls it on whatever it has restored.
        if hasattr(self._source, "start_prefetch"):
            self._source.start_prefetch()

    def close(self) -> None:
        """Drops the batches under way and closes the source."""
        self._closed = True
        self._ahead.clear()
        if hasattr(self._source, "close"):
            self._source.close()

    def _advance(self) -> None:
        try:
            with jax.profiler.TraceAnnotation("jaxaccel.load"):
                host = next(self._iterator)
            state = self._source.get_state() if self._has_state else None
            self._ahead.append((self._put(host), state))
        except Exception as error:
            # Batches that are under way already still reach the caller first.
            self._stop = error

    def _put(self, batch: Any) -> dict[str, jax.Array]:
        check_batch(batch)
        start = time.perf_counter()
        if self._copy:
            # The buffer is ours from here on; device arrays cannot change.
            batch = {
                name: np.array(x) if isinstance(x, np.ndarray) else x
                for name, x in batch.items()
            }
        with jax.profiler.TraceAnnotation("jaxaccel.put"):
            placed = {
                name: put_column(name, x, self._sharding) for name, x in batch.items()
            }
        if self._add_seconds is not None:
            self._add_seconds("put", time.perf_counter() - start)
        self.bytes_put += sum(x.nbytes for x in batch.values())
        return placed

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(
                "the device iterator is closed; call to_device on a new loader"
            )

    def _require_state(self) -> None:
        if not self._has_state:
            raise TypeError(
                f"{type(self._source).__name__} has no state to save or restore; "
                "hand a Loader to to_device"
            )


def check_batch(batch: object) -> None:
    """Checks that a batch is a dict of arrays that jax would take as they are.

    Args:
      batch: The batch.

    Raises:
      TypeError: If it is not, naming the column and the remedy.
      ValueError: If the columns differ in length.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(
            "a batch must be a non-empty dict of arrays, as in {'image': ..., "
            f"'label': ...}}, got {type(batch).__name__}"
        )
    for name, array in batch.items():
        check_column(name, array)
    lengths = {name: array.shape[0] for name, array in batch.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"all columns of a batch must have one length, got {lengths}; check the "
            "function that makes the batches"
        )


def check_column(name: str, array: Any) -> None:
    """Checks one column; see `check_batch`."""
    if not isinstance(array, (np.ndarray, jax.Array)):
        raise TypeError(
            f"column {name!r} must be an array, got {type(array).__name__}; convert "
            "it with np.asarray(x, dtype=...)"
        )
    if array.ndim == 0:
        raise TypeError(f"column {name!r} is a scalar; it needs a leading batch axis")
    dtype = np.dtype(array.dtype)
    if isinstance(array, jax.Array):
        return
    if dtype.kind in "OSUMmT" or dtype.type is np.void:
        raise TypeError(
            f"column {name!r} has dtype {dtype}, which no device holds; encode it as "
            "numbers"
        )
    wide = dtype.itemsize == 8 and dtype.kind in "iuf" or dtype == np.complex128
    if wide and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        narrow = "float32, or keep images in uint8" if dtype.kind == "f" else "int32"
        narrow = "uint8, uint16 or int32" if dtype.kind in "iu" else narrow
        raise TypeError(
            f"column {name!r} has dtype {dtype}, which jax would silently narrow "
            f"(jax_enable_x64 is off); store it as {narrow}"
        )


def put_column(
    name: str, array: Any, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Places one column; the caller has seen to aliasing.

    Args:
      name: Its name, for the messages.
      array: This process's rows.
      sharding: Where they go; None leaves them uncommitted.

    Returns:
      The device array.

    Raises:
      ValueError: If the sharding does not fit the array's shape.
    """
    if sharding is None:
        return jax.device_put(array)
    check_rank(name, array.shape, sharding)
    try:
        if isinstance(array, jax.Array):
            return jax.device_put(array, sharding)
        return jax.make_array_from_process_local_data(sharding, array)
    except ValueError as error:
        raise layout_error(name, array.shape, sharding) from error


def check_rank(
    name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> None:
    """Checks that a column has the axes that a sharding names."""
    # jax says this with an AssertionError or an IndexError.
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise layout_error(name, shape, sharding)


def check_sharding(sharding: object) -> None:
    """Checks that an argument is a sharding, or None."""
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            "sharding must be a jax.sharding.Sharding or None, got "
            f"{sharding!r}; for example NamedSharding(mesh, PartitionSpec('data')) or "
            "SingleDeviceSharding(device)"
        )


def _check_source(batches: object) -> None:
    if isinstance(batches, (Store, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"to_device takes an iterable of batches, got {type(batches).__name__}; "
            "pass Loader(store, plan), and one batch as [batch]"
        )


def layout_error(
    name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> ValueError:
    """Says why a column cannot be laid out over the devices."""
    return ValueError(
        f"column {name!r} of shape {shape} cannot be laid out as {sharding}: "
        "the batch axis must be divisible by the number of shards, and the "
        "sharding must name no axis that the column lacks; choose such a "
        "batch_size, or shard the batch axis alone"
    )
