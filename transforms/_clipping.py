"""Clipping of gradients by value and by their common norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccel.transforms._kernels import check_inexact
from jaxaccel.transforms._norms import clip_leaves, fit, global_norm
from jaxaccel.transforms._reductions import statistics_dtype
from jaxaccel.transforms._shards import AxisName, check_axis_name
from jaxaccel.transforms._validate import (
    check_nonnegative,
    check_real_scalar,
)


def clip_by_value(
    max_abs: jax.typing.ArrayLike,
) -> optax.GradientTransformationExtraArgs:
    """Limits every entry of the gradients to an interval around zero.

    ::

        min(max(g, -max_abs), max_abs)

    As `optax.clip`, but for leaves of different types and a bound of any type.
    Entries within the bound pass bitwise unchanged. It turns the gradient,
    since large entries shrink and small ones do not: to bound its size alone
    use `clip_by_global_norm`. An infinite entry becomes the bound, as any
    other large one; a NaN stays a NaN.

    Args:
        max_abs: the bound, a number or scalar array >= 0, rounded to each
            leaf's type; `inf` never clips, 0 turns every gradient into zeros.

    Returns:
        An `optax.GradientTransformationExtraArgs` without state; updates keep
        the gradients' types. There is nothing to say about sharding: no entry
        depends on another.

    Raises:
        ValueError: `max_abs` is negative, NaN or not a scalar.
        TypeError: `max_abs` is not a real number; at update, a gradient is
            not floating.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import clip_by_value
        >>> grads = {"kernel": jnp.array([[3.0, -0.25, -8.0]])}
        >>> tx = clip_by_value(1.0)
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> np.asarray(updates["kernel"]).tolist()
        [[1.0, -0.25, -1.0]]

    References:
        Mikolov, Statistical Language Models Based on Neural Networks, PhD
        thesis, Brno University of Technology, 2012
    """
    check_nonnegative("max_abs", max_abs, finite=False)

    def init_fn(params):
        del params
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args

        def clip(path, grad):
            check_inexact("clip_by_value", path, grad, allow_complex=False)
            grad = jnp.asarray(grad)
            bound = jnp.asarray(max_abs).astype(grad.dtype)
            # Not minimum and maximum, which flush subnormals to zero on CPU.
            above = jnp.where(grad >= bound, bound, grad)
            return jnp.where(grad <= -bound, -bound, above)

        return jax.tree_util.tree_map_with_path(clip, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def clip_by_global_norm(
    max_norm: jax.typing.ArrayLike, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scales all gradients down so that their common norm is at most a bound.

    ::

        g * min(1, max_norm / norm),   norm = sqrt(sum of |g|^2 over all leaves)

    As `optax.clip_by_global_norm`, but the norm is float32 whatever the leaves'
    types, each leaf may have a type of its own, and derivatives through the
    update are finite. Gradients within the bound pass bitwise unchanged.

    A norm that is NaN or infinite (a NaN or Inf in any leaf, or float32
    entries above 1e19) makes every entry NaN, so that no step looks right
    which is not; skip such steps with `optax.apply_if_finite`. With
    `max_norm=inf` only a NaN does so. Under `jit` sharded leaves are right;
    inside `shard_map` the norm is that of the local shard, unless `axis_name`
    says over which mesh axes leaves are split.

    Args:
        max_norm: the bound, a number or scalar array >= 0; `inf` never clips,
            0 turns every gradient into zeros.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which leaves are split, to sum the squares over. Of a leaf
            that is not split over them `shard_map` knows it, unless
            `check_vma=False`; there, a function `(path, leaf) ->
            PartitionSpec`, the leaf's own, tells. Without it the norm is that
            of the local shard.

    Returns:
        An `optax.GradientTransformationExtraArgs` without state. Its `update`
        takes a keyword `norm`, a scalar: the global norm of the very updates
        it is given, where that is known already. In a chain no transformation
        before it may then change the updates.

    Raises:
        ValueError: `max_norm` is negative, NaN or not a scalar; at update,
            `axis_name` is not an axis there.
        TypeError: `max_norm` is not a real number; at update, a gradient is
            neither floating nor complex.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import clip_by_global_norm
        >>> grads = {"kernel": jnp.array([[3.0, 0.0]]), "bias": jnp.array([4.0])}
        >>> tx = clip_by_global_norm(1.0)
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[0.6 0. ]]
        >>> updates, _ = tx.update(grads, tx.init(grads), norm=10.0)
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[0.3 0. ]]

    References:
        Pascanu, Mikolov, Bengio, On the difficulty of training Recurrent Neural
        Networks, 2012, arXiv:1211.5063
    """
    check_nonnegative("max_norm", max_norm, finite=False)
    check_axis_name("clip_by_global_norm", axis_name)

    def init_fn(params):
        del params
        return optax.EmptyState()

    def update_fn(updates, state, params=None, *, norm=None, **extra_args):
        del params, extra_args
        if norm is None:
            norm = global_norm("clip_by_global_norm", updates, axis_name)
        else:
            norm = _given_norm(norm)
        fits, scale = fit(
            norm, jnp.asarray(max_norm).astype(norm.dtype), zero_stops=True
        )
        return clip_leaves(updates, fits, scale), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _given_norm(norm: Any) -> jax.Array:
    check_real_scalar("norm", norm)
    dtype = jnp.result_type(norm)
    return jnp.asarray(norm, statistics_dtype(dtype))
