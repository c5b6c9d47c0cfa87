"""One checkpoint as a folder that orbax writes and reads.

It holds two items: `state`, the arrays under the names of their leaves, and `host`,
a JSON dict with the description of the tree, the metrics and the states of whatever
was saved beside it.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.train._trees import (
    PyTree,
    describe_tree,
    differences,
    is_key,
    named_leaves,
)

_FORMAT = 1


def make_checkpointer() -> Any:
    """Returns an orbax checkpointer, which writes in the background."""
    import orbax.checkpoint as ocp

    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def write(checkpointer: Any, path: str, state: PyTree, host: Mapping[str, Any]) -> None:
    """Begins to write a checkpoint; returns once the arrays may be donated.

    Args:
      checkpointer: From `make_checkpointer`.
      path: An absolute path that is not there yet. It appears when all is written.
      state: The tree.
      host: What goes into the JSON, beside the description of the tree.
    """
    import orbax.checkpoint as ocp

    tree = describe_tree(state)
    # Orbax refuses arrays without elements, of which the description says it all.
    arrays = {
        name: _stored(leaf) for name, leaf in named_leaves(state).items() if _size(leaf)
    }
    if not arrays:
        raise ValueError("the state has no arrays: there is nothing to save")
    host = {"format": _FORMAT, "tree": tree, **host}
    checkpointer.save(
        path,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host)
        ),
    )


def read_host(checkpointer: Any, path: str) -> dict[str, Any]:
    """Reads the JSON of a checkpoint.

    Args:
      checkpointer: From `make_checkpointer`.
      path: The checkpoint.

    Returns:
      What `write` was given as `host`, with `"tree"`.

    Raises:
      ValueError: If it is damaged, or no checkpoint of this library.
    """
    import orbax.checkpoint as ocp

    try:
        host = checkpointer.restore(
            path, args=ocp.args.Composite(host=ocp.args.JsonRestore())
        )["host"]
    except Exception as error:
        raise _unreadable(path, error) from error
    if not isinstance(host, dict) or host.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is no checkpoint of this version of jaxaccel; read it with "
            "orbax.checkpoint"
        )
    return host


def read_state(
    checkpointer: Any, path: str, tree: Mapping[str, str], like: PyTree
) -> PyTree:
    """Reads the arrays of a checkpoint.

    Args:
      checkpointer: From `make_checkpointer`.
      path: The checkpoint.
      tree: Its `read_host(...)["tree"]`.
      like: A tree of the same structure, shapes and dtypes. Its arrays may be
        abstract, or deleted; they say where the new ones go.

    Returns:
      A tree like `like`.

    Raises:
      ValueError: If it does not fit, naming the leaves, or is damaged.
    """
    import orbax.checkpoint as ocp

    wrong = differences(tree, describe_tree(like), "saved")
    if wrong:
        raise ValueError(
            f"the checkpoint {path} does not fit this state:\n{wrong}\nBuild the state "
            "with the model, transformation and options of the run that saved it"
        )
    leaves = named_leaves(like)
    wanted = {name: _target(leaf) for name, leaf in leaves.items() if _size(leaf)}
    try:
        found = checkpointer.restore(
            path, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        )["state"]
    except Exception as error:
        raise _unreadable(path, error) from error
    restored = [
        _placed(
            found[name] if name in found else np.zeros(leaf.shape, leaf.dtype), leaf
        )
        for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _unreadable(path: str, error: Exception) -> ValueError:
    return ValueError(
        f"the checkpoint {path} cannot be read ({type(error).__name__}: "
        f"{str(error).splitlines()[0] if str(error) else ''}); if it is damaged, "
        f"restore another step ({os.path.dirname(path)} lists them)"
    )


def _size(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf)))


def _stored(leaf: Any) -> Any:
    if is_key(leaf):
        return jax.random.key_data(leaf)
    # The caller may write to NumPy arrays while they are being saved.
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)


def _target(leaf: Any) -> Any:
    if is_key(leaf):
        shape = jax.eval_shape(jax.random.key_data, _abstract(leaf))
        return np.empty(shape.shape, shape.dtype)
    sharding = _sharding(leaf)
    if sharding is None:
        return np.empty(
            np.shape(leaf), np.asarray(leaf).dtype if _plain(leaf) else leaf.dtype
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(found: Any, leaf: Any) -> Any:
    if _plain(leaf):
        return type(leaf)(found)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return found if isinstance(leaf, np.ndarray) else found[()]
    if is_key(leaf):
        found = jax.random.wrap_key_data(jnp.array(found), impl=_key_impl(leaf))
    sharding = _sharding(leaf)
    if sharding is not None:
        return jax.device_put(found, sharding)
    # The copy belongs to jax alone, and may be donated.
    return found if isinstance(found, jax.Array) else jnp.array(found, copy=True)


def _key_impl(leaf: Any) -> Any:
    found = []
    # Under a trace, since only real keys and traced ones tell.
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), _abstract(leaf))
    return found[0]


def _plain(leaf: Any) -> bool:
    return isinstance(leaf, (int, float, complex)) and not hasattr(leaf, "dtype")


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _sharding(leaf: Any) -> Any:
    """Where an array must go; None leaves it uncommitted, like a fresh one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
