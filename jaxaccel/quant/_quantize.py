"""Numbers to codes and back."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._qparams import (
    QParams,
    as_float32,
    check_qparams,
    divide,
    is_concrete,
    spread,
)
from jaxaccel.quant._spec import QuantSpec


def quantize(
    x: ArrayLike, qparams: QParams, spec: QuantSpec, *, key: jax.Array | None = None
) -> jax.Array:
    r"""Returns the codes of numbers.

    .. math:: q = \mathrm{clip}(\mathrm{round}(x / s) + z, q_{min}, q_{max})

    in float32, with a true division, as `QuantizeLinear` of ONNX does.

    Args:
      x: Floating numbers of any dtype, from NumPy or jax.
      qparams: Scale and zero point, of the shapes of `spec.params_shape(x.shape)`.
      spec: Format of the codes.
      key: For stochastic rounding, which needs one; else unused.

    Returns:
      Codes in `spec.storage_dtype`, of the shape of `x`. Infinity gives the last
      code on its side. Inside `jit` NaN gives the code of 0 (NaN in float8).

    Raises:
      TypeError: If `x` is not floating, or a zero point no integer.
      ValueError: If a shape is wrong, a scale is not positive, a zero point is no
        code, stochastic rounding lacks a key, or `x` holds NaN (values are looked
        at outside of `jit` only).

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(symmetric=True)
      >>> x = np.array([-1.0, 0.0, 0.25, 1.0])
      >>> qparams = quant.compute_qparams(x.min(), x.max(), spec)
      >>> print(quant.quantize(x, qparams, spec))
      [-127    0   32  127]
    """
    check_input(x, spec, key)
    check_qparams(qparams, np.shape(x), spec)
    if is_concrete(x) and np.isnan(np.asarray(x)).any():
        raise ValueError("x must not hold NaN: it has no code")
    noise = draw(key, np.shape(x), spec)
    scale, zero = as_arrays(qparams)
    return encode(as_float32(x), scale, zero, noise, spec=spec)


def dequantize(
    q: ArrayLike,
    qparams: QParams,
    spec: QuantSpec,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Returns the numbers that codes stand for, `scale * (q - zero_point)`.

    Args:
      q: Codes.
      qparams: Scale and zero point, of the shapes of `spec.params_shape(q.shape)`.
      spec: Format of the codes.
      dtype: Of the result; the arithmetic is float32.

    Returns:
      Numbers of the shape of `q`.

    Raises:
      TypeError: If `q` is floating and the format is not, or the other way round.
      ValueError: If a shape is wrong, a scale is not positive, or a zero point is
        no code.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> codes = np.array([-128, 0, 127], np.int8)
      >>> qparams = quant.QParams(np.float32(0.5), np.int32(-28))
      >>> print(quant.dequantize(codes, qparams, quant.INT8_ACTIVATION))
      [-50.   14.   77.5]
    """
    wanted = jnp.floating if spec.is_float else jnp.integer
    if not jnp.issubdtype(jnp.result_type(q), wanted):
        raise TypeError(
            f"codes of {spec.number_format} are {spec.storage_dtype}; got "
            f"{jnp.result_type(q)}"
        )
    check_qparams(qparams, np.shape(q), spec)
    return decode(jnp.asarray(q), *as_arrays(qparams), spec=spec).astype(dtype)


def encode(
    x: jax.Array,
    scale: jax.Array,
    zero: jax.Array,
    noise: jax.Array | None = None,
    *,
    spec: QuantSpec,
) -> jax.Array:
    """Returns codes, with nothing checked."""
    ratio = divide(x, spread(scale, x.shape, spec))
    if spec.is_float:
        # Beyond its largest number float8 would be NaN or infinite.
        return jnp.clip(ratio, spec.qmin, spec.qmax).astype(spec.storage_dtype)
    zeros = spread(zero, x.shape, spec).astype(jnp.float32)
    codes = jnp.clip(round_to(ratio, noise, spec) + zeros, spec.qmin, spec.qmax)
    return jnp.where(jnp.isnan(codes), zeros, codes).astype(spec.storage_dtype)


def decode(
    q: jax.Array, scale: jax.Array, zero: jax.Array, *, spec: QuantSpec
) -> jax.Array:
    """Returns float32 numbers of codes, with nothing checked."""
    scales = spread(scale, q.shape, spec)
    if spec.is_float:
        return q.astype(jnp.float32) * scales
    steps = q.astype(jnp.int32) - spread(zero, q.shape, spec)
    return steps.astype(jnp.float32) * scales


def round_to(ratio: jax.Array, noise: jax.Array | None, spec: QuantSpec) -> jax.Array:
    """Rounds as the format says."""
    if spec.rounding == "half_even":
        return jnp.round(ratio)
    floor = jnp.floor(ratio)
    # The difference is exact, unlike ratio + 0.5. Infinity minus itself is NaN.
    fraction = jnp.where(jnp.isfinite(ratio), ratio - floor, 0.0)
    up = fraction >= 0.5 if noise is None else noise < fraction
    return floor + up.astype(jnp.float32)


def check_input(x: ArrayLike, spec: QuantSpec, key: jax.Array | None) -> None:
    """Raises unless there are floating numbers, and a key where one is needed."""
    if not (hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))):
        raise TypeError(f"x must be an array; got {type(x).__name__}")
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"x must be floating numbers; got {dtype}")
    if spec.rounding == "stochastic" and key is None:
        raise ValueError("rounding='stochastic' needs a key=; got None")


def draw(
    key: jax.Array | None, shape: tuple[int, ...], spec: QuantSpec
) -> jax.Array | None:
    """Returns the random numbers of stochastic rounding, None for the others."""
    if spec.rounding != "stochastic":
        return None
    assert key is not None
    return jax.random.uniform(key, shape, jnp.float32)


def as_arrays(qparams: QParams) -> tuple[jax.Array, jax.Array]:
    """Returns scale and zero point as float32 and int32 arrays of jax."""
    zero = jnp.asarray(qparams.zero_point, jnp.int32)
    return as_float32(qparams.scale), zero
