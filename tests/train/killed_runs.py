"""Trains in processes that are killed at random moments, then to the end.

    python killed_runs.py FOLDER KILLS SEED

prints as JSON whether the final state has the bits of a run without interruption, and
at which step each process began.
"""

import contextlib
import json
import math
import os
import random
import select
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Once, before the processes are forked.
import orbax.checkpoint  # noqa: F401

from jaxaccel import data, train

# A process is killed at the latest a little after so many steps.
LONGEST_LIFE = 5
OPTIONS = {"ema": 0.9, "finite_guard": True}


def loss_fn(params, model_state, batch, key):
    """A layer with dropout and a running mean: all that a state can hold."""
    x = batch["image"].astype(jnp.float32) / 255
    mean = 0.9 * model_state["mean"] + 0.1 * x.mean(0)
    x = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x - mean, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["w"] + params["b"][None], batch["label"].astype(jnp.int32)
    )
    return losses.mean(), ({"mean": mean}, {})


def run(folder, until, report):
    rng = np.random.default_rng(0)
    columns = {
        "image": rng.integers(0, 256, (96, 8)).astype(np.uint8),
        "label": rng.integers(0, 3, 96).astype(np.uint8),
    }
    store, plan = data.ArrayStore(columns), data.BatchPlan(96, 8, seed=3)
    tx = optax.adam(1e-2)
    step = train.make_train_step(loss_fn, tx, **OPTIONS)
    state = train.TrainState.create(
        {"w": np.zeros((8, 3), np.float32), "b": np.zeros(3, np.float32)},
        tx,
        key=jax.random.key(1),
        model_state={"mean": np.zeros(8, np.float32)},
        **OPTIONS,
    )
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(data.to_device(data.Loader(store, plan)))
        saving = {}
        if folder is not None:
            checkpoints = train.Checkpoints(folder, run={"seed": 3})
            stack.enter_context(checkpoints)
            state = checkpoints.resume(state, loader=batches)
            saving = {"checkpoints": checkpoints, "checkpoint_every": 1}
        os.write(report, b"%d\n" % int(state.step))
        for i, new, _ in train.run(step, state, batches, until=until, **saving):
            os.write(report, b"%d\n" % i)
            state = new
    state = state.replace(key=jax.random.key_data(state.key))
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state)).hex()


def in_a_process(function, *args, lines=math.inf, seconds=0.0):
    """Returns what the process wrote, line by line.

    It is killed so many seconds after it has written so many lines, and anyway after
    its longest life: how fast it is depends on what else the machine does.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            os.write(writing, f"final {function(*args, writing)}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    received, killed, deadline = b"", lines == math.inf, math.inf
    while True:
        count = received.count(b"\n")
        if not killed and count >= lines and deadline == math.inf:
            deadline = time.monotonic() + seconds
        if not killed and (time.monotonic() >= deadline or count > LONGEST_LIFE):
            # The rest of the loop reads what it had written before it died.
            os.kill(pid, signal.SIGKILL)
            killed = True
        wait = None
        if not killed and deadline < math.inf:
            wait = max(0.0, deadline - time.monotonic())
        if select.select([reading], [], [], wait)[0]:
            chunk = os.read(reading, 1 << 16)
            received += chunk
            if not chunk:
                break
    os.waitpid(pid, 0)
    os.close(reading)
    return received.decode().splitlines()


def main(folder, kills, seed):
    rng, until = random.Random(seed), 8 * (kills + 1)
    begun = time.monotonic()
    *_, whole = in_a_process(run, None, until)
    start = time.monotonic() - begun
    lives = []
    for _ in range(kills):
        lines = rng.randrange(LONGEST_LIFE)
        # From a moment in the start, or from one between two steps.
        seconds = rng.uniform(0, 0.1 if lines else start)
        lives.append(in_a_process(run, folder, until, lines=lines, seconds=seconds))
    lives.append(in_a_process(run, folder, until))
    report = {
        "same": whole == lives[-1][-1],
        "bytes": len(whole.removeprefix("final ")) // 2,
        "began": [int(lines[0]) for lines in lives if lines],
        "steps": [len(lines) for lines in lives],
        "finished": sum(bool(x) and x[-1].startswith("final") for x in lives),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
