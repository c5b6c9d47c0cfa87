"""Gradient centralization."""

import operator

import jax
import optax

from jaxaccel.transforms._dims import Resolver
from jaxaccel.transforms._kernels import Kernel, Kernels
from jaxaccel.transforms._reductions import statistics_dtype, sum_over
from jaxaccel.transforms._shards import AxisName, sum_over_devices


def centralize_gradients(
    *, dims: Resolver | None = None, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Subtracts from each unit's gradient its mean over the fan-in.

    ::

        g[..., o] - mean(g[..., o])

    for each output unit o of each kernel, which projects the gradient onto the
    vectors of sum 0: with SGD or momentum the sum of a unit's weights stays
    what it was. Unlike `optax.centralize`, which averages all axes but the
    first, PyTorch's layout, this is right for Flax kernels, whose output axis
    is the last.

    Put it before momentum or moments. Biases, norm parameters and embeddings
    pass bitwise unchanged, and so does a kernel with a fan-in of one entry,
    which it would stop from training. A NaN or Inf makes its unit NaN. Under
    `jit` sharded leaves are right; inside `shard_map` the mean is that of the
    local shard, unless `axis_name` says over which mesh axes the fan-in is split.

    Args:
        dims: `(path, leaf) -> KernelDims | None`, None for a leaf that is not
            a kernel; by default `flax_dims`. `torch_dims` is the layout of
            `optax.centralize`.
        axis_name: inside `shard_map` only: the mesh axis, or a tuple of them,
            over which the fan-in of each kernel is split. Of a leaf that is not
            split over them `shard_map` knows it, unless `check_vma=False`.
            There, and where units are split, give a function
            `(path, leaf) -> PartitionSpec`, the leaf's own. None otherwise.

    Returns:
        An `optax.GradientTransformationExtraArgs` without state. Means are
        float32, updates keep the gradients' types. For
        `optax.inject_hyperparams` both arguments are static. `init` raises
        ValueError if it would change no leaf at all, unless the tree is empty
        or a part of a masked or partitioned one.

    Raises:
        TypeError: `dims` is not a function; `axis_name` is of another type.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import centralize_gradients
        >>> grads = {"kernel": jnp.array([[1.0, 5.0], [3.0, 9.0]])}
        >>> tx = centralize_gradients()
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> np.asarray(updates["kernel"]).tolist()
        [[-1.0, -2.0], [1.0, 2.0]]

    References:
        Yong, Huang, Hua, Zhang, Gradient Centralization: A New Optimization
        Technique for Deep Neural Networks, 2020, arXiv:2004.01461
    """
    kernels = Kernels(
        "centralize_gradients",
        dims,
        axes_of=operator.attrgetter("reduction"),
        allow_complex=True,
        axis_name=axis_name,
    )

    def init_fn(params):
        kernels.check(params)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        return kernels.map_together(_centralize, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _centralize(kernels: list[Kernel]) -> list[jax.Array]:
    xs = [k.leaf.astype(statistics_dtype(k.leaf.dtype)) for k in kernels]
    sums = [sum_over(x, k.axes) for x, k in zip(xs, kernels, strict=True)]
    sums = sum_over_devices(sums, [k.mesh_axes for k in kernels], fuse=False)
    return [
        (x - total / k.count).astype(k.leaf.dtype)
        for x, total, k in zip(xs, sums, kernels, strict=True)
    ]
