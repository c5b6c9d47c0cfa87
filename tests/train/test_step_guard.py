"""Steps that are not finite, and the average of those that are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxaccel import train
from jaxaccel.train._guard import all_finite


def scaled_loss(params, model_state, batch, key):
    loss = (batch["x"] @ params).mean()
    return loss, ({"seen": model_state["seen"] + loss}, {"u": jax.random.uniform(key)})


def state_of(tx, **options):
    return train.TrainState.create(
        jnp.ones(2),
        tx,
        key=jax.random.key(0),
        model_state={"seen": jnp.zeros(())},
        **options,
    )


GOOD = {"x": np.ones((2, 2), np.float32)}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_step_changes_nothing_but_its_number(bad):
    tx = optax.sgd(0.1, momentum=0.9)
    options = {"finite_guard": True, "ema": 0.9}
    step = train.make_train_step(scaled_loss, tx, donate=False, **options)
    state, first = step(state_of(tx, **options), GOOD)
    after, metrics = step(state, {"x": np.full((2, 2), bad, np.float32)})
    for name in ("params", "opt_state", "model_state", "ema"):
        for a, b in zip(
            jax.tree.leaves(getattr(state, name)),
            jax.tree.leaves(getattr(after, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    assert (int(after.step), float(metrics["skipped"])) == (2, 1.0)
    assert not np.isfinite(metrics["loss"])
    assert metrics["u"] != first["u"]  # the next step draws from other keys
    after, metrics = step(after, GOOD)
    assert jax.device_get(after.skips) == (1, 0) and float(metrics["skipped"]) == 0.0
    assert not np.array_equal(after.params, state.params)


def test_an_infinite_gradient_of_a_finite_loss_is_seen():
    def root_loss(params, model_state, batch, key):
        return jnp.sqrt(jnp.abs(params - 1).sum()), (model_state, {})

    tx = optax.sgd(0.1)
    step = train.make_train_step(root_loss, tx, finite_guard=True)
    state, metrics = step(state_of(tx, finite_guard=True), GOOD)
    assert float(metrics["loss"]) == 0.0 and float(metrics["skipped"]) == 1.0
    np.testing.assert_array_equal(state.params, np.ones(2))


def test_the_transformation_is_not_run_on_bad_gradients():
    """One that counts its calls sees the finite steps only, in float16 too."""

    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda g: -0.1 * g, updates), state + 1

    tx = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros((), jnp.int32), update
    )
    step = train.make_train_step(scaled_loss, tx, finite_guard=True)
    state = state_of(tx, finite_guard=True)
    for x in (1, np.nan, np.nan, 1):
        state, _ = step(state, {"x": np.full((2, 2), x, np.float32)})
    assert int(state.opt_state) == 2 and int(state.skips.total) == 2


def test_check_finite_ends_a_run_that_cannot_learn():
    tx = optax.sgd(0.1)
    step = train.make_train_step(scaled_loss, tx, finite_guard=True)
    state = state_of(tx, finite_guard=True)
    for _ in range(3):
        state, _ = step(state, {"x": np.full((2, 2), np.nan, np.float32)})
    train.check_finite(state, limit=3)
    with pytest.raises(FloatingPointError, match="last 3 steps.*from the first step"):
        train.check_finite(state, limit=2)
    with pytest.raises(TypeError, match="finite_guard=True"):
        train.check_finite(state_of(tx))


@pytest.mark.parametrize("shape", [(80, 64), (64,), (), (4, 20, 64)])
def test_one_bad_entry_is_found_wherever_it_is(shape, rng):
    finite = jax.jit(all_finite)
    x = rng.standard_normal(shape).astype(np.float32)
    x.flat[0] = 3e38  # large, and fine
    assert finite({"x": x, "y": np.float32(1)})
    for bad in (np.nan, np.inf, -np.inf):
        place = tuple(rng.integers(0, n) for n in shape)
        broken = np.array(x)
        broken[place] = bad
        assert not finite({"x": broken, "y": np.float32(1)})


def bytes_of(task, tx, params, model_state, batch, guard):
    state = train.TrainState.create(
        params,
        tx,
        key=jax.random.key(0),
        model_state=model_state,
        finite_guard=guard,
    )
    step = train.make_train_step(task.train_loss, tx, finite_guard=guard)
    compiled = step.lower(state, batch).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    assert cost is not None and memory is not None
    return cost["bytes accessed"], memory.alias_size_in_bytes, state


def test_the_guard_costs_few_bytes_and_leaves_donation_alone(key):
    """At most 1.15 times the bytes: a `where` over the state would be 1.44."""
    net = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(10)])
    task = train.from_linen(net, train.classification_loss)
    batch = {"image": jnp.ones((64, 784)), "label": jnp.zeros(64, jnp.int32)}
    params, model_state = jax.jit(task.init)(key, batch)
    arguments = (task, optax.sgd(0.1, momentum=0.9), params, model_state, batch)
    plain, *_ = bytes_of(*arguments, guard=False)
    guarded, alias, state = bytes_of(*arguments, guard=True)
    assert guarded <= 1.15 * plain
    kept = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    assert alias >= kept


def test_the_average_is_the_weighted_mean_of_the_steps():
    """Weights d**(n - t), the first parameters have none."""
    tx = optax.sgd(1.0)
    step = train.make_train_step(scaled_loss, tx, ema=0.5)
    state, seen = state_of(tx, ema=0.5), []
    np.testing.assert_array_equal(state.with_average().params, state.params)
    for x in (1.0, 2.0, -3.0):
        state, _ = step(state, {"x": np.full((2, 2), x, np.float32)})
        seen.append(np.asarray(state.params, np.float64))
    want = np.average(seen, axis=0, weights=[0.25, 0.5, 1.0])
    np.testing.assert_allclose(state.with_average().params, want, rtol=1e-6)


def test_the_average_of_bfloat16_parameters_is_kept_in_float32():
    tx = optax.sgd(1.0)
    state = train.TrainState.create(
        jnp.ones(2, jnp.bfloat16), tx, key=jax.random.key(0), ema=0.999
    )
    assert state.ema is not None and state.ema.average.dtype == jnp.float32
    assert state.with_average().params.dtype == jnp.bfloat16


def test_evaluate_uses_the_average_when_asked_with_one_compilation():
    def loss_fn(params, model_state, batch, key):
        return train.masked_mean(batch["x"] * params[0], batch), (model_state, {})

    tx = optax.sgd(1.0)
    state = state_of(tx, ema=0.5)
    step = train.make_train_step(loss_fn, tx, ema=0.5)
    for _ in range(2):
        state, _ = step(state, {"x": np.ones(4, np.float32)})  # 0, then -1
    eval_step = train.make_eval_step(loss_fn)
    batches = [{"x": np.full(4, 3.0, np.float32)}]
    with train.CompileCounter() as compiles:
        assert train.evaluate(eval_step, state, batches) == {"loss": -3.0}
        averaged = train.evaluate(eval_step, state, batches, ema=True)
    assert averaged["loss"] == pytest.approx(-2.0)
    assert compiles.counts["eval_step"] == 1
    with pytest.raises(TypeError, match="keeps no average.*ema=0.999"):
        train.evaluate(eval_step, state_of(tx), batches, ema=True)


@pytest.mark.parametrize(
    ("created", "built", "field"),
    [
        ({}, {"ema": 0.9}, "nothing in state.ema"),
        ({"ema": 0.9}, {}, "something in state.ema"),
        ({}, {"finite_guard": True}, "nothing in state.skips"),
        ({"finite_guard": True}, {}, "something in state.skips"),
        ({"finite_guard": True}, {"precision": "float16"}, "nothing in state.loss_sc"),
    ],
)
def test_a_state_of_other_options_is_refused(created, built, field):
    tx = optax.sgd(0.1)
    with pytest.raises(TypeError, match=f"{field}.*same tx, precision, finite_guard"):
        train.make_train_step(scaled_loss, tx, **built)(state_of(tx, **created), GOOD)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, float("nan")])
def test_a_decay_lies_between_zero_and_one(decay):
    with pytest.raises(ValueError, match="decay between 0 and 1"):
        train.make_train_step(scaled_loss, optax.sgd(0.1), ema=decay)
    with pytest.raises(ValueError, match="decay between 0 and 1"):
        state_of(optax.sgd(0.1), ema=decay)
