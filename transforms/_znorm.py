"""Z-score normalization of gradients."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxaccel.transforms._dims import KernelDims, Resolver
from jaxaccel.transforms._kernels import Kernels
from jaxaccel.transforms._shards import AxisName
from jaxaccel.transforms._standardize import standardize
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
    fuse_statistics: bool = False,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Normalizes the gradient of every kernel to mean 0 and standard deviation 1.

    ::

        z = (g - mean(g)) / (std(g) + eps)

    with the statistics of each kernel over all its entries (`scope="tensor"`),
    or over the fan-in of each output unit (`"unit"`); never across batch axes.
    With `"pooled"` each kernel's own mean is removed, and one standard
    deviation is that of all kernels' centred entries together, so that
    kernels keep their sizes relative to one another.

    The update has root mean square 1 whatever the gradient's size. So the
    learning rate must be far lower than without (SGD: by a factor of 100 to
    300), and must decay to zero: the steps do not shrink near a minimum by
    themselves. Put it before momentum or moments and before weight decay, on
    gradients already unscaled and averaged over devices and micro-batches
    (inside `optax.MultiSteps`, not outside). Under `jit` sharded leaves are
    right. Inside `shard_map` the statistics are those of the local shard
    unless `axis_name` says over which mesh axes the leaves are split; average
    over the data axis first, which does not belong there.

    Everything but kernels passes bitwise unchanged: biases, norm parameters,
    embeddings, leaves below `min_ndim` or `min_size`. A kernel whose layout is
    ambiguous is an error in both scopes, since a stack of kernels must not
    share one statistic. A constant gradient gives exactly 0, and so does one
    whose deviation is below 1e-19, where float32 squares vanish. A NaN or Inf,
    or a sum of squares beyond float32 (a deviation above 1.8e19 /
    sqrt(entries)), makes every entry that shares the statistic NaN (pooled: of
    all kernels): check for finite gradients before.

    Args:
        eps: added to the standard deviation; 0 is allowed.
        scope: `"tensor"`, `"unit"` or `"pooled"`.
        ddof: the variance divides by `n - ddof`: 0 is the population's, 1 the
            sample's, PyTorch's default. Pooled, n counts all kernels' entries.
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
        fuse_statistics: whether the sums of all kernels travel between devices
            together: for a whole tree two collectives for each group of devices
            that leaves are split over, in place of two a leaf. In exchange no
            leaf is finished before the sums of all are known. Not for the
            scope `"unit"`, whose statistics stay where the units are, as those
            of stacked kernels do.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which the axes of each kernel's statistics are split. Of a leaf
            that is not split over them `shard_map` knows it, unless
            `check_vma=False`. There, and where units (scope `"unit"`) or
            stacks are split, give a function `(path, leaf) -> PartitionSpec`,
            the leaf's own. None otherwise.

    Returns:
        An `optax.GradientTransformationExtraArgs` without state. Statistics
        are float32, updates keep the gradients' types. For
        `optax.inject_hyperparams` all arguments but `eps` and `rel_floor` are
        static. `init` raises ValueError if it would change no leaf at all,
        unless the tree is empty or a part of a masked or partitioned one.

    Raises:
        ValueError: unknown scope; a negative or non-finite number; `min_size`
            not above `ddof`; `fuse_statistics` with the scope `"unit"`.
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
    if fuse_statistics and scope == "unit":
        raise ValueError(
            "`fuse_statistics` is for the scopes 'tensor' and 'pooled': the "
            "statistics of units stay on the devices that hold the units"
        )
    kernels = Kernels(
        "znorm", dims, _AXES_OF[scope], min_size, min_ndim, axis_name=axis_name
    )

    def init_fn(params):
        kernels.check(params)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args

        def normalize(kernels):
            return standardize(
                kernels,
                eps=eps,
                ddof=ddof,
                rel_floor=rel_floor,
                pooled=scope == "pooled",
                fuse=fuse_statistics,
            )

        return kernels.map_together(normalize, updates), state

    transform = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return transform if mask is None else optax.masked(transform, mask)


def _all_of_one_kernel(dims: KernelDims) -> tuple[int, ...]:
    return dims.reduction + dims.output


_AXES_OF = {
    "pooled": _all_of_one_kernel,
    "tensor": _all_of_one_kernel,
    "unit": operator.attrgetter("reduction"),
}
