"""Clipping of each tensor by the running average of its own past norms."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxaccel.transforms._norms import (
    align,
    clip_leaves,
    fit,
    is_hole,
    leaf_squares,
)
from jaxaccel.transforms._reductions import safe_sqrt
from jaxaccel.transforms._shards import AxisName, check_axis_name
from jaxaccel.transforms._validate import (
    check_at_least,
    check_decay,
    check_int,
    check_nonnegative,
)


class AdaGCState(NamedTuple):
    """State of `adagc`.

    Attributes:
        count: steps taken into the averages so far.
        gamma: the parameters' tree, for each leaf the average of its clipped
            norms; 0 for a leaf whose gradient was zero in every step.
    """

    count: jax.Array  # () int32
    gamma: Any  # tree of () float32


def adagc(
    ratio: jax.typing.ArrayLike = 1.05,
    *,
    decay: jax.typing.ArrayLike = 0.98,
    max_norm: jax.typing.ArrayLike = 1.0,
    warmup_steps: int = 100,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Bounds each leaf's gradient by the average of its own past norms.

    ::

        g * min(1, ratio * gamma / norm)
        gamma <- decay * gamma + (1 - decay) * (norm after clipping)

    for each leaf by itself. In the first `warmup_steps` all leaves are clipped
    together, as by `clip_by_global_norm(max_norm)`, and `gamma` is the least
    clipped norm of the leaf so far.

    Past the warm-up `gamma` grows by a factor of at most
    `1 + (1 - decay) * (ratio - 1)` a step, 1.001 by default. So that a leaf
    that starts with zeros, as the second factor of a low-rank adapter makes
    the first one's gradient, can train at all, an exactly zero gradient leaves
    `gamma` as it is, in which this departs from the paper; a leaf without
    history past the warm-up is clipped to `max_norm` by itself.

    If any norm is NaN or infinite (a NaN or Inf in any leaf, or float32
    entries above 1e19) the whole update is zeros and the state stays as it is,
    bit by bit. Momentum and weight decay behind it still move the parameters:
    to skip the whole step wrap the chain in `optax.apply_if_finite`.

    Args:
        ratio: of the bound to the average, finite and >= 1: below 1 bounds
            would shrink to zero by themselves.
        decay: of the average, >= 0 and < 1.
        max_norm: bound on the global norm during warm-up, >= 0; `inf` for none.
        warmup_steps: number of steps before the averages bound, at least 1.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which leaves are split, to sum the squares over. Of a leaf
            that is not split over them `shard_map` knows it, unless
            `check_vma=False`; there, a function `(path, leaf) ->
            PartitionSpec`, the leaf's own, tells. Without it the norm is that
            of the local shard, and the state differs from one to the next.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a state of `count` and
        `gamma`, a float32 scalar for each leaf. Updates keep the gradients'
        types. For `optax.inject_hyperparams` `warmup_steps` is static, and so
        is `axis_name` if it is a function.

    Raises:
        ValueError: a number out of its range; at update, the gradients' tree
            is not that of `init`, or `axis_name` is not an axis there.
        TypeError: an argument of the wrong type; at update, a gradient is
            neither floating nor complex.

    Examples:
        Norms of 1, then one of 100 in one leaf alone:

        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import adagc
        >>> tx = adagc(max_norm=10.0, warmup_steps=2)
        >>> state = tx.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
        >>> for norm in (1.0, 1.0, 100.0):
        ...     grads = {"a": jnp.array([norm]), "b": jnp.ones(1)}
        ...     updates, state = tx.update(grads, state)
        >>> print(np.asarray(updates["a"]).round(3), updates["b"])
        [1.05] [1.]
        >>> print(state.gamma["a"].round(3))
        1.001

    References:
        Wang, Li, Chen, Zeng, Yang, Yu, Ma, Shen, AdaGC: Enhancing LLM
        Pretraining Stability via Adaptive Gradient Clipping, 2025,
        arXiv:2502.11034
    """
    check_at_least("ratio", ratio, 1.0)
    check_decay("decay", decay)
    check_nonnegative("max_norm", max_norm, finite=False)
    check_int("warmup_steps", warmup_steps, at_least=1)
    check_axis_name("adagc", axis_name)

    def init_fn(params):
        return AdaGCState(
            count=jnp.zeros((), jnp.int32),
            gamma=jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params),
        )

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        squares = leaf_squares("adagc", updates, axis_name).astype(jnp.float32)
        total = safe_sqrt(jnp.sum(squares))
        usable = jnp.isfinite(total)
        total = jnp.where(usable, total, 0)
        norms = jnp.where(usable, safe_sqrt(squares), 0)
        gamma = _averages_of(updates, state.gamma)
        in_warmup = state.count < warmup_steps
        limit, norm = _limits(norms, total, gamma, in_warmup, ratio, max_norm)
        fits, scale = fit(norm, limit)
        clipped = jnp.where(fits, norms, norms * scale)
        moved = _move(gamma, clipped, in_warmup, jnp.asarray(decay, jnp.float32))
        new_state = AdaGCState(
            count=jnp.where(usable, optax.safe_increment(state.count), state.count),
            gamma=_put_back(updates, state.gamma, jnp.where(usable, moved, gamma)),
        )
        return clip_leaves(updates, fits, scale, usable), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _averages_of(updates: Any, gamma: Any) -> jax.Array:
    """Stacks the averages of those leaves that have an update."""
    places, _ = align("adagc", updates, "the state", gamma)
    found = [average for _, update, average in places if not is_hole(update)]
    return jnp.stack(found) if found else jnp.zeros((0,), jnp.float32)


def _put_back(updates: Any, gamma: Any, moved: jax.Array) -> Any:
    places, treedef = align("adagc", updates, "the state", gamma)
    remaining = iter(moved)
    return treedef.unflatten(
        [
            average if is_hole(update) else next(remaining)
            for _, update, average in places
        ]
    )


def _limits(
    norms: jax.Array,
    total: jax.Array,
    gamma: jax.Array,
    in_warmup: jax.Array,
    ratio: jax.typing.ArrayLike,
    max_norm: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """The bound of each leaf, and the norm that it bounds."""
    absolute = jnp.asarray(max_norm).astype(jnp.float32)
    relative = jnp.asarray(ratio).astype(jnp.float32) * gamma
    alone = jnp.where(gamma == 0, absolute, relative)
    return jnp.where(in_warmup, absolute, alone), jnp.where(in_warmup, total, norms)


def _move(
    gamma: jax.Array, clipped: jax.Array, in_warmup: jax.Array, decay: jax.Array
) -> jax.Array:
    """Takes the clipped norms into the averages."""
    average = jnp.where(
        in_warmup, jnp.minimum(gamma, clipped), decay * gamma + (1 - decay) * clipped
    )
    average = jnp.where(gamma == 0, clipped, average)
    return jnp.where(clipped == 0, gamma, average)
