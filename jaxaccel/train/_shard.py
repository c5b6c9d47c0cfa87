"""Data-parallel layouts over a mesh: thin names for JAX's own shardings."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a train step's arrays lie on a mesh; from `data_parallel` or `fsdp`.

    Batches are split along their leading axis. Loss, gradient and batch statistics
    are those of the whole batch, on any number of devices.

    Attributes:
      mesh: The mesh, of Auto or of Explicit axes.
      axis: The mesh axis that batches are split over.
      rule: `rule(shape) -> PartitionSpec` of parameters, their average and the
        optimizer's state. All else is replicated.
    """

    mesh: Mesh
    axis: str
    rule: Callable[[tuple[int, ...]], PartitionSpec]

    @property
    def batch(self) -> NamedSharding:
        """The sharding of batches, for `jaxaccel.data.to_device`."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    @property
    def stacked(self) -> NamedSharding:
        """The same for the stacks of batches that `steps_per_call` takes."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.axis))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds in full."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, state: Any) -> Any:
        """Returns a state of shardings, as `orbax` and `jax.jit` take them."""

        def by_rule(tree: PyTree) -> PyTree:
            return jax.tree.map(
                lambda x: NamedSharding(self.mesh, self.rule(x.shape)), tree
            )

        replicated = jax.tree.map(lambda x: self.replicated, state)
        return replicated.replace(
            params=by_rule(state.params),
            opt_state=by_rule(state.opt_state),
            ema=by_rule(state.ema),
        )

    def place(self, state: Any) -> Any:
        """Puts a state on the mesh, such as one that was just restored."""
        return jax.device_put(state, self.shardings(state))

    def constrain(self, state: Any) -> Any:
        """Keeps the state of a step in its place; inside jit."""
        return jax.tree.map(self._put, state, self.shardings(state))

    def constrain_params(self, params: PyTree) -> PyTree:
        """The same for a tree like the parameters."""
        return jax.tree.map(
            lambda x: self._put(x, NamedSharding(self.mesh, self.rule(x.shape))), params
        )

    def constrain_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a batch."""
        return {name: self._put(x, self.batch) for name, x in batch.items()}

    def gather(self, params: PyTree) -> PyTree:
        """Gathers parameters for their use; the gradient is scattered again."""
        return jax.tree.map(lambda x: self._put(x, self.replicated), params)

    def _put(self, x: Any, sharding: NamedSharding) -> jax.Array:
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.sharding.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)


def data_parallel(mesh: Mesh, *, axis: str | None = None) -> Layout:
    """Lays batches out over a mesh and parameters on every device of it.

    Args:
      mesh: From `jax.make_mesh`.
      axis: The mesh axis that batches are split over; None means the first.

    Returns:
      The layout, for `TrainState.create`, `make_train_step` and `make_eval_step`;
      its `batch` is the sharding for `jaxaccel.data.to_device`.

    Raises:
      ValueError: If the mesh has no such axis.

    Examples:
      >>> import jax
      >>> from jaxaccel import train
      >>> layout = train.data_parallel(jax.make_mesh((1,), ("data",)))
      >>> print(tuple(layout.batch.spec), tuple(layout.replicated.spec))
      ('data',) ()
    """
    return Layout(mesh, _axis(mesh, axis), lambda shape: PartitionSpec())


def fsdp(mesh: Mesh, *, axis: str | None = None, min_size: int = 2**14) -> Layout:
    """Also splits parameters, their average and the optimizer's state.

    Each device holds a part of every large array: of its longest axis that the
    number of devices divides. The step gathers parameters where they are used and
    scatters their gradient, so that a device keeps `1/n` of the state and the update
    runs on that part.

    Args:
      mesh: From `jax.make_mesh`.
      axis: The mesh axis that batches and arrays are split over; None means the
        first.
      min_size: Arrays of fewer elements stay replicated: gathering them costs more
        than it saves.

    Returns:
      The layout, as from `data_parallel`.

    Raises:
      ValueError: If the mesh has no such axis.

    Examples:
      >>> import jax
      >>> from jaxaccel import train
      >>> layout = train.fsdp(jax.make_mesh((1,), ("data",)))
      >>> print(tuple(layout.rule((100, 400))), tuple(layout.rule((400,))))
      (None, 'data') ()
    """
    name = _axis(mesh, axis)
    count = mesh.shape[name]

    def rule(shape: tuple[int, ...]) -> PartitionSpec:
        divided = [i for i, n in enumerate(shape) if n % count == 0]
        if math.prod(shape) < min_size or not divided:
            return PartitionSpec()
        longest = max(divided, key=lambda i: shape[i])
        return PartitionSpec(*[None] * longest, name)

    return Layout(mesh, name, rule)


def count_collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Counts the collective operations of a compiled step.

    Args:
      compiled: `step.lower(state, batch).compile()`.

    Returns:
      Number of operations by kind, without the kinds that do not occur. One
      operation may move many arrays.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import train
      >>> compiled = jax.jit(jnp.sum).lower(jnp.ones(4)).compile()
      >>> train.count_collectives(compiled)
      {}
    """
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text() or "")
    return dict(collections.Counter(found))


def _axis(mesh: Mesh, axis: str | None) -> str:
    if axis is not None and axis not in mesh.axis_names:
        raise ValueError(
            f"the mesh has no axis {axis!r}; its axes are {mesh.axis_names}"
        )
    return axis or mesh.axis_names[0]
