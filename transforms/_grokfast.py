"""Amplifying the slow part of the gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxaccel.transforms._norms import global_norm
from jaxaccel.transforms._reductions import statistics_dtype
from jaxaccel.transforms._shards import AxisName, check_axis_name
from jaxaccel.transforms._validate import check_decay, check_nonnegative


class GrokfastEmaState(NamedTuple):
    """State of `grokfast_ema`.

    Attributes:
        count: gradients taken into the average so far.
        ema: their running average.
    """

    count: jax.Array  # () int32
    ema: Any  # a tree like the parameters, float32 at least


def grokfast_ema(
    alpha: jax.typing.ArrayLike = 0.98,
    lamb: jax.typing.ArrayLike = 2.0,
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adds to each gradient a multiple of its running average.

    ::

        ema = alpha * ema + (1 - alpha) * g,   ema = g at the first update
        g + lamb * ema

    A low-pass filter in front of any optimizer: what the gradients of many
    steps have in common is amplified by `1 + lamb`, what changes from step to
    step passes as it is. So the step is up to `1 + lamb` times as long: lower
    the learning rate, or put a clip behind it. All leaves take part, biases
    as well. Put it before momentum or moments.

    A norm of the whole gradient that is NaN or infinite (a NaN or Inf in any
    leaf, or float32 entries above 1e19) gives an update of zeros and leaves the
    state as it is, bit by bit. Momentum and weight decay behind it still move
    the parameters: to skip the whole step wrap the chain in
    `optax.apply_if_finite`.

    Args:
        alpha: decay of the average, >= 0 and < 1; its memory is `1 / (1 - alpha)`
            updates.
        lamb: factor of the average, >= 0; 0 changes nothing.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which leaves are split, or a function `(path, leaf) ->
            PartitionSpec`; for the check of the norm alone.

    Returns:
        An `optax.GradientTransformationExtraArgs` whose state is a counter and
        the average, as large as the parameters and float32. Updates keep the
        gradients' types. For `optax.inject_hyperparams` `axis_name` is static.

    Raises:
        ValueError: a number out of its range.
        TypeError: an argument of the wrong type; at update, a gradient is
            neither floating nor complex.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxaccel.transforms import grokfast_ema
        >>> tx = grokfast_ema(alpha=0.5, lamb=2.0)
        >>> state = tx.init({"kernel": jnp.zeros(2)})
        >>> for sign in (1.0, -1.0):
        ...     grads = {"kernel": jnp.array([1.0, sign])}
        ...     updates, state = tx.update(grads, state)
        >>> print(updates["kernel"])
        [ 3. -1.]

    References:
        Lee, Kang, Kim, Lee, Grokfast: Accelerated Grokking by Amplifying Slow
        Gradients, 2024, arXiv:2405.20233
    """
    check_decay("alpha", alpha)
    check_nonnegative("lamb", lamb)
    check_axis_name("grokfast_ema", axis_name)

    def init_fn(params):
        ema = jax.tree.map(
            lambda p: jnp.zeros_like(p, dtype=statistics_dtype(p.dtype)), params
        )
        return GrokfastEmaState(count=jnp.zeros((), jnp.int32), ema=ema)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        usable = jnp.isfinite(global_norm("grokfast_ema", updates, axis_name))
        is_first = state.count == 0

        def average(grad, ema):
            x = jnp.asarray(grad).astype(ema.dtype)
            decay = jnp.asarray(alpha).astype(ema.dtype)
            new = jnp.where(is_first, x, decay * ema + (1 - decay) * x)
            return jnp.where(usable, new, ema)

        def amplify(grad, ema):
            grad = jnp.asarray(grad)
            slow = jnp.asarray(lamb).astype(ema.dtype) * ema
            return jnp.where(usable, grad.astype(ema.dtype) + slow, 0).astype(
                grad.dtype
            )

        ema = jax.tree.map(average, updates, state.ema)
        count = jnp.where(usable, optax.safe_increment(state.count), state.count)
        return jax.tree.map(amplify, updates, ema), GrokfastEmaState(count, ema)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
