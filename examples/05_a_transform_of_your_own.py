"""Writes a gradient transformation, and uses it in the jitted step.

`add_gradient_noise` has the form that every transformation here has: a factory that
checks its arguments and returns two pure functions. It takes its randomness from the
`key` that the step hands to every transformation, so it keeps no generator of its
own, and a run that is repeated or resumed draws the same noise again.

    python examples/05_a_transform_of_your_own.py
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxaccel import data, train

digits = data.load_dataset("digits")
plan = data.BatchPlan(len(digits.train), 64, seed=0, epochs=5)
normalize = data.make_normalizer(digits.mean, digits.std)


class GradientNoiseState(NamedTuple):
    """State of `add_gradient_noise`."""

    count: jax.Array  # int32 scalar: updates so far


def add_gradient_noise(
    eta: float, gamma: float = 0.55
) -> optax.GradientTransformationExtraArgs:
    """Adds normal noise of variance `eta / (1 + t)**gamma` (arXiv:1511.06807)."""
    if eta < 0:
        raise ValueError(f"eta is a variance and must be at least 0, got {eta}")

    def init_fn(params):
        del params
        return GradientNoiseState(count=jnp.zeros((), jnp.int32))

    def update_fn(updates, state, params=None, *, key=None, **extra_args):
        del params, extra_args
        if key is None:
            raise ValueError("add_gradient_noise needs update(..., key=key)")
        std = jnp.sqrt(eta / (1.0 + state.count.astype(jnp.float32)) ** gamma)
        leaves, treedef = jax.tree.flatten(updates)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            g + std.astype(g.dtype) * jax.random.normal(k, g.shape, g.dtype)
            for g, k in zip(leaves, keys, strict=True)
        ]
        state = GradientNoiseState(count=state.count + 1)
        return jax.tree.unflatten(treedef, noisy), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def preprocess(batch, key):
    return {**batch, "image": normalize(batch["image"])}


task = train.from_nnx(
    nnx.Linear(64, 10, rngs=nnx.Rngs(0)),
    train.classification_loss,
    inputs=lambda batch: batch["image"].reshape(-1, 64),
)
tx = optax.chain(add_gradient_noise(eta=0.1), optax.sgd(0.1))
step = train.make_train_step(task.train_loss, tx, preprocess=preprocess)


def losses_of_run(seed: int) -> tuple[float, float]:
    params, model_state = task.init()
    key = jax.random.key(seed)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    losses = []
    with data.to_device(data.Loader(digits.train, plan)) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
    return float(losses[0]), float(losses[-1])


if __name__ == "__main__":
    for name, seed in (("seed 0", 0), ("again", 0), ("seed 1", 1)):
        first, last = losses_of_run(seed)
        print(f"{name:7} first loss {first:.6f}, last loss {last:.6f}")
