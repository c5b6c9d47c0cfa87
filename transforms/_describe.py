"""A table of the rule that each leaf got."""

from typing import Any

import jax
import numpy as np

from jaxaccel.transforms._dims import KeyPath, Resolver, path_names
from jaxaccel.transforms._flax_dims import flax_dims


def describe_dims(params: Any, dims: Resolver | None = None) -> str:
    """Tabulates which axes a resolver finds in each leaf, and by which rule.

    A leaf that the resolver refuses is in the table with the word `error`:
    a transformation given the same resolver raises there.

    Args:
        params: the tree of parameters, arrays or `jax.ShapeDtypeStruct`.
        dims: `(path, leaf) -> KernelDims | None`; by default `flax_dims`.

    Returns:
        One line a leaf below a line of titles, to be printed. `-` is a leaf
        that is not a kernel, which transformations pass unchanged.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxaccel.transforms import describe_dims
        >>> params = {"Dense_0": {"bias": jnp.zeros(4), "kernel": jnp.zeros((3, 4))}}
        >>> print(describe_dims(params))
        leaf            shape   fan-in  output  batch  rule
        Dense_0/bias    (4,)    -       -       -      -
        Dense_0/kernel  (3, 4)  (0,)    (1,)    ()     dense (in, out)
    """
    titles = ("leaf", "shape", "fan-in", "output", "batch", "rule")
    found = jax.tree_util.tree_leaves_with_path(params)
    rows = [titles, *(_row(dims or flax_dims, path, leaf) for path, leaf in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _row(resolver: Resolver, path: KeyPath, leaf: Any) -> tuple[str, ...]:
    shape = np.shape(leaf)
    head = ("/".join(path_names(path)), str(shape))
    try:
        dims = resolver(path, leaf)
        if dims is None:
            return (*head, "-", "-", "-", "-")
        dims = dims.at_rank(len(shape))
    except ValueError as error:
        reason = str(error).split(": ")[0]
        return (*head, "error", "", "", reason)
    axes = (str(part) for part in (dims.reduction, dims.output, dims.batch))
    return (*head, *axes, dims.rule or "given")
