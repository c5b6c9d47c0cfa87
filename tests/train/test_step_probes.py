"""Probes, activations, rematerialization, and mistakes in the options."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxaccel import train


def deep_loss(params, model_state, batch, key):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(jnp.sin(x @ w))
    return (x**2).mean(), (model_state, {})


def deep_state(rng, tx, layers=3, d=32):
    params = [rng.standard_normal((d, d)).astype(np.float32) for _ in range(layers)]
    return train.TrainState.create(params, tx, key=jax.random.key(0))


def test_rematerialization_computes_again_and_keeps_the_numbers(rng):
    """By the program handed to XLA, whose CPU backend merges the two again."""
    tx, batch = optax.sgd(0.1), {"x": rng.random((8, 32)).astype(np.float32)}
    state, params, work = deep_state(rng, tx), {}, {}
    nothing = jax.checkpoint_policies.nothing_saveable
    for policy in (None, "everything_saveable", "dots_saveable", nothing):
        step = train.make_train_step(deep_loss, tx, rematerialize=policy, donate=False)
        lowered = step.lower(state, batch)
        cost = lowered.cost_analysis()
        assert cost is not None
        work[policy] = cost["transcendentals"], cost["flops"]
        params[policy] = lowered.compile()(state, batch)[0].params
    assert work["everything_saveable"][0] == work[None][0]
    # tanh and sin of three layers again; the matrix products only with nothing.
    assert work["dots_saveable"][0] >= work[None][0] + 3 * batch["x"].size
    products = 2 * 8 * 32 * 32
    assert work["dots_saveable"][1] < work[None][1] + products
    assert work[nothing][1] >= work[None][1] + 2 * products
    for got in params.values():
        for a, b in zip(got, params[None], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_policy_has_a_known_name():
    with pytest.raises(ValueError, match="one of everything_saveable.*'some'"):
        train.make_train_step(deep_loss, optax.sgd(0.1), rematerialize="some")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rematerialize": 3}, "name of a policy or a policy; got int"),
        ({"probes": [len]}, "dict of functions by name; got list"),
        ({"probes": {"norm": 3}}, "probe 'norm' must be a function.*got int"),
    ],
)
def test_options_are_of_the_right_kind(options, message):
    with pytest.raises(TypeError, match=message):
        train.make_train_step(deep_loss, optax.sgd(0.1), **options)


def norms(params, grads, updates, batch):
    return {
        "update_ratio": jax.tree.map(
            lambda u, p: jnp.linalg.norm(u) / jnp.linalg.norm(p), updates, params
        ),
        "histogram": jnp.histogram(jax.tree.leaves(grads)[0], 5)[0],
        "size": jnp.asarray(batch["x"].shape[0]),
    }


def test_probes_see_the_step_and_stand_apart(rng):
    tx, batch = optax.sgd(0.5), {"x": rng.random((8, 32)).astype(np.float32)}
    state = deep_state(rng, tx, layers=2)
    step = train.make_train_step(deep_loss, tx, probes={"norms": norms}, donate=False)
    after, metrics = step(state, batch)
    probes = metrics.pop("probes")["norms"]
    assert set(metrics) == {"loss"} and int(probes["size"]) == 8
    for ratio, new, old in zip(
        probes["update_ratio"], after.params, state.params, strict=True
    ):
        want = np.linalg.norm(new - old) / np.linalg.norm(old)
        np.testing.assert_allclose(ratio, want, rtol=1e-4)
    grad = (state.params[0] - after.params[0]) / 0.5
    assert int(probes["histogram"].sum()) == grad.size
    np.testing.assert_array_equal(probes["histogram"].shape, (5,))


def test_probes_of_a_skipped_step_show_where_it_went_wrong(rng):
    def loss_fn(params, model_state, batch, key):
        loss = params["a"] + params["b"] * batch["x"].mean()
        return loss, (model_state, {})

    tx = optax.sgd(1.0)
    state = train.TrainState.create(
        {"a": jnp.ones(()), "b": jnp.ones(())},
        tx,
        key=jax.random.key(0),
        finite_guard=True,
    )
    step = train.make_train_step(
        loss_fn,
        tx,
        finite_guard=True,
        probes={"seen": lambda p, g, u, b: (jax.tree.map(jnp.isfinite, g), u)},
    )
    _, metrics = step(state, {"x": np.full(2, np.inf, np.float32)})
    finite, updates = jax.device_get(metrics["probes"]["seen"])
    assert finite == {"a": True, "b": False} and updates == {"a": 0.0, "b": 0.0}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(4)(x))
        self.sow("intermediates", "hidden", x)
        return nn.Dense(3)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(2, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        self.sow(nnx.Intermediate, "hidden", x)
        return self.last(x)


def hidden_means(sown):
    return {"mean": sown["hidden"][0].mean(), "zeros": (sown["hidden"][0] == 0).mean(0)}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("system", ["linen", "nnx"])
def test_activations_are_captured_by_both_module_systems(system, accumulate, rng, key):
    batch = {
        "image": rng.standard_normal((8, 2)).astype(np.float32),
        "label": np.zeros(8, np.uint8),
    }
    loss, tx = train.classification_loss, optax.sgd(0.1)
    if system == "linen":
        task = train.from_linen(LinenNet(), loss, capture=hidden_means)
        kernel, bias = ("Dense_0", "kernel"), ("Dense_0", "bias")
    else:
        task = train.from_nnx(NnxNet(nnx.Rngs(0)), loss, capture=hidden_means)
        kernel, bias = ("first", "kernel"), ("first", "bias")
    params, model_state = task.init(key, batch)

    def leaf(path):
        node = params[path[0]][path[1]]
        return np.asarray(node.get_value() if hasattr(node, "get_value") else node)

    hidden = np.maximum(batch["image"] @ leaf(kernel) + leaf(bias), 0)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    eval_sums = train.make_eval_step(task.eval_loss)(state, batch)
    assert set(eval_sums) == {"loss", "accuracy", "weight"}
    step = train.make_train_step(task.train_loss, tx, accumulate=accumulate)
    _, metrics = step(state, batch)
    got = metrics["probes"]["activations"]
    np.testing.assert_allclose(got["mean"], hidden.mean(), rtol=1e-5)
    np.testing.assert_allclose(got["zeros"], (hidden == 0).mean(0), rtol=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(eval_sums["loss"]) / 8)


@pytest.mark.parametrize("name", ["loss", "skipped", "loss_scale", "weight"])
def test_the_steps_own_metrics_keep_their_names(name):
    def loss_fn(params, model_state, batch, key):
        return params.sum(), (model_state, {name: params.sum()})

    tx = optax.sgd(0.1)
    state = train.TrainState.create(jnp.ones(2), tx, key=jax.random.key(0))
    with pytest.raises(TypeError, match=f"'{name}'.*names of the step's own"):
        train.make_train_step(loss_fn, tx)(state, {"x": np.ones(2)})


def test_a_missing_entry_is_named():
    def loss_fn(params, model_state, batch, key):
        return params.sum() * batch["y"].sum(), (model_state, {})

    tx, batch = optax.sgd(0.1), {"x": np.ones(2, np.float32)}
    state = train.TrainState.create(jnp.ones(2), tx, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"the loss looked up 'y'.*holds \['x'\]"):
        train.make_train_step(loss_fn, tx)(state, batch)
    step = train.make_train_step(loss_fn, tx, preprocess=lambda b, k: {"y": b["z"]})
    with pytest.raises(ValueError, match=r"preprocess looked up 'z'"):
        step(state, batch)
