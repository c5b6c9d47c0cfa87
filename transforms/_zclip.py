"""Clipping of outliers among the norms of past gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxaccel.transforms._norms import clip_leaves, fit, global_norm
from jaxaccel.transforms._reductions import safe_sqrt
from jaxaccel.transforms._shards import AxisName, check_axis_name
from jaxaccel.transforms._validate import (
    check_decay,
    check_int,
    check_nonnegative,
)


class ZClipState(NamedTuple):
    """State of `zclip`.

    Attributes:
        count: norms taken into the statistics so far.
        mean: their mean in the warm-up, then its running average.
        variance: their variance about the mean, the same way.
    """

    count: jax.Array  # () int32
    mean: jax.Array  # () float32
    variance: jax.Array  # () float32


def zclip(
    z_threshold: jax.typing.ArrayLike = 2.5,
    *,
    decay: jax.typing.ArrayLike = 0.97,
    max_norm: jax.typing.ArrayLike = 1.0,
    eps: jax.typing.ArrayLike = 1e-6,
    warmup_steps: int = 25,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales a gradient down when its norm is an outlier among those before it.

    ::

        z     = (norm - mean) / (std + eps)
        bound = mean + z_threshold^2 * std / z     where z > z_threshold
        g * min(1, min(bound, max_norm) / norm)

    with `norm` the global one, and `mean` and `std` running averages of the
    norms before it. The larger the outlier, the closer to the mean it is
    brought. Afterwards the averages take in `min(norm, bound)`, so that a
    spike hardly moves them; the variance is about the new mean. During the
    first `warmup_steps` only `max_norm` clips, and the averages are the plain
    mean and variance of the unclipped norms.

    A norm that is NaN or infinite (a NaN or Inf in any leaf, or float32
    entries above 1e19) gives an update of zeros and leaves the state as it is,
    bit by bit. Momentum and weight decay behind it still move the parameters:
    to skip the whole step wrap the chain in `optax.apply_if_finite`.

    Args:
        z_threshold: standard deviations above the mean where clipping starts,
            >= 0.
        decay: of the running averages, >= 0 and < 1.
        max_norm: bound that holds from the first step, >= 0; `inf` for none.
            It does not limit what the averages take in.
        eps: added to the standard deviation.
        warmup_steps: norms behind the first mean and variance, at least 2.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which leaves are split, to sum the squares over. Of a leaf
            that is not split over them `shard_map` knows it, unless
            `check_vma=False`; there, a function `(path, leaf) ->
            PartitionSpec`, the leaf's own, tells. Without it the norm is that
            of the local shard, and the state differs from one to the next.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a state of three
        scalars, `count`, `mean` and `variance`. Updates keep the gradients'
        types. For `optax.inject_hyperparams` `warmup_steps` is static, and so
        is `axis_name` if it is a function.

    Raises:
        ValueError: a number out of its range; at update, `axis_name` is not an
            axis there.
        TypeError: an argument of the wrong type; at update, a gradient is
            neither floating nor complex.

    Examples:
        Norms of 0.9 and 1.1 in turn, then one of 100:

        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import zclip
        >>> tx = zclip(max_norm=jnp.inf, warmup_steps=4)
        >>> state = tx.init({"w": jnp.zeros(1)})
        >>> for norm in (0.9, 1.1, 0.9, 1.1, 100.0):
        ...     updates, state = tx.update({"w": jnp.array([norm])}, state)
        >>> print(np.asarray(updates["w"]).round(3), state.mean.round(3))
        [1.001] 1.0

    References:
        Kumar, Owen, Chowdhury, Güra, ZClip: Adaptive Spike Mitigation for LLM
        Pre-Training, 2025, arXiv:2504.02507
    """
    check_nonnegative("z_threshold", z_threshold)
    check_decay("decay", decay)
    check_nonnegative("max_norm", max_norm, finite=False)
    check_nonnegative("eps", eps)
    check_int("warmup_steps", warmup_steps, at_least=2)
    check_axis_name("zclip", axis_name)

    def init_fn(params):
        del params
        return ZClipState(
            count=jnp.zeros((), jnp.int32),
            mean=jnp.zeros((), jnp.float32),
            variance=jnp.zeros((), jnp.float32),
        )

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        norm = global_norm("zclip", updates, axis_name).astype(jnp.float32)
        usable = jnp.isfinite(norm)
        norm = jnp.where(usable, norm, 0)
        in_warmup = state.count < warmup_steps
        bounded = jnp.where(
            in_warmup, norm, _bound_outlier(norm, state, z_threshold, eps)
        )
        fits, scale = fit(norm, jnp.minimum(bounded, _float32(max_norm)))
        mean, variance = _averages(bounded, state, in_warmup, _float32(decay))
        new_state = ZClipState(
            count=jnp.where(usable, optax.safe_increment(state.count), state.count),
            mean=jnp.where(usable, mean, state.mean),
            variance=jnp.where(usable, variance, state.variance),
        )
        return clip_leaves(updates, fits, scale, usable), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _bound_outlier(
    norm: jax.Array,
    state: ZClipState,
    z_threshold: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
) -> jax.Array:
    # Written without the quotient z, which would be 0 / 0 at a variance of 0.
    std = safe_sqrt(state.variance)
    unit = std + _float32(eps)
    excess = norm - state.mean
    is_outlier = excess > _float32(z_threshold) * unit
    allowed = jnp.square(_float32(z_threshold)) * std * unit
    return jnp.where(
        is_outlier, state.mean + allowed / jnp.where(is_outlier, excess, 1), norm
    )


def _averages(
    norm: jax.Array, state: ZClipState, in_warmup: jax.Array, decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # With this weight in the warm-up, the running averages are Welford's
    # recurrence: the plain mean and variance of the norms so far.
    count = state.count.astype(jnp.float32)
    weight = jnp.where(in_warmup, 1 / (count + 1), 1 - decay)
    mean = state.mean + weight * (norm - state.mean)
    about = jnp.where(in_warmup, norm - state.mean, norm - mean)
    variance = state.variance + weight * (about * (norm - mean) - state.variance)
    return mean, variance


def _float32(value: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(value).astype(jnp.float32)
