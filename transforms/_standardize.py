"""The arithmetic of z-scores, over all kernels of a tree at once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccel.transforms._kernels import Kernel
from jaxaccel.transforms._reductions import safe_sqrt, statistics_dtype, sum_over
from jaxaccel.transforms._shards import device_count, sum_over_devices


def standardize(
    kernels: list[Kernel],
    *,
    eps: jax.typing.ArrayLike,
    ddof: int,
    rel_floor: jax.typing.ArrayLike,
    pooled: bool,
    fuse: bool,
) -> list[jax.Array]:
    """Returns (g - mean) / (std + eps) of each kernel, the deviation its own or not.

    Two passes over each leaf: the sum of squares alone cancels where the mean is
    large, and a shifted one-pass variance in one variadic reduce, 3.0 times the
    tree's bytes, fails on an outlier in the entry that it shifts by and takes
    1.3 to 1.7 times as long on CPU. The barriers, on the small statistics only,
    keep XLA from sharing `x - mean` between the passes, which would write it to
    memory. Bytes accessed of a float32 tree, in multiples of its size: 4.0 on
    jax 0.12.0.1 (6.0 without barriers, 7.0 inside a step with a barrier on the
    gradient itself) and 6.1 on 0.10.1, whose CPU reductions never fuse with what
    they reduce.
    """
    if not kernels:
        return []
    xs = [k.leaf.astype(statistics_dtype(k.leaf.dtype)) for k in kernels]
    total = functools.partial(
        sum_over_devices, names=[k.mesh_axes for k in kernels], fuse=fuse
    )
    sums = total([sum_over(x, k.axes) for x, k in zip(xs, kernels, strict=True)])
    means = [
        lax.optimization_barrier(total / k.count)
        for total, k in zip(sums, kernels, strict=True)
    ]
    squares = total(
        [
            sum_over(lax.square(x - mean), k.axes)
            for x, mean, k in zip(xs, means, kernels, strict=True)
        ]
    )
    stds = [
        safe_sqrt(square / (k.count - ddof))
        for square, k in zip(squares, kernels, strict=True)
    ]
    constant = [
        _is_constant(*pair, rel_floor) for pair in zip(stds, means, strict=True)
    ]
    if pooled:
        stds = _pooled_deviation(kernels, squares, constant, ddof)
    scales = [
        _reciprocal(std, still, eps) for std, still in zip(stds, constant, strict=True)
    ]
    return [
        _apply(x, mean, scale).astype(k.leaf.dtype)
        for x, mean, scale, k in zip(xs, means, scales, kernels, strict=True)
    ]


def _is_constant(
    std: jax.Array, mean: jax.Array, rel_floor: jax.typing.ArrayLike
) -> jax.Array:
    # False where the deviation is NaN, so that a NaN is passed on.
    return std <= jnp.asarray(rel_floor, std.dtype) * jnp.abs(mean)


def _pooled_deviation(
    kernels: list[Kernel],
    squares: list[jax.Array],
    constant: list[jax.Array],
    ddof: int,
) -> list[jax.Array]:
    """Returns the deviation of all centred entries, once in each leaf's type."""
    wide = jnp.result_type(*squares)
    count = 0
    parts = []
    for kernel, square, still in zip(kernels, squares, constant, strict=True):
        # What is left of a constant gradient is rounding: it counts as 0.
        parts.append(jnp.sum(jnp.where(still, 0, square)).astype(wide))
        count += kernel.count * square.size * device_count(kernel.stack_axes)
    parts = sum_over_devices(parts, [k.stack_axes for k in kernels], fuse=True)
    # The barrier keeps XLA from forming the sum anew inside each leaf's kernel.
    pool = lax.optimization_barrier(jnp.stack(parts))
    std = safe_sqrt(jnp.sum(pool) / (count - ddof))
    return [
        jnp.broadcast_to(std.astype(square.dtype), square.shape) for square in squares
    ]


def _reciprocal(
    std: jax.Array, is_constant: jax.Array, eps: jax.typing.ArrayLike
) -> jax.Array:
    divisor = jnp.where(is_constant, 1, std + jnp.asarray(eps, std.dtype))
    scale = jnp.where(is_constant, 0, 1 / divisor)
    # An overflowed variance must not pass for an update of zero.
    return jnp.where(jnp.isinf(std), jnp.nan, scale)


def _apply(x: jax.Array, mean: jax.Array, scale: jax.Array) -> jax.Array:
    mean, scale = lax.optimization_barrier((mean, scale))
    return (x - mean) * scale
