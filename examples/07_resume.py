"""Kills a training and resumes it: the bits are those of a run without interruption.

A checkpoint holds the whole state, the random key included, and where the batches are.
`Checkpoints` writes it in the background and renames it when it is complete, so that
a process may die at any moment. The same lines start a run and resume it.

    python examples/07_resume.py
"""

import os
import signal
import subprocess
import sys
import tempfile

import jax
import numpy as np
import optax
from flax import nnx

from jaxaccel import data, train

digits = data.load_dataset("digits")
normalize = data.make_normalizer(digits.mean, digits.std)


class Net(nnx.Module):
    """Two dense layers with batch norm and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, image):
        """Returns the logits."""
        x = self.norm(self.hidden(image.reshape(-1, 64)))
        return self.out(self.dropout(nnx.relu(x)))


def preprocess(batch, key):
    image = data.random_crop_flip(key, batch["image"], pad=1, flip=False)
    return {**batch, "image": normalize(image)}


def train_to(folder: str, until: int, die_at: int = 0) -> train.TrainState:
    task = train.from_nnx(Net(nnx.Rngs(0)), train.classification_loss)
    tx = optax.adam(1e-2)
    step = train.make_train_step(task.train_loss, tx, preprocess=preprocess)
    params, model_state = task.init()
    state = train.TrainState.create(
        params, tx, key=jax.random.key(0), model_state=model_state
    )
    plan = data.BatchPlan(len(digits.train), 64, seed=0)
    with (
        data.to_device(data.Loader(digits.train, plan)) as batches,
        train.Checkpoints(folder, run={"seed": 0}) as checkpoints,
    ):
        state = checkpoints.resume(state, loader=batches)
        print(f"from step {state.step} on", flush=True)
        loop = train.run(
            step,
            state,
            batches,
            until=until,
            checkpoints=checkpoints,
            checkpoint_every=10,
        )
        for i, state, _ in loop:  # noqa: B007
            if i == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return state


def bits(state: train.TrainState) -> bytes:
    leaves = jax.tree.leaves((state.params, state.model_state, state.opt_state))
    return b"".join(np.asarray(leaf).tobytes() for leaf in leaves)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_to(sys.argv[1], until=60, die_at=37)
    with tempfile.TemporaryDirectory() as folder:
        killed = os.path.join(folder, "killed")
        done = subprocess.run([sys.executable, __file__, killed])
        print(f"the process ended with code {done.returncode}")
        resumed = train_to(killed, until=60)
        whole = train_to(os.path.join(folder, "whole"), until=60)
    print(f"{len(bits(whole))} bytes, the same bits: {bits(resumed) == bits(whole)}")
