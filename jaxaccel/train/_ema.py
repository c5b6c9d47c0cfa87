"""An exponential moving average of the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccel.train._precision import at_least_float32, cast_like

PyTree = Any


class Ema(NamedTuple):
    r"""State of an average over the steps so far.

    .. math:: a_t = d\,a_{t-1} + (1 - d)\,\theta_t, \quad
        w_t = d\,w_{t-1} + (1 - d), \quad a_0 = 0,\ w_0 = 0

    with :math:`a_t / w_t` the average, free of any share of the first parameters.

    Attributes:
      average: :math:`a_t`, shaped like the parameters, in at least float32.
      weight: :math:`w_t`, float32 scalar.
    """

    average: PyTree
    weight: jax.Array


def init_ema(params: PyTree) -> Ema:
    """Returns the average of no steps."""
    average = jax.tree.map(jnp.zeros_like, at_least_float32(params))
    return Ema(average, jnp.zeros((), jnp.float32))


def update_ema(ema: Ema, params: PyTree, decay: float) -> Ema:
    """Returns the average with the parameters of one more step."""

    def move(a: Any, p: Any) -> Any:
        return a + (1 - decay) * (p - a)

    average = jax.tree.map(move, ema.average, at_least_float32(params))
    return Ema(average, move(ema.weight, jnp.ones((), jnp.float32)))


@jax.jit
def averaged(ema: Ema, params: PyTree) -> PyTree:
    """Returns the corrected average in the parameters' dtypes."""

    def correct(a: jax.Array, p: jax.Array) -> jax.Array:
        started = ema.weight > 0
        weight = jnp.where(started, ema.weight, 1.0).astype(a.dtype)
        return jnp.where(started, a / weight, p)

    wide = at_least_float32(params)
    return cast_like(jax.tree.map(correct, ema.average, wide), params)


def check_decay(ema: Any) -> None:
    """Raises unless `ema` is None or a decay."""
    if ema is not None and not 0 < ema < 1:
        raise ValueError(
            f"ema must be a decay between 0 and 1, such as 0.999; got {ema}. None "
            "keeps no average"
        )
