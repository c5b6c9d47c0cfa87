"""Colour jitter, inside jit."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxaccel.data._images import (
    as_range,
    as_share,
    between,
    check_images,
    check_key,
    choose,
)

# ITU-R BT.601, as in Pillow's conversion to gray.
_LUMA = (0.299, 0.587, 0.114)


def color_jitter(
    key: jax.Array,
    images: jax.Array,
    *,
    brightness: float | Sequence[float] = 0.0,
    contrast: float | Sequence[float] = 0.0,
    saturation: float | Sequence[float] = 0.0,
    hue: float | Sequence[float] = 0.0,
    p: float = 1.0,
) -> jax.Array:
    r"""Changes brightness, contrast, saturation and hue of each image at random.

    With a factor $f$ drawn for each image and each change, in this order:
    brightness $f x$, contrast $f x + (1 - f)\,\overline{g}$, saturation
    $f x + (1 - f)\,g$, each clipped to the range of pixels, and then hue, a turn of
    the colour circle of HSV by $f$. $g$ is the gray value (ITU-R BT.601) and
    $\overline{g}$ its mean over the image.

    All is computed in float32. Of uint8 images the result is rounded to the nearest
    integer, once, at the end: half a level is the largest error.

    Args:
      key: PRNG key; the same key repeats the same changes.
      images: `(batch, height, width, channels)`, uint8, or floating in 0 to 1. Jitter
        before normalizing.
      brightness: A number b for factors uniform in max(0, 1 - b) to 1 + b, or their
        range (low, high). 0 leaves it as it is.
      contrast: Likewise.
      saturation: Likewise.
      hue: A number h for turns uniform in -h to h, at most 0.5 (half the circle), or
        their range.
      p: Share of the images that are changed.

    Returns:
      The images, same shape and dtype.

    Raises:
      TypeError: If the images are neither uint8 nor floating.
      ValueError: If they are not of rank 4, a number is out of range, or saturation
        or hue are to change in images without three channels.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import color_jitter
      >>> images = jnp.full((1, 2, 2, 3), 100, jnp.uint8)
      >>> brighter = color_jitter(jax.random.key(0), images, brightness=(1.5, 1.5))
      >>> brighter[0, 0, 0].tolist()
      [150, 150, 150]
    """
    check_key(key)
    check_images(images)
    p = as_share("p", p)
    factors = {
        "brightness": _as_factors("brightness", brightness),
        "contrast": _as_factors("contrast", contrast),
        "saturation": _as_factors("saturation", saturation),
    }
    turns = hue if isinstance(hue, Sequence) else (-hue, hue)
    turns = as_range("hue", turns, -0.5, 0.5)
    _check_channels(images, factors["saturation"] != (1, 1) or turns != (0, 0))
    key_factors, key_choice = jax.random.split(key)
    # One draw for all: it is what the random numbers cost.
    draws = jax.random.uniform(key_factors, (4, images.shape[0], 1, 1, 1))
    top = 255.0 if images.dtype == jnp.uint8 else 1.0
    x = images.astype(jnp.float32)
    for index, (name, bounds) in enumerate(factors.items()):
        if bounds != (1, 1):
            factor = between(draws[index], *bounds)
            x = jnp.clip(factor * x + (1 - factor) * _base(name, x), 0, top)
    if turns != (0, 0):
        x = turn_hue(x, between(draws[3], *turns))
    if images.dtype == jnp.uint8:
        x = jnp.round(x)
    x = x.astype(images.dtype)
    return x if p == 1 else jnp.where(choose(key_choice, p, images), x, images)


def turn_hue(x: jax.Array, turn: jax.Array) -> jax.Array:
    """Turns the hue of RGB images, keeping value and saturation of HSV.

    Args:
      x: `(..., 3)`, floating, on any scale.
      turn: Shape that broadcasts against `(..., 1)`; 1 is the whole circle.

    Returns:
      The turned images, on the same scale.
    """
    r, g, b = (x[..., c : c + 1] for c in range(3))
    value = jnp.maximum(jnp.maximum(r, g), b)
    chroma = value - jnp.minimum(jnp.minimum(r, g), b)
    # Gray has no hue; any will do, but not a division by 0.
    safe = jnp.where(chroma > 0, chroma, 1.0)
    sextant = jnp.where(
        value == r,
        (g - b) / safe,
        jnp.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe),
    )
    sextant = sextant + 6 * turn
    # A channel falls from the value by the chroma as the hue moves away from it.
    channels = []
    for offset in (5, 3, 1):
        k = jnp.mod(offset + sextant, 6)
        fall = jnp.clip(jnp.minimum(k, 4 - k), 0, 1)
        channels.append(value - chroma * fall)
    return jnp.concatenate(channels, axis=-1)


def _as_factors(name: str, value: float | Sequence[float]) -> tuple[float, float]:
    if isinstance(value, Sequence):
        return as_range(name, value, 0.0, float("inf"))
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be at least 0, or a range, got {value}")
    return max(0.0, 1.0 - value), 1.0 + value


def _check_channels(images: jax.Array, needs_colour: bool) -> None:
    channels = images.shape[-1]
    if channels not in (1, 3):
        raise ValueError(
            f"images must have 1 or 3 channels, got shape {images.shape}; pass NHWC "
            "images"
        )
    if needs_colour and channels == 1:
        raise ValueError(
            "gray images have neither saturation nor hue; leave both at 0, got shape "
            f"{images.shape}"
        )


def _base(name: str, x: jax.Array) -> jax.Array:
    """What an image is blended with: black, its mean gray, or its gray values."""
    if name == "brightness":
        return jnp.zeros((), x.dtype)
    gray = x if x.shape[-1] == 1 else _gray(x)
    return gray.mean(axis=(1, 2), keepdims=True) if name == "contrast" else gray


def _gray(x: jax.Array) -> jax.Array:
    r, g, b = (weight * x[..., c : c + 1] for c, weight in enumerate(_LUMA))
    return r + g + b
