"""Sums over the devices of a mesh, for use inside shard_map."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxaccel.transforms._dims import KeyPath

AxisName = str | tuple[str, ...] | Callable[[KeyPath, Any], PartitionSpec]


def check_axis_name(name: str, value: Any) -> None:
    """Raises unless the value is None or names mesh axes, or is a function."""
    names = value if isinstance(value, tuple) else (value,)
    if value is None or callable(value):
        return
    if not names or not all(isinstance(one, str) for one in names):
        raise TypeError(
            f"{name}: `axis_name` must be the name of a mesh axis, a tuple of names, "
            f"or a function (path, leaf) -> PartitionSpec, got {value!r}"
        )


def names_over(
    axis_name: AxisName | None, path: KeyPath, leaf: Any, axes: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the mesh axes over which certain axes of a leaf are split."""
    if axis_name is None:
        return ()
    if not callable(axis_name):
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        return tuple(name for name in names if may_vary(leaf, name))
    spec = axis_name(path, leaf)
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"`axis_name` answered {spec!r} for {jax.tree_util.keystr(path)}; "
            "it must answer the leaf's jax.sharding.PartitionSpec"
        )
    parts = [spec[axis] for axis in axes if axis < len(spec)]
    groups = [part if isinstance(part, tuple) else (part,) for part in parts]
    return tuple(name for group in groups for name in group if name is not None)


def device_count(names: tuple[str, ...]) -> int:
    """Number of devices along mesh axes; 1 outside shard_map, as in `init`."""
    try:
        return lax.axis_size(names) if names else 1
    except NameError:
        return 1


def sum_over_devices(
    values: Sequence[jax.Array], names: Sequence[tuple[str, ...]], *, fuse: bool
) -> list[jax.Array]:
    """Sums each value over its mesh axes; fused, numbers travel together.

    Fusing matters under `jit` too, where XLA inserts the sums itself: behind
    one stack with a barrier it forms one for all leaves.
    """
    totals = list(values)
    for group in dict.fromkeys(names):
        members = [i for i, own in enumerate(names) if own == group]
        single = [i for i in members if values[i].size == 1] if fuse else []
        if len(single) > 1:
            for i, total in zip(single, _stacked(values, single, group), strict=True):
                totals[i] = total
            members = [i for i in members if i not in single]
        for i in members:
            totals[i] = _psum(values[i], group)
    return totals


def _stacked(
    values: Sequence[jax.Array], which: list[int], names: tuple[str, ...]
) -> list[jax.Array]:
    dtype = jnp.result_type(*(values[i] for i in which))
    stack = jnp.stack([values[i].reshape(()).astype(dtype) for i in which])
    stack = lax.optimization_barrier(_psum(stack, names))
    return [
        stack[k].reshape(values[i].shape).astype(values[i].dtype)
        for k, i in enumerate(which)
    ]


def _psum(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    try:
        return lax.psum(x, names) if names else x
    except NameError:
        raise ValueError(
            f"`axis_name` names the mesh axes {names}, which do not exist where the "
            "update runs; give it inside jax.shard_map only, and leave it out under "
            "jit, where sharded gradients need nothing"
        ) from None


def may_vary(leaf: Any, name: str) -> bool:
    """False if shard_map knows that all devices hold the same values."""
    try:
        index = lax.axis_index(name)
    except NameError:
        return True
    # Nothing is known with check_vma=False: not even the index then varies.
    return name not in _varying(index) or name in _varying(leaf)


def _varying(x: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return getattr(kind, "varying", frozenset())
