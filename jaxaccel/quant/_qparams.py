"""Scale and zero point: computed from a range, checked, spread over an array."""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._spec import QuantSpec


class QParams(NamedTuple):
    """What turns codes into numbers: `r = scale * (q - zero_point)`.

    Attributes:
      scale: float32, positive; of shape `()`, `(channels,)` or, with blocks, the
        array's shape with the split axis divided by the block size.
      zero_point: int32 of the same shape, the code of the number 0.
    """

    scale: Any
    zero_point: Any


def compute_qparams(lo: ArrayLike, hi: ArrayLike, spec: QuantSpec) -> QParams:
    r"""Returns the scale and the zero point that cover a range.

    Without symmetry the range is first widened to hold 0, which padding and ReLU
    need to be exact:

    .. math:: s = \frac{h - l}{q_{max} - q_{min}}, \quad
        z = \mathrm{clip}(\mathrm{round}(q_{min} - l / s))

    and with symmetry :math:`s = \max(|l|, |h|) / q_{max}, z = 0`. A range of 0 alone
    has scale 1; no scale is below the least normal float32, `2**-126`. A scale that
    has to be a power of two is rounded up.

    Args:
      lo: Lowest number, of the shape that `spec.params_shape` tells.
      hi: Highest number, of the same shape.
      spec: Format of the codes.

    Returns:
      float32 scale and int32 zero point, of the shape of `lo`.

    Raises:
      ValueError: If the shapes differ, a bound is not finite, `lo > hi`, or `lo < 0`
        for codes without a sign and without a zero point. Values are checked
        outside of `jit` only; inside a NaN gives a scale of NaN.

    Examples:
      >>> from jaxaccel import quant
      >>> p = quant.compute_qparams(-1.0, 3.0, quant.UINT8_ACTIVATION)
      >>> print(f"{p.scale:.6f}", p.zero_point)
      0.015686 64
      >>> print(quant.compute_qparams(-1.0, 0.5, quant.QuantSpec(symmetric=True)).scale)
      0.007874016

    References:
      Jacob et al., Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference, 2018, arXiv:1712.05877
    """
    _check_range(lo, hi, spec)
    lo, hi = as_float32(lo), as_float32(hi)
    if spec.symmetric:
        largest = jnp.maximum(jnp.abs(lo), jnp.abs(hi))
        scale = _usable(divide(largest, np.float32(spec.qmax)), largest, spec)
        return QParams(scale, jnp.zeros(scale.shape, jnp.int32))
    lo, hi = jnp.minimum(lo, 0.0), jnp.maximum(hi, 0.0)
    steps = np.float32(spec.qmax - spec.qmin)
    # Divided apart: the difference of two large bounds overflows.
    scale = _usable(divide(hi, steps) - divide(lo, steps), hi - lo, spec)
    zero = jnp.round(spec.qmin - divide(lo, scale))
    zero = jnp.clip(zero, spec.qmin, spec.qmax).astype(jnp.int32)
    return QParams(scale, zero)


def check_qparams(qparams: QParams, shape: tuple[int, ...], spec: QuantSpec) -> None:
    """Raises unless scale and zero point fit an array and its codes.

    Values are looked at where they are known, outside of `jit`.

    Raises:
      ValueError: If a shape is wrong, a scale is not positive and finite, or a zero
        point is no code, or not 0 with `symmetric=True`.
      TypeError: If zero points are not integers.
    """
    wanted = spec.params_shape(shape)
    for name, value in zip(QParams._fields, qparams, strict=True):
        if np.shape(value) != wanted:
            raise ValueError(
                f"{name} must be of shape {wanted} for an array of shape {shape} with "
                f"channel_axis={spec.channel_axis}, block_size={spec.block_size}; got "
                f"{np.shape(value)}"
            )
    if not jnp.issubdtype(jnp.result_type(qparams.zero_point), jnp.integer):
        raise TypeError(
            f"zero_point must be integers; got {jnp.result_type(qparams.zero_point)}"
        )
    check_values(qparams, spec)


