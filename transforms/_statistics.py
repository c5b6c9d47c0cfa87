"""Measuring gradients and updates, layer by layer, without leaving the step."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxaccel.transforms._dims import path_names
from jaxaccel.transforms._kernels import check_inexact
from jaxaccel.transforms._norms import align, is_hole
from jaxaccel.transforms._reductions import safe_sqrt, statistics_dtype, sum_over
from jaxaccel.transforms._validate import check_decay

_NAME = "gradient_statistics"


class GradientStatisticsState(NamedTuple):
    """State of `gradient_statistics`: trees like the parameters, a scalar a leaf.

    Attributes:
        count: updates measured so far.
        skipped: updates left out, since not every statistic was finite.
        gradient_norm: L2 norm of the leaf's gradient.
        gradient_mean: mean of its entries.
        gradient_std: population standard deviation of its entries.
        update_ratio: norm of the leaf's final update over that of its weights,
            0 where the weights are all 0.
        fraction_clipped: share of the entries that `clip` changed; None
            without one.
        clip: state of `clip`.
        inner: state of the transformation measured.
    """

    count: jax.Array  # () int32
    skipped: jax.Array  # () int32
    gradient_norm: Any  # tree of () float32
    gradient_mean: Any  # tree of () float32
    gradient_std: Any  # tree of () float32
    update_ratio: Any  # tree of () float32
    fraction_clipped: Any  # tree of () float32, or None
    clip: Any
    inner: Any


_STATISTICS = (
    "gradient_norm",
    "gradient_mean",
    "gradient_std",
    "update_ratio",
    "fraction_clipped",
)


@runtime_checkable
class ScalarWriter(Protocol):
    """What takes the statistics, such as `jaxaccel.train.TensorBoardWriter`."""

    def scalars(self, step: int, values: Mapping[str, Any], /) -> None:
        """Writes host scalars by name."""


def gradient_statistics(
    inner: optax.GradientTransformation,
    *,
    clip: optax.GradientTransformation | None = None,
    decay: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Measures each layer's gradient and update around a transformation.

    It wraps the transformation, the whole chain as a rule, since the gradients
    are known before it and the update only after it. Updates are those of
    `inner`, or of `clip` followed by `inner`, bit by bit. For each leaf of the
    parameters the state holds

    ::

        gradient_norm, gradient_mean, gradient_std   of the gradient handed in
        update_ratio      = |update| / |weights|     of the update handed out
        fraction_clipped  = entries that `clip` changed / entries

    `optax.tree.get(opt_state, "gradient_norm")` reads one of them as a tree, and
    `write_gradient_statistics` sends all to a writer; nothing is copied to the
    host before. An update ratio near 1e-3 is usual; a layer far off trains at
    another speed than the rest.

    An update with a statistic that is NaN or infinite is left out: it raises
    `skipped` and leaves the others as they were. Inside `shard_map` the
    statistics are those of the local shard; under `jit` sharded leaves are
    right. A stack of layers in one leaf has common statistics.

    Args:
        inner: the transformation to measure.
        clip: a transformation applied before `inner`, to see how much it
            clips: the share is 0 or 1 for a clip by norm, but for zeros.
        decay: 0 keeps the last update's statistics; above 0, and < 1, they are
            running averages, `fraction_clipped` that of many steps.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a
        `GradientStatisticsState`. For `optax.inject_hyperparams` `inner` and
        `clip` are static.

    Raises:
        TypeError: `inner` or `clip` is no transformation; at update, a
            gradient is not floating.
        ValueError: `decay` out of its range; at update, parameters are missing.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from jaxaccel.transforms import clip_by_value, gradient_statistics
        >>> tx = gradient_statistics(optax.sgd(0.01), clip=clip_by_value(2.0))
        >>> params = {"kernel": jnp.array([3.0, 4.0])}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"kernel": jnp.array([0.0, 6.0])}, state, params)
        >>> for name in ("gradient_norm", "update_ratio", "fraction_clipped"):
        ...     print(name, round(float(optax.tree.get(state, name)["kernel"]), 4))
        gradient_norm 6.0
        update_ratio 0.004
        fraction_clipped 0.5
    """
    for name, tx in (("inner", inner), ("clip", clip)):
        if not (isinstance(tx, optax.GradientTransformation) or (name, tx) == _NO_CLIP):
            raise TypeError(
                f"`{name}` must be an optax.GradientTransformation, got {tx!r}"
            )
    check_decay("decay", decay)
    inner = optax.with_extra_args_support(inner)
    first = optax.with_extra_args_support(clip or optax.identity())

    def init_fn(params):
        def zeros():
            return jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params)

        return GradientStatisticsState(
            count=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            gradient_norm=zeros(),
            gradient_mean=zeros(),
            gradient_std=zeros(),
            update_ratio=zeros(),
            fraction_clipped=None if clip is None else zeros(),
            clip=first.init(params),
            inner=inner.init(params),
        )

    def update_fn(updates, state, params=None, **extra_args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
            check_inexact(_NAME, path, leaf, allow_complex=False)
        if params is None:
            raise ValueError(
                f"{_NAME} compares updates with weights: call update(grads, state, "
                "params)"
            )
        clipped, clip_state = first.update(updates, state.clip, params, **extra_args)
        final, inner_state = inner.update(clipped, state.inner, params, **extra_args)
        new: dict[str, Any] = _moments(updates)
        new["update_ratio"] = _ratios(final, params)
        if clip is not None:
            new["fraction_clipped"] = jax.tree.map(_share_changed, updates, clipped)
        state = _averaged(state, new, decay)
        return final, state._replace(clip=clip_state, inner=inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def write_gradient_statistics(writer: ScalarWriter, step: int, opt_state: Any) -> None:
    """Sends what `gradient_statistics` holds to a writer, in one call.

    Waits for the device: call it at the steps that log, outside `jit`.

    Args:
        writer: anything with `scalars(step, values)`, such as
            `jaxaccel.train.TensorBoardWriter`.
        step: the step to write them under.
        opt_state: state of the optimizer, or a part of it with one
            `gradient_statistics`.

    Raises:
        ValueError: the state holds none, or several.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from jaxaccel.transforms import (
        ...     gradient_statistics, write_gradient_statistics)
        >>> class Printer:
        ...     def scalars(self, step, values):
        ...         print(step, values["gradient_norm/dense/kernel"])
        >>> tx = gradient_statistics(optax.sgd(0.1))
        >>> params = {"dense": {"kernel": jnp.array([3.0, 4.0])}}
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> write_gradient_statistics(Printer(), 7, state)
        7 5.0
    """

    def is_ours(node: Any) -> bool:
        return isinstance(node, GradientStatisticsState)

    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_ours)]
    states = [node for node in found if is_ours(node)]
    if len(states) != 1:
        raise ValueError(
            f"the optimizer's state holds {len(states)} of {_NAME}, one is needed: "
            "wrap the optimizer in gradient_statistics(tx), or give the part of the "
            "state that you mean"
        )
    values = {
        "/".join((name, *path_names(path))): leaf
        for name in _STATISTICS
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(states[0], name))
    }
    values["skipped_updates"] = states[0].skipped
    fetched = jax.device_get(values)
    writer.scalars(step, {name: float(value) for name, value in fetched.items()})


