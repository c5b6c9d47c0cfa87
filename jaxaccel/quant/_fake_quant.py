"""Quantize and dequantize in one, with a straight-through gradient.

The forward pass is a primitive of its own, so that a traced network shows each of its
quantizers as one equation: from that the integer network is made.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike

from jaxaccel.quant._qparams import (
    QParams,
    as_array,
    check_qparams,
    divide,
    spread,
)
from jaxaccel.quant._quantize import as_arrays, check_input, decode, draw, encode
from jaxaccel.quant._spec import QuantSpec


def fake_quant(
    x: ArrayLike, qparams: QParams, spec: QuantSpec, *, key: jax.Array | None = None
) -> jax.Array:
    r"""Returns numbers rounded to those that codes can stand for.

    .. math:: \hat x = s \, (q(x) - z), \qquad
        \frac{\partial \hat x}{\partial x} = [\, q_{min} \le x / s + z \le q_{max} \,]

    The gradient passes straight through the rounding, inside of the range and on its
    edges, where the largest weight sits; outside it is 0, and for scale and zero
    point always (`lsq` and `pact` learn them). Gradients are of reverse mode only.

    Args:
      x: Floating numbers.
      qparams: Scale and zero point, of the shapes of `spec.params_shape(x.shape)`.
      spec: Format of the codes.
      key: For stochastic rounding, which needs one.

    Returns:
      Numbers of the shape and dtype of `x`, computed in float32. NaN stays NaN, with a
      gradient of 0, so that a step's check for finite numbers finds it.

    Raises:
      TypeError: If `x` is not floating, or a zero point no integer.
      ValueError: If a shape is wrong, a scale is not positive, a zero point is no
        code, or stochastic rounding lacks a key (values are looked at outside of
        `jit` only).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=2, symmetric=True)
      >>> f = lambda x: quant.fake_quant(x, quant.QParams(1.0, 0), spec)
      >>> x = jnp.array([-9.0, -0.6, 0.4, 1.0, 2.0])
      >>> print(f(x), jax.grad(lambda x: f(x).sum())(x))
      [-2. -1.  0.  1.  1.] [0. 1. 1. 1. 0.]

    References:
      Bengio, Léonard, Courville, Estimating or Propagating Gradients Through
      Stochastic Neurons for Conditional Computation, 2013, arXiv:1308.3432;
      Jacob et al., 2018, arXiv:1712.05877
    """
    check_input(x, spec, key)
    check_qparams(qparams, np.shape(x), spec)
    noise = draw(key, np.shape(x), spec)
    x, scale, zero = vary_alike(as_array(x), *as_arrays(qparams))
    return _fake_quant(x, scale, zero, noise, spec)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Marks arrays as varying over the same axes of `shard_map`, as a sum would.

    So the gradient of what was replicated is summed over the devices.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [tuple(frozenset().union(*varying) - axes) for axes in varying]
    return tuple(
        jax.lax.pcast(x, names, to="varying") if names else x
        for x, names in zip(arrays, missing, strict=True)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fake_quant(x, scale, zero, noise, spec):
    operands = (x, scale, zero) if noise is None else (x, scale, zero, noise)
    return fake_quant_p.bind(*operands, spec=spec)


def _forward(x, scale, zero, noise, spec):
    y = _fake_quant(x, scale, zero, noise, spec)
    return y, (in_range(x, scale, zero, spec), noise)


def _backward(spec, residuals, cotangent):
    inside, noise = residuals
    gradient = jnp.where(inside, cotangent, jnp.zeros_like(cotangent))
    return gradient, None, None, None if noise is None else jnp.zeros_like(noise)


_fake_quant.defvjp(_forward, _backward)


def in_range(
    x: jax.Array, scale: jax.Array, zero: jax.Array, spec: QuantSpec
) -> jax.Array:
    """Returns where numbers are within the range of the codes, edges included."""
    ratio = divide(x.astype(jnp.float32), spread(scale, x.shape, spec))
    lo, hi = jnp.float32(spec.qmin), jnp.float32(spec.qmax)
    if not spec.is_float:
        zeros = spread(zero, x.shape, spec).astype(jnp.float32)
        lo, hi = lo - zeros, hi - zeros
    # The scale was rounded: the number it was made from may lie some ulp outside.
    slack = np.float32(2.0**-21)
    return (ratio >= lo - slack * jnp.abs(lo)) & (ratio <= hi + slack * jnp.abs(hi))


def _compute(x, scale, zero, noise=None, *, spec):
    q = encode(x.astype(jnp.float32), scale, zero, noise, spec=spec)
    y = decode(q, scale, zero, spec=spec).astype(x.dtype)
    return jnp.where(jnp.isnan(x), x, y)


fake_quant_p = Primitive("fake_quant")
"""`fake_quant_p.bind(x, scale, zero_point[, noise], spec=spec)`."""

fake_quant_p.def_impl(jax.jit(_compute, static_argnames="spec"))
fake_quant_p.def_abstract_eval(lambda x, *_, spec: x.update(weak_type=False))
mlir.register_lowering(fake_quant_p, mlir.lower_fun(_compute, multiple_results=False))


def _batch(operands, dims, *, spec):
    compute = functools.partial(_compute, spec=spec)
    return jax.vmap(compute, in_axes=dims)(*operands), 0


batching.primitive_batchers[fake_quant_p] = _batch
