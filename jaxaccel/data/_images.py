"""What the augmentations share: checks of arguments, boxes, gathers."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# As in torchvision: the first of ten draws that fits the image is taken.
_TRIES = 10


class Boxes(NamedTuple):
    """One rectangle an image, each field int32 of shape `(batch,)`."""

    top: jax.Array
    left: jax.Array
    height: jax.Array
    width: jax.Array


def check_key(key: Any) -> None:
    """Checks that the first argument is a key."""
    if not isinstance(key, jax.Array):
        raise TypeError(
            f"key must be a PRNG key, jax.random.key(seed), got {type(key).__name__}"
        )


def check_images(images: Any, *, floating: bool = True) -> None:
    """Checks that images are `(batch, height, width, channels)` of a known dtype.

    Args:
      images: The images.
      floating: Whether floats pass, besides uint8.

    Raises:
      TypeError: If they are no array, or the dtype is another one.
      ValueError: If the rank is not 4.
    """
    if not isinstance(images, (jax.Array, np.ndarray)):
        raise TypeError(f"images must be an array, got {type(images).__name__}")
    if images.ndim != 4:
        raise ValueError(
            f"images must be (batch, height, width, channels), got shape "
            f"{images.shape}; gray images need a trailing axis of 1"
        )
    if images.dtype == jnp.uint8:
        return
    if not floating:
        raise TypeError(
            f"images must be uint8, got {images.dtype}; augment before normalizing, "
            "it is exact and moves a quarter of the bytes"
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(f"images must be uint8 or floating, got {images.dtype}")


def as_share(name: str, value: float) -> float:
    """Checks that an argument lies in 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in 0 to 1, got {value}")
    return float(value)


def as_range(
    name: str, value: Sequence[float], least: float, most: float
) -> tuple[float, float]:
    """Checks a pair `(low, high)` with `least <= low <= high <= most`."""
    pair = _as_pair(name, value)
    if not least <= pair[0] <= pair[1] <= most:
        raise ValueError(
            f"{name} must be (low, high) with {least:g} <= low <= high <= {most:g}, "
            f"got {value}"
        )
    return pair