_NO_CLIP = ("clip", None)


def _moments(updates: Any) -> dict[str, Any]:
    leaves, treedef = jax.tree.flatten(updates)
    moments = [_moments_of(jnp.asarray(leaf)) for leaf in leaves]
    return {
        name: treedef.unflatten([each[i] for each in moments])
        for i, name in enumerate(_STATISTICS[:3])
    }


def _moments_of(grad: jax.Array) -> tuple[jax.Array, ...]:
    x = grad.astype(statistics_dtype(grad.dtype))
    axes, count = tuple(range(x.ndim)), max(math.prod(x.shape), 1)
    mean = lax.optimization_barrier(sum_over(x, axes) / count)
    variance = sum_over(lax.square(x - mean), axes) / count
    norm = safe_sqrt(count * (variance + lax.square(mean)))
    parts = (norm, mean, safe_sqrt(variance))
    return tuple(part.reshape(()).astype(jnp.float32) for part in parts)


def _ratios(updates: Any, params: Any) -> Any:
    pairs, treedef = align(_NAME, updates, "params", params)
    return treedef.unflatten(
        update if is_hole(update) else _ratio(_norm(update), _norm(weight))
        for _, update, weight in pairs
    )


def _norm(x: Any) -> jax.Array:
    return _moments_of(jnp.asarray(x))[0]


def _ratio(update: jax.Array, weight: jax.Array) -> jax.Array:
    is_zero = weight == 0
    return jnp.where(is_zero, 0, update / jnp.where(is_zero, 1, weight))


def _share_changed(before: Any, after: Any) -> jax.Array:
    changed = (jnp.asarray(before) != jnp.asarray(after)).astype(jnp.float32)
    axes = tuple(range(changed.ndim))
    return sum_over(changed, axes).reshape(()) / max(math.prod(changed.shape), 1)


def _averaged(
    state: GradientStatisticsState, new: dict[str, Any], decay: jax.typing.ArrayLike
) -> GradientStatisticsState:
    values, treedef = jax.tree.flatten(new)
    old = jax.tree.leaves({name: getattr(state, name) for name in new})
    if not values:
        return state._replace(count=optax.safe_increment(state.count))
    # One vector, with barriers: of scalars XLA computes all statistics anew for
    # each one that is stored, and the time to compile grows with their number
    # squared.
    latest = lax.optimization_barrier(jnp.stack(values))
    usable = jnp.all(jnp.isfinite(latest))
    count = jnp.where(usable, optax.safe_increment(state.count), state.count)
    rate = jnp.asarray(decay).astype(jnp.float32)
    # Of a count of 1 the weight is 1: averages start from the first update.
    age = jnp.maximum(count, 1).astype(jnp.float32)
    weight = (1 - rate) / (1 - rate**age)
    before = jnp.stack(old)
    step = weight * jnp.where(usable, latest - before, 0)
    averages = treedef.unflatten(list(lax.optimization_barrier(before + step)))
    skipped = optax.safe_increment(state.skipped)
    skipped = jnp.where(usable, state.skipped, skipped)
    return state._replace(count=count, skipped=skipped, **averages)
