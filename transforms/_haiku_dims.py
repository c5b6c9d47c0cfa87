"""A resolver for the parameters of Haiku models."""

from typing import Any

import numpy as np

from jaxaccel.transforms._dims import KernelDims, KeyPath, path_names
from jaxaccel.transforms._flax_dims import ambiguous_kernel, last_axis_is_output


def haiku_dims(path: KeyPath, leaf: Any) -> KernelDims | None:
    """Resolves the parameters of Haiku models, `{"mlp/~/linear_0": {"w": ...}}`.

    Only leaves named `w` are kernels. The module's name and the rank decide:

    - rank 2: Linear, recurrent cells, attention, `(in, out)`.
    - rank 3 to 5 of a module with `conv` in its name: `(..., in, out)`,
      depthwise and grouped ones included; with `transpose` in it as well,
      `(..., out, in)`.
    - below a `layer_stack` the first axis is the stacked one.

    Any other `w` of rank >= 3 is an error. Embeddings, biases `b`, and the
    `scale` and `offset` of norms are not kernels.

    Args:
        path: key path of the leaf, as `jax.tree_util` gives it.
        leaf: the array, or anything with its shape.

    Returns:
        The axes, or None for a leaf that is not a kernel.

    Raises:
        ValueError: path and rank do not decide the layout of a kernel.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jaxaccel.transforms import haiku_dims
        >>> params = {"net/~/conv2_d": {"w": jnp.zeros((3, 3, 1, 8))}}
        >>> jax.tree_util.tree_map_with_path(haiku_dims, params)["net/~/conv2_d"]
        {'w': KernelDims(reduction=(0, 1, 2), output=(3,), batch=())}
    """
    names, shape = path_names(path), np.shape(leaf)
    modules = "/".join(names[:-1]).lower().split("/")
    stacked = any("layer_stack" in name for name in modules)
    rank = len(shape) - stacked
    if not names or names[-1] != "w" or rank < 2:
        return None
    dims = _by_module(modules[-1], rank)
    if dims is None:
        raise ValueError(ambiguous_kernel(path, shape))
    if stacked:
        dims = dims.stacked(0).with_rule(f"layer stack of {dims.rule}")
    return dims


def _by_module(name: str, rank: int) -> KernelDims | None:
    if rank == 2:
        return last_axis_is_output(2, "linear (in, out)")
    if "conv" not in name or rank > 5:
        return None
    if "transpose" in name:
        reduction = (*range(rank - 2), rank - 1)
        rule = "transposed convolution (..., out, in)"
        return KernelDims(reduction, (rank - 2,), rule=rule)
    return last_axis_is_output(rank, "convolution (..., in, out)")
