"""Flax linen modules as tasks."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxaccel.train._task import Batch, Task, reduce_loss, select_inputs

# The keywords that Flax modules use for their mode, and whether True is training.
_MODE_KEYWORDS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
# Made anew by every call, so never carried from step to step.
_TRANSIENT = ("intermediates",)


def from_linen(
    module: Any,
    loss: Callable[[Any, Batch], Any],
    *,
    rngs: Sequence[str] = ("dropout",),
    mutable: Sequence[str] = ("batch_stats",),
    train_kwarg: str | None = "auto",
    inputs: str | Callable[[Batch], Any] = "image",
    capture: Callable[[Any], Any] | None = None,
) -> Task:
    """Makes a task of a Flax linen module.

    Args:
      module: The module, unbound.
      loss: `loss(outputs, batch)`, which returns one loss an example, or `(losses,
        metrics)` with a dict of one value an example each. The adapter takes the
        means over the examples that count. `classification_loss` is one.
      rngs: Names of the random streams; each step feeds them keys of its own.
      mutable: Collections that training updates. They, and all other collections
        besides `params`, make up `model_state`.
      train_kwarg: The module's keyword that switches training on. For
        `deterministic` and `use_running_average` the adapter passes the opposite.
        `"auto"` takes the one of these, `train`, `training` and `is_training` that
        `__call__` has, if any; None passes nothing.
      inputs: The entry of the batch that the module is called with, or a function
        of the batch that returns its positional arguments (a tuple of several).
      capture: Statistics of what training sows into `intermediates`: a function of
        that collection, a nested dict, that returns a pytree of arrays. A train
        step returns them as `metrics["probes"]["activations"]`, averaged over
        micro-batches. None drops the collection.

    Returns:
      The `Task`. `init(key, batch)` initializes the module with the shapes of the
      batch; `merge(params, model_state)` returns the variables for `apply`.

    Raises:
      TypeError: If `module` is no linen module or has no such keyword.
      ValueError: If `"auto"` finds several such keywords.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxaccel import train
      >>> task = train.from_linen(nn.Dense(3), train.classification_loss)
      >>> batch = {"image": jnp.zeros((2, 4)), "label": jnp.array([0, 1])}
      >>> params, model_state = task.init(jax.random.key(0), batch)
      >>> loss, _ = task.train_loss(params, model_state, batch, jax.random.key(1))
      >>> print(loss.round(4))  # log(3)
      1.0986
    """
    from flax import core, linen

    if not isinstance(module, linen.Module):
        raise TypeError(
            f"from_linen needs a flax.linen.Module; got {type(module).__name__}. "
            "from_nnx takes nnx modules"
        )
    keyword = _mode_keyword(module, train_kwarg)

    def mode(train: bool) -> dict[str, Any]:
        if keyword is None:
            return {}
        return {keyword: train == _MODE_KEYWORDS.get(keyword, True)}

    def streams(key: jax.Array) -> dict[str, jax.Array]:
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(rngs)}

    def init(key: jax.Array, batch: Batch):
        params_key, other_key = jax.random.split(key)
        variables = module.init(
            {"params": params_key, **streams(other_key)},
            *select_inputs(inputs, batch),
            **mode(train=False),
        )
        variables = dict(core.unfreeze(variables))
        params = variables.pop("params", {})
        state = {k: v for k, v in variables.items() if k not in _TRANSIENT}
        return params, state

    def train_loss(params, model_state, batch, key):
        outputs, updated = module.apply(
            {"params": params, **model_state},
            *select_inputs(inputs, batch),
            **mode(train=True),
            rngs=streams(key),
            mutable=[*mutable, *(_TRANSIENT if capture else ())],
        )
        updated = dict(core.unfreeze(updated))
        sown = updated.pop("intermediates", {}) if capture else {}
        result, metrics = reduce_loss(loss(outputs, batch), batch)
        if capture is not None:
            metrics = {**metrics, "probes": {"activations": capture(sown)}}
        return result, ({**model_state, **updated}, metrics)

    def eval_loss(params, model_state, batch, key):
        outputs = module.apply(
            {"params": params, **model_state},
            *select_inputs(inputs, batch),
            **mode(train=False),
            rngs=streams(key),
        )
        result, metrics = reduce_loss(loss(outputs, batch), batch)
        return result, (model_state, metrics)

    def merge(params, model_state):
        return {"params": params, **model_state}

    return Task(init, train_loss, eval_loss, merge)


def _mode_keyword(module: Any, train_kwarg: str | None) -> str | None:
    if train_kwarg is None:
        return None
    parameters = inspect.signature(type(module).__call__).parameters
    if train_kwarg != "auto":
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if train_kwarg not in parameters and not takes_any:
            raise TypeError(
                f"{type(module).__name__}.__call__ has no argument {train_kwarg!r}; "
                f"it has {[*parameters][1:]}. Name its mode with train_kwarg=, None "
                "for none"
            )
        return train_kwarg
    found = [name for name in _MODE_KEYWORDS if name in parameters]
    if len(found) > 1:
        raise ValueError(
            f"{type(module).__name__}.__call__ has several mode arguments, {found}; "
            "say which one with train_kwarg="
        )
    return found[0] if found else None
