"""A whole data set on the device: only indices travel."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel.data._device import (
    DeviceBatches,
    check_batch,
    check_sharding,
    put_column,
    to_device,
)
from jaxaccel.data._loader import check_plan
from jaxaccel.data._plan import Plan
from jaxaccel.data._residency import check_memory, load_columns
from jaxaccel.data._state import make_state, read_state, sample_content
from jaxaccel.data._store import ColumnSpec, Store, check_store

# Marks the columns that a plan adds, among the rows of a step.
_EXTRA = "extra_"


@jax.tree_util.register_pytree_with_keys_class
class DeviceDataset:
    """All columns of a store, resident on the device.

    A pytree: pass it to a jitted function as an argument. Closing over it would
    write the whole data set into the compiled program.

    Args:
      store: Any store. It is read once, in blocks of 64 MiB, and copied: later
        changes to its arrays do not show.
      sharding: Where each column goes; None uses the default device, uncommitted.
        With several processes each reads what its own devices hold.
      max_fraction: Largest share of a device's memory that the data may take.
      max_bytes: Largest size in bytes on a device, instead of the share. Where
        the device does not tell its memory (CPU), the default is 2 GiB.

    Attributes:
      columns: Device array of each column, `(examples, ...)`.

    Raises:
      TypeError: If it is no store, the sharding none, or jax would silently narrow a
        column.
      ValueError: If the data is larger than the limit, or the sharding does not
        divide it.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore, BatchPlan, DeviceDataset
      >>> store = ArrayStore({"label": np.arange(6, dtype=np.uint8)})
      >>> dataset = DeviceDataset(store)
      >>> dataset.take(np.array([5, 0]))["label"].tolist()
      [5, 0]
      >>> with dataset.batches(BatchPlan(6, 3, epochs=1, shuffle=False)) as batches:
      ...     labels = [batch["label"].tolist() for batch in batches]
      >>> labels, batches.bytes_put
      ([[0, 1, 2], [3, 4, 5]], 24)
    """

    def __init__(
        self,
        store: Store,
        *,
        sharding: jax.sharding.Sharding | None = None,
        max_fraction: float = 0.5,
        max_bytes: int | None = None,
    ):
        check_store("DeviceDataset", store)
        check_sharding(sharding)
        if not 0 < max_fraction <= 1:
            raise ValueError(
                f"max_fraction must be in (0, 1], got {max_fraction}; 0.5 leaves half "
                "of the memory to the model"
            )
        if len(store) > np.iinfo(np.int32).max:
            raise ValueError(
                f"a resident data set is indexed by int32, but the store holds "
                f"{len(store)} examples; use a Loader"
            )
        check_memory(store, sharding, max_fraction, max_bytes)
        self.num_examples = len(store)
        self._content = sample_content(store)
        self.columns: dict[str, Any] = load_columns(store, sharding)

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        return f"DeviceDataset({self.num_examples} examples, {self.columns})"

    @property
    def spec(self) -> dict[str, ColumnSpec]:
        """`ColumnSpec` (shape of one example, dtype) by name."""
        return {
            name: ColumnSpec(tuple(array.shape[1:]), np.dtype(array.dtype))
            for name, array in self.columns.items()
        }

    def take(self, indices: jax.typing.ArrayLike) -> dict[str, jax.Array]:
        """Reads rows on the device; works inside jit.

        Args:
          indices: Integers, any shape. Host indices are checked; traced or
            device ones cannot be without waiting for the device, and are clipped
            to the valid range.

        Returns:
          One array for each column, `(*indices.shape, ...)`.

        Raises:
          IndexError: If a host index is out of range.
          TypeError: If the indices are not integers.
        """
        if not isinstance(indices, jax.Array):
            indices = np.asarray(indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(
                f"indices must be integers, got {indices.dtype}; cast them "
                "with .astype(np.int32)"
            )
        if isinstance(indices, np.ndarray) and indices.size:
            if indices.min() < 0 or indices.max() >= self.num_examples:
                raise IndexError(
                    f"indices must lie in 0 to {self.num_examples - 1}, got "
                    f"{indices.min()} to {indices.max()}"
                )
        rows = jnp.asarray(indices)
        return {name: _take(array, rows) for name, array in self.columns.items()}

    def batches(
        self,
        plan: Plan,
        *,
        sharding: jax.sharding.Sharding | None = None,
        depth: int = 2,
    ) -> "ResidentBatches":
        """Iterates over the batches of a plan, gathered on the device.

        The batches equal those of a `Loader` with the same plan, and a state
        saved from either continues with the other. Only the indices travel, four
        bytes an example, and what the plan adds besides `mask`.

        Args:
          plan: Which examples make up which batch.
          sharding: Where the indices go; None leaves them uncommitted.
          depth: Index arrays under way ahead of the batch handed out.

        Returns:
          An iterator over device batches, like that of `to_device`.

        Raises:
          ValueError: If the plan is for another number of examples.
        """
        source = _Indices(self, plan)
        return ResidentBatches(self, to_device(source, sharding=sharding, depth=depth))

    def rows(
        self,
        plan: Plan,
        steps: range | None = None,
        *,
        sharding: jax.sharding.Sharding | None = None,
    ) -> dict[str, jax.Array]:
        """Puts the indices of many steps on the device, for `make_epoch_scan`.

        Args:
          plan: Which examples make up which batch.
          steps: The steps; None takes those of the first epoch. Those of epoch e are
            `range(e * n, (e + 1) * n)` with n = `plan.steps_per_epoch`; a run that
            was stopped at step t continues with `range(t, ...)`.
          sharding: Where the indices of a batch go, as for `batches`.

        Returns:
          The indices, int32 of shape `(steps, batch)`, in a dict whose key says
          whether there is padding, and the columns that the plan adds besides
          `mask`. Rows of it are what `batch` takes.

        Raises:
          IndexError: If a step is out of range.
          TypeError: If `steps` are no steps, or jax would silently narrow a column
            that the plan adds.
          ValueError: If there is no step, or the plan is for another number of
            examples.
        """
        check_sharding(sharding)
        check_plan(len(self), self.spec, plan)
        steps = range(plan.steps_per_epoch) if steps is None else steps
        if not isinstance(steps, range):
            raise TypeError(f"steps must be a range, as range(3), got {steps!r}")
        if not steps:
            raise ValueError(f"there must be at least one step, got {steps}")
        batches = [_host_rows(plan, step) for step in steps]
        check_batch(batches[0])
        if isinstance(sharding, NamedSharding):
            spec = PartitionSpec(None, *sharding.spec)
            sharding = NamedSharding(sharding.mesh, spec)
        return {
            name: put_column(
                name, np.stack([batch[name] for batch in batches]), sharding
            )
            for name in batches[0]
        }

    def batch(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Gathers the batch of one step; works inside jit.

        Args:
          rows: The rows of one step: what `rows` returned, without its first axis.

        Returns:
          One array for each column, `(batch, ...)`, and what the plan adds: `mask`
          where it pads, and columns of its own.
        """
        extras = {
            name.removeprefix(_EXTRA): array
            for name, array in rows.items()
            if name.startswith(_EXTRA)
        }
        if "index" in rows:
            return {**self.take(rows["index"]), **extras}
        padded = rows["padded_index"]
        mask = padded >= 0
        taken = self.take(jnp.where(mask, padded, ~padded))
        return {**taken, **extras, "mask": mask}

    def tree_flatten_with_keys(self):
        """Splits the data set into its columns and the number of examples."""
        names = sorted(self.columns)
        leaves = [(jax.tree_util.DictKey(n), self.columns[n]) for n in names]
        return leaves, (tuple(names), self.num_examples)

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        """Rebuilds the data set, without the checks of a new one."""
        dataset = object.__new__(cls)
        names, dataset.num_examples = aux
        # Not among the static parts: other data must not compile anew.
        dataset._content = None
        dataset.columns = dict(zip(names, leaves, strict=True))
        return dataset


