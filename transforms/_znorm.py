"""Z-score normalization of gradients."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxaccel.transforms._dims import KernelDims, Resolver
from jaxaccel.transforms._kernels import Kernels
from jaxaccel.transforms._reductions import safe_sqrt, statistics_dtype, sum_over
from jaxaccel.transforms._validate import check_int, check_nonnegative


def znorm(
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    scope: str = "tensor",
    ddof: int = 0,
    min_ndim: int = 2,
    min_size: int = 8,
    dims: Resolver | None = None,
    rel_floor: jax.typing.ArrayLike = 4e-6,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Normalizes the gradient of every kernel to mean 0 and standard deviation 1.

    ::

        z = (g - mean(g)) / (std(g) + eps)

    with the statistics of each kernel over all its entries (`scope="tensor"`),
    or over the fan-in of each output unit (`"unit"`); never across batch axes.

    The update has root mean square 1 whatever the gradient's size. So the
    learning rate must be far lower than without (SGD: by a factor of 100 to
    300), and must decay to zero: the steps do not shrink near a minimum by
    themselves. Put it before momentum or moments and before weight decay, on
    gradients already unscaled and averaged over devices and micro-batches
    (inside `optax.MultiSteps`, not outside). Inside `shard_map` the statistics
    are those of the local shard: average first, and use it on replicated
    gradients only; under `jit` sharded leaves are right.

    Everything but kernels passes bitwise unchanged: biases, norm parameters,
    embeddings, leaves below `min_ndim` or `min_size`. A kernel whose layout is
    ambiguous is an error in both scopes, since a stack of kernels must not
    share one statistic. A constant gradient gives exactly 0; a NaN or Inf, or
    a variance beyond float32 (entries above 1e19), makes every entry that
    shares the statistic NaN: check for finite gradients before.

    Args:
        eps: added to the standard deviation; 0 is allowed.
        scope: `"tensor"` or `"unit"`.
        ddof: the variance divides by `n - ddof`: 0 is the population's, 1 the
            sample's, PyTorch's default.
        min_ndim: leaves of lower rank pass unchanged.
        min_size: leaves with fewer entries a statistic pass unchanged. Of n
            entries normalization leaves n - 2 degrees of freedom: a single one
            would never train, two would only keep their order; at 8 a quarter
            is lost.
        dims: `(path, leaf) -> KernelDims | None`, None for a leaf that is not
            a kernel; by default `flax_dims`.
        rel_floor: a standard deviation of at most this fraction of the mean's
            size is rounding and counts as 0. The default is three times the
            largest error of a float32 mean that was seen (1.3e-6).
        mask: as in `optax.masked`: a tree of booleans, or a function of the
            parameters that returns one; leaves with False pass unchanged.

    Returns:
        An `optax.GradientTransformationExtraArgs` without state. Statistics
        are float32, updates keep the gradients' types. For
        `optax.inject_hyperparams` all arguments but `eps` and `rel_floor` are
        static. `init` raises ValueError if it would change no leaf at all,
        unless the tree is empty or a part of a masked or partitioned one.

    Raises:
        ValueError: unknown scope; a negative or non-finite number; `min_size`
            not above `ddof`.
        TypeError: an argument of the wrong type.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import znorm
        >>> grads = {"kernel": jnp.arange(8.0).reshape(2, 4), "bias": jnp.ones(4)}
        >>> tx = znorm()
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> print(np.asarray(updates["kernel"]).round(3))
        [[-1.528 -1.091 -0.655 -0.218]
         [ 0.218  0.655  1.091  1.528]]
        >>> print(updates["bias"])
        [1. 1. 1. 1.]

    References:
        Yun, Kim, Cho, Kang, ZNorm: Z-Score Gradient Normalization for
        Accelerating Neural Network Training, 2024, arXiv:2408.01215
    """
    check_nonnegative("eps", eps)
    check_nonnegative("rel_floor", rel_floor)
    check_int("ddof", ddof, at_least=0)
    check_int("min_ndim", min_ndim, at_least=0)
    check_int("min_size", min_size, at_least=max(2, ddof + 1))
    if scope not in _AXES_OF:
        raise ValueError(f"`scope` must be one of {sorted(_AXES_OF)}, got {scope!r}")
    kernels = Kernels("znorm", dims, _AXES_OF[scope], min_size, min_ndim)

    def init_fn(params):
        kernels.check(params)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args

        def normalize(grad, axes):
            return _normalize(grad, axes, eps, ddof, rel_floor)

        return kernels.map(normalize, updates), state

    transform = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return transform if mask is None else optax.masked(transform, mask)


def _all_of_one_kernel(dims: KernelDims) -> tuple[int, ...]:
    return dims.reduction + dims.output


_AXES_OF = {"tensor": _all_of_one_kernel, "unit": operator.attrgetter("reduction")}


def _normalize(
    grad: jax.Array,
    axes: tuple[int, ...],
    eps: jax.typing.ArrayLike,
    ddof: int,
    rel_floor: jax.typing.ArrayLike,
) -> jax.Array:
    x = grad.astype(statistics_dtype(grad.dtype))
    count = math.prod(x.shape[axis] for axis in axes)
    # Two passes: the sum of squares alone cancels where the mean is large. The
    # barriers, on the small statistics only, keep XLA from sharing `x - mean`
    # between the passes, which would write it to memory. Bytes accessed by a
    # float32 tree, in multiples of its size: 4.0 on jax 0.12.0.1 (6.0 without
    # barriers, 7.0 inside a step with a barrier on the gradient itself) and
    # 6.1 on 0.10.1, whose CPU reductions never fuse with what they reduce.
    mean = lax.optimization_barrier(sum_over(x, axes) / count)
    variance = sum_over(lax.square(x - mean), axes) / (count - ddof)
    scale = _reciprocal_deviation(mean, variance, eps, rel_floor)
    mean, scale = lax.optimization_barrier((mean, scale))
    return ((x - mean) * scale).astype(grad.dtype)


def _reciprocal_deviation(
    mean: jax.Array,
    variance: jax.Array,
    eps: jax.typing.ArrayLike,
    rel_floor: jax.typing.ArrayLike,
) -> jax.Array:
    std = safe_sqrt(variance)
    # False where the deviation is NaN, so that a NaN is passed on.
    is_constant = std <= jnp.asarray(rel_floor, std.dtype) * jnp.abs(mean)
    divisor = jnp.where(is_constant, 1, std + jnp.asarray(eps, std.dtype))
    scale = jnp.where(is_constant, 0, 1 / divisor)
    # An overflowed variance must not pass for an update of zero.
    return jnp.where(jnp.isinf(std), jnp.nan, scale)
