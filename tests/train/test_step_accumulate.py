"""Micro-batches: the gradient of the whole batch in the memory of a part."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxaccel import train


def residual_loss(params, model_state, batch, key):
    error = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]
    return train.masked_mean(error**2, batch), (
        model_state,
        {"mae": train.masked_mean(abs(error), batch)},
    )


def params_of(rng, d=4, h=8):
    return {
        "w": rng.standard_normal((d, h)).astype(np.float32),
        "v": rng.standard_normal(h).astype(np.float32),
    }


def batch_of(rng, n=24, d=4):
    x = rng.standard_normal((n, d)).astype(np.float32)
    return {"x": x, "y": x.sum(-1)}


def gradient_of(params, batch, loss_fn=residual_loss, **options):
    """Returns the gradient that reaches the transformation, and the metrics."""
    tx = optax.identity()
    state = train.TrainState.create(params, tx, key=jax.random.key(0))
    step = train.make_train_step(
        loss_fn, tx, probes={"grads": lambda p, g, u, b: g}, **options
    )
    _, metrics = step(state, batch)
    return metrics.pop("probes")["grads"], metrics


def same(got, want, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Relative to the leaf: its entries are sums that may cancel.
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def float64_gradient(params, batch):
    w, v = (params[k].astype(np.float64) for k in "wv")
    keep = batch.get("mask", np.ones(len(batch["x"]), bool))
    x, y = batch["x"][keep].astype(np.float64), batch["y"][keep]
    hidden = np.tanh(x @ w)
    error = 2 * (hidden @ v - y) / len(x)
    return {"w": x.T @ (error[:, None] * v * (1 - hidden**2)), "v": hidden.T @ error}


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_is_that_of_the_whole_batch(masked, rng):
    params, batch = params_of(rng), batch_of(rng)
    if masked:  # micro-batches of 6, 5, 5 and 0 examples
        batch["mask"] = (np.arange(24) % 4 != 3) & ~np.isin(np.arange(24), (1, 2))
        batch["x"][3::4] = 50.0
    want, whole = gradient_of(params, batch)
    got, parts = gradient_of(params, batch, accumulate=4)
    same(got, want, 1e-6)
    same(got, float64_gradient(params, batch), 2e-6)
    for name in ("loss", "mae"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6)


def test_a_batch_without_any_example_gives_zero(rng):
    def careless(params, model_state, batch, key):
        mask = batch["mask"].astype(jnp.float32)
        loss = (batch["x"] @ params["w"]).sum(-1) @ mask / mask.sum()  # 0/0
        return loss + 0 * params["v"].sum(), (model_state, {})

    batch = batch_of(rng) | {"mask": np.zeros(24, bool)}
    got, metrics = gradient_of(params_of(rng), batch, careless, accumulate=2)
    assert all(not np.any(x) for x in jax.tree.leaves(got))
    assert float(metrics["loss"]) == 0.0


def test_one_bad_micro_batch_drops_the_step(rng):
    batch = batch_of(rng)
    batch["x"][5] = np.nan
    tx = optax.sgd(0.1, momentum=0.9)
    state = train.TrainState.create(
        params_of(rng), tx, key=jax.random.key(0), finite_guard=True
    )
    step = train.make_train_step(
        residual_loss, tx, accumulate=3, finite_guard=True, donate=False
    )
    after, metrics = step(state, batch)
    assert float(metrics["skipped"]) == 1.0
    same(after.params, jax.device_get(state.params), 0)


def test_preprocess_runs_once_on_the_whole_batch(rng):
    seen = []

    def preprocess(batch, key):
        seen.append(batch["x"].shape)
        return {**batch, "x": batch["x"] - batch["x"].mean(0, keepdims=True)}

    params, batch = params_of(rng), batch_of(rng)
    got, _ = gradient_of(params, batch, preprocess=preprocess, accumulate=4)
    assert seen == [(24, 4)]
    centred = {**batch, "x": batch["x"] - batch["x"].mean(0)}
    same(got, gradient_of(params, centred)[0], 5e-6)


def test_statistics_are_threaded_and_keys_differ(rng, key):
    """Each micro-batch moves the running mean once, in turn; rows are dealt out."""
    net = nn.BatchNorm(use_running_average=False, momentum=0.5)

    def loss_fn(params, model_state, batch, key):
        outputs, updated = net.apply(
            {"params": params, **model_state}, batch["x"], mutable=["batch_stats"]
        )
        return outputs.mean(), (dict(updated), {"u": jax.random.uniform(key)})

    batch, tx = batch_of(rng), optax.sgd(0.0)
    variables = jax.jit(net.init)(key, batch["x"])
    step = train.make_train_step(loss_fn, tx, accumulate=2)
    state = train.TrainState.create(
        variables["params"],
        tx,
        key=key,
        model_state={"batch_stats": variables["batch_stats"]},
    )
    state, metrics = step(state, batch)
    first, second = (batch["x"][i::2].astype(np.float64).mean(0) for i in (0, 1))
    np.testing.assert_allclose(
        state.model_state["batch_stats"]["mean"], first / 4 + second / 2, atol=1e-6
    )
    # The mean of two different draws.
    loss_key = jax.random.split(jax.random.fold_in(key, 0))[1]
    draws = [jax.random.uniform(jax.random.fold_in(loss_key, i)) for i in (0, 1)]
    np.testing.assert_allclose(metrics["u"], np.mean(draws), rtol=1e-6)


def test_line_searches_see_the_whole_loss(rng):
    """L-BFGS evaluates value_fn: whole or in parts, the same steps."""
    params, batch = params_of(rng), batch_of(rng)
    tx, losses = optax.lbfgs(), {}
    for pieces in (1, 3):
        state = train.TrainState.create(params, tx, key=jax.random.key(0))
        step = train.make_train_step(residual_loss, tx, accumulate=pieces)
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(2):
                state, metrics = step(state, batch)
        losses[pieces] = float(metrics["loss"])
    np.testing.assert_allclose(losses[1], losses[3], rtol=1e-3)


def test_accumulation_saves_memory(rng):
    params = {"w": np.zeros((64, 256), np.float32), "v": np.zeros(256, np.float32)}
    batch = batch_of(rng, 512, 64)
    tx, temporary = optax.sgd(0.1), {}
    for pieces in (1, 8):
        state = train.TrainState.create(params, tx, key=jax.random.key(0))
        step = train.make_train_step(residual_loss, tx, accumulate=pieces)
        memory = step.lower(state, batch).compile().memory_analysis()
        assert memory is not None
        temporary[pieces] = memory.temp_size_in_bytes
    assert temporary[8] < 0.5 * temporary[1]


@pytest.mark.parametrize("pieces", [0, 2.0, -1])
@pytest.mark.usefixtures("unchecked")
def test_pieces_are_counted(pieces):
    with pytest.raises(ValueError, match="number of micro-batches"):
        train.make_train_step(residual_loss, optax.sgd(0.1), accumulate=pieces)


def test_pieces_divide_the_batch(rng):
    with pytest.raises(ValueError, match="accumulate=5 does not divide.* 24"):
        gradient_of(params_of(rng), batch_of(rng), accumulate=5)
