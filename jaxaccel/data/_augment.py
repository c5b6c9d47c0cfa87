"""Augmentation of uint8 images, inside jit."""

import jax
import jax.numpy as jnp

from jaxaccel.data._checks import as_count
from jaxaccel.data._images import check_images, check_key, gather_pixels

_MODES = ("reflect", "constant", "edge")


def random_crop_flip(
    key: jax.Array,
    images: jax.Array,
    *,
    pad: int = 4,
    mode: str = "reflect",
    flip: bool = True,
) -> jax.Array:
    """Shifts each image at random, and mirrors half of them.

    Each image is padded by `pad` pixels on all sides, cropped back to its size at
    an offset drawn uniformly for it, and mirrored from left to right with
    probability 1/2. It happens on uint8, before normalization, by a gather of rows
    and columns: no padded copy is made.

    Args:
      key: PRNG key; the same key repeats the same augmentation. Derive it from the
        step (`jax.random.fold_in(key, step)`) so that a resumed run does, too.
      images: `(batch, height, width, channels)`, uint8.
      pad: Pixels of padding, 0 for none.
      mode: What the padding holds: `"reflect"` mirrors the image without its edge
        pixel, `"edge"` repeats the edge pixel, `"constant"` is 0.
      flip: Whether to mirror; leave it off where left and right differ in meaning,
        as in digits.

    Returns:
      The augmented images, same shape and dtype.

    Raises:
      TypeError: If the images are not uint8.
      ValueError: If they are not of rank 4, `pad` is negative, `mode` unknown, or
        the padding is too wide to reflect.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import random_crop_flip
      >>> images = jnp.arange(2 * 4 * 4, dtype=jnp.uint8).reshape(2, 4, 4, 1)
      >>> augmented = random_crop_flip(jax.random.key(0), images, pad=1)
      >>> augmented.shape, augmented.dtype
      ((2, 4, 4, 1), dtype('uint8'))
      >>> still = random_crop_flip(jax.random.key(0), images, pad=0, flip=False)
      >>> bool((still == images).all())
      True
    """
    check_key(key)
    _check(images, pad, mode)
    batch, height, width, _ = images.shape
    key_shift, key_flip = jax.random.split(key)
    shift = jax.random.randint(key_shift, (2, batch, 1), 0, 2 * pad + 1) - pad
    rows = jnp.arange(height)[None, :] + shift[0]
    columns = jnp.arange(width)[None, :] + shift[1]
    if flip:
        mirrored = jax.random.bernoulli(key_flip, 0.5, (batch, 1))
        columns = jnp.where(mirrored, columns[:, ::-1], columns)
    cropped = gather_pixels(images, _fold(rows, height, mode), axis=1)
    cropped = gather_pixels(cropped, _fold(columns, width, mode), axis=2)
    if mode != "constant":
        return cropped
    inside = _is_inside(rows, height)[:, :, None] & _is_inside(columns, width)[:, None]
    return jnp.where(inside[..., None], cropped, jnp.zeros((), images.dtype))


def _check(images: jax.Array, pad: int, mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {_MODES}, got {mode!r}")
    as_count("pad", pad, 0)
    check_images(images, floating=False)
    smallest = min(images.shape[1:3])
    if mode == "reflect" and pad >= smallest:
        raise ValueError(
            f"pad {pad} is too wide to reflect images of shape {images.shape[1:3]}; "
            f"use {smallest - 1} at most, or mode='edge'"
        )


def _fold(positions: jax.Array, size: int, mode: str) -> jax.Array:
    if mode != "reflect":
        return jnp.clip(positions, 0, size - 1)
    positions = jnp.abs(positions)
    return jnp.minimum(positions, 2 * (size - 1) - positions)


def _is_inside(positions: jax.Array, size: int) -> jax.Array:
    return (positions >= 0) & (positions < size)
