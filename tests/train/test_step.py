"""The jitted step: its arithmetic, its contract with Optax, its compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccel import train


def linear_loss(params, model_state, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return train.masked_mean(error**2, batch), (model_state, {"mae": abs(error).mean()})


def linear_batch(rng, n=16, d=3):
    x = rng.standard_normal((n, d)).astype(np.float32)
    return {"x": x, "y": (x @ np.arange(1.0, d + 1)).astype(np.float32)}


def linear_state(tx, d=3, dtype=jnp.float32):
    params = {"w": jnp.zeros(d, dtype), "b": jnp.zeros((), dtype)}
    return train.TrainState.create(params, tx, key=jax.random.key(7))


def sgd_momentum_oracle(batch, steps, lr, momentum):
    x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
    theta, trace = np.zeros(x.shape[1] + 1), np.zeros(x.shape[1] + 1)
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    for _ in range(steps):
        grad = 2 * x.T @ (x @ theta - y) / len(x)
        trace = momentum * trace + grad
        theta = theta - lr * trace
    return theta


@given(st.integers(2, 20), st.integers(1, 5), st.integers(0, 2**31))
def test_steps_equal_float64_sgd_with_momentum(n, d, seed):
    batch = linear_batch(np.random.default_rng(seed), n, d)
    tx = optax.sgd(0.02, momentum=0.9)
    step, state = train.make_train_step(linear_loss, tx), linear_state(tx, d)
    for _ in range(5):
        state, _ = step(state, batch)
    want = sgd_momentum_oracle(batch, 5, 0.02, 0.9)
    got = np.append(np.asarray(state.params["w"]), state.params["b"])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert int(state.step) == 5


def test_metrics_are_float32_scalars_on_the_device(rng):
    tx = optax.sgd(0.1)
    batch = linear_batch(rng)
    state, metrics = train.make_train_step(linear_loss, tx)(linear_state(tx), batch)
    assert set(metrics) == {"loss", "mae"}
    for value in metrics.values():
        assert isinstance(value, jax.Array)
        assert (value.shape, value.dtype) == ((), jnp.float32)
    np.testing.assert_allclose(metrics["loss"], np.mean(batch["y"] ** 2), rtol=1e-5)


@pytest.mark.parametrize(
    "tx",
    [
        optax.lbfgs(),
        optax.polyak_sgd(max_learning_rate=0.1),
        optax.chain(
            optax.sgd(0.1),
            optax.contrib.reduce_on_plateau(
                patience=2, factor=0.5, accumulation_size=1
            ),
        ),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05)),
    ],
    ids=["lbfgs", "polyak_sgd", "reduce_on_plateau", "adamw"],
)
def test_optax_transformations_with_extra_arguments_train(tx, rng):
    batch = linear_batch(rng)
    step, state = train.make_train_step(linear_loss, tx), linear_state(tx)
    with jax.numpy_dtype_promotion("standard"), train.CompileCounter() as compiles:
        state, first = step(state, batch)
        for _ in range(30):
            state, metrics = step(state, batch)
    assert metrics["loss"] < 0.5 * first["loss"]
    assert compiles.counts["train_step"] == 1


def test_lbfgs_equals_optax_own_loop(rng):
    batch = jax.tree.map(jnp.asarray, linear_batch(rng))
    tx = optax.lbfgs()
    step, state = train.make_train_step(linear_loss, tx), linear_state(tx)

    def value_fn(params):
        return linear_loss(params, {}, batch, None)[0]

    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    opt_state = tx.init(params)

    @jax.jit
    def reference(params, opt_state):
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, opt_state = tx.update(
            grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state

    with jax.numpy_dtype_promotion("standard"):
        for _ in range(4):
            state, _ = step(state, batch)
            params, opt_state = reference(params, opt_state)
    for name in params:
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-5)


def test_extra_arguments_are_float32_and_close_over_the_step(rng):
    """The transformation receives all five, and value_fn repeats the loss."""
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra, updates=updates, params=params)
        return updates, {"again": extra["value_fn"](params), "value": extra["value"]}

    tx = optax.GradientTransformationExtraArgs(
        lambda params: {"again": jnp.zeros(()), "value": jnp.zeros(())}, update
    )

    def noisy_loss(params, model_state, batch, key):
        noise = jax.random.normal(key, batch["x"].shape)
        error = (batch["x"] + noise) @ params["w"].astype(jnp.float32) - batch["y"]
        return jnp.mean(error**2), (model_state, {})

    state = linear_state(tx, dtype=jnp.bfloat16)
    state, metrics = train.make_train_step(
        noisy_loss,
        tx,
        preprocess=lambda batch, key: {**batch, "x": batch["x"] * 2},
    )(state, linear_batch(rng))
    assert set(seen) >= {"value", "grad", "value_fn", "batch", "key"}
    assert state.opt_state["value"] == state.opt_state["again"] == metrics["loss"]
    for tree in (seen["updates"], seen["grad"], seen["params"], seen["value"]):
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype(jnp.float32)}
    assert state.params["w"].dtype == jnp.bfloat16


def test_preprocess_runs_inside_with_fresh_keys_each_step(rng):
    def preprocess(batch, key):
        return {"x": jax.random.uniform(key, batch["x"].shape)}

    def loss_fn(params, model_state, batch, key):
        mean = batch["x"].mean()
        return params * mean, (model_state, {"x": mean, "u": jax.random.uniform(key)})

    tx = optax.sgd(0.1)
    step = train.make_train_step(loss_fn, tx, preprocess=preprocess)

    def run(seed):
        state = train.TrainState.create(jnp.zeros(()), tx, key=jax.random.key(seed))
        drawn = []
        for _ in range(3):
            state, metrics = step(state, {"x": np.zeros((4, 2), np.float32)})
            drawn += [float(metrics["x"]), float(metrics["u"])]
        return drawn

    assert len(set(run(0) + run(1))) == 12
    assert run(0) == run(0)


def test_one_compilation_for_many_steps(rng):
    tx = optax.adam(1e-2)
    step, state = train.make_train_step(linear_loss, tx), linear_state(tx)
    with jax.numpy_dtype_promotion("standard"), train.CompileCounter() as compiles:
        for _ in range(20):
            state, _ = step(state, linear_batch(rng))
    assert compiles.counts["train_step"] == 1


def test_donation_spares_the_callers_arrays(rng):
    tx = optax.lbfgs()
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    model_state, key = {"seen": jnp.zeros(())}, jax.random.key(0)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    with jax.numpy_dtype_promotion("standard"):
        new, _ = train.make_train_step(linear_loss, tx)(state, linear_batch(rng))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, model_state, new)))
    np.testing.assert_array_equal(params["w"], np.ones(3))
    assert not key.is_deleted()


def test_donation_can_be_switched_off(rng):
    tx = optax.sgd(0.1)
    state = linear_state(tx)
    train.make_train_step(linear_loss, tx, donate=False)(state, linear_batch(rng))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_numpy_parameters_are_copied(rng):
    w = np.ones(3, np.float32)
    tx = optax.sgd(0.1)
    state = train.TrainState.create({"w": w}, tx, key=jax.random.key(0))
    w[:] = 5
    np.testing.assert_array_equal(state.params["w"], np.ones(3))


def test_partially_trained_tree_with_none_leaves(rng):
    def loss_fn(params, model_state, batch, key):
        return (params["a"] ** 2).sum(), (model_state, {})

    tx = optax.sgd(0.25)
    state = train.TrainState.create(
        {"a": jnp.ones(2), "b": None}, tx, key=jax.random.key(0)
    )
    state, _ = train.make_train_step(loss_fn, tx)(state, linear_batch(rng))
    np.testing.assert_allclose(state.params["a"], 0.5)
    assert state.params["b"] is None


def test_step_runs_in_scan(rng):
    tx = optax.sgd(0.02, momentum=0.9)
    step = train.make_train_step(linear_loss, tx, donate=False)
    batch = linear_batch(rng)
    batches = jax.tree.map(lambda x: np.stack([x] * 5), batch)
    state, metrics = jax.lax.scan(step, linear_state(tx), batches)
    want = sgd_momentum_oracle(batch, 5, 0.02, 0.9)
    np.testing.assert_allclose(state.params["w"], want[:-1], rtol=1e-4)
    assert metrics["loss"].shape == (5,)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, optax.sgd(0.1)), "loss_fn must be a function; got int"),
        ((linear_loss, 0.1), "tx must be an Optax transformation.*got float"),
    ],
)
def test_building_a_step_checks_its_arguments(arguments, message):
    with pytest.raises(TypeError, match=message):
        train.make_train_step(*arguments)


@pytest.mark.usefixtures("unchecked")
def test_calling_a_step_checks_state_and_batch(rng):
    tx = optax.sgd(0.1)
    step, state, batch = (
        train.make_train_step(linear_loss, tx),
        linear_state(tx),
        linear_batch(rng),
    )
    with pytest.raises(TypeError, match="must be a TrainState; got dict"):
        step({"w": jnp.ones(3)}, batch)
    with pytest.raises(TypeError, match="a batch is a dict of arrays"):
        step(state, batch["x"])
    with pytest.raises(ValueError, match="same leading batch axis.*16.*15"):
        step(state, {"x": batch["x"], "y": batch["y"][:15]})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda p, s: p.sum(), "must return"),
        (lambda p, s: (p, (s, {})), "'loss' must be a scalar.*3"),
        (lambda p, s: (p.sum(), (s, {"x": p})), "'x' must be a scalar"),
        (lambda p, s: (p.sum(), (s, {"loss": p.sum()})), "names of the step's own"),
        (
            lambda p, s: (p.sum(), ({"n": s["n"].astype(jnp.float16)}, {})),
            r"changed state.model_state\['n'\] from float32\[\] to float16",
        ),
        (lambda p, s: (p.sum(), ({}, {})), r"structure of state.model_state.*\['n'\]"),
    ],
)
def test_a_wrong_loss_is_explained(result, message, rng):
    tx = optax.sgd(0.1)
    step = train.make_train_step(lambda p, s, b, k: result(p, s), tx)
    state = train.TrainState.create(
        jnp.ones(3), tx, key=jax.random.key(0), model_state={"n": jnp.zeros(())}
    )
    with pytest.raises(TypeError, match=message):
        step(state, linear_batch(rng))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("params", "key", "error", "message"),
    [
        ({"w": jnp.ones(2)}, 0, TypeError, "typed PRNG key.*int"),
        ({"w": jnp.ones(2)}, jnp.zeros(2, jnp.uint32), TypeError, "got uint32"),
        ({"w": jnp.ones(2)}, jax.random.split(jax.random.key(0)), TypeError, "single"),
        ({"w": jnp.arange(2)}, jax.random.key(0), TypeError, r"\['w'\] is int32"),
        ({}, jax.random.key(0), ValueError, "nothing to train"),
    ],
)
def test_creating_a_state_checks_its_arguments(params, key, error, message):
    with pytest.raises(error, match=message):
        train.TrainState.create(params, optax.sgd(0.1), key=key)


def test_weak_types_do_not_compile_twice():
    tx = optax.sgd(0.1)
    state = train.TrainState.create(jnp.asarray(1.0), tx, key=jax.random.key(0))

    def loss_fn(params, model_state, batch, key):
        return params * batch["x"].sum(), (model_state, {})

    step = train.make_train_step(loss_fn, tx)
    with train.CompileCounter() as compiles:
        for _ in range(3):
            state, _ = step(state, {"x": np.ones(2, np.float32)})
    assert compiles.counts["train_step"] == 1


def test_bfloat16_parameters_keep_float32_optimizer_state(rng):
    tx = optax.sgd(0.02, momentum=0.9)
    batch = linear_batch(rng)

    def loss_fn(params, model_state, batch, key):
        params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return linear_loss(params, model_state, batch, key)

    step, state = train.make_train_step(loss_fn, tx), linear_state(tx, dtype="bfloat16")
    for _ in range(5):
        state, _ = step(state, batch)
    want = sgd_momentum_oracle(batch, 5, 0.02, 0.9)
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.opt_state[0].trace["w"].dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(state.params["w"], np.float32), want[:-1], rtol=0.05, atol=0.02
    )


def test_sharded_batches_give_the_same_steps_and_compile_once(rng):
    batch, tx = linear_batch(rng), optax.sgd(0.02, momentum=0.9)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_example = NamedSharding(mesh, PartitionSpec("x"))
    state = jax.device_put(linear_state(tx), NamedSharding(mesh, PartitionSpec()))
    step = train.make_train_step(linear_loss, tx)
    with train.CompileCounter() as compiles:
        for _ in range(5):
            state, _ = step(state, jax.device_put(batch, by_example))
    want = sgd_momentum_oracle(batch, 5, 0.02, 0.9)
    np.testing.assert_allclose(state.params["w"], want[:-1], rtol=1e-4)
    assert compiles.counts["train_step"] == 1
