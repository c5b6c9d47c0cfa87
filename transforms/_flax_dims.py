"""The default resolver: kernels of Flax models by their name and rank."""

from typing import Any

import jax
import numpy as np

from jaxaccel.transforms._dims import KernelDims, KeyPath, path_names

_MAX_WINDOW = 32
"""Widest window of an unnamed convolution; ViT's largest patches are this wide."""


def flax_dims(path: KeyPath, leaf: Any) -> KernelDims | None:
    """Resolves the parameters of Linen and NNX models by path and rank.

    Only leaves named `kernel` are kernels. What the name above it and the
    rank decide:

    - rank 2: Dense, Linear, recurrent cells, `(in, out)`.
    - rank 3 to 5 below a name with `conv` in it, and rank 4 and 5 whose
      leading axes are at most 32 wide: convolutions `(..., in, out)`, grouped
      and depthwise ones included. Fan-in is all but the last axis.
    - rank 3 below `query`, `key` or `value`: `(in, heads, features)`, fan-in
      is axis 0; below `out`: `(heads, features, out)`, fan-in is (0, 1).

    Embeddings, biases (of rank 2 in attention), norm parameters and low-rank
    adapters are not kernels. Path and rank cannot tell a stack of Dense
    kernels from a 1-D convolution: any other kernel of rank >= 3 is an error,
    and so is one of rank >= 3 inside a Linen `Scan...` or `Vmap...` module.
    A kernel stacked below a name with `conv` in it, and a ConvTranspose built
    with `transpose_kernel=True`, `(..., out, in)`, cannot be recognized at
    all: give `module_dims(model)` for an NNX model, or `override_dims`.

    Args:
        path: key path of the leaf, as `jax.tree_util` gives it.
        leaf: the array, or anything with its shape.

    Returns:
        The axes, or None for a leaf that is not a kernel.

    Raises:
        ValueError: path and rank do not decide the layout of a kernel.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jaxaccel.transforms import flax_dims
        >>> params = {"Conv_0": {"kernel": jnp.zeros((3, 3, 1, 8))}}
        >>> jax.tree_util.tree_map_with_path(flax_dims, params)
        {'Conv_0': {'kernel': KernelDims(reduction=(0, 1, 2), output=(3,), batch=())}}
    """
    names, shape = path_names(path), np.shape(leaf)
    if not names or names[-1] != "kernel" or len(shape) < 2:
        return None
    owner = next((name for name in reversed(names[:-1]) if not name.isdigit()), "")
    dims = _by_owner(owner.lower(), shape)
    stacked = any(name.startswith(("Scan", "Vmap")) for name in names)
    if dims is None or (stacked and len(shape) > 2):
        raise ValueError(ambiguous_kernel(path, shape))
    return dims


def _by_owner(owner: str, shape: tuple[int, ...]) -> KernelDims | None:
    rank = len(shape)
    if "einsum" in owner or "convlocal" in owner:
        return None
    if rank == 2:
        return KernelDims((0,), (1,))
    if owner in ("query", "key", "value"):
        return KernelDims((0,), (1, 2)) if rank == 3 else None
    if owner == "out":
        return KernelDims((0, 1), (2,)) if rank == 3 else None
    if "conv" in owner:
        return _all_but_last(rank) if rank <= 5 else None
    if owner.startswith(("dense", "linear")):
        return None
    is_window = rank in (4, 5) and max(shape[:-2]) <= _MAX_WINDOW
    return _all_but_last(rank) if is_window else None


def _all_but_last(rank: int) -> KernelDims:
    return KernelDims(tuple(range(rank - 1)), (rank - 1,))


def ambiguous_kernel(path: KeyPath, shape: tuple[int, ...]) -> str:
    """Words the error about a kernel whose layout is not known."""
    candidates = {
        2: (
            "(in, out) is KernelDims((0,), (1,))",
            "(out, in) is KernelDims((1,), (0,))",
        ),
        3: (
            "a convolution (width, in, out) is KernelDims((0, 1), (2,))",
            "stacked Dense (layers, in, out) is KernelDims((1,), (2,), batch=(0,))",
            "DenseGeneral (in, heads, features) is KernelDims((0,), (1, 2))",
        ),
        4: (
            "a convolution (height, width, in, out) is KernelDims((0, 1, 2), (3,))",
            "stacked attention (layers, in, heads, features) is "
            "KernelDims((1,), (2, 3), batch=(0,))",
            "its output (layers, heads, features, out) is "
            "KernelDims((1, 2), (3,), batch=(0,))",
        ),
        5: (
            "a convolution (..., in, out) is KernelDims((0, 1, 2, 3), (4,))",
            "a stacked one (layers, height, width, in, out) is "
            "KernelDims((1, 2, 3), (4,), batch=(0,))",
        ),
    }
    found = candidates.get(len(shape), ("name each axis once in KernelDims",))
    name = "/".join(path_names(path))
    return (
        f"the kernel {jax.tree_util.keystr(path)} of shape {shape} has no layout that "
        f"its path and rank decide: {'; '.join(found)}. Give the axes with "
        f"dims=override_dims({{{name!r}: KernelDims(...)}}), None in their "
        "place to leave it untouched, or, of an NNX model, dims=module_dims(model)"
    )
