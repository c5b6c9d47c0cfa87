"""Leaving out the steps whose loss or gradient is not finite."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxaccel.train._state import TrainState

PyTree = Any

# Elements from which on the way an array is read shows.
_LARGE = 2**12


class Skips(NamedTuple):
    """Counts of the steps that the finite guard left out.

    Attributes:
      total: All of them, int32 scalar.
      in_a_row: Those since the last finite step, int32 scalar.
    """

    total: jax.Array
    in_a_row: jax.Array


def init_skips() -> Skips:
    """Returns the counts of a new run."""
    return Skips(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def count_skip(skips: Skips, finite: jax.Array) -> Skips:
    """Returns the counts with one more step."""
    skipped = (~finite).astype(jnp.int32)
    return Skips(skips.total + skipped, (skips.in_a_row + 1) * skipped)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether no entry of any leaf is infinite or NaN."""
    return jnp.stack([_finite(x) for x in jax.tree.leaves(tree)]).all()


def check_finite(state: "TrainState", *, limit: int = 20) -> None:
    """Raises if the finite guard has skipped many steps in a row.

    A guard makes a run survive single bad steps; one whose loss is NaN from the
    first step on would otherwise run to its end without learning. Reads the device:
    call it where metrics are read, not every step.

    Args:
      state: A state of a step with `finite_guard=True` or a loss scale.
      limit: Number of steps skipped in a row that is still accepted. The first loss
        scale of float16 may cost a few.

    Raises:
      FloatingPointError: If more were skipped.
      TypeError: If the state counts no skips.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxaccel import train
      >>> state = train.TrainState.create(
      ...     jnp.ones(2), optax.sgd(0.1), key=jax.random.key(0), finite_guard=True)
      >>> train.check_finite(state)
      >>> print(state.skips.total)
      0
    """
    if state.skips is None:
        raise TypeError(
            "the state counts no skipped steps; build it and the step with "
            "finite_guard=True"
        )
    total, in_a_row, step = jax.device_get((*state.skips, state.step))
    if in_a_row > limit:
        when = "from the first step on" if in_a_row == step else f"of {step} so far"
        raise FloatingPointError(
            f"the last {in_a_row} steps had a loss or gradient that is not finite and "
            f"were skipped ({total} in all, {when}); lower the learning rate, look "
            "for bad values in the batches, or find the operation with "
            "jax.debug_nans(True)"
        )


def _finite(x: jax.Array) -> jax.Array:
    small = x.ndim < 2 or x.size < _LARGE
    if small or jax.typeof(x).sharding.spec[-1] is not None:
        return jnp.isfinite(x).all()
    # 0 * x is NaN exactly where x is not finite. A product with a vector reads x once;
    # the reduction above writes the flags of large arrays to memory first (CPU).
    zeros = jnp.zeros(x.shape[-1:], x.dtype)
    return jnp.isfinite(
        jax.lax.dot_general(x, zeros, (((x.ndim - 1,), (0,)), ((), ())))
    ).all()
