"""What a quantized layer does to its input and its kernel, in linen and in NNX."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.quant._fake_quant import fake_quant
from jaxaccel.quant._learned import lsq
from jaxaccel.quant._observers import Observer
from jaxaccel.quant._policy import LayerRule
from jaxaccel.quant._ranges import array_qparams


def quantize_kernel(kernel: Any, rule: LayerRule, scale: Any = None) -> jax.Array:
    """Returns the kernel as its codes stand for it.

    Args:
      kernel: The kernel.
      rule: Of the layer.
      scale: Where it is learned.
    """
    if rule.weight is None:
        return kernel
    if scale is not None:
        return lsq(kernel, scale, rule.weight)
    qparams = array_qparams(jax.lax.stop_gradient(kernel), rule.weight)
    return fake_quant(kernel, qparams, rule.weight)


def quantize_input(x: Any, observer: Observer, state: Any) -> jax.Array:
    """Returns the input as its codes stand for it, in the range that was observed."""
    return fake_quant(x, observer.qparams(state), observer.spec)


def watch(x: Any, observer: Observer, state: Any) -> Any:
    """Returns the observer's state after it has seen an input, without a gradient."""
    return observer.update(state, jax.lax.stop_gradient(jnp.asarray(x)))


def initial(observer: Observer, features: int) -> Any:
    """Returns the observer's state before the first input of so many features."""
    return observer.init((features,))