def as_box_ranges(
    scale: Sequence[float], ratio: Sequence[float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Checks the ranges that `draw_boxes` takes."""
    scale, ratio = _as_pair("scale", scale), _as_pair("ratio", ratio)
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(
            f"scale must be (low, high) with 0 < low <= high <= 1, got {scale}"
        )
    if not 0 < ratio[0] <= ratio[1] < math.inf:
        raise ValueError(
            f"ratio must be (low, high) with 0 < low <= high, both finite, got {ratio}"
        )
    return scale, ratio


def _as_pair(name: str, value: Any) -> tuple[float, float]:
    try:
        low, high = (float(x) for x in value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be two numbers, (low, high), got {value!r}"
        ) from None
    return low, high


def as_size(name: str, value: Any) -> tuple[int, int]:
    """Checks a size: (height, width) in pixels, or one number for both."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in pair)
    if len(pair) != 2 or not whole or min(pair) < 1:
        raise ValueError(
            f"{name} must be one number of pixels or (height, width), at least 1, got "
            f"{value}"
        )
    return pair[0], pair[1]


def as_fill(fill: Any, images: jax.Array) -> jax.Array:
    """Checks what erased pixels become; returns it as `(1, 1, 1, channels or 1)`."""
    try:
        value = np.asarray(fill, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"fill must be a number, one for each channel, or, in random_erasing, "
            f"'noise', got {fill!r}"
        ) from None
    if value.ndim > 1 or (value.ndim == 1 and value.size != images.shape[-1]):
        raise ValueError(
            f"fill must be a number or one for each of the {images.shape[-1]} "
            f"channels, got {fill}"
        )
    if images.dtype == jnp.uint8:
        if not np.all((value >= 0) & (value <= 255) & (value == np.round(value))):
            raise ValueError(
                f"fill of uint8 images must be whole numbers in 0 to 255, got {fill}"
            )
    elif not np.all(np.isfinite(value)):
        raise ValueError(f"fill must be finite, got {fill}")
    return jnp.asarray(value.reshape(1, 1, 1, -1), images.dtype)


def choose(key: jax.Array, share: float, images: jax.Array) -> jax.Array:
    """True with probability `share`, for each image; shape `(batch, 1, 1, 1)`."""
    return jax.random.bernoulli(key, share, (images.shape[0], 1, 1, 1))


def draw_boxes(
    key: jax.Array,
    images: jax.Array,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Boxes, jax.Array]:
    """Draws a box inside each image.

    Its share of the area is uniform in `scale`, the logarithm of its ratio of width
    to height in `ratio`, and its place uniform.

    Args:
      key: PRNG key.
      images: `(batch, height, width, channels)`.
      scale: Range of the share.
      ratio: Range of the ratio.

    Returns:
      The boxes, and whether one of the ten draws fitted, `(batch,)`; where none
      did, the box is empty.
    """
    batch, height, width, _ = images.shape
    # One draw for all: it is what the random numbers cost.
    draws = jax.random.uniform(key, (2 * _TRIES + 2, batch))
    area = height * width * between(draws[:_TRIES], *scale)
    aspect = jnp.exp(between(draws[_TRIES:-2], *map(math.log, ratio)))
    heights = jnp.round(jnp.sqrt(area / aspect)).astype(jnp.int32)
    widths = jnp.round(jnp.sqrt(area * aspect)).astype(jnp.int32)
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    found = fits.any(axis=0)
    is_first = fits & (jnp.cumsum(fits, axis=0) == 1)
    h, w = (jnp.where(is_first, x, 0).sum(axis=0) for x in (heights, widths))
    top, left = place(draws[-2], height - h + 1), place(draws[-1], width - w + 1)
    return Boxes(top, left, h, w), found


def place(draws: jax.Array, count: jax.Array | int) -> jax.Array:
    """Turns uniform draws from [0, 1) into whole numbers in `0 <= x < count`."""
    count = jnp.asarray(count, jnp.int32)
    # The product may round up to the count.
    return jnp.minimum((draws * count.astype(draws.dtype)).astype(jnp.int32), count - 1)


def between(draws: jax.Array, low: float, high: float) -> jax.Array:
    """Turns uniform draws from [0, 1) into uniform ones from low to high."""
    return low + (high - low) * draws


def is_inside(boxes: Boxes, images: jax.Array) -> jax.Array:
    """True for each pixel inside its image's box, `(batch, height, width, 1)`."""

    def covers(start: jax.Array, length: jax.Array, size: int) -> jax.Array:
        positions = jnp.arange(size)[None, :]
        return (positions >= start[:, None]) & (positions < (start + length)[:, None])

    rows = covers(boxes.top, boxes.height, images.shape[1])
    columns = covers(boxes.left, boxes.width, images.shape[2])
    return (rows[:, :, None] & columns[:, None, :])[..., None]


def gather_pixels(images: jax.Array, positions: jax.Array, axis: int) -> jax.Array:
    """Gathers rows (`axis=1`) or columns (`axis=2`), others for each image.

    Args:
      images: `(batch, height, width, channels)`.
      positions: `(batch, size)`, all in range.
      axis: Which axis they are positions on.

    Returns:
      The images with `size` rows or columns.
    """
    # take_along_axis batches over the images, so that a sharded batch stays
    # sharded; one gather with an index for the image would collect it.
    index = jnp.expand_dims(positions, (2, 3) if axis == 1 else (1, 3))
    # Every index is in range; telling so spares XLA the masks.
    return jnp.take_along_axis(images, index, axis=axis, mode="promise_in_bounds")


def take_examples(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers examples of a batch, which keeps its sharding."""
    layout = jax.typeof(array).sharding
    if AxisType.Explicit not in layout.mesh.axis_types:
        return array.at[rows].get(mode="promise_in_bounds")
    layout = NamedSharding(layout.mesh, layout.spec)
    return array.at[rows].get(mode="promise_in_bounds", out_sharding=layout)


def replicate(array: jax.Array) -> jax.Array:
    """Spreads a small array over all devices of an explicit mesh."""
    mesh = jax.typeof(array).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))
