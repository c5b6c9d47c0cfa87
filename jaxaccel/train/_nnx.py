"""Flax NNX modules as tasks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.train._task import Batch, Task, reduce_loss, select_inputs

PyTree = Any


def from_nnx(
    model: Any,
    loss: Callable[[Any, Batch], Any],
    *,
    wrt: Any = None,
    inputs: str | Callable[[Batch], Any] = "image",
    capture: Callable[[Any], Any] | None = None,
) -> Task:
    """Makes a task of an initialized Flax NNX module.

    The module itself is never changed: training and evaluation work on copies,
    switched once by `model.train()` and `model.eval()`. Random streams (dropout)
    are keyed anew from each step's key, every layer with one of its own, so they
    are no part of the state.

    Args:
      model: The module.
      loss: `loss(outputs, batch)`, which returns one loss an example, or `(losses,
        metrics)` with a dict of one value an example each. The adapter takes the
        means over the examples that count. `classification_loss` is one.
      wrt: What is trained, an `nnx` filter; None means `nnx.Param`. All other
        variables (batch statistics, frozen parameters) make up `model_state`.
      inputs: The entry of the batch that the module is called with, or a function
        of the batch that returns its positional arguments (a tuple of several).
      capture: Statistics of the `nnx.Intermediate` variables that training sows: a
        function of a nested dict of them that returns a pytree of arrays. A train
        step returns them as `metrics["probes"]["activations"]`, averaged over
        micro-batches. None drops the variables.

    Returns:
      The `Task`. `init()` returns copies of the module's own variables, any
      arguments are ignored; `merge(params, model_state)` returns a module in
      evaluation mode.

    Raises:
      TypeError: If `model` is no nnx module.
      ValueError: If `wrt` selects no variable.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxaccel import train
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
      >>> task = train.from_nnx(model, train.classification_loss)
      >>> params, model_state = task.init()
      >>> batch = {"image": jnp.zeros((2, 4)), "label": jnp.array([0, 1])}
      >>> loss, _ = task.train_loss(params, model_state, batch, jax.random.key(1))
      >>> print(loss.round(4))  # log(3)
      1.0986
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"from_nnx needs an initialized nnx.Module; got {type(model).__name__}. "
            "from_linen takes linen modules"
        )
    wrt = nnx.Param if wrt is None else wrt

    def split(module: Any) -> tuple:
        return nnx.split(module, wrt, nnx.RngKey, nnx.RngCount, ...)

    def in_mode(train: bool) -> Any:
        module = nnx.clone(model)
        module.train() if train else module.eval()
        nnx.pop(module, nnx.Intermediate)
        return split(module)

    train_graph, own_params, keys, counts, own_state = in_mode(train=True)
    eval_graph = in_mode(train=False)[0]
    if not jax.tree.leaves(own_params):
        raise ValueError(f"wrt={wrt} selects no variable of {type(model).__name__}")

    def check(name: str, given: PyTree, needed: PyTree) -> None:
        found, wanted = (len(jax.tree.leaves(tree)) for tree in (given, needed))
        if found != wanted:
            raise TypeError(
                f"{name} has {found} arrays, but the {type(model).__name__} needs "
                f"{wanted}; give both trees of task.init() to TrainState.create("
                "params, tx, key=key, model_state=model_state)"
            )

    def apply(graph: Any, params: PyTree, model_state: PyTree, batch: Batch, key):
        check("params", params, own_params)
        check("model_state", model_state, own_state)
        # The copy gives the variables this trace's level: inside grad, batch
        # statistics could not be assigned otherwise.
        module = nnx.merge(
            graph, params, _rekey(keys, key), _zeros(counts), model_state, copy=True
        )
        arguments, sown = select_inputs(inputs, batch), nnx.State({})
        if capture is None:
            outputs = module(*arguments)
        else:
            outputs, sown = nnx.capture(module, nnx.Intermediate)(*arguments)
        nnx.pop(module, nnx.Intermediate)
        return outputs, split(module)[-1], sown

    def init(key: Any = None, batch: Any = None):
        del key, batch
        return jax.tree.map(lambda x: jnp.array(x, copy=True), (own_params, own_state))

    def train_loss(params, model_state, batch, key):
        outputs, new_state, sown = apply(train_graph, params, model_state, batch, key)
        result, metrics = reduce_loss(loss(outputs, batch), batch)
        if capture is not None:
            statistics = capture(nnx.to_pure_dict(sown))
            metrics = {**metrics, "probes": {"activations": statistics}}
        return result, (new_state, metrics)

    def eval_loss(params, model_state, batch, key):
        outputs, _, _ = apply(eval_graph, params, model_state, batch, key)
        result, metrics = reduce_loss(loss(outputs, batch), batch)
        return result, (model_state, metrics)

    def merge(params, model_state):
        return nnx.merge(eval_graph, params, keys, counts, model_state, copy=True)

    return Task(init, train_loss, eval_loss, merge)


def _rekey(keys: PyTree, key: jax.Array) -> PyTree:
    """Gives every stream a key of its own: equal keys would drop equal units."""
    leaves, treedef = jax.tree.flatten(keys)
    fresh = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    return jax.tree.unflatten(
        treedef,
        [
            jax.random.split(k, leaf.shape) if leaf.shape else k
            for k, leaf in zip(fresh, leaves, strict=True)
        ],
    )


def _zeros(counts: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, counts)
