"""Clipping of gradients by their norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxaccel.transforms._kernels import check_inexact
from jaxaccel.transforms._reductions import safe_sqrt, statistics_dtype, sum_over
from jaxaccel.transforms._validate import check_nonnegative, check_real_scalar


def clip_by_global_norm(
    max_norm: jax.typing.ArrayLike,
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
    `max_norm=inf` only a NaN does so. Inside `shard_map` the norm is that of
    the local shard: give `norm`; under `jit` sharded leaves are right.

    Args:
        max_norm: the bound, a number or scalar array >= 0; `inf` never clips,
            0 turns every gradient into zeros.

    Returns:
        An `optax.GradientTransformationExtraArgs` without state. Its `update`
        takes a keyword `norm`, a scalar: the global norm of the very updates
        it is given, where that is known already. In a chain no transformation
        before it may then change the updates.

    Raises:
        ValueError: `max_norm` is negative, NaN or not a scalar.
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

    def init_fn(params):
        del params
        return optax.EmptyState()

    def update_fn(updates, state, params=None, *, norm=None, **extra_args):
        del params, extra_args
        norm = _global_norm(updates) if norm is None else _given_norm(norm)
        limit = jnp.asarray(max_norm, norm.dtype)
        fits = norm <= limit
        # The other branch of a `where` is differentiated too: no 0 / 0 there.
        scale = limit / jnp.where(fits, 1, norm)
        scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
        fits, scale = lax.optimization_barrier((fits, scale))

        def clip(grad):
            grad = jnp.asarray(grad)
            dtype = statistics_dtype(grad.dtype)
            clipped = (grad.astype(dtype) * scale.astype(dtype)).astype(grad.dtype)
            return jnp.where(fits, grad, clipped)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _global_norm(tree: Any) -> jax.Array:
    squares = [
        _sum_of_squares(path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not squares:
        return jnp.zeros((), jnp.float32)
    wide = any(square.dtype == jnp.float64 for square in squares)
    squares = [x.astype(jnp.float64 if wide else jnp.float32) for x in squares]
    # Without the barrier XLA computes the sum of all leaves anew inside the
    # kernel of each one, and the time to compile grows with their number
    # squared: minutes, not seconds, at 400 leaves.
    return safe_sqrt(jnp.sum(lax.optimization_barrier(jnp.stack(squares))))


def _sum_of_squares(path: tuple[Any, ...], leaf: Any) -> jax.Array:
    check_inexact("clip_by_global_norm", path, leaf, allow_complex=True)
    x = jnp.asarray(leaf)
    x = x.astype(statistics_dtype(x.dtype))
    if jnp.iscomplexobj(x):
        squares = lax.square(x.real) + lax.square(x.imag)
    else:
        squares = lax.square(x)
    axes = tuple(range(x.ndim))
    return jnp.squeeze(sum_over(squares, axes), axes)


def _given_norm(norm: Any) -> jax.Array:
    check_real_scalar("norm", norm)
    dtype = jnp.result_type(norm)
    return jnp.asarray(norm, statistics_dtype(dtype))
