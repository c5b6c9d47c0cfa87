"""One optimizer update as one jitted function."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccel.train._accumulate import check_pieces, mean_gradient, mean_loss
from jaxaccel.train._call_loss import (
    call_loss,
    check_batch,
    count_examples,
    missing_entries_explained,
)
from jaxaccel.train._ema import check_decay, update_ema
from jaxaccel.train._fit import check_options, keep_types, update_explained
from jaxaccel.train._guard import all_finite, count_skip
from jaxaccel.train._many import scan_steps
from jaxaccel.train._precision import (
    Precision,
    as_precision,
    at_least_float32,
    cast_like,
)
from jaxaccel.train._remat import check_policy, rematerialized
from jaxaccel.train._shard import Layout
from jaxaccel.train._state import TrainState, check_transformation
from jaxaccel.train._task import LossFn

PyTree = Any
Preprocess = Callable[[Any, jax.Array], Any]
Probe = Callable[[PyTree, PyTree, PyTree, Any], PyTree]


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    preprocess: Preprocess | None = None,
    precision: str | Precision | None = None,
    accumulate: int = 1,
    finite_guard: bool = False,
    ema: float | None = None,
    rematerialize: str | Callable[..., Any] | None = None,
    steps_per_call: int = 1,
    donate: bool = True,
    sharding: Layout | None = None,
    probes: Mapping[str, Probe] | None = None,
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

    Every option works with every other. The order is: preprocess the whole batch,
    split it into micro-batches, differentiate the scaled loss, unscale, mean over
    devices and micro-batches, finite check, transformation, parameters, their
    average. Options that carry state (`tx`, `precision`, `finite_guard`, `ema`,
    `sharding`) are given to `TrainState.create` as well.

    Host arrays may be handed over directly, but must not be written to again: the
    call returns before they are read. `jaxaccel.data.to_device` copies them where
    needed.

    Args:
      loss_fn: `loss_fn(params, model_state, batch, key) -> (loss, (model_state,
        metrics))` with a scalar loss and a flat dict of scalar metrics.
      tx: Any Optax transformation.
      preprocess: `preprocess(batch, key) -> batch`, applied in the same program
        to the batch as it came from the loader; None leaves it as it is.
      precision: What the loss computes in: `"float32"`, `"bfloat16"`, `"float16"`
        with dynamic loss scaling, or a `Precision`. None casts nothing.
      accumulate: Number of micro-batches, one after another, that a batch is split
        into; row `i` is in micro-batch `i % accumulate`. Memory is that of one, the
        gradient that of the whole batch, weighted by the examples that count. Batch
        statistics are updated by one micro-batch after the other; each has keys of
        its own.
      finite_guard: Whether a step whose loss or gradient is not finite leaves
        parameters, optimizer, average and model state alone, and is counted in
        `state.skips`. Its step number still counts. Loss scaling implies it.
      ema: Decay of an average of the parameters, say 0.999, corrected for its
        start; `evaluate(..., ema=True)` uses it. None keeps none.
      rematerialize: What the backward pass may keep, the rest is computed again:
        a policy of `jax.checkpoint_policies` or the name of one, such as
        `"dots_saveable"`. It applies to the loss as a whole; wrap single blocks of a
        model with `nn.remat` or `nnx.remat`. None keeps everything.
      steps_per_call: Steps in one call. Above 1 the step takes batches stacked along
        a new leading axis, from `stack_batches`, and returns stacked metrics; a
        stack of one batch does a single step.
      donate: Whether the step may reuse the memory of the state it is given.
        Then a state is gone once it went into a step; keep the returned one.
      sharding: Layout over a mesh, from `data_parallel` or `fsdp`. None computes
        wherever state and batch are.
      probes: Functions `probe(params, grads, updates, batch)` by name, called inside
        the step: parameters before the update, the mean gradient, what is added
        to the parameters (zeros in a skipped step) and the preprocessed batch. They
        return pytrees of arrays, `metrics["probes"][name]`.

    Returns:
      `train_step(state, batch, dataset=None) -> (state, metrics)`, a jitted function
      (with `lower` and `trace`). With a `jaxaccel.data.DeviceDataset` as `dataset`
      the batch is what `dataset.rows` returned for the step. The metrics are those
      of the loss and `"loss"`, all float32 scalars on the device; a guard adds
      `"skipped"` (0 or 1), loss scaling `"loss_scale"`, and probes `"probes"`.

    Raises:
      TypeError: If an argument is of the wrong kind; when the step is first called:
        if the loss does not return what is said above, the state was created for
        other options, or it would change its dtypes from step to step.
      ValueError: If an option has no such value; when the step is first called: if
        the batch's arrays differ in length, `accumulate` does not divide it, or an
        entry is looked up that it lacks.

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
    check_functions(loss_fn, tx, preprocess)
    check_pieces(accumulate)
    check_decay(ema)
    check_policy(rematerialize)
    _check_steps(steps_per_call)
    probes = _check_probes(probes)
    policy = as_precision(precision)
    scaled = policy is not None and policy.scales
    guarded = finite_guard or scaled
    transform = optax.with_extra_args_support(tx)

    loss = prepared_loss(loss_fn, policy, sharding)
    loss = rematerialized(loss, rematerialize)
    whole_loss = mean_loss(loss, accumulate)
    gradient = mean_gradient(loss, accumulate, _zeros(sharding))

    def one_step(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        check_options(state, ema=ema, guarded=guarded, scaled=scaled)
        check_batch(batch)
        preprocess_key, loss_key = jax.random.split(
            jax.random.fold_in(state.key, state.step)
        )
        batch = prepared_batch(batch, preprocess_key, preprocess, sharding)
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        (value, (model_state, metrics)), grads = gradient(
            state.params, state.model_state, batch, loss_key, scale
        )
        wide = at_least_float32(state.params)

        # Optax's line searches hand `batch` and `key` on to value_fn.
        def value_fn(params: PyTree, batch: Any = batch, key: Any = loss_key):
            params = cast_like(params, state.params)
            return whole_loss(params, state.model_state, batch, key)[0]

        def update() -> tuple[TrainState, PyTree]:
            with update_explained(transform, wide, state.opt_state):
                updates, opt_state = transform.update(
                    grads,
                    state.opt_state,
                    wide,
                    value=value,
                    grad=grads,
                    value_fn=value_fn,
                    batch=batch,
                    key=loss_key,
                )
            params = cast_like(optax.apply_updates(wide, updates), state.params)
            new = state.replace(
                params=params, model_state=model_state, opt_state=opt_state
            )
            if ema is not None and state.ema is not None:
                new = new.replace(ema=update_ema(state.ema, params, ema))
            return _settled(state, new, sharding), probe(updates)

        def skip() -> tuple[TrainState, PyTree]:
            nothing = jax.tree.map(jnp.zeros_like, wide)
            return _settled(state, state, sharding), probe(nothing)

        def probe(updates: PyTree) -> PyTree:
            return {
                name: function(wide, grads, updates, batch)
                for name, function in probes.items()
            }

        metrics = {"loss": value, **metrics}
        seen = metrics.pop("probes", {})
        if state.skips is None:
            new, probed = update()
        else:
            finite = all_finite((value, grads))
            new, probed = jax.lax.cond(finite, update, skip)
            new = new.replace(skips=count_skip(state.skips, finite))
            metrics["skipped"] = (~finite).astype(jnp.float32)
            if policy is not None and state.loss_scale is not None:
                new = new.replace(loss_scale=policy.update(state.loss_scale, finite))
                metrics["loss_scale"] = state.loss_scale.scale
        if probes or seen:
            metrics["probes"] = {**seen, **probed}
        return new.replace(step=state.step + 1), metrics

    def train_step(state: TrainState, batch: Any, dataset: Any = None):
        def step(state: TrainState, batch: Any):
            if dataset is not None:
                batch = dataset.batch(batch)
            return one_step(state, batch)

        if steps_per_call == 1:
            return step(state, batch)
        return scan_steps(step, state, batch, steps_per_call)

    return jax.jit(train_step, donate_argnums=(0,) if donate else ())


def make_eval_step(
    loss_fn: LossFn,
    *,
    preprocess: Preprocess | None = None,
    precision: str | Precision | None = None,
    sharding: Layout | None = None,
) -> jax.stages.Wrapped:
    """Builds the jitted function that `evaluate` calls for every batch.

    Args:
      loss_fn: As for `make_train_step`, in evaluation mode: `task.eval_loss`.
      preprocess: `preprocess(batch, key) -> batch`, usually without the
        augmentation; its key is the same for every batch.
      precision: As for `make_train_step`.
      sharding: As for `make_train_step`.

    Returns:
      `eval_step(state, batch) -> sums`, jitted: `"loss"` and the metrics, each
      times the number of examples that count, and that number as `"weight"`.

    Raises:
      TypeError: If an argument is not callable.
      ValueError: If there is no such precision.

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
    check_functions(loss_fn, optax.identity(), preprocess)
    loss = prepared_loss(loss_fn, as_precision(precision), sharding)

    def eval_step(state: TrainState, batch: Any):
        check_batch(batch)
        batch = prepared_batch(batch, state.key, preprocess, sharding)
        value, (_, metrics) = loss(state.params, state.model_state, batch, state.key)
        metrics.pop("probes", None)
        weight = count_examples(batch)
        sums = {name: x * weight for name, x in {"loss": value, **metrics}.items()}
        return {**sums, "weight": weight}

    return jax.jit(eval_step)


