"""Masks of one bit a pixel: packed on the host, unpacked inside jit."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data._checks import as_count


def pack_bits(mask: np.ndarray) -> np.ndarray:
    """Packs the booleans of each example into bits, an eighth of the bytes.

    Row i of the result is `np.packbits(mask[i])`, most significant bit first and
    the last byte filled up with zeros. `unpack_bits` undoes it on the device.

    Args:
      mask: `(examples, ...)`, bool, on the host.

    Returns:
      `(examples, ceil(n / 8))` uint8, with n booleans in an example.

    Raises:
      TypeError: If it is not bool.
      ValueError: If it has no axis of examples.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import pack_bits
      >>> mask = np.eye(3, dtype=bool)[None]
      >>> pack_bits(mask).tolist()
      [[136, 128]]
    """
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(
            f"a mask must be bool, got {mask.dtype}; say which values count: mask > 0"
        )
    if mask.ndim == 0:
        raise ValueError("a mask needs a leading axis of examples, got a scalar")
    return np.packbits(mask.reshape(len(mask), math.prod(mask.shape[1:])), axis=1)


def unpack_bits(packed: jax.typing.ArrayLike, shape: Sequence[int]) -> jax.Array:
    """Unpacks masks that `pack_bits` packed; works inside jit.

    Args:
      packed: `(batch, bytes)`, uint8.
      shape: Shape of one example's mask, static.

    Returns:
      `(batch, *shape)`, bool.

    Raises:
      TypeError: If `packed` is not uint8, or `shape` no sequence of integers.
      ValueError: If it has not as many bytes as `shape` needs.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import pack_bits, unpack_bits
      >>> mask = np.eye(3, dtype=bool)[None]
      >>> bool((unpack_bits(pack_bits(mask), (3, 3)) == mask).all())
      True
    """
    packed = jnp.asarray(packed)
    if not isinstance(shape, Sequence):
        raise TypeError(f"shape must be a tuple, such as (9,), got {shape!r}")
    shape = tuple(as_count("shape", size, 1) for size in shape)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"packed masks must be uint8, got {packed.dtype}")
    count = math.prod(shape)
    if packed.ndim != 2 or packed.shape[1] != -(-count // 8):
        raise ValueError(
            f"masks of shape {shape} take {-(-count // 8)} bytes, so packed masks "
            f"must be (batch, {-(-count // 8)}), got shape {packed.shape}"
        )
    shifts = jnp.arange(7, -1, -1, dtype=jnp.uint8)
    bits = (packed[:, :, None] >> shifts[None, None, :]) & jnp.uint8(1)
    bits = bits.reshape(packed.shape[0], -1)[:, :count]
    return bits.reshape(packed.shape[0], *shape).astype(bool)
