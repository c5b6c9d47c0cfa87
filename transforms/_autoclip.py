"""Clipping at a percentile of the norms of past gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxaccel.transforms._norms import clip_leaves, fit, global_norm
from jaxaccel.transforms._shards import AxisName, check_axis_name
from jaxaccel.transforms._validate import (
    check_int,
    check_nonnegative,
    check_percentile,
)


class AutoClipState(NamedTuple):
    """State of `autoclip`.

    Attributes:
        count: norms recorded so far; the next one goes to `count % history`.
        norms: a ring of the last norms, unclipped; 0 where none is yet.
    """

    count: jax.Array  # () int32
    norms: jax.Array  # (history,) float32


def autoclip(
    percentile: jax.typing.ArrayLike = 10.0,
    *,
    history: int = 1000,
    max_norm: jax.typing.ArrayLike = jnp.inf,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales a gradient down to a percentile of the norms seen so far.

    ::

        bound = percentile of the last norms, this one included
        g * min(1, min(bound, max_norm) / norm)

    with the global norm, recorded unclipped. Percentiles are interpolated
    linearly, as by `numpy.percentile`, over those norms alone that are there:
    the first step is never clipped, unless by `max_norm`. At the authors' 10
    nine steps in ten are clipped, which makes it close to a normalized
    gradient of slowly changing length; 90 and more clips outliers alone. The
    authors keep all norms; here the last `history`.

    A norm that is NaN or infinite (a NaN or Inf in any leaf, or float32
    entries above 1e19) gives an update of zeros and leaves the state as it is,
    bit by bit. Momentum and weight decay behind it still move the parameters:
    to skip the whole step wrap the chain in `optax.apply_if_finite`.

    Args:
        percentile: from 0 to 100.
        history: number of norms kept, at least 1.
        max_norm: bound that holds from the first step, >= 0; `inf`, the
            default, for none.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which leaves are split, to sum the squares over. Of a leaf
            that is not split over them `shard_map` knows it, unless
            `check_vma=False`; there, a function `(path, leaf) ->
            PartitionSpec`, the leaf's own, tells. Without it the norm is that
            of the local shard, and the state differs from one to the next.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a state of `count` and
        `norms`, `history` float32 numbers. Updates keep the gradients' types.
        For `optax.inject_hyperparams` `history` is static, and so is
        `axis_name` if it is a function.

    Raises:
        ValueError: a number out of its range; at update, `axis_name` is not an
            axis there.
        TypeError: an argument of the wrong type; at update, a gradient is
            neither floating nor complex.

    Examples:
        Norms of 1, 2 and 9; the median of the three is 2:

        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import autoclip
        >>> tx = autoclip(50.0, history=100)
        >>> state = tx.init({"w": jnp.zeros(1)})
        >>> for norm in (1.0, 2.0, 9.0):
        ...     updates, state = tx.update({"w": jnp.array([norm])}, state)
        >>> print(np.asarray(updates["w"]).round(3))
        [2.]

    References:
        Seetharaman, Wichern, Pardo, Le Roux, AutoClip: Adaptive Gradient
        Clipping for Source Separation Networks, 2020, arXiv:2007.14469
    """
    check_percentile("percentile", percentile)
    check_int("history", history, at_least=1)
    check_nonnegative("max_norm", max_norm, finite=False)
    check_axis_name("autoclip", axis_name)

    def init_fn(params):
        del params
        return AutoClipState(
            count=jnp.zeros((), jnp.int32), norms=jnp.zeros((history,), jnp.float32)
        )

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        norm = global_norm("autoclip", updates, axis_name).astype(jnp.float32)
        usable = jnp.isfinite(norm)
        norm = jnp.where(usable, norm, 0)
        norms = state.norms.at[state.count % history].set(norm)
        count = optax.safe_increment(state.count)
        bound = _percentile(norms, jnp.minimum(count, history), percentile)
        limit = jnp.minimum(bound, jnp.asarray(max_norm).astype(jnp.float32))
        fits, scale = fit(norm, limit)
        new_state = AutoClipState(
            count=jnp.where(usable, count, state.count),
            norms=jnp.where(usable, norms, state.norms),
        )
        return clip_leaves(updates, fits, scale, usable), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _percentile(
    values: jax.Array, filled: jax.Array, percentile: jax.typing.ArrayLike
) -> jax.Array:
    """Percentile of the first `filled` values; the others may be anything."""
    is_filled = jnp.arange(len(values)) < filled
    ordered = jnp.sort(jnp.where(is_filled, values, jnp.inf))
    last = filled - 1
    fraction = jnp.asarray(percentile).astype(jnp.float32) / 100
    rank = fraction * last.astype(jnp.float32)
    below = jnp.floor(rank)
    lower = jnp.clip(below.astype(jnp.int32), 0, last)
    upper = jnp.minimum(lower + 1, last)
    step = ordered[upper] - ordered[lower]
    return ordered[lower] + (rank - below) * step
