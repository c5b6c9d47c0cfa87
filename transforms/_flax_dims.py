"""The default resolver: kernels of Flax models by their name and rank."""

from typing import Any

import jax
import numpy as np

from jaxaccel.transforms._dims import ASSUMED, KernelDims, KeyPath, path_names

_MAX_WINDOW = 32
"""Widest window of an unnamed convolution; ViT's largest patches are this wide."""


def flax_dims(path: KeyPath, leaf: Any) -> KernelDims | None:
    """Resolves the parameters of Linen and NNX models by path and rank.

    Leaves named `kernel` are kernels. What the name above it and the rank
    decide:

    - rank 2: Dense, Linear, recurrent cells, `(in, out)`.
    - rank 3 to 5 below a name with `conv` in it, and rank 4 and 5 whose
      leading axes are at most 32 wide: convolutions `(..., in, out)`, grouped
      and depthwise ones included. Fan-in is all but the last axis.
    - rank 3 below `query`, `key` or `value`: `(in, heads, features)`, fan-in
      is axis 0; below `out`: `(heads, features, out)`, fan-in is (0, 1).

    Embeddings, tokens, biases (of rank 2 in attention), norm parameters and
    low-rank adapters are not kernels. A leaf of rank >= 2 whose name says
    nothing takes its last axis as output; a transformation given such leaves
    warns of them at initialization. Path and rank cannot tell a stack of Dense
    kernels from a 1-D convolution: any other kernel of rank >= 3 is an error,
    and so is one of rank >= 3 inside a Linen `Scan...` or `Vmap...` module.
    A kernel stacked below a name with `conv` in it, and a ConvTranspose built
    with `transpose_kernel=True`, `(..., out, in)`, cannot be recognized at
    all: give `module_dims(model)`, which reads the layers, or `override_dims`.

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
    name = names[-1].lower() if names else ""
    if len(shape) < 2 or _is_no_kernel(name):
        return None
    if name == "kernel":
        owner = next((name for name in reversed(names[:-1]) if not name.isdigit()), "")
        dims = _by_owner(owner.lower(), shape)
    else:
        dims = last_axis_is_output(len(shape), ASSUMED)
    stacked = any(name.startswith(("Scan", "Vmap")) for name in names)
    if dims is None or (stacked and len(shape) > 2):
        raise ValueError(ambiguous_kernel(path, shape))
    return dims


_NO_KERNELS = frozenset(
    "b bias beta scale gamma offset mean var variance average codebook "
    "lora_a lora_b cls u v sigma hidden count temperature".split()
)


def _is_no_kernel(name: str) -> bool:
    parts = ("embed", "token", "position")
    return name in _NO_KERNELS or any(part in name for part in parts)


def _by_owner(owner: str, shape: tuple[int, ...]) -> KernelDims | None:
    rank = len(shape)
    if "einsum" in owner or "convlocal" in owner:
        return None
    if rank == 2:
        return last_axis_is_output(2, "dense (in, out)")
    if owner in ("query", "key", "value"):
        rule = "attention (in, heads, features)"
        return KernelDims((0,), (1, 2), rule=rule) if rank == 3 else None
    if owner == "out":
        rule = "attention (heads, features, out)"
        return KernelDims((0, 1), (2,), rule=rule) if rank == 3 else None
    convolution = last_axis_is_output(rank, "convolution (..., in, out)")
    if "conv" in owner:
        return convolution if rank <= 5 else None
    if owner.startswith(("dense", "linear")):
        return None
    is_window = rank in (4, 5) and max(shape[:-2]) <= _MAX_WINDOW
    return convolution if is_window else None


def last_axis_is_output(rank: int, rule: str) -> KernelDims:
    """Returns the roles in an array of which all axes but the last are fan-in."""
    return KernelDims(tuple(range(rank - 1)), (rank - 1,), rule=rule)


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
        "place to leave it untouched, or read them off a Flax model with "
        "dims=module_dims(model)"
    )
