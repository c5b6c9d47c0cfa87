"""Names and kinds of a tree's leaves, and what differs between two trees."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

# A wrong optimizer changes hundreds of leaves; the first ones say as much.
_MOST_NAMED = 8


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves by their path, such as `.params['w']`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def is_key(leaf: Any) -> bool:
    """Whether a leaf holds typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def describe(leaf: Any) -> str:
    """Returns dtype and shape, `float32[2,3]`.

    Args:
      leaf: An array, an abstract array or a number; deleted arrays will do.

    Returns:
      The text; for keys the name of their implementation stands for the dtype.

    Raises:
      TypeError: If it is none of these.
    """
    if not isinstance(
        leaf,
        (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float, complex),
    ):
        raise TypeError(f"{type(leaf).__name__} is no array")
    array: Any = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    shape = ",".join(map(str, array.shape))
    return f"{array.dtype}[{shape}]"


def describe_tree(tree: PyTree) -> dict[str, str]:
    """Describes every leaf of a tree, by its path.

    Args:
      tree: Any pytree of arrays, abstract arrays and numbers.

    Returns:
      The descriptions.

    Raises:
      TypeError: If a leaf is something else, with its path.
    """
    described = {}
    for name, leaf in named_leaves(tree).items():
        try:
            described[name] = describe(leaf)
        except TypeError as error:
            raise TypeError(
                f"state{name} is {error}; keep it outside of the state"
            ) from None
    return described


def differences(before: Mapping[str, str], now: Mapping[str, str], was: str) -> str:
    """Says how two described trees differ.

    Args:
      before: The one that was there first.
      now: The other one.
      was: What to call the first, as in "saved".

    Returns:
      Lines of text; empty if there is no difference.
    """
    groups = (
        (f"only {was}", [f"{n}: {before[n]}" for n in before if n not in now]),
        ("only now", [f"{n}: {now[n]}" for n in now if n not in before]),
        (
            "changed",
            [
                f"{n}: {was} {before[n]}, now {now[n]}"
                for n in before
                if n in now and before[n] != now[n]
            ],
        ),
    )
    lines = []
    for title, entries in groups:
        lines += [f"  {title}: {entry}" for entry in entries[:_MOST_NAMED]]
        if len(entries) > _MOST_NAMED:
            lines.append(f"  {title}: {len(entries) - _MOST_NAMED} more")
    return "\n".join(lines)
