"""Norms of leaves and trees, and scaling each leaf down to a bound."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxaccel.transforms._dims import KeyPath
from jaxaccel.transforms._kernels import check_inexact
from jaxaccel.transforms._reductions import safe_sqrt, statistics_dtype, sum_over
from jaxaccel.transforms._shards import AxisName, names_over, sum_over_devices


def global_norm(name: str, tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """L2 norm of all leaves together, a scalar of at least float32."""
    return safe_sqrt(jnp.sum(leaf_squares(name, tree, axis_name)))


def leaf_squares(name: str, tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Sum of squares of each leaf, in the order of the leaves, shape (leaves,)."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    squares = [_sum_of_squares(name, path, leaf) for path, leaf in found]
    if not squares:
        return jnp.zeros((0,), jnp.float32)
    wide = any(square.dtype == jnp.float64 for square in squares)
    squares = [x.astype(jnp.float64 if wide else jnp.float32) for x in squares]
    if axis_name is not None:
        names = [names_over(axis_name, *item, all_axes(item[1])) for item in found]
        squares = sum_over_devices(squares, names, fuse=True)
    # Without the barrier XLA computes the sum of all leaves anew inside the
    # kernel of each one, and the time to compile grows with their number
    # squared: minutes, not seconds, at 400 leaves.
    return lax.optimization_barrier(jnp.stack(squares))


def all_axes(leaf: Any) -> tuple[int, ...]:
    """Axes of a leaf, all of them."""
    return tuple(range(jnp.ndim(leaf)))


def _sum_of_squares(name: str, path: KeyPath, leaf: Any) -> jax.Array:
    check_inexact(name, path, leaf, allow_complex=True)
    axes = all_axes(leaf)
    return jnp.squeeze(squares_over(jnp.asarray(leaf), axes), axes)


def squares_over(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Sum of |entry|^2 over axes, which are kept, in at least float32."""
    x = x.astype(statistics_dtype(x.dtype))
    if jnp.iscomplexobj(x):
        return sum_over(lax.square(x.real) + lax.square(x.imag), axes)
    return sum_over(lax.square(x), axes)


def clip_leaves(
    tree: Any,
    fits: jax.Array,
    scale: jax.Array,
    usable: jax.Array | None = None,
) -> Any:
    """Multiplies the leaves that do not fit by their scale, the others pass.

    Args:
        tree: gradients.
        fits: booleans, a scalar or one a leaf.
        scale: factors, a scalar or one a leaf.
        usable: False turns every leaf into zeros, whatever it holds.
    """
    fits, scale = lax.optimization_barrier((fits, scale))
    leaves, treedef = jax.tree.flatten(tree)

    def clip(i: int, leaf: Any) -> jax.Array:
        mine = (fits, scale) if fits.ndim == 0 else (fits[i], scale[i])
        clipped = clip_leaf(jnp.asarray(leaf), *mine)
        return clipped if usable is None else jnp.where(usable, clipped, 0)

    return treedef.unflatten([clip(i, leaf) for i, leaf in enumerate(leaves)])


def clip_leaf(grad: jax.Array, fits: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies by the scale where the gradient does not fit."""
    dtype = statistics_dtype(grad.dtype)
    clipped = (grad.astype(dtype) * scale.astype(dtype)).astype(grad.dtype)
    return jnp.where(fits, grad, clipped)


def fit(
    norm: jax.Array, limit: jax.Array, *, zero_stops: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Whether a norm is within its limit, and the factor that brings it there.

    A norm that is NaN or infinite gives the factor NaN, unless it fits. With
    `zero_stops` nothing fits a limit of 0, not even a norm of 0, which that of
    tiny gradients is rounded to.
    """
    fits = norm <= limit
    if zero_stops:
        fits &= limit > 0
    # The other branch of a `where` is differentiated too: neither 0 / 0 nor an
    # infinite factor may stand there.
    factor = limit / jnp.where(fits | (norm == 0), 1, norm)
    scale = jnp.where(fits, 1, factor)
    return fits, jnp.where(fits | jnp.isfinite(norm), scale, jnp.nan)


def align(
    name: str, updates: Any, other_name: str, other: Any
) -> tuple[list[tuple[KeyPath, Any, Any]], Any]:
    """Lists (path, update, other) for each place, and the structure of the updates.

    None and `MaskedNode` in the updates are places too, told by `is_hole`; the
    other tree may have anything there.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_hole)
    try:
        mates = treedef.flatten_up_to(other)
    except ValueError:
        raise ValueError(
            f"{name}: updates and {other_name} are trees of different structure, "
            f"{jax.tree.structure(updates)} and {jax.tree.structure(other)}"
        ) from None
    pairs = zip(found, mates, strict=True)
    return [(path, leaf, mate) for (path, leaf), mate in pairs], treedef


def is_hole(node: Any) -> bool:
    """Whether a node of the updates stands for the lack of one."""
    return node is None or isinstance(node, optax.MaskedNode)
