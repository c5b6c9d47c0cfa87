"""Puts everything between two batches into one compiled function.

Augmentation, normalization, loss, gradient, clipping and update are one program: it
compiles once, it reuses the memory of its own state, and the host reads the metrics
of many steps at once instead of waiting for the device in every step.

    python examples/03_one_jitted_step.py
"""

import jax
import optax
from flax import nnx

from jaxaccel import data, train, transforms

digits = data.load_dataset("digits")
plan = data.BatchPlan(len(digits.train), 64, seed=0, epochs=10)
normalize = data.make_normalizer(digits.mean, digits.std)


class Net(nnx.Module):
    """A convolution, a dropout and a dense layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, image):
        """Returns the logits."""
        x = nnx.relu(self.conv(image)).reshape(len(image), -1)
        return self.out(self.dropout(x))


def augment_and_normalize(batch, key):
    # A mirrored digit is no digit: shift only.
    image = data.random_crop_flip(key, batch["image"], pad=1, flip=False)
    return {**batch, "image": normalize(image)}


if __name__ == "__main__":
    task = train.from_nnx(Net(nnx.Rngs(0)), train.classification_loss)
    tx = optax.chain(transforms.clip_by_global_norm(1.0), optax.adam(1e-2))
    step = train.make_train_step(task.train_loss, tx, preprocess=augment_and_normalize)
    params, model_state = task.init()
    key = jax.random.key(0)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    first_state = state

    log = train.MetricBuffer(every=55)
    batches = data.to_device(data.Loader(digits.train, plan))
    with batches, train.CompileCounter() as compiles:
        for number, batch in enumerate(batches, start=1):
            state, metrics = step(state, batch)
            if log.append(number, metrics):  # here, and only here, the host waits
                loss, accuracy = log.latest["loss"], log.latest["accuracy"]
                print(f"step {number:3}: loss {loss:.3f}, accuracy {accuracy:.1%}")

    print(f"compilations of the step: {compiles.counts['train_step']}")
    reused = all(x.is_deleted() for x in jax.tree.leaves(first_state.params))
    print(f"memory of the first parameters was reused: {reused}")
    print(f"the model's own arrays are alive: {not params['out']['bias'].is_deleted()}")
