"""Rounding and quantizers whose range is learned by gradient descent."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._fake_quant import fake_quant_p, in_range, vary_alike
from jaxaccel.quant._qparams import (
    QParams,
    as_array,
    as_float32,
    check_qparams,
    divide,
    spread,
)
from jaxaccel.quant._quantize import check_input, round_to
from jaxaccel.quant._ranges import sum_to_params
from jaxaccel.quant._spec import QuantSpec

_TINY = np.float32(2.0**-126)


@jax.custom_jvp
def ste_round(x: ArrayLike) -> jax.Array:
    """Rounds half to even, with a gradient of 1.

    Args:
      x: Floating numbers.

    Returns:
      Integers in the dtype of `x`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import quant
      >>> value, gradient = jax.value_and_grad(quant.ste_round)(jnp.float32(2.5))
      >>> print(value, gradient)
      2.0 1.0

    References:
      Bengio, Léonard, Courville, 2013, arXiv:1308.3432
    """
    return jnp.round(x)


@ste_round.defjvp
def _ste_round_jvp(primals, tangents):
    return ste_round(*primals), tangents[0]


def lsq(x: ArrayLike, scale: ArrayLike, spec: QuantSpec) -> jax.Array:
    r"""Fake-quantizes with a scale that is a parameter (learned step size).

    With :math:`v = x / s` and the code :math:`q = \mathrm{clip}(\mathrm{round}(v))`

    .. math:: \hat x = s\,q, \qquad \frac{\partial \hat x}{\partial s} =
        \frac{1}{\sqrt{N q_{max}}} \begin{cases} q - v & q_{min} \le v \le q_{max} \\
        q & \text{else} \end{cases}

    summed over the :math:`N` entries that share the scale (of a batch of
    activations, all of its examples); the gradient of `x` is 1 in the range and 0
    outside.

    Args:
      x: Floating numbers.
      scale: Positive, of the shape `spec.params_shape(x.shape)`; start at
        `lsq_init(x, spec)`. Inside `jit` its magnitude is taken.
      spec: Format of the codes; symmetric, not stochastic, any scale.

    Returns:
      Numbers of the shape and dtype of `x`.

    Raises:
      TypeError: If `x` is not floating.
      ValueError: If `spec` is not symmetric integer, is stochastic, or wants scales
        that are powers of two; if the scale has another shape or, outside of `jit`,
        is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=3, symmetric=True)
      >>> x = jnp.array([0.2, 0.7, 9.0])
      >>> print(quant.lsq(x, 0.5, spec))
      [0.  0.5 1.5]
      >>> print(f"{jax.grad(lambda s: quant.lsq(x, s, spec).sum())(0.5):.4f}")
      0.7333

    References:
      Esser et al., Learned Step Size Quantization, 2020, arXiv:1902.08153
    """
    _check_learned("lsq", spec)
    check_input(x, spec, None)
    zero = np.zeros(np.shape(scale), np.int32)
    check_qparams(QParams(scale, zero), np.shape(x), spec)
    return _lsq(*vary_alike(as_array(x), as_float32(scale)), spec)


def lsq_init(x: ArrayLike, spec: QuantSpec) -> jax.Array:
    r"""Returns where the scale of `lsq` starts.

    .. math:: s_0 = 2\,\mathrm{mean}|x| / \sqrt{q_{max}}

    Args:
      x: The weights, or a batch of activations.
      spec: Format of the codes.

    Returns:
      float32 of the shape `spec.params_shape(x.shape)`, positive (1 for zeros).

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=4, symmetric=True)
      >>> print(f"{quant.lsq_init(np.array([1.0, -3.0]), spec):.4f}")
      1.5119
    """
    magnitude = jnp.abs(as_float32(x))
    total = sum_to_params(magnitude, spec)
    mean = total / np.float32(shared_by(np.shape(x), spec))
    start = 2 * mean / np.float32(math.sqrt(spec.qmax))
    return jnp.where(start > 0, jnp.maximum(start, _TINY), np.float32(1))


def shared_by(shape: tuple[int, ...], spec: QuantSpec) -> int:
    """Number of entries of an array that share a scale."""
    return math.prod(shape) // max(1, math.prod(spec.params_shape(shape)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lsq(x, scale, spec):
    scale = jnp.maximum(jnp.abs(scale), _TINY)
    return fake_quant_p.bind(x, scale, jnp.zeros(scale.shape, jnp.int32), spec=spec)


def _lsq_forward(x, scale, spec):
    return _lsq(x, scale, spec), (x, scale)


def _lsq_backward(spec, residuals, cotangent):
    x, scale = residuals
    size = jnp.maximum(jnp.abs(scale), _TINY)
    v = divide(x.astype(jnp.float32), spread(size, x.shape, spec))
    inside = in_range(x, size, jnp.zeros(size.shape, jnp.int32), spec)
    code = jnp.clip(round_to(v, None, spec), spec.qmin, spec.qmax)
    slope = jnp.where(inside, code - v, code) * cotangent.astype(jnp.float32)
    factor = 1 / math.sqrt(shared_by(x.shape, spec) * spec.qmax)
    gradient = sum_to_params(slope, spec) * np.float32(factor)
    gradient = jnp.where(scale < 0, -gradient, gradient)
    return jnp.where(inside, cotangent, jnp.zeros_like(cotangent)), gradient


_lsq.defvjp(_lsq_forward, _lsq_backward)


def pact(x: ArrayLike, alpha: ArrayLike, spec: QuantSpec) -> jax.Array:
    r"""Clips activations at a learned bound and fake-quantizes them.

    .. math:: y = \mathrm{clip}(x, 0, \alpha), \quad \hat y = s\,\mathrm{round}(y / s),
        \quad s = \alpha / q_{max}, \quad
        \frac{\partial \hat y}{\partial \alpha} = \sum [x \ge \alpha]

    It takes the place of a ReLU. Put an L2 penalty on `alpha`, as its authors do.

    Args:
      x: Floating numbers.
      alpha: The bound, a positive scalar. Inside `jit` its magnitude is taken.
      spec: Format of the codes; symmetric without a sign, one scale.

    Returns:
      Numbers of the shape and dtype of `x`.

    Raises:
      TypeError: If `x` is not floating.
      ValueError: If `spec` is of another kind; if `alpha` is no scalar or, outside of
        `jit`, not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=2, signed=False, symmetric=True)
      >>> x = jnp.array([-1.0, 0.9, 2.0, 7.0])
      >>> print(quant.pact(x, 3.0, spec))
      [0. 1. 2. 3.]
      >>> print(jax.grad(lambda a: quant.pact(x, a, spec).sum())(3.0))
      1.0

    References:
      Choi et al., PACT: Parameterized Clipping Activation for Quantized Neural
      Networks, 2018, arXiv:1805.06085
    """
    _check_learned("pact", spec)
    if spec.signed or spec.channel_axis is not None or spec.block_size is not None:
        raise ValueError(
            "pact needs signed=False, symmetric=True and one scale for the array; got "
            f"{spec}"
        )
    check_input(x, spec, None)
    check_qparams(QParams(alpha, np.zeros(np.shape(alpha), np.int32)), (), spec)
    return _pact(*vary_alike(as_array(x), as_float32(alpha)), spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pact(x, alpha, spec):
    scale = divide(jnp.abs(alpha), np.float32(spec.qmax))
    scale = jnp.maximum(scale, _TINY)
    return fake_quant_p.bind(x, scale, jnp.int32(0), spec=spec)


def _pact_forward(x, alpha, spec):
    return _pact(x, alpha, spec), (x, alpha)


def _pact_backward(spec, residuals, cotangent):
    x, alpha = residuals
    wide = x.astype(jnp.float32)
    above = wide >= jnp.abs(alpha)
    zeros = jnp.zeros_like(cotangent)
    gradient = jnp.where(above, cotangent, zeros).astype(jnp.float32).sum()
    gradient = jnp.where(alpha < 0, -gradient, gradient)
    return jnp.where((wide >= 0) & ~above, cotangent, zeros), gradient


_pact.defvjp(_pact_forward, _pact_backward)


def _check_learned(name: str, spec: QuantSpec) -> None:
    if (
        not spec.symmetric
        or spec.is_float
        or spec.rounding == "stochastic"
        or spec.pow2_scale
    ):
        raise ValueError(
            f"{name} needs symmetric=True, pow2_scale=False, number_format='integer' "
            f"and a rounding that is not stochastic; got {spec}"
        )