def check_values(qparams: QParams, spec: QuantSpec) -> None:
    """Raises unless scales are positive and zero points are codes, if known."""
    if is_concrete(qparams.scale):
        scale = np.asarray(qparams.scale, np.float64)
        bad = ~((scale > 0) & np.isfinite(scale))
        if bad.any():
            raise ValueError(
                f"scale must be positive and finite; got {scale[bad].flat[0]}"
            )
    if is_concrete(qparams.zero_point):
        zero = np.asarray(qparams.zero_point)
        lo, hi = (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
        bad = (zero < lo) | (zero > hi)
        if bad.any():
            raise ValueError(
                f"zero_point must be from {lo} to {hi} for {spec}; got "
                f"{zero[bad].flat[0]}"
            )


def spread(values: jax.Array, shape: tuple[int, ...], spec: QuantSpec) -> jax.Array:
    """Returns scales or zero points so that they broadcast against the array."""
    if spec.block_size is not None:
        return jnp.repeat(values, spec.block_size, axis=spec.block_axis(shape))
    if spec.channel_axis is None:
        return values
    axis = spec.positive_channel_axis(len(shape))
    return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def divide(x: jax.Array, by: ArrayLike) -> jax.Array:
    """Returns the quotient rounded once, the same inside and outside of `jit`.

    Compiled, a plain `x / by` multiplies by the inverse of a constant or spread `by`:
    half of the quotients are then an ulp off, and codes near ties other ones.
    """
    one = np.float32(1)
    # A divisor that depends on x has no inverse to compute beforehand.
    return x / jnp.where(jnp.isnan(x), one, by)


def as_float32(x: ArrayLike) -> jax.Array:
    """Returns the numbers as float32; float64 of NumPy as well."""
    return as_array(x, jnp.float32)


def as_array(x: ArrayLike, dtype: Any = None) -> jax.Array:
    """Returns an array of jax; float64 beyond float32 becomes infinite, silently."""
    with np.errstate(over="ignore"):
        return jnp.asarray(x, dtype)


def is_concrete(x: Any) -> bool:
    """Whether values can be looked at: outside of transformations, on this host."""
    if isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return False
    return getattr(x, "is_fully_addressable", True)


def _usable(scale: jax.Array, extent: jax.Array, spec: QuantSpec) -> jax.Array:
    # A scale below the normal numbers is flushed to 0 by some backends.
    scale = jnp.where(extent == 0, np.float32(1), jnp.maximum(scale, _TINY))
    if not spec.pow2_scale:
        return scale
    mantissa, exponent = jnp.frexp(scale)
    exponent = exponent + (mantissa > 0.5).astype(exponent.dtype)
    # The next power of two of the largest numbers would be infinite.
    power = jnp.ldexp(jnp.ones_like(scale), jnp.minimum(exponent, 128) - 1)
    return jnp.where(jnp.isnan(scale), scale, power)


_TINY = np.float32(2.0**-126)


def _check_range(lo: ArrayLike, hi: ArrayLike, spec: QuantSpec) -> None:
    if np.shape(lo) != np.shape(hi):
        raise ValueError(
            f"lo and hi must be of one shape; got {np.shape(lo)} and {np.shape(hi)}"
        )
    if not (is_concrete(lo) and is_concrete(hi)):
        return
    with np.errstate(over="ignore"):
        low, high = np.asarray(lo, np.float32), np.asarray(hi, np.float32)
    for name, value in (("lo", low), ("hi", high)):
        if not np.isfinite(value).all():
            raise ValueError(
                f"{name} must be finite; got {value[~np.isfinite(value)].flat[0]}: "
                "look for NaN in the data it was taken from"
            )
    if (low > high).any():
        i = np.argmax((low > high).ravel())
        raise ValueError(
            f"lo must not be above hi; got lo={low.flat[i]}, hi={high.flat[i]}"
        )
    if spec.symmetric and not spec.signed and (low < 0).any():
        raise ValueError(
            f"codes without sign and zero point hold no negative numbers; got "
            f"lo={low.min()}: use signed=True or symmetric=False"
        )
