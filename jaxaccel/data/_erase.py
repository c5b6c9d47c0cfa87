"""Erasing a rectangle of each image, inside jit."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxaccel.data._images import (
    Boxes,
    as_box_ranges,
    as_fill,
    as_share,
    as_size,
    check_images,
    check_key,
    choose,
    draw_boxes,
    is_inside,
    place,
)

Fill = int | float | Sequence[int] | Sequence[float]


def cutout(
    key: jax.Array,
    images: jax.Array,
    size: int | Sequence[int],
    *,
    fill: Fill = 0,
    p: float = 1.0,
) -> jax.Array:
    """Erases a square of each image.

    Its centre is uniform over the image; what lies outside is cut off, so that
    parts near the border are seen more often than with whole squares.

    Args:
      key: PRNG key; the same key repeats the same squares.
      images: `(batch, height, width, channels)`, uint8 (exact, and a quarter of the
        bytes) or floating.
      size: Side of the square in pixels, or (height, width) of a rectangle.
      fill: What the pixels become, a number or one for each channel. The mean
        colour of the data set is 0 after normalization.
      p: Share of the images that are changed.

    Returns:
      The images, same shape and dtype.

    Raises:
      TypeError: If the images are neither uint8 nor floating.
      ValueError: If they are not of rank 4, or a number is out of range.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import cutout
      >>> images = jnp.ones((1, 4, 4, 1), jnp.uint8)
      >>> cutout(jax.random.key(2), images, 2)[0, :, :, 0].tolist()
      [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]

    References:
      DeVries and Taylor, *Improved Regularization of Convolutional Neural Networks
      with Cutout*, 2017, arXiv:1708.04552
    """
    check_key(key)
    check_images(images)
    height, width = as_size("size", size)
    value, p = as_fill(fill, images), as_share("p", p)
    key_centre, key_choice = jax.random.split(key)
    draws = jax.random.uniform(key_centre, (2, images.shape[0]))
    row, column = place(draws[0], images.shape[1]), place(draws[1], images.shape[2])
    boxes = Boxes(
        row - height // 2,
        column - width // 2,
        jnp.full_like(row, height),
        jnp.full_like(row, width),
    )
    erased = is_inside(boxes, images)
    if p < 1:
        erased = erased & choose(key_choice, p, images)
    return jnp.where(erased, value, images)


def random_erasing(
    key: jax.Array,
    images: jax.Array,
    *,
    p: float = 0.5,
    scale: Sequence[float] = (0.02, 0.33),
    ratio: Sequence[float] = (0.3, 10 / 3),
    fill: Fill | str = 0,
) -> jax.Array:
    """Erases a random rectangle of some images.

    The rectangle lies inside the image. Its share of the area is uniform in
    `scale`, the logarithm of its ratio of width to height uniform in `ratio`; of
    ten draws the first that fits counts, and where none does the image stays.

    Args:
      key: PRNG key; the same key repeats the same rectangles.
      images: `(batch, height, width, channels)`, uint8 (exact, and a quarter of the
        bytes) or floating.
      p: Share of the images that are changed.
      scale: Smallest and largest share of the image's area, in (0, 1].
      ratio: Smallest and largest ratio of width to height.
      fill: What the pixels become: a number, one for each channel, or `"noise"`
        (uniform bytes in uint8 images, standard normal in floating ones).

    Returns:
      The images, same shape and dtype.

    Raises:
      TypeError: If the images are neither uint8 nor floating.
      ValueError: If they are not of rank 4, or a number is out of range.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import random_erasing
      >>> images = jnp.ones((1, 4, 4, 1), jnp.uint8)
      >>> erased = random_erasing(
      ...     jax.random.key(0), images, p=1.0, scale=(0.25, 0.25), ratio=(1.0, 1.0))
      >>> int(erased.sum())
      12

    References:
      Zhong et al., *Random Erasing Data Augmentation*, 2017, arXiv:1708.04896
    """
    check_key(key)
    check_images(images)
    p = as_share("p", p)
    scale, ratio = as_box_ranges(scale, ratio)
    key_box, key_choice, key_noise = jax.random.split(key, 3)
    value = _noise(key_noise, images) if fill == "noise" else as_fill(fill, images)
    boxes, _ = draw_boxes(key_box, images, scale, ratio)
    erased = is_inside(boxes, images)
    if p < 1:
        erased = erased & choose(key_choice, p, images)
    return jnp.where(erased, value, images)


def _noise(key: jax.Array, images: jax.Array) -> jax.Array:
    if images.dtype == jnp.uint8:
        return jax.random.bits(key, images.shape, jnp.uint8)
    return jax.random.normal(key, images.shape, images.dtype)
