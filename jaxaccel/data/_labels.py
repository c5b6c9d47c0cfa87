"""Class numbers to targets, inside jit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data._checks import as_count
from jaxaccel.data._images import as_share


def one_hot(
    labels: jax.typing.ArrayLike,
    num_classes: int,
    *,
    smoothing: float = 0.0,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    r"""Turns class numbers into targets, smoothed if wanted.

    $y_{ic} = (1 - s)\,[c = \ell_i] + s / C$ for $C$ classes. Labels travel in one or
    two bytes and are widened here. A label that is no class gives a row of NaN, so
    that it cannot go unnoticed. (64-bit ones that enter a jitted function as its
    arguments are cut to 32 bits by jax before: keep labels narrow.)

    Args:
      labels: Integers of any shape and width, uint8 included.
      num_classes: C, at least 1.
      smoothing: s, the share spread evenly over all classes, 0 to 1.
      dtype: Floating dtype of the result.

    Returns:
      `(*labels.shape, num_classes)`; each row sums to 1.

    Raises:
      TypeError: If the labels are not integers, or `dtype` is not floating.
      ValueError: If a number is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import one_hot
      >>> one_hot(jnp.array([0, 2], jnp.uint8), 4, smoothing=0.5).tolist()
      [[0.625, 0.125, 0.125, 0.125], [0.125, 0.125, 0.625, 0.125]]

    References:
      Szegedy et al., *Rethinking the Inception Architecture for Computer Vision*,
      2015, arXiv:1512.00567
    """
    classes = as_count("num_classes", num_classes, 1)
    smoothing = as_share("smoothing", smoothing)
    labels = as_labels(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels must be class numbers of an integer dtype, got {labels.dtype}"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"targets need a floating dtype, got {dtype}")
    if jnp.issubdtype(labels.dtype, jnp.unsignedinteger) and labels.dtype.itemsize > 2:
        # What int32 cannot hold must not become a class.
        labels = jnp.minimum(labels, jnp.array(2**31 - 1, labels.dtype))
    if not jnp.issubdtype(labels.dtype, jnp.signedinteger) or labels.dtype.itemsize < 4:
        # Narrow types could not hold num_classes.
        labels = labels.astype(jnp.int32)
    numbers = jnp.arange(classes, dtype=labels.dtype)
    numbers = numbers.reshape((1,) * labels.ndim + (classes,))
    labels = labels[..., None]
    spread = smoothing / classes
    targets = jnp.where(labels == numbers, 1 - smoothing + spread, spread)
    is_class = (labels >= 0) & (labels < classes)
    return jnp.where(is_class, targets, jnp.nan).astype(dtype)


def as_labels(labels: Any) -> jax.Array:
    """Brings labels to the device, wide ones of the host without changing classes.

    Args:
      labels: Numbers of any dtype.

    Returns:
      The labels; 64-bit integers as int32, -1 where that cannot hold them.
    """
    if isinstance(labels, (np.ndarray, np.generic, int)):
        labels = np.asarray(labels)
        if labels.dtype.kind in "iu" and labels.dtype.itemsize == 8:
            # jax would keep the lower half of each number.
            fits = (labels >= 0) & (labels < 2**31)
            labels = np.where(fits, labels.astype(np.int32), np.int32(-1))
    return jnp.asarray(labels)
