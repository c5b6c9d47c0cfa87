"""The MaxK nonlinearity: the k largest entries of each row pass, the others are 0."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


class SparseRows(NamedTuple):
    """Rows with equally many entries, compressed.

    Attributes:
      values: `(..., k)`, in the order of the columns.
      columns: `(..., k)`, rising in each row; uint8 for up to 256 columns, else uint16
        or int32.
      bitmap: `(..., ceil(columns / 32))` uint32; bit `c % 32` of word `c // 32` says
        whether column c is there.
    """

    values: jax.Array
    columns: jax.Array
    bitmap: jax.Array


def maxk(x: ArrayLike, k: int, *, axis: int = -1) -> jax.Array:
    r"""Keeps the k largest entries along an axis and sets the others to 0.

    .. math:: y_i = x_i \, [\, x_i \text{ is among the } k \text{ largest} \,], \qquad
        \frac{\partial y_i}{\partial x_i} = [\, y_i \text{ was kept} \,]

    Largest by value, not by magnitude: what is kept may be negative. Of equal entries
    those of lower index are kept, so that exactly k are. With :math:`k = n` on
    :math:`[z, -z]`, z of n entries, it is :math:`[\mathrm{relu}(z),
    \mathrm{relu}(-z)]`.

    Args:
      x: Floating numbers.
      k: Entries to keep, from 1 to the length of the axis.
      axis: The axis, usually of features.

    Returns:
      An array of the shape and dtype of `x`. NaN counts as larger than anything, so
      that it is not hidden; 0.0 and -0.0 are equal.

    Raises:
      TypeError: If `x` is not floating or k is no integer.
      ValueError: If `axis` does not exist or k is out of range.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import ops
      >>> x = jnp.array([3.0, -1.0, 2.0, 2.0])
      >>> print(ops.maxk(x, 2), jax.grad(lambda x: ops.maxk(x, 2).sum())(x))
      [3. 0. 2. 0.] [1. 0. 1. 0.]

    References:
      Peng et al., MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph
      Neural Networks Training, 2024, arXiv:2312.08656
    """
    x, k, axis = _checked(x, k, axis)
    return jnp.moveaxis(_maxk(jnp.moveaxis(x, axis, -1), k), -1, axis)


def maxk_rows(x: ArrayLike, k: int) -> SparseRows:
    """Returns the k largest entries of each row, compressed.

    Args:
      x: Floating numbers, `(..., columns)`.
      k: Entries to keep, from 1 to the number of columns.

    Returns:
      What `maxk(x, k)` keeps. It has no gradient of its own; `maxk` has.

    Raises:
      TypeError: As `maxk`.
      ValueError: As `maxk`.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import ops
      >>> rows = ops.maxk_rows(np.array([[3.0, -1.0, 2.0, 2.0]]), 2)
      >>> rows.values.tolist(), rows.columns.tolist(), rows.bitmap.tolist()
      ([[3.0, 2.0]], [[0, 2]], [[5]])
    """
    x, k, _ = _checked(x, k, -1)
    length = x.shape[-1]
    # Rising columns: neighbours in memory are then read in order.
    columns = jnp.sort(jax.lax.top_k(_sortable(x), k)[1], axis=-1)
    values = jnp.take_along_axis(x, columns, axis=-1)
    return SparseRows(values, columns.astype(_narrowest(length)), pack_mask(kept(x, k)))


def kept(x: jax.Array, k: int) -> jax.Array:
    """Returns which entries of each row are among its k largest."""
    keys = _sortable(x)
    # With the indices unused XLA would sort whole rows.
    values, indices = jax.lax.top_k(keys, k)
    last, position = values[..., -1:], indices[..., -1:]
    columns = jax.lax.broadcasted_iota(indices.dtype, x.shape, x.ndim - 1)
    # Equal entries come in the order of their columns, up to the last one taken.
    return (keys > last) | ((keys == last) & (columns <= position))


def pack_mask(mask: jax.Array) -> jax.Array:
    """Returns a mask with 32 entries of its last axis in each uint32."""
    missing = -mask.shape[-1] % 32
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
    bits = jnp.pad(mask, widths).reshape(*mask.shape[:-1], -1, 32)
    weights = jnp.asarray(np.uint32(1) << np.arange(32, dtype=np.uint32))
    weights = weights.reshape((1,) * (bits.ndim - 1) + (32,))
    return jnp.sum(bits.astype(jnp.uint32) * weights, axis=-1, dtype=jnp.uint32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _maxk(x, k):
    return jnp.where(kept(x, k), x, jnp.zeros_like(x))


def _forward(x, k):
    mask = kept(x, k)
    return jnp.where(mask, x, jnp.zeros_like(x)), mask


def _backward(k, mask, cotangent):
    del k
    return (jnp.where(mask, cotangent, jnp.zeros_like(cotangent)),)


_maxk.defvjp(_forward, _backward)


def _sortable(x: jax.Array) -> jax.Array:
    # Only float32 has a fast selection on CPU; narrower types convert exactly.
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    infinite = jnp.asarray(np.inf, wide.dtype)
    return jnp.where(jnp.isnan(wide), infinite, wide) + jnp.asarray(0.0, wide.dtype)


def _narrowest(length: int) -> Any:
    return jnp.uint8 if length <= 256 else jnp.uint16 if length <= 65536 else jnp.int32


def _checked(x: ArrayLike, k: int, axis: int) -> tuple[jax.Array, int, int]:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(f"x must be floating numbers; got {jnp.result_type(x)}")
    if isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TypeError(f"k must be an integer; got {k!r}")
    rank, k = np.ndim(x), operator.index(k)
    if not -rank <= axis < rank:
        raise ValueError(f"axis={axis} is out of range for an array of rank {rank}")
    length = np.shape(x)[axis]
    if not 1 <= k <= length:
        raise ValueError(f"k must be from 1 to {length}, the axis's length; got {k}")
    return jnp.asarray(x), k, axis
