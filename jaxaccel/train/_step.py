"""One optimizer update as one jitted function."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccel.train._state import (
    TrainState,
    at_least_float32,
    check_transformation,
)
from jaxaccel.train._task import LossFn

PyTree = Any
Preprocess = Callable[[Any, jax.Array], Any]


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    preprocess: Preprocess | None = None,
    donate: bool = True,
) -> jax.stages.Wrapped:
    r"""Builds the jitted function that does one step of training.

    Everything happens in one compiled program: preprocessing (normalize,
    augment), the loss and its gradient, the transformation and the update

    .. math:: \theta_{t+1} = \theta_t + u_t, \quad
        u_t = \mathrm{tx}(\nabla_\theta L(\theta_t; b_t, k_t))

    with the keys of step :math:`t` folded out of `state.key`. The host never
    waits. The transformation always receives the extra arguments `value`,
    `grad`, `value_fn`, `batch` and `key`, so that `optax.lbfgs`,
    `optax.polyak_sgd` and `optax.contrib.reduce_on_plateau` work as they are.
    (One that takes extra arguments must ignore those it does not know, as Optax
    asks; `optax.contrib.sam` does not.)
    It sees gradients, parameters and `value` in at least float32, whatever the
    dtype of the parameters, which are rounded back after the update.

    Host arrays may be handed over directly, but must not be written to again: the
    call returns before they are read. `jaxaccel.data.to_device` copies them where
    needed.

    Args:
      loss_fn: `loss_fn(params, model_state, batch, key) -> (loss, (model_state,
        metrics))` with a scalar loss and a flat dict of scalar metrics.
      tx: Any Optax transformation.
      preprocess: `preprocess(batch, key) -> batch`, applied in the same program
        to the batch as it came from the loader; None leaves it as it is.
      donate: Whether the step may reuse the memory of the state it is given.
        Then a state is gone once it went into a step; keep the returned one.

    Returns:
      `train_step(state, batch) -> (state, metrics)`, a jitted function (with
      `lower` and `trace`); the metrics are those of the loss and `"loss"`, all
      float32 scalars on the device.

    Raises:
      TypeError: If an argument is not callable or `tx` is no transformation;
        when the step is first called: if the loss does not return what is said
        above, or the state would change its dtypes from step to step.
      ValueError: When the step is first called: if the batch's arrays differ in
        length.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxaccel import train
      >>> def loss_fn(params, model_state, batch, key):
      ...     error = params["w"] * batch["x"] - batch["y"]
      ...     return jnp.mean(error**2), (model_state, {})
      >>> tx = optax.sgd(0.1)
      >>> step = train.make_train_step(loss_fn, tx)
      >>> state = train.TrainState.create(
      ...     {"w": jnp.array(0.0)}, tx, key=jax.random.key(0))
      >>> batch = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([2.0, 4.0])}
      >>> for _ in range(3):
      ...     state, metrics = step(state, batch)
      >>> print(state.params["w"], metrics["loss"].round(3))
      1.75 0.625
    """
    _check_arguments(loss_fn, tx, preprocess)
    transform = optax.with_extra_args_support(tx)

    def train_step(state: TrainState, batch: Any):
        _check_call(state, batch)
        preprocess_key, loss_key = jax.random.split(
            jax.random.fold_in(state.key, state.step)
        )
        if preprocess is not None:
            batch = preprocess(batch, preprocess_key)

        def checked_loss(params, batch, key):
            return call_loss(loss_fn, params, state.model_state, batch, key)

        # Optax's line searches hand `batch` and `key` on to value_fn.
        def value_fn(params, batch=batch, key=loss_key):
            return checked_loss(_cast_like(params, state.params), batch, key)[0]

        (loss, (model_state, metrics)), grads = jax.value_and_grad(
            checked_loss, has_aux=True
        )(state.params, batch, loss_key)
        grads, params = at_least_float32(grads), at_least_float32(state.params)
        with _explained(transform, params, state.opt_state):
            updates, opt_state = transform.update(
                grads,
                state.opt_state,
                params,
                value=loss,
                grad=grads,
                value_fn=value_fn,
                batch=batch,
                key=loss_key,
            )
        new_state = state.replace(
            step=state.step + 1,
            params=_cast_like(optax.apply_updates(params, updates), state.params),
            model_state=model_state,
            opt_state=opt_state,
        )
        return _keep_types(state, new_state), {"loss": loss, **metrics}

    return jax.jit(train_step, donate_argnums=(0,) if donate else ())


def make_eval_step(
    loss_fn: LossFn, *, preprocess: Preprocess | None = None
) -> jax.stages.Wrapped:
    """Builds the jitted function that `evaluate` calls for every batch.

    Args:
      loss_fn: As for `make_train_step`, in evaluation mode: `task.eval_loss`.
      preprocess: `preprocess(batch, key) -> batch`, usually without the
        augmentation; its key is the same for every batch.

    Returns:
      `eval_step(state, batch) -> sums`, jitted: `"loss"` and the metrics, each
      times the number of examples that count, and that number as `"weight"`.

    Raises:
      TypeError: If an argument is not callable.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxaccel import train
      >>> def loss_fn(params, model_state, batch, key):
      ...     loss = train.masked_mean((params - batch["x"]) ** 2, batch)
      ...     return loss, (model_state, {})
      >>> state = train.TrainState.create(
      ...     jnp.array(1.0), optax.sgd(0.1), key=jax.random.key(0))
      >>> sums = train.make_eval_step(loss_fn)(state, {"x": jnp.array([1.0, 4.0])})
      >>> print(sums["loss"], sums["weight"])
      9.0 2.0
    """
    _check_arguments(loss_fn, optax.identity(), preprocess)

    def eval_step(state: TrainState, batch: Any):
        _check_call(state, batch)
        if preprocess is not None:
            batch = preprocess(batch, state.key)
        loss, (_, metrics) = call_loss(
            loss_fn, state.params, state.model_state, batch, state.key
        )
        weight = _examples(batch)
        sums = {name: x * weight for name, x in {"loss": loss, **metrics}.items()}
        return {**sums, "weight": weight}

    return jax.jit(eval_step)


def _examples(batch: Mapping[str, jax.Array]) -> jax.Array:
    mask = batch.get("mask")
    if mask is not None:
        return mask.astype(jnp.float32).sum()
    return jnp.asarray(jax.tree.leaves(batch)[0].shape[0], jnp.float32)


def _cast_like(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, ref: x.astype(ref.dtype), tree, like)


def _keep_types(old: TrainState, new: TrainState) -> TrainState:
    """Makes the new state fit the compiled step, or says what does not fit."""
    if not jax.tree.leaves((old.model_state, new.model_state)):
        # Two kinds of nothing, {} and an empty nnx.State.
        new = new.replace(model_state=old.model_state)
    for field in ("params", "model_state", "opt_state"):
        _check_same(f"state.{field}", getattr(old, field), getattr(new, field))
    # Naming the dtype makes weak types strong: they would compile it again.
    return jax.tree.map(lambda x: jnp.asarray(x, dtype=x.dtype), new)


def _check_same(name: str, old: PyTree, new: PyTree) -> None:
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


def _check_arguments(loss_fn: Any, tx: Any, preprocess: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function; got {type(loss_fn).__name__}")
    check_transformation(tx)
    if preprocess is not None and not callable(preprocess):
        raise TypeError(
            f"preprocess must be a function (batch, key) -> batch; got "
            f"{type(preprocess).__name__}"
        )


def _check_call(state: Any, batch: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the first argument must be a TrainState; got {type(state).__name__}. "
            "Build it with TrainState.create(params, tx, key=...)"
        )
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(
            f"a batch is a dict of arrays, {{'image': ..., 'label': ...}}; got "
            f"{type(batch).__name__}"
        )
    for name, x in batch.items():
        if not hasattr(x, "shape"):
            raise TypeError(
                f"batch[{name!r}] is a {type(x).__name__}, not an array; write "
                "np.asarray(x), and a flat dict for several arrays"
            )
    shapes = {name: jnp.shape(x) for name, x in batch.items()}
    lengths = {shape[:1] for shape in shapes.values()}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            f"every array of a batch needs the same leading batch axis; got {shapes}"
        )


@contextlib.contextmanager
def _explained(tx: Any, params: PyTree, opt_state: PyTree) -> Iterator[None]:
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


def call_loss(
    loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: Any, key: jax.Array
) -> tuple[jax.Array, tuple[PyTree, dict]]:
    """Calls a loss, checks what it returns and that it looks at a mask."""
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    if mask is not None:
        jaxpr = jax.make_jaxpr(
            lambda mask: loss_fn(params, model_state, {**batch, "mask": mask}, key)[0]
        )(mask).jaxpr
        used = any(jaxpr.invars[0] is v for eqn in jaxpr.eqns for v in eqn.invars)
        if not used:
            raise ValueError(
                "the batch has a mask, but the loss does not look at it: padding "
                "would count as examples. Average with jaxaccel.train.masked_mean("
                "losses, batch)"
            )
    return _check_result(loss_fn(params, model_state, batch, key))


def _check_result(result: Any) -> tuple[jax.Array, tuple[PyTree, dict]]:
    try:
        loss, (model_state, metrics) = result
        metrics = dict(metrics)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "loss_fn must return (loss, (model_state, metrics)), with {} for no "
            f"state and no metrics; got {type(result).__name__}"
        ) from error
    for name, value in {"loss": loss, **metrics}.items():
        if isinstance(value, (Mapping, str)) or jnp.iscomplexobj(value):
            raise TypeError(
                f"{name!r} must be a real scalar; got {type(value).__name__}. Metrics "
                "are a flat dict"
            )
        if jnp.shape(value) != ():
            raise TypeError(
                f"{name!r} must be a scalar, the mean over the batch; got shape "
                f"{jnp.shape(value)}. jaxaccel.train.masked_mean averages it"
            )
    if "loss" in metrics or "weight" in metrics:
        raise TypeError("'loss' and 'weight' are names of the step's own metrics")
    scalars = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
    return jnp.asarray(loss, jnp.float32), (model_state, scalars)
