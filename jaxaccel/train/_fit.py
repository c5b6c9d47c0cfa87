"""Whether a state fits the step that it went into and came out of."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.train._state import TrainState

PyTree = Any


def check_options(
    state: Any, *, ema: float | None, guarded: bool, scaled: bool
) -> None:
    """Raises unless the state was created for a step with the same options."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the first argument must be a TrainState; got {type(state).__name__}. "
            "Build it with TrainState.create(params, tx, key=...)"
        )
    for name, needed, held, example in (
        ("ema", ema is not None, state.ema is not None, f"ema={ema or 0.999}"),
        ("skips", guarded, state.skips is not None, "finite_guard=True"),
        ("loss_scale", scaled, state.loss_scale is not None, "precision='float16'"),
    ):
        if needed != held:
            has, wants = (
                ("nothing", "needs it") if needed else ("something", "has no use for")
            )
            raise TypeError(
                f"the state holds {has} in state.{name}, but the step {wants}: give "
                "TrainState.create and make_train_step the same tx, precision, "
                f"finite_guard and ema (here {example}{'' if needed else ' or not'})"
            )


def keep_types(old: TrainState, new: TrainState) -> TrainState:
    """Makes the new state fit the compiled step, or says what does not fit."""
    new = new.replace(model_state=fit_model_state(old.model_state, new.model_state))
    for field in ("params", "opt_state"):
        check_same(f"state.{field}", getattr(old, field), getattr(new, field))
    return strong(new)


def fit_model_state(old: PyTree, new: PyTree) -> PyTree:
    """The same for what a loss returned as its model state."""
    if not jax.tree.leaves((old, new)):
        # Two kinds of nothing, {} and an empty nnx.State.
        return old
    check_same("state.model_state", old, new)
    return strong(new)


def strong(tree: PyTree) -> PyTree:
    """Makes weak types strong: they would compile the step again."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype=x.dtype), tree)


def check_same(name: str, old: PyTree, new: PyTree) -> None:
    """Raises if structure, shapes or dtypes differ, and says where."""
    old_leaves, old_tree = jax.tree_util.tree_flatten_with_path(old)
    new_leaves, new_tree = jax.tree_util.tree_flatten_with_path(new)
    if old_tree != new_tree:
        before, after = (
            [name + jax.tree_util.keystr(path) for path, _ in leaves]
            for leaves in (old_leaves, new_leaves)
        )
        raise TypeError(
            f"the step changed the structure of {name}, which would compile it again "
            f"at every call. It held {before or 'nothing'}, and now "
            f"{after or 'nothing'}. The loss must return a model_state like the one "
            "it got; give the first one to TrainState.create(model_state=...)"
        )
    for (path, before), (_, after) in zip(old_leaves, new_leaves, strict=True):
        if (before.shape, before.dtype) != (jnp.shape(after), jnp.result_type(after)):
            raise TypeError(
                f"the step changed {name}{jax.tree_util.keystr(path)} from "
                f"{before.dtype}{list(before.shape)} to {jnp.result_type(after)}"
                f"{list(jnp.shape(after))}, which would compile it again; cast it "
                "back in the loss or in the transformation"
            )


@contextlib.contextmanager
def update_explained(tx: Any, params: PyTree, opt_state: PyTree) -> Iterator[None]:
    """Explains a failed update where the state is another transformation's."""
    try:
        yield
    except Exception as error:
        wanted = jax.tree.structure(jax.eval_shape(tx.init, params))
        if jax.tree.structure(opt_state) == wanted:
            raise
        raise TypeError(
            "state.opt_state is not of this step's transformation: use one `tx` for "
            "TrainState.create and make_train_step"
        ) from error