def prepared_loss(
    loss_fn: LossFn, policy: Precision | None, sharding: Layout | None
) -> LossFn:
    """Returns the checked loss of parameters as the state holds them."""

    def loss(params: PyTree, model_state: PyTree, batch: Any, key: jax.Array):
        if policy is not None:
            params, batch = policy.cast_params(params), policy.cast_batch(batch)
        if sharding is not None:
            # After the cast: half of the bytes travel.
            params = sharding.gather(params)
        return call_loss(loss_fn, params, model_state, batch, key)

    return loss


def prepared_batch(
    batch: Any, key: jax.Array, preprocess: Preprocess | None, sharding: Layout | None
) -> Any:
    """Returns the batch as the loss sees it."""
    if preprocess is not None:
        with missing_entries_explained(batch, "preprocess"):
            batch = preprocess(batch, key)
        if not isinstance(batch, Mapping) or not batch:
            raise TypeError(
                "preprocess must return the batch, a dict of arrays, as in {**batch, "
                f"'image': ...}}; got {type(batch).__name__}"
            )
    return batch if sharding is None else sharding.constrain_batch(batch)


def check_functions(loss_fn: Any, tx: Any, preprocess: Any) -> None:
    """Raises unless the arguments can be called."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function; got {type(loss_fn).__name__}")
    check_transformation(tx)
    if preprocess is not None and not callable(preprocess):
        raise TypeError(
            f"preprocess must be a function (batch, key) -> batch; got "
            f"{type(preprocess).__name__}"
        )


def _settled(old: TrainState, new: TrainState, sharding: Layout | None) -> TrainState:
    """Gives the new state the types and the places of the old one."""
    new = keep_types(old, new)
    return new if sharding is None else sharding.constrain(new)


def _zeros(sharding: Layout | None) -> Callable[[PyTree], PyTree]:
    def zeros(params: PyTree) -> PyTree:
        tree = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
        return tree if sharding is None else sharding.constrain_params(tree)

    return zeros


def _check_steps(steps_per_call: Any) -> None:
    if not isinstance(steps_per_call, int) or steps_per_call < 1:
        raise ValueError(
            f"steps_per_call must be a number of steps, at least 1; got "
            f"{steps_per_call!r}"
        )


def _check_probes(probes: Any) -> dict[str, Probe]:
    if not isinstance(probes, Mapping | None):
        raise TypeError(
            f"probes must be a dict of functions by name; got {type(probes).__name__}"
        )
    probes = dict(probes or {})
    for name, function in probes.items():
        if not callable(function):
            raise TypeError(
                f"probe {name!r} must be a function (params, grads, updates, batch); "
                f"got {type(function).__name__}"
            )
    return probes
