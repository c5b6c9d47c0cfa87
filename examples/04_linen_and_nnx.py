"""Trains a linen and an nnx model with the same step, from the same weights.

An adapter turns a model of either kind into a `Task` of pure functions, and the step
knows nothing else of a model. From equal weights both give the same losses, step by
step; four functions written by hand would do as well.

    python examples/04_linen_and_nnx.py
"""

import jax
import optax
from flax import linen, nnx

from jaxaccel import data, train

digits = data.load_dataset("digits")
plan = data.BatchPlan(len(digits.train), 64, seed=0, epochs=2)
normalize = data.make_normalizer(digits.mean, digits.std)


class LinenNet(linen.Module):
    """A perceptron, in linen: parameters live outside of the module."""

    @linen.compact
    def __call__(self, image):
        """Returns the logits."""
        x = image.reshape(len(image), -1)
        x = linen.relu(linen.Dense(128, name="hidden")(x))
        return linen.Dense(10, name="out")(x)


class NnxNet(nnx.Module):
    """The same perceptron, in nnx: parameters live inside."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, image):
        """Returns the logits."""
        x = image.reshape(len(image), -1)
        return self.out(nnx.relu(self.hidden(x)))


def preprocess(batch, key):
    return {**batch, "image": normalize(batch["image"])}


def losses_of(task: train.Task, params, model_state) -> list[float]:
    tx = optax.adam(1e-3)
    key = jax.random.key(0)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    step = train.make_train_step(task.train_loss, tx, preprocess=preprocess)
    losses = []
    with data.to_device(data.Loader(digits.train, plan)) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    sample = preprocess(digits.train.take([0]), None)
    linen_task = train.from_linen(LinenNet(), train.classification_loss)
    linen_params, linen_state = linen_task.init(jax.random.key(0), sample)

    model = NnxNet(nnx.Rngs(1))
    nnx.update(model, linen_params)
    nnx_task = train.from_nnx(model, train.classification_loss)

    linen_losses = losses_of(linen_task, linen_params, linen_state)
    nnx_losses = losses_of(nnx_task, *nnx_task.init())
    for number in (1, 10, len(plan)):
        a, b = linen_losses[number - 1], nnx_losses[number - 1]
        print(f"step {number:2}: linen {a:.4f}, nnx {b:.4f}")
    largest = max(abs(a - b) for a, b in zip(linen_losses, nnx_losses, strict=True))
    print(f"largest difference: {largest:.1e}")
