"""The gradient noise scale: how large a batch still pays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxaccel.transforms._norms import global_norm
from jaxaccel.transforms._reductions import statistics_dtype
from jaxaccel.transforms._shards import (
    AxisName,
    check_axis_name,
    device_count,
    may_vary,
)
from jaxaccel.transforms._validate import check_decay, check_int


class GradientNoise(NamedTuple):
    """Unbiased estimates from the gradients of two batch sizes.

    Attributes:
        gradient_square: of the squared norm of the true gradient; may come out
            negative, as the noise of the estimate is subtracted.
        noise_trace: of the trace of the covariance of one example's gradient.
    """

    gradient_square: jax.Array  # () float32
    noise_trace: jax.Array  # () float32


class GradientNoiseScaleState(NamedTuple):
    """State of `gradient_noise_scale`.

    Attributes:
        count: large batches measured so far.
        micro_count: small ones of the large batch that has begun.
        total: sum of their gradients; empty with `data_axis`.
        small_squares: sum of their squared norms.
        gradient_square: running average of `GradientNoise.gradient_square`.
        noise_trace: running average of `GradientNoise.noise_trace`.
        noise_scale: the quotient of the two averages, in examples; infinite
            where the first is not positive, 0 before the first measurement.
    """

    count: jax.Array  # () int32
    micro_count: jax.Array  # () int32
    total: Any  # a tree like the parameters, float32 at least, or ()
    small_squares: jax.Array  # () float32
    gradient_square: jax.Array  # () float32
    noise_trace: jax.Array  # () float32
    noise_scale: jax.Array  # () float32


def estimate_gradient_noise(
    small_square: jax.typing.ArrayLike,
    big_square: jax.typing.ArrayLike,
    small_batch: int | float,
    big_batch: int | float,
) -> GradientNoise:
    """Splits squared gradient norms at two batch sizes into signal and noise.

    ::

        |G|^2   = (B * |G_B|^2 - b * |G_b|^2) / (B - b)
        tr(S)   = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

    `tr(S) / |G|^2` is the simple noise scale: the batch size at which the noise
    of the mean gradient is as large as the gradient. Average both estimates
    over many steps before you divide: each is unbiased, the quotient is not.

    Args:
        small_square: squared norm of the mean gradient of a small batch,
            itself the mean over several such batches, if there are.
        big_square: squared norm of the mean gradient of a large batch.
        small_batch: examples in a small batch, b.
        big_batch: examples in the large batch, B > b.

    Returns:
        The two estimates, float32 scalars.

    Raises:
        ValueError: not 0 < b < B.

    Examples:
        >>> from jaxaccel.transforms import estimate_gradient_noise
        >>> noise = estimate_gradient_noise(3.0, 1.5, small_batch=8, big_batch=32)
        >>> print(noise.gradient_square, noise.noise_trace)
        1.0 16.0

    References:
        McCandlish, Kaplan, Amodei, OpenAI Dota Team, An Empirical Model of
        Large-Batch Training, 2018, arXiv:1812.06162
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(
            f"two batch sizes with 0 < small < big are needed, got {small_batch} "
            f"and {big_batch}"
        )
    small = jnp.asarray(small_square, jnp.float32)
    big = jnp.asarray(big_square, jnp.float32)
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    return GradientNoise(signal, (small - big) / (1 / small_batch - 1 / big_batch))


