"""Random resized crops, inside jit."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxaccel.data._images import (
    Boxes,
    as_box_ranges,
    as_size,
    check_images,
    check_key,
    draw_boxes,
    gather_pixels,
)


def random_resized_crop(
    key: jax.Array,
    images: jax.Array,
    size: int | Sequence[int],
    *,
    scale: Sequence[float] = (0.08, 1.0),
    ratio: Sequence[float] = (3 / 4, 4 / 3),
    flip: bool = False,
    antialias: bool = True,
) -> jax.Array:
    """Cuts a random part out of each image and resizes it.

    The part's share of the area is uniform in `scale`, the logarithm of its ratio
    of width to height uniform in `ratio`, its place uniform; of ten draws the
    first that fits the image counts, and else the largest centred part of an
    allowed ratio. Each image draws its own.

    Resizing is bilinear, in float32, rounded once to the nearest integer: within
    one level of Pillow's `crop(box).resize(size, BILINEAR)`. It gathers two
    neighbours of each pixel, and more only where it shrinks.

    Args:
      key: PRNG key; the same key repeats the same crops.
      images: `(batch, height, width, channels)`, uint8 or floating.
      size: (height, width) of the result in pixels, or one number for both.
      scale: Smallest and largest share of the image's area, in (0, 1].
      ratio: Smallest and largest ratio of width to height.
      flip: Whether to mirror half of the images as well, at no cost.
      antialias: Whether to average over all pixels that a shrunken one covers, as
        Pillow does. False interpolates between two, which is cheaper where
        the images are larger than `size`, and aliases.

    Returns:
      `(batch, *size, channels)`, in the images' dtype.

    Raises:
      TypeError: If the images are neither uint8 nor floating.
      ValueError: If they are not of rank 4, or a number is out of range.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import random_resized_crop
      >>> images = jnp.full((2, 12, 10, 3), 7, jnp.uint8)
      >>> crops = random_resized_crop(jax.random.key(0), images, 8)
      >>> crops.shape, crops.dtype, int(crops.min()), int(crops.max())
      ((2, 8, 8, 3), dtype('uint8'), 7, 7)

    References:
      Szegedy et al., *Going Deeper with Convolutions*, 2014, arXiv:1409.4842
    """
    check_key(key)
    check_images(images)
    new_size = as_size("size", size)
    scale, ratio = as_box_ranges(scale, ratio)
    key_box, key_flip = jax.random.split(key)
    boxes, found = draw_boxes(key_box, images, scale, ratio)
    centred = _centred(images.shape[1:3], ratio)
    chosen = [jnp.where(found, b, c) for b, c in zip(boxes, centred, strict=True)]
    boxes = Boxes(*chosen)
    mirrored = None
    if flip:
        mirrored = jax.random.bernoulli(key_flip, 0.5, (images.shape[0], 1, 1))
    return resize_boxes(images, boxes, new_size, mirrored, antialias=antialias)


def resize_boxes(
    images: jax.Array,
    boxes: Boxes,
    size: tuple[int, int],
    mirrored: jax.Array | None = None,
    *,
    antialias: bool = True,
) -> jax.Array:
    """Resizes a box of each image, bilinearly.

    Args:
      images: `(batch, height, width, channels)`.
      boxes: One box an image, inside it, not empty.
      size: (height, width) of the result.
      mirrored: Which results to mirror, `(batch, 1, 1)`; None for none.
      antialias: As for `random_resized_crop`.

    Returns:
      `(batch, *size, channels)`, in the images' dtype.
    """
    _, height, width, _ = images.shape
    rows = _taps(boxes.top, boxes.height, height, size[0], antialias)
    columns = _taps(boxes.left, boxes.width, width, size[1], antialias)
    if mirrored is not None:
        columns = tuple(jnp.where(mirrored, x[:, ::-1], x) for x in columns)
    resized = _blend(_blend(images, *rows, axis=1), *columns, axis=2)
    if images.dtype == jnp.uint8:
        # Weights sum to 1 but for rounding, which must not wrap around.
        resized = jnp.clip(jnp.round(resized), 0, 255)
    return resized.astype(images.dtype)


def _centred(image: Sequence[int], ratio: tuple[float, float]) -> tuple[int, ...]:
    height, width = image
    h, w = height, width
    if width / height < ratio[0]:
        h = max(round(width / ratio[0]), 1)
    elif width / height > ratio[1]:
        w = max(round(height * ratio[1]), 1)
    return (height - h) // 2, (width - w) // 2, h, w


def _taps(
    start: jax.Array, length: jax.Array, old: int, new: int, antialias: bool
) -> tuple[jax.Array, jax.Array]:
    """Source positions and weights of each new pixel: `(batch, new, taps)` each."""
    start = start[:, None].astype(jnp.float32)
    length = length[:, None].astype(jnp.float32)
    step = length / new
    # Half the width of the triangle that weighs the source pixels.
    reach = jnp.maximum(step, 1.0) if antialias else jnp.ones_like(step)
    count = math.ceil(2 * max(old / new, 1.0)) if antialias else 2
    centre = start + (jnp.arange(new, dtype=jnp.float32)[None] + 0.5) * step
    first = jnp.ceil(centre - reach - 0.5)
    positions = first[..., None] + jnp.arange(count, dtype=jnp.float32)[None, None]
    distance = jnp.abs(positions + 0.5 - centre[..., None])
    weights = jnp.maximum(1.0 - distance / reach[..., None], 0.0)
    inside = (positions >= start[..., None]) & (positions < (start + length)[..., None])
    weights = jnp.where(inside, weights, 0.0)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.clip(positions, 0, old - 1).astype(jnp.int32), weights


def _blend(
    images: jax.Array, positions: jax.Array, weights: jax.Array, *, axis: int
) -> jax.Array:
    # A loop over two or three taps: gathers of rows and columns beat a matrix
    # product with mostly zeros, even on processors that multiply fast.
    total = None
    for tap in range(positions.shape[-1]):
        pixels = gather_pixels(images, positions[..., tap], axis)
        weight = jnp.expand_dims(weights[..., tap], (2, 3) if axis == 1 else (1, 3))
        term = pixels.astype(jnp.float32) * weight
        total = term if total is None else total + term
    assert total is not None
    return total
