"""Clipping of each leaf, or each unit of a kernel, by a norm of its own."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxaccel.transforms._dims import KeyPath, Resolver
from jaxaccel.transforms._kernels import Kernels, check_inexact
from jaxaccel.transforms._norms import (
    align,
    all_axes,
    clip_leaf,
    fit,
    is_hole,
    squares_over,
)
from jaxaccel.transforms._reductions import safe_sqrt
from jaxaccel.transforms._shards import (
    AxisName,
    check_axis_name,
    names_over,
    sum_over_devices,
)
from jaxaccel.transforms._validate import check_nonnegative


def clip_by_layer_norm(
    max_norm: jax.typing.ArrayLike, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scales each leaf's gradient down so that its own norm is at most a bound.

    ::

        g * min(1, max_norm / norm),   norm = sqrt(sum of |g|^2 over the leaf)

    One bound for all leaves, and no leaf's norm reaches another: a spike in
    one layer does not shrink the step of the others, and the direction of the
    whole gradient may turn. `optax.clip_by_block_rms` bounds the root mean
    square instead, which is the norm over the square root of the leaf's size.
    Gradients within the bound pass bitwise unchanged. A norm that is NaN or
    infinite (a NaN or Inf, or float32 entries above 1e19) makes its leaf NaN.
    Leaves that stack layers, as `flax.linen.scan` makes them, are one leaf:
    use `jax.vmap` over the stacked axis, or `adaptive_grad_clip`, whose `dims`
    know it.

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
        An `optax.GradientTransformationExtraArgs` without state. Norms are
        float32, updates keep the gradients' types.

    Raises:
        ValueError: `max_norm` is negative, NaN or not a scalar; at update,
            `axis_name` is not an axis there.
        TypeError: an argument of the wrong type; at update, a gradient is
            neither floating nor complex.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import clip_by_layer_norm
        >>> grads = {"kernel": jnp.array([[3.0, 4.0]]), "bias": jnp.array([0.5])}
        >>> tx = clip_by_layer_norm(1.0)
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> print(np.asarray(updates["kernel"]).round(3), updates["bias"])
        [[0.6 0.8]] [0.5]

    References:
        Pascanu, Mikolov, Bengio, On the difficulty of training Recurrent Neural
        Networks, 2012, arXiv:1211.5063
    """
    check_nonnegative("max_norm", max_norm, finite=False)
    check_axis_name("clip_by_layer_norm", axis_name)

    def init_fn(params):
        del params
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args

        def clip(path, grad):
            check_inexact("clip_by_layer_norm", path, grad, allow_complex=True)
            grad, axes = jnp.asarray(grad), all_axes(grad)
            norm = _norm_over(grad, axes, names_over(axis_name, path, grad, axes))
            fits, scale = fit(
                norm, jnp.asarray(max_norm).astype(norm.dtype), zero_stops=True
            )
            # Without it the norm is computed anew for every entry it scales.
            return clip_leaf(grad, *lax.optimization_barrier((fits, scale)))

        return jax.tree_util.tree_map_with_path(clip, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def adaptive_grad_clip(
    clipping: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike = 1e-3,
    *,
    dims: Resolver | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Bounds each unit's gradient by a fraction of the norm of its weights.

    ::

        g * min(1, clipping * max(||w||, eps) / ||g||)

    with the norms over the fan-in of each output unit of a kernel, never
    across batch axes. Every other leaf is one unit: biases, norm parameters
    and embeddings are clipped by the norm of the whole leaf, as in the
    authors' code. (`optax.adaptive_grad_clip` goes by the rank alone: the same
    for vectors, Dense and 2-D or 3-D convolutions; but attention's output
    kernels, 1-D convolutions, stacked kernels, embeddings and attention's
    biases are reduced over axis 0.) The authors do not clip the last layer:
    leave it out with `optax.masked`.

    Units within the bound pass bitwise unchanged. A NaN or Inf makes its unit
    NaN. Put it where `clip_by_global_norm` would be, before momentum.

    Args:
        clipping: greatest ratio of a unit's gradient norm to its weight norm,
            >= 0; the authors use 0.01 for batches of 4096, more for smaller.
        eps: least weight norm to reckon with, so that units that start at
            zero can leave it.
        dims: `(path, leaf) -> KernelDims | None`, None for a leaf that is one
            unit; by default `flax_dims`.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which the fan-in of kernels is split. Of a leaf that is not
            split over them `shard_map` knows it, unless `check_vma=False`.
            Where kernels are split along their output axes too, a function
            `(path, leaf) -> PartitionSpec`, the leaf's own. Without it norms
            are those of the local shard.

    Returns:
        An `optax.GradientTransformationExtraArgs` without state, whose update
        needs `params`. Norms are float32, updates keep the gradients' types.
        For `optax.inject_hyperparams` `dims` is static.

    Raises:
        ValueError: `clipping` or `eps` is negative or not finite; at init, a
            kernel whose layout is ambiguous; at update, `params` missing or of
            other shapes than the gradients, or `axis_name` not an axis there.
        TypeError: an argument of the wrong type; at update, a gradient is
            neither floating nor complex.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import adaptive_grad_clip
        >>> params = {"kernel": jnp.ones((4, 2))}
        >>> grads = {"kernel": jnp.ones((4, 2)) * jnp.array([[5.0, 0.01]])}
        >>> tx = adaptive_grad_clip(0.1)
        >>> updates, _ = tx.update(grads, tx.init(params), params)
        >>> print(np.asarray(updates["kernel"][0]).round(3))
        [0.1  0.01]

    References:
        Brock, De, Smith, Simonyan, High-Performance Large-Scale Image
        Recognition Without Normalization, 2021, arXiv:2102.06171
    """
    check_nonnegative("clipping", clipping)
    check_nonnegative("eps", eps)
    kernels = Kernels(
        "adaptive_grad_clip",
        dims,
        axes_of=operator.attrgetter("reduction"),
        # A unit with a fan-in of one entry is a unit all the same.
        min_size=1,
        allow_complex=True,
        axis_name=axis_name,
    )

    def init_fn(params):
        kernels.check(params, needs_kernel=False)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "You are using a transformation that requires the current value of "
                "parameters, but you are not passing `params` when calling `update`. "
                "(adaptive_grad_clip compares gradients with them.)"
            )
        leaves, treedef = align("adaptive_grad_clip", updates, "params", params)
        clipped = [
            grad
            if is_hole(grad)
            else _clip_units(kernels, path, grad, param, clipping, eps)
            for path, grad, param in leaves
        ]
        return treedef.unflatten(clipped), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _clip_units(
    kernels: Kernels,
    path: KeyPath,
    grad: Any,
    param: Any,
    clipping: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
) -> jax.Array:
    check_inexact(kernels.name, path, grad, allow_complex=True)
    grad, param = jnp.asarray(grad), jnp.asarray(param)
    if grad.shape != param.shape:
        raise ValueError(
            f"{kernels.name}: the gradient {jax.tree_util.keystr(path)} has shape "
            f"{grad.shape}, its parameter {param.shape}; they must be the same"
        )
    axes = kernels.axes(path, grad) or all_axes(grad)
    grad_norm, param_norm = (
        _norm_over(x, axes, names_over(kernels.axis_name, path, x, axes))
        for x in (grad, param)
    )
    least = jnp.asarray(eps).astype(param_norm.dtype)
    ratio = jnp.asarray(clipping).astype(param_norm.dtype)
    limit = ratio * jnp.maximum(param_norm, least)
    fits, scale = fit(grad_norm, limit.astype(grad_norm.dtype))
    return clip_leaf(grad, *lax.optimization_barrier((fits, scale)))


def _norm_over(
    x: jax.Array, axes: tuple[int, ...], names: tuple[str, ...]
) -> jax.Array:
    """L2 norm over axes of an array, which are kept, and over mesh axes."""
    return safe_sqrt(sum_over_devices([squares_over(x, axes)], [names], fuse=False)[0])