def gradient_noise_scale(
    batch_size: int,
    *,
    micro_batches: int | None = None,
    data_axis: str | tuple[str, ...] | None = None,
    decay: jax.typing.ArrayLike = 0.95,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Measures the gradient noise scale and passes the gradients unchanged.

    ::

        noise_scale = average of tr(S) / average of |G|^2

    with the two estimates of `estimate_gradient_noise`. It takes gradients of
    two batch sizes, and a chain is handed one gradient an update; so say where
    the other comes from, by exactly one of:

    - `micro_batches=k`: the chain sees the gradients of small batches one by one,
      and k updates in a row, at the same parameters, make the large batch. That
      is the place *around* `optax.MultiSteps`: `optax.chain(
      gradient_noise_scale(b, micro_batches=k),
      optax.MultiSteps(tx, k).gradient_transformation())`. Inside MultiSteps there
      is but the mean, and with one update a step there are no two sizes.
    - `data_axis`: inside `shard_map`, before the mean over devices is formed, each
      device holds the gradient of its own small batch, and the mean over
      the axis is that of the large one.

    Read it with `optax.tree.get(state, "noise_scale")`. A batch much smaller wastes
    steps on noise, one much larger wastes examples. A large batch of whose
    norms one is NaN or infinite is left out of the averages.

    Args:
        batch_size: examples behind each gradient that is handed in.
        micro_batches: updates that make one large batch, at least 2.
        data_axis: mesh axis, or a tuple of them, over which the examples are
            split. `shard_map` forms the mean of the gradients of replicated
            parameters on its own: make them varying before you differentiate,
            `jax.lax.pcast(params, axis, to="varying")`. That is checked,
            unless `check_vma=False`.
        decay: of the averages, >= 0 and < 1; they start unbiased.
        axis_name: inside `shard_map` only: mesh axes over which leaves are
            split, as in `clip_by_global_norm`; not those of the data.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a
        `GradientNoiseScaleState`; with `micro_batches` that holds the sum of the
        gradients, as large as the parameters and float32. For
        `optax.inject_hyperparams` all arguments but `decay` are static.

    Raises:
        ValueError: not exactly one of `micro_batches` and `data_axis`; a number
            out of its range; at update, the gradients are the mean already.
        TypeError: an argument of the wrong type; at update, a gradient is
            neither floating nor complex.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from jaxaccel.transforms import gradient_noise_scale
        >>> tx = gradient_noise_scale(8, micro_batches=2)
        >>> state = tx.init({"kernel": jnp.zeros(2)})
        >>> for noise in (1.0, -1.0):
        ...     _, state = tx.update({"kernel": jnp.array([2.0, noise])}, state)
        >>> print(round(float(optax.tree.get(state, "noise_scale")), 3))
        5.333

    References:
        McCandlish, Kaplan, Amodei, OpenAI Dota Team, An Empirical Model of
        Large-Batch Training, 2018, arXiv:1812.06162
    """
    check_int("batch_size", batch_size, at_least=1)
    check_decay("decay", decay)
    check_axis_name("gradient_noise_scale", axis_name)
    check_axis_name("gradient_noise_scale", data_axis)
    if (micro_batches is None) == (data_axis is None):
        raise ValueError(
            "gradient_noise_scale takes exactly one of `micro_batches` and "
            f"`data_axis`, got {micro_batches} and {data_axis}"
        )
    if micro_batches is not None:
        check_int("micro_batches", micro_batches, at_least=2)

    def init_fn(params):
        total = ()
        if micro_batches is not None:
            total = jax.tree.map(
                lambda p: jnp.zeros_like(p, dtype=statistics_dtype(p.dtype)), params
            )
        zero = jnp.zeros((), jnp.float32)
        count = jnp.zeros((), jnp.int32)
        return GradientNoiseScaleState(count, count, total, zero, zero, zero, zero)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        square = _square_norm(updates, axis_name)
        if micro_batches is not None:
            state, is_full, small, big = _accumulate(
                updates, square, state, micro_batches, axis_name
            )
            ratio = micro_batches
        else:
            small, big, ratio = _across_devices(updates, square, data_axis, axis_name)
            is_full = jnp.ones((), bool)
        noise = estimate_gradient_noise(small, big, batch_size, ratio * batch_size)
        return updates, _averaged(state, noise, is_full, decay)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _square_norm(tree: Any, axis_name: AxisName | None) -> jax.Array:
    norm = global_norm("gradient_noise_scale", tree, axis_name)
    return jnp.square(norm.astype(jnp.float32))


def _accumulate(
    updates: Any,
    square: jax.Array,
    state: GradientNoiseScaleState,
    micro_batches: int,
    axis_name: AxisName | None,
) -> tuple[GradientNoiseScaleState, jax.Array, jax.Array, jax.Array]:
    total = jax.tree.map(
        lambda g, t: t + jnp.asarray(g).astype(t.dtype), updates, state.total
    )
    small = state.small_squares + square
    big = _square_norm(total, axis_name) / micro_batches**2
    is_full = state.micro_count + 1 >= micro_batches
    state = state._replace(
        micro_count=jnp.where(is_full, 0, state.micro_count + 1),
        total=jax.tree.map(lambda t: jnp.where(is_full, 0, t), total),
        small_squares=jnp.where(is_full, 0, small),
    )
    return state, is_full, small / micro_batches, big


def _across_devices(
    updates: Any,
    square: jax.Array,
    data_axis: str | tuple[str, ...] | None,
    axis_name: AxisName | None,
) -> tuple[jax.Array, jax.Array, int]:
    names = data_axis if isinstance(data_axis, tuple) else (str(data_axis),)
    count = device_count(names)
    if count < 2:
        raise ValueError(
            f"`data_axis` {data_axis!r} must be an axis of two devices or more where "
            "the update runs; give it inside jax.shard_map only"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if not all(may_vary(leaf, name) for name in names):
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} is the same on all devices "
                f"along {names}: the mean is formed already. Put the transformation "
                "before it; of replicated parameters shard_map forms it on its own, so "
                'differentiate jax.lax.pcast(params, axis, to="varying")'
            )
    mean = jax.tree.map(lambda g: lax.pmean(_as_statistic(g), names), updates)
    return lax.pmean(square, names), _square_norm(mean, axis_name), count


def _as_statistic(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(statistics_dtype(x.dtype))


def _averaged(
    state: GradientNoiseScaleState,
    noise: GradientNoise,
    is_full: jax.Array,
    decay: jax.typing.ArrayLike,
) -> GradientNoiseScaleState:
    usable = jnp.isfinite(noise.gradient_square) & jnp.isfinite(noise.noise_trace)
    usable = is_full & usable
    count = jnp.where(usable, optax.safe_increment(state.count), state.count)
    rate = jnp.asarray(decay).astype(jnp.float32)
    # Of a count of 1 the weight is 1: the averages start from the first estimate.
    age = jnp.maximum(count, 1).astype(jnp.float32)
    weight = jnp.where(usable, (1 - rate) / (1 - rate**age), 0)
    signal, trace = (
        old + weight * jnp.where(usable, new - old, 0)
        for old, new in (
            (state.gradient_square, noise.gradient_square),
            (state.noise_trace, noise.noise_trace),
        )
    )
    ratio = jnp.maximum(trace, 0) / jnp.where(signal > 0, signal, 1)
    scale = jnp.where((signal > 0) | (trace <= 0), ratio, jnp.inf)
    return state._replace(
        count=count, gradient_square=signal, noise_trace=trace, noise_scale=scale
    )
