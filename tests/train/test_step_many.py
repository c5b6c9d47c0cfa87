"""Several steps in one call: the same steps, stacked metrics, a loader of stacks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxaccel import data, train


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3), strides=2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


def mlp():
    return nn.Sequential([lambda x: x.reshape(x.shape[0], -1), nn.Dense(8), nn.tanh])


TASKS = {
    "mlp": lambda: train.from_linen(mlp(), train.classification_loss),
    "conv": lambda: train.from_linen(ConvNet(), train.classification_loss),
}


def noise(batch, key):
    x = batch["image"].astype(jnp.float32) / 255
    return {**batch, "image": x + jax.random.normal(key, x.shape) / 10}


@pytest.fixture
def store(rng):
    return data.ArrayStore(
        {
            "image": rng.integers(0, 256, (40, 6, 6, 1), dtype=np.uint8),
            "label": rng.integers(0, 3, 40).astype(np.uint8),
        }
    )


def start(task, tx):
    image = np.zeros((2, 6, 6, 1), np.float32)
    params, model_state = jax.jit(task.init)(jax.random.key(1), {"image": image})
    return train.TrainState.create(
        params, tx, key=jax.random.key(0), model_state=model_state
    )


@pytest.mark.parametrize(("name", "rtol"), [("mlp", 1e-6), ("conv", 1e-3)])
def test_eight_steps_in_two_calls_are_the_same_steps(name, rtol, store):
    task, tx = TASKS[name](), optax.sgd(0.05, momentum=0.9)
    plan = data.BatchPlan(40, 8, epochs=2, seed=3)
    single = train.make_train_step(task.train_loss, tx, preprocess=noise)
    many = train.make_train_step(
        task.train_loss, tx, preprocess=noise, steps_per_call=4
    )
    dataset = data.DeviceDataset(store)
    with jax.numpy_dtype_promotion("standard"):
        one, losses = start(task, tx), []
        with data.Loader(store, plan) as loader:
            for batch in itertools.islice(loader, 8):
                one, metrics = single(one, batch)
                losses.append(metrics["loss"])
        stacked, resident = start(task, tx), start(task, tx)
        batches = [plan.indices(t) for t in range(8)]
        for t in (0, 4):
            rows = np.stack(batches[t : t + 4])
            stacked, metrics = many(
                stacked,
                store.take(rows.ravel())
                | {name: store.columns[name][rows] for name in store.columns},
            )
            assert metrics["loss"].shape == (4,)
            np.testing.assert_allclose(metrics["loss"], losses[t : t + 4], rtol=rtol)
            rows = dataset.rows(plan, range(t, t + 4))
            if name == "mlp":
                resident, _ = many(resident, rows, dataset)
    for other in (stacked, resident) if name == "mlp" else (stacked,):
        assert int(other.step) == 8
        for a, b in zip(
            jax.tree.leaves((one.params, one.model_state)),
            jax.tree.leaves((other.params, other.model_state)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(a).max())


def test_a_single_step_takes_rows_of_a_data_set(store):
    def loss_fn(params, model_state, batch, key):
        x = batch["image"].astype(jnp.float32).mean()
        return params * x, (model_state, {"x": x})

    tx, plan = optax.sgd(0.0), data.BatchPlan(40, 8, seed=1)
    dataset = data.DeviceDataset(store)
    state = train.TrainState.create(jnp.ones(()), tx, key=jax.random.key(0))
    rows = jax.tree.map(lambda x: x[0], dataset.rows(plan, range(3, 4)))
    _, metrics = train.make_train_step(loss_fn, tx)(state, rows, dataset)
    want = store.columns["image"][plan.indices(3)].mean()
    np.testing.assert_allclose(metrics["x"], want, rtol=1e-6)


def stacks_of(store, count, plan, state=None):
    loader = data.Loader(store, plan)
    if state is not None:
        loader.set_state(state)
    return data.to_device(train.stack_batches(loader, count), copy=False)


def test_stacks_follow_the_plan_and_end_with_the_epoch(store):
    """Five steps an epoch: 2, 2, 1 and again; the state moves by whole stacks."""
    plan = data.BatchPlan(40, 8, epochs=2, seed=5)
    sizes, labels, states = [], [], []
    with stacks_of(store, 2, plan) as batches:
        for stack in batches:
            sizes.append(stack["label"].shape)
            labels += list(np.asarray(stack["label"]))
            states.append(batches.get_state())
    assert sizes == [(2, 8), (2, 8), (1, 8)] * 2
    assert [state["step"] for state in states] == [2, 4, 5, 7, 9, 10]
    want = [store.columns["label"][plan.indices(t)] for t in range(10)]
    np.testing.assert_array_equal(labels, want)
    with stacks_of(store, 2, plan, states[2]) as batches:
        rest = [row for stack in batches for row in np.asarray(stack["label"])]
    np.testing.assert_array_equal(rest, want[5:])


def test_the_tail_compiles_once_more(store):
    def loss_fn(params, model_state, batch, key):
        return params * batch["label"].astype(jnp.float32).mean(), (model_state, {})

    tx, plan = optax.sgd(0.1), data.BatchPlan(40, 8, epochs=3)
    step = train.make_train_step(loss_fn, tx, steps_per_call=2)
    state = train.TrainState.create(jnp.ones(()), tx, key=jax.random.key(0))
    with train.CompileCounter() as compiles, stacks_of(store, 2, plan) as batches:
        for stack in batches:
            state, _ = step(state, stack)
    assert int(state.step) == 15 and compiles.counts["train_step"] == 2


def test_any_iterable_can_be_stacked():
    batches = ({"x": np.full(2, i)} for i in range(7))
    stacks = train.stack_batches(batches, 3)
    got = [stack["x"][:, 0].tolist() for stack in stacks]
    assert got == [[0, 1, 2], [3, 4, 5], [6]]
    assert not hasattr(stacks, "get_state")
    ragged = [{"x": np.zeros(2)}, {"x": np.zeros(1)}]
    with pytest.raises(ValueError, match="different shapes.*remainder='drop'"):
        next(train.stack_batches(ragged, 2))
    with pytest.raises(ValueError, match="at least 1 batch; got 0"):
        train.stack_batches([], 0)


def test_stacks_of_another_height_are_refused():
    def loss_fn(params, model_state, batch, key):
        return params * batch["x"].mean(), (model_state, {})

    tx = optax.sgd(0.1)
    step = train.make_train_step(loss_fn, tx, steps_per_call=4)
    state = train.TrainState.create(jnp.ones(()), tx, key=jax.random.key(0))
    for shape in ((8, 2), (3, 8)):
        with pytest.raises(ValueError, match="takes 4 batches stacked.*stack_batches"):
            step(state, {"x": np.zeros(shape, np.float32)})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("steps", [0, 1.0])
def test_steps_per_call_is_a_count(steps):
    with pytest.raises(ValueError, match="steps_per_call must be a number"):
        train.make_train_step(
            TASKS["mlp"]().train_loss, optax.sgd(0.1), steps_per_call=steps
        )
