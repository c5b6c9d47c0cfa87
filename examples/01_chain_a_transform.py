"""Puts gradient transformations in front of SGD, and shows what they ask of it.

Trains one small network on scikit-learn's digits with four chains. `znorm` gives
every kernel's gradient a root mean square of 1, so it wants a learning rate about a
hundred times lower than plain SGD's; at SGD's own rate it learns nothing.

    python examples/01_chain_a_transform.py
"""

import jax
import optax
from flax import nnx

from jaxaccel import data, train, transforms

EPOCHS, BATCH_SIZE, SEED = 20, 64, 0

digits = data.load_dataset("digits")
plan = data.BatchPlan(len(digits.train), BATCH_SIZE, seed=SEED, epochs=EPOCHS)
normalize = data.make_normalizer(digits.mean, digits.std)


class Net(nnx.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, image):
        """Returns the logits."""
        x = image.reshape(len(image), -1)
        return self.out(nnx.relu(self.hidden(x)))


def preprocess(batch, key):
    return {**batch, "image": normalize(batch["image"])}


def accuracy_of(tx: optax.GradientTransformation) -> float:
    task = train.from_nnx(Net(nnx.Rngs(SEED)), train.classification_loss)
    params, model_state = task.init()
    key = jax.random.key(SEED)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    step = train.make_train_step(task.train_loss, tx, preprocess=preprocess)
    with data.to_device(data.Loader(digits.train, plan)) as batches:
        for batch in batches:
            state, _ = step(state, batch)
    eval_step = train.make_eval_step(task.eval_loss, preprocess=preprocess)
    return train.evaluate(eval_step, state, digits.test.scan(128))["accuracy"]


def sgd(learning_rate: float) -> optax.GradientTransformation:
    # Decay matters to znorm: its steps do not shrink near a minimum by themselves.
    schedule = optax.cosine_decay_schedule(learning_rate, len(plan))
    return optax.sgd(schedule, momentum=0.9)


# Each rate is the best of a grid with factors of about 3, but for the last one.
CHAINS = {
    "sgd(0.1)": sgd(0.1),
    "centralize, clip, sgd(0.1)": optax.chain(
        transforms.centralize_gradients(),
        transforms.clip_by_global_norm(1.0),
        sgd(0.1),
    ),
    "znorm, sgd(0.001)": optax.chain(transforms.znorm(), sgd(0.001)),
    "znorm, sgd(0.1)": optax.chain(transforms.znorm(), sgd(0.1)),
}

if __name__ == "__main__":
    for name, tx in CHAINS.items():
        print(f"{name:28} test accuracy {accuracy_of(tx):.1%}")
