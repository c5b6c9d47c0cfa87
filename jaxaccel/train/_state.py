"""The state of a training run, as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccel.train._ema import Ema, averaged, check_decay, init_ema
from jaxaccel.train._guard import Skips, init_skips
from jaxaccel.train._precision import (
    LossScale,
    Precision,
    as_precision,
    at_least_float32,
)
from jaxaccel.train._shard import Layout

PyTree = Any
# An array in a run; a sharding or a shape in a tree that was mapped to those.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and the key that its randomness comes from.

    Build it with `create`. Each step derives its keys from `key` and `step`, so
    that a restored state repeats the same dropout and augmentation.

    Attributes:
      step: Number of finished steps, int32 scalar.
      params: The trainable arrays, in their own dtypes.
      model_state: What the model carries from step to step without gradient
        (batch statistics, observers); `{}` if nothing.
      opt_state: The state of the gradient transformation, which sees float32.
      key: The typed PRNG key of the run; steps never change it.
      ema: The average of the parameters, an `Ema`; None without the option `ema`.
      loss_scale: The `LossScale` of float16; None without one.
      skips: Number of steps left out, a `Skips`; None without `finite_guard`.
    """

    step: Leaf
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: Leaf
    ema: Ema | None = None
    loss_scale: LossScale | None = None
    skips: Skips | None = None

    @classmethod
    def create(
        cls,
        params: PyTree,
        tx: optax.GradientTransformation,
        *,
        key: jax.Array,
        model_state: PyTree = None,
        precision: str | Precision | None = None,
        finite_guard: bool = False,
        ema: float | None = None,
        sharding: Layout | None = None,
    ) -> "TrainState":
        """Copies the arrays and initializes the transformation.

        The copy is what makes donation safe: the step may reuse the memory of
        its state, and the caller's own arrays stay alive.

        `tx`, `precision`, `finite_guard`, `ema` and `sharding` are also options of
        `make_train_step`. Give both the same: a step refuses a state that lacks
        what it needs, or holds what it would never update.

        Args:
          params: Pytree of floating or complex arrays.
          tx: Any Optax transformation. It is initialized with the parameters in
            at least float32, as `make_train_step` will call it.
          key: A typed key, `jax.random.key(seed)`.
          model_state: Pytree of arrays; None means `{}`.
          precision: As for `make_train_step`; one that scales the loss adds
            `loss_scale` and `skips` to the state.
          finite_guard: True adds `skips`.
          ema: A decay adds `ema`; None keeps no average.
          sharding: Where the arrays go, from `data_parallel` or `fsdp`; None leaves
            them on the default device.

        Returns:
          The state of step 0.

        Raises:
          TypeError: If `key` is no typed PRNG key, `tx` is no transformation, a
            parameter cannot be differentiated, or `model_state` holds no arrays.
          ValueError: If `params` has no arrays, or an option has no such value.

        Examples:
          >>> import jax, jax.numpy as jnp, optax
          >>> from jaxaccel import train
          >>> params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
          >>> state = train.TrainState.create(
          ...     params, optax.sgd(0.1, momentum=0.9), key=jax.random.key(0))
          >>> print(state.step, state.opt_state[0].trace["w"].dtype)
          0 float32
        """
        _check_key(key)
        check_transformation(tx)
        _check_params(params)
        _check_model_state(model_state)
        check_decay(ema)
        policy = as_precision(precision)
        scaled = policy is not None and policy.scales
        params = jax.tree.map(_copy, params)
        # The second copy separates what the transformation keeps (L-BFGS keeps
        # the parameters) from the parameters: no buffer may be donated twice.
        opt_state = jax.tree.map(_copy, tx.init(at_least_float32(params)))
        state = cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=jax.tree.map(_copy, {} if model_state is None else model_state),
            opt_state=opt_state,
            key=_copy(key),
            ema=None if ema is None else init_ema(params),
            loss_scale=policy.init() if policy is not None else None,
            skips=init_skips() if finite_guard or scaled else None,
        )
        return state if sharding is None else sharding.place(state)

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a state with some fields exchanged."""
        return dataclasses.replace(self, **changes)

    def with_average(self) -> "TrainState":
        """Returns the state with the averaged parameters in place of its own.

        Before the first step the average is that of no parameters, and the state's
        own are returned. The model state stays the same: batch statistics are the
        running ones of training, which average over its last batches themselves.

        Returns:
          A state to evaluate or to export, not to train on with.

        Raises:
          TypeError: If the state keeps no average.

        Examples:
          >>> import jax, jax.numpy as jnp, optax
          >>> from jaxaccel import train
          >>> tx = optax.sgd(1.0)
          >>> state = train.TrainState.create(
          ...     jnp.array(1.0), tx, key=jax.random.key(0), ema=0.5)
          >>> step = train.make_train_step(
          ...     lambda p, s, b, k: (p, (s, {})), tx, ema=0.5)
          >>> for _ in range(2):  # the parameter is 0, then -1
          ...     state, _ = step(state, {"x": jnp.zeros(1)})
          >>> print(state.with_average().params.round(4))  # weights 1/3 and 2/3
          -0.6667
        """
        if self.ema is None:
            raise TypeError(
                "the state keeps no average of the parameters; give ema=0.999 to "
                "TrainState.create and make_train_step"
            )
        return self.replace(params=averaged(self.ema, self.params))


def _copy(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.array(jax.random.key_data(x), copy=True), impl=jax.random.key_impl(x)
        )
    # Naming the dtype makes the type strong: a weak one would become strong in
    # the first step and the second step would compile again.
    return jnp.array(x, dtype=x.dtype, copy=True)


def check_transformation(tx: Any) -> None:
    """Raises unless `tx` has the two functions of an Optax transformation."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            "tx must be an Optax transformation such as optax.sgd(0.1); got "
            f"{type(tx).__name__}"
        )


def _check_model_state(model_state: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
            raise TypeError(
                f"model_state{jax.tree_util.keystr(path)} is "
                f"{type(leaf).__name__}, not an array; keep it outside of the state"
            )


def _check_key(key: Any) -> None:
    if not (
        isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    ):
        raise TypeError(
            "key must be a typed PRNG key, jax.random.key(seed); got "
            f"{getattr(key, 'dtype', None) or type(key).__name__}. Wrap old-style "
            "keys with jax.random.wrap_key_data"
        )
    if key.shape:
        raise TypeError(f"key must be a single key; got keys of shape {key.shape}")


def _check_params(params: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("params has no arrays: there is nothing to train")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            raise TypeError(
                f"parameter {jax.tree_util.keystr(path)} is "
                f"{type(leaf).__name__}, not an array; write jnp.array(x)"
            )
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"parameter {jax.tree_util.keystr(path)} is {dtype}, which has no "
                "gradient; keep such values in model_state"
            )
