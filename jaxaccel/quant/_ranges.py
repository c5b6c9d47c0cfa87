"""Reductions over the entries that share a scale."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxaccel.quant._qparams import QParams, as_float32, compute_qparams
from jaxaccel.quant._spec import QuantSpec


def array_qparams(x: ArrayLike, spec: QuantSpec) -> QParams:
    """Returns scale and zero point that cover an array, such as a kernel.

    Args:
      x: Floating numbers.
      spec: Format of the codes.

    Returns:
      Those of `compute_qparams` for the least and the largest entry of each group
      that shares a scale.

    Raises:
      ValueError: As `compute_qparams`; if the axes do not fit.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> kernel = np.array([[1.27, -0.5], [0.1, 2.54]])
      >>> print(quant.array_qparams(kernel, quant.INT8_WEIGHT).scale)
      [0.01 0.02]
    """
    return compute_qparams(*extremes(x, spec), spec)


def extremes(x: ArrayLike, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """Returns least and largest entry of each group that shares a scale."""
    x = as_float32(x)
    check_entries(x)
    return _reduce(jnp.min, x, spec), _reduce(jnp.max, x, spec)


def check_entries(x: jax.Array) -> None:
    """Raises ValueError for an array of size 0."""
    if x.size == 0:
        raise ValueError(f"an array without entries has no range; got shape {x.shape}")


def sum_to_params(x: jax.Array, spec: QuantSpec) -> jax.Array:
    """Returns the sum of each group that shares a scale."""
    return _reduce(jnp.sum, x, spec)


def as_groups(x: jax.Array, spec: QuantSpec) -> jax.Array:
    """Returns the entries as `(groups, entries)`, for one scale or one a channel."""
    sharding = jax.typeof(x).sharding
    if any(axis is not None for axis in sharding.spec):
        # On a mesh of Explicit axes a split array cannot be reshaped.
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))
    if spec.channel_axis is None:
        return x.reshape(1, -1)
    axis = spec.positive_channel_axis(x.ndim)
    return jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def _reduce(function: Callable[..., Any], x: jax.Array, spec: QuantSpec) -> jax.Array:
    if spec.block_size is not None:
        axis = spec.block_axis(x.shape)
        split = (*x.shape[:axis], -1, spec.block_size, *x.shape[axis + 1 :])
        return function(x.reshape(split), axis=axis + 1)
    if spec.channel_axis is None:
        return function(x)
    channel = spec.positive_channel_axis(x.ndim)
    return function(x, axis=tuple(i for i in range(x.ndim) if i != channel))