class ResidentBatches:
    """Iterator over gathered batches; `DeviceDataset.batches` describes it."""

    def __init__(self, dataset: DeviceDataset, indices: DeviceBatches):
        self._dataset, self._indices = dataset, indices

    def __iter__(self) -> "ResidentBatches":
        iter(self._indices)
        return self

    def __next__(self) -> dict[str, jax.Array]:
        return _gather(self._dataset, next(self._indices))

    def __len__(self) -> int:
        return len(self._indices)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> "ResidentBatches":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def bytes_put(self) -> int:
        """Size of all index arrays handed to the device so far."""
        return self._indices.bytes_put

    def get_state(self) -> dict[str, Any]:
        """Returns the state after the batch that was handed out last."""
        return self._indices.get_state()

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Continues at a saved state."""
        self._indices.set_state(state)

    def start_prefetch(self) -> None:
        """See `DeviceBatches.start_prefetch`."""
        self._indices.start_prefetch()

    def close(self) -> None:
        """Drops the indices under way."""
        self._indices.close()


class _Indices:
    """Host batches of int32 indices and a plan's columns, with a loader's state."""

    def __init__(self, dataset: DeviceDataset, plan: Plan):
        check_plan(len(dataset), dataset.spec, plan)
        self._plan, self._spec, self._step = plan, dataset.spec, 0
        self._content = dataset._content

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._step == self._plan.num_steps:
            raise StopIteration
        batch = _host_rows(self._plan, self._step)
        self._step += 1
        return batch

    def __len__(self) -> int:
        return len(self._plan)

    def get_state(self) -> dict[str, Any]:
        return make_state(self._step, self._plan, self._spec, self._content)

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        self._step = read_state(state, self._plan, self._spec, self._content)


def _host_rows(plan: Plan, step: int) -> dict[str, np.ndarray]:
    rows = plan.indices(step).astype(np.int32)
    extras = plan.extras(step)
    if plan.remainder == "pad":
        # Padding travels as the complement, so that no mask has to.
        host = {"padded_index": np.where(extras.pop("mask"), rows, ~rows)}
    else:
        host = {"index": rows}
    return host | {_EXTRA + name: array for name, array in extras.items()}


@jax.jit
def _gather(dataset: DeviceDataset, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return dataset.batch(rows)


def _take(column: jax.Array, rows: jax.Array) -> jax.Array:
    mesh = jax.typeof(column).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return jnp.take(column, rows, axis=0, mode="clip")
    # On a mesh of explicit axes jax asks where the result goes: to the indices.
    layout = NamedSharding(mesh, jax.typeof(rows).sharding.spec)
    return column.at[rows].get(mode="clip", out_sharding=layout)
