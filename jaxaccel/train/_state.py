"""The state of a training run, as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


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
    """

    step: jax.Array
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: jax.Array

    @classmethod
    def create(
        cls,
        params: PyTree,
        tx: optax.GradientTransformation,
        *,
        key: jax.Array,
        model_state: PyTree = None,
    ) -> "TrainState":
        """Copies the arrays and initializes the transformation.

        The copy is what makes donation safe: the step may reuse the memory of
        its state, and the caller's own arrays stay alive.

        Args:
          params: Pytree of floating or complex arrays.
          tx: Any Optax transformation. It is initialized with the parameters in
            at least float32, as `make_train_step` will call it.
          key: A typed key, `jax.random.key(seed)`.
          model_state: Pytree of arrays; None means `{}`.

        Returns:
          The state of step 0.

        Raises:
          TypeError: If `key` is no typed PRNG key, `tx` is no transformation, a
            parameter cannot be differentiated, or `model_state` holds no arrays.
          ValueError: If `params` has no arrays.

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
        params = jax.tree.map(_copy, params)
        # The second copy separates what the transformation keeps (L-BFGS keeps
        # the parameters) from the parameters: no buffer may be donated twice.
        opt_state = jax.tree.map(_copy, tx.init(at_least_float32(params)))
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=jax.tree.map(_copy, {} if model_state is None else model_state),
            opt_state=opt_state,
            key=_copy(key),
        )

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a state with some fields exchanged."""
        return dataclasses.replace(self, **changes)


def at_least_float32(tree: PyTree) -> PyTree:
    """Widens floating leaves narrower than float32; leaves all others alone."""

    def widen(x: jax.Array) -> jax.Array:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if narrow else x

    return jax.tree.map(widen, tree)


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
