"""Multiplication by a real number with integers only: 32-bit multiplier and shift."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

ROUNDINGS = ("single", "double")


def quantize_multiplier(multiplier: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns the integer multiplier and the right shift that stand for a number.

    .. math:: M \approx m_0 \, 2^{-\mathrm{shift}}, \qquad 2^{30} \le m_0 < 2^{31}

    so that the relative error is at most :math:`2^{-31}`. Powers of two are exact,
    with :math:`m_0 = 2^{30}`.

    Args:
      multiplier: Numbers in (0, 2**30), in float64 if they are. Below 2**-32 any
        product rounds to 0: m0 is 0 then.

    Returns:
      int32 arrays of the shape of `multiplier`: m0, and the shift, from 1 to 62.

    Raises:
      ValueError: If a multiplier is not positive, not finite, or 2**30 or more.

    Examples:
      >>> from jaxaccel import quant
      >>> m0, shift = quant.quantize_multiplier(0.75)
      >>> int(m0), int(shift), int(m0) / 2**int(shift)
      (1610612736, 31, 0.75)

    References:
      Jacob et al., Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference, 2018, arXiv:1712.05877, section 2.2
    """
    values = np.asarray(multiplier, np.float64)
    bad = ~((values > 0) & (values < 2.0**30))
    if bad.any():
        raise ValueError(
            f"multiplier must be in (0, 2**30); got {values[bad].flat[0]}: the scales "
            "of a layer's input, kernel and output are too far apart"
        )
    fraction, exponent = np.frexp(values)
    m0 = np.floor(fraction * 2.0**31 + 0.5)
    # The fraction may round up to 1, which needs one bit more than there are.
    full = m0 == 2.0**31
    m0, exponent = np.where(full, 2.0**30, m0), exponent + full
    shift = 31 - exponent
    m0, shift = np.where(shift > 62, 0, m0), np.where(shift > 62, 31, shift)
    return m0.astype(np.int32), shift.astype(np.int32)


def requantize(
    acc: ArrayLike, m0: ArrayLike, shift: ArrayLike, *, rounding: str = "single"
) -> jax.Array:
    r"""Returns accumulators times a real multiplier, rounded to integers.

    .. math:: \mathrm{single}: \left\lfloor
        \frac{a\,m_0 + 2^{\mathrm{shift}-1}}{2^{\mathrm{shift}}} \right\rfloor

    `"double"` rounds twice, as gemmlowp and TFLite-Micro do: first the product to 32
    bits, half up, then the rest of the shift, half away from zero. The two differ by
    1 in some of a hundred results. Products are 64 bits wide, made of 16-bit halves
    in uint32: `jax_enable_x64` is not needed.

    Args:
      acc: int32 accumulators.
      m0: int32 multiplier, at least 0, that broadcasts against `acc`; along the last
        axis, as `quantize_multiplier` gave it.
      shift: int32, from 1 to 62, of the shape of `m0`.
      rounding: `"single"` or `"double"`.

    Returns:
      int32 of the shape of `acc`; what does not fit is the nearest that does.

    Raises:
      TypeError: If `acc` is not int32.
      ValueError: If `rounding` is another word.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> m0, shift = quant.quantize_multiplier(0.25)
      >>> acc = np.array([5, 6, -6, -7], np.int32)
      >>> print(quant.requantize(acc, m0, shift))
      [ 1  2 -1 -2]
      >>> print(quant.requantize(acc, m0, shift, rounding="double"))
      [ 2  2 -2 -2]

    References:
      Jacob et al., 2018, arXiv:1712.05877, section 2.3
    """
    check_rounding(rounding)
    if jnp.result_type(acc) != jnp.int32:
        raise TypeError(f"acc must be int32; got {jnp.result_type(acc)}")
    acc = jnp.asarray(acc)
    m0 = jnp.broadcast_to(jnp.asarray(m0, jnp.int32), acc.shape)
    shift = jnp.broadcast_to(jnp.asarray(shift, jnp.int32), acc.shape)
    if rounding == "single":
        return _multiply_shift(acc, m0, shift)
    zero = jnp.zeros_like(shift)
    left, right = jnp.maximum(31 - shift, zero), jnp.maximum(shift - 31, zero)
    high = _multiply_shift(_shift_left(acc, left), m0, jnp.full_like(shift, 31))
    return _shift_right_away(high, right)


def check_rounding(rounding: str) -> None:
    """Raises ValueError unless the rounding is one of the two."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be 'single' or 'double'; got {rounding!r}")


def _multiply_shift(a: jax.Array, b: jax.Array, shift: jax.Array) -> jax.Array:
    high, low = _multiply(a, b)
    high, low = _add_power_of_two(high, low, shift - 1)
    signed = lax.bitcast_convert_type(high, jnp.int32)
    far = lax.shift_right_arithmetic(signed, jnp.clip(shift - 32, 0, 31))
    near_shift = jnp.clip(shift, 1, 31)
    near = lax.bitcast_convert_type(
        (high << (32 - near_shift).astype(jnp.uint32))
        | (low >> near_shift.astype(jnp.uint32)),
        jnp.int32,
    )
    # What is above the sign bit of the result must repeat it.
    above = lax.shift_right_arithmetic(signed, near_shift - 1)
    fits = (above == 0) | (above == -1)
    near = jnp.where(fits, near, _limit(signed))
    return jnp.where(shift >= 32, far, near)


def _multiply(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the 64-bit product of int32 and int32 >= 0 as two uint32."""
    ua, ub = a.astype(jnp.uint32), b.astype(jnp.uint32)
    a0, a1, b0, b1 = ua & 0xFFFF, ua >> 16, ub & 0xFFFF, ub >> 16
    p01, p10 = a0 * b1, a1 * b0
    middle = (a0 * b0 >> 16) + (p01 & 0xFFFF) + (p10 & 0xFFFF)
    high = a1 * b1 + (p01 >> 16) + (p10 >> 16) + (middle >> 16)
    # As unsigned, a negative a counts 2**32 too much.
    return high - jnp.where(a < 0, ub, jnp.zeros_like(ub)), ua * ub


def _add_power_of_two(
    high: jax.Array, low: jax.Array, bit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    one, zero = jnp.ones_like(low), jnp.zeros_like(low)
    upper = bit >= 32
    power = one << jnp.where(upper, bit - 32, bit).astype(jnp.uint32)
    total = low + jnp.where(upper, zero, power)
    carry = (total < low).astype(jnp.uint32)
    return high + jnp.where(upper, power, zero) + carry, total


def _shift_left(x: jax.Array, bits: jax.Array) -> jax.Array:
    shifted = x << bits
    exact = lax.shift_right_arithmetic(shifted, bits) == x
    return jnp.where(exact, shifted, _limit(x))


def _shift_right_away(x: jax.Array, bits: jax.Array) -> jax.Array:
    mask = (jnp.ones_like(x) << bits) - 1
    half = lax.shift_right_arithmetic(mask, jnp.ones_like(mask))
    up = (x & mask) > half + (x < 0).astype(jnp.int32)
    return lax.shift_right_arithmetic(x, bits) + up.astype(jnp.int32)


def _limit(x: jax.Array) -> jax.Array:
    return jnp.where(x < 0, np.int32(-(2**31)), np.int32(2**31 - 1))
