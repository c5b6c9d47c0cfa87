"""From uint8 pixels to normalized floats, inside jit."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_Statistic = float | int | np.generic | np.ndarray | Sequence[float | int]


def make_normalizer(
    mean: _Statistic,
    std: _Statistic,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    r"""Makes a function that normalizes uint8 images.

    $y = x \cdot \frac{1}{255\,\sigma} - \frac{\mu}{\sigma}$, one multiply-add in
    float32 with constants computed in float64, then a cast to `dtype`. Used inside
    the jitted step, it lets batches travel as uint8, a quarter of the bytes.

    Args:
      mean: Mean of the pixels on the scale 0 to 1, a scalar or one value for each
        channel.
      std: Standard deviation on the same scale, likewise.
      dtype: Floating dtype of the result.

    Returns:
      `normalize(images)`, for uint8 arrays of any rank whose last axis is the
      channels; works under jit, vmap and grad of what follows.

    Raises:
      TypeError: If `dtype` is not floating; from `normalize`, if the images are
        not uint8.
      ValueError: If a mean is outside 0 to 1 (statistics of 0 to 255 pixels must
        be divided by 255), a std is not in (0, 1], one is not finite, or the
        numbers of values do not match each other or the channels.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import make_normalizer
      >>> normalize = make_normalizer(mean=0.5, std=0.25)
      >>> images = np.array([0, 51, 255], np.uint8).reshape(1, 1, 3, 1)
      >>> [round(float(y), 4) for y in normalize(images).ravel()]
      [-2.0, -1.2, 2.0]
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"normalized images need a floating dtype, got {dtype}; use jnp.float32 "
            "or jnp.bfloat16"
        )
    mean64, std64 = _as_statistic("mean", mean), _as_statistic("std", std)
    _check_statistics(mean64, std64)
    # float64 on the host: the constants are rounded once, not in each operation.
    scale = np.asarray(1.0 / (255.0 * std64), np.float32)
    shift = np.asarray(mean64 / std64, np.float32)
    channels = max(scale.size, shift.size)

    def normalize(images: jax.typing.ArrayLike) -> jax.Array:
        images = jnp.asarray(images)
        if images.dtype != jnp.uint8:
            raise TypeError(
                f"normalize takes uint8 images (0 to 255), got {images.dtype}; ship "
                "them as uint8 and normalize once, inside the step"
            )
        if scale.ndim or shift.ndim:
            if images.ndim == 0 or images.shape[-1] != channels:
                raise ValueError(
                    f"mean and std have {channels} channels, but the images' last "
                    f"axis does not: shape {images.shape}; pass NHWC images"
                )
        pixels = images.astype(jnp.float32)
        y = pixels * _fit(scale, images.ndim) - _fit(shift, images.ndim)
        return y.astype(dtype)

    return normalize


def _as_statistic(name: str, value: _Statistic) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.ndim > 1:
        raise ValueError(
            f"{name} must be a scalar or one value for each channel, got shape "
            f"{array.shape}"
        )
    if not array.size or not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must hold finite numbers, got {value}")
    return array


def _check_statistics(mean: np.ndarray, std: np.ndarray) -> None:
    if np.any(mean < 0) or np.any(mean > 1):
        raise ValueError(
            f"mean must be on the scale 0 to 1, got {mean.tolist()}; divide "
            "statistics of 0 to 255 pixels by 255"
        )
    if np.any(std <= 0) or np.any(std > 1):
        raise ValueError(
            f"std must be in (0, 1], on the scale 0 to 1, got {std.tolist()}; divide "
            "statistics of 0 to 255 pixels by 255, and leave constant channels at 1"
        )
    if mean.ndim and std.ndim and mean.size != std.size:
        raise ValueError(
            f"mean has {mean.size} channels and std has {std.size}; pass one value "
            "for each channel to both, or a scalar"
        )


def _fit(constant: np.ndarray, ndim: int) -> np.ndarray:
    # Spelled out, so that it also works where rank promotion is an error.
    return constant.reshape((1,) * (ndim - constant.ndim) + constant.shape)
