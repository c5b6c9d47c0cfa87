"""What the loss computes in, and dynamic loss scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxaccel import train


def square_loss(params, model_state, batch, key):
    predicted = batch["x"] @ params["w"]
    error = predicted.astype(jnp.float32) - batch["y"]
    return jnp.mean(error**2), (model_state, {})


def state_of(tx, precision, w=None, **options):
    params = {"w": jnp.zeros(3) if w is None else jnp.asarray(w, jnp.float32)}
    return train.TrainState.create(
        params, tx, key=jax.random.key(0), precision=precision, **options
    )


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_loss_sees_the_dtype_and_the_optimizer_float32(name):
    seen = {}

    def loss_fn(params, model_state, batch, key):
        seen["params"] = {k: p.dtype.name for k, p in params.items()}
        seen["batch"] = {k: x.dtype.name for k, x in batch.items()}
        loss = (params["w"].sum() + params["norm"].sum()) ** 2 + batch["x"].sum()
        return loss, (model_state, {})

    def update(updates, state, params=None, **extra):
        trees = (updates, params, extra["value"], extra["grad"])
        seen["update"] = {x.dtype.name for x in jax.tree.leaves(trees)}
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = {"w": jnp.ones(2), "norm": jnp.ones(2)}
    batch = {
        "x": np.zeros(2, np.float32),
        "label": np.zeros(2, np.float32),
        "id": np.zeros(2, np.uint8),
    }
    state = train.TrainState.create(params, tx, key=jax.random.key(0), precision=name)
    state, _ = train.make_train_step(loss_fn, tx, precision=name)(state, batch)
    assert seen["params"] == {"w": name, "norm": name}
    assert seen["batch"] == {"x": name, "label": "float32", "id": "uint8"}
    assert seen["update"] == {"float32"}
    assert state.params["w"].dtype == jnp.float32
    eval_step = train.make_eval_step(loss_fn, precision=name)
    jax.eval_shape(eval_step, state, batch)
    assert seen["batch"]["x"] == name


def test_a_policy_keeps_what_its_pattern_finds():
    policy = train.Precision("bfloat16", keep="norm|bias$", exclude=("x",))
    params = {"norm_1": {"scale": jnp.ones(1)}, "dense": {"bias": jnp.ones(1)}}
    params["dense"]["kernel"] = jnp.ones(1)
    cast = policy.cast_params(params)
    assert cast["norm_1"]["scale"].dtype == cast["dense"]["bias"].dtype == jnp.float32
    assert cast["dense"]["kernel"].dtype == jnp.bfloat16
    batch = policy.cast_batch({"x": jnp.ones(1), "label": jnp.ones(1)})
    assert (batch["x"].dtype, batch["label"].dtype) == (jnp.float32, jnp.bfloat16)


def test_scaling_saves_gradients_that_float16_loses(rng):
    """2**-26 is below float16's smallest number, and exact after unscaling."""

    def tiny_loss(params, model_state, batch, key):
        # In float16 up to here: its cotangent is 2**-26 times the scale.
        return params["w"].sum().astype(jnp.float32) * 2.0**-26, (model_state, {})

    tx, batch = optax.sgd(1.0), {"x": np.zeros(2, np.float32)}
    moved = {}
    for scale in (1.0, 2.0**12):
        policy = train.Precision("float16", loss_scale=scale)
        step = train.make_train_step(tiny_loss, tx, precision=policy)
        state, metrics = step(state_of(tx, policy), batch)
        moved[scale] = float(state.params["w"][0])
        assert float(metrics["loss_scale"]) == scale
        assert float(metrics["loss"]) == 0.0
    assert moved == {1.0: 0.0, 2.0**12: -(2.0**-26)}


def test_overflow_is_skipped_halves_the_scale_and_recovers():
    """Overflow at steps 2 and 3; the scale doubles after three good steps."""
    policy = train.Precision("float16", loss_scale=8.0, growth_interval=3)
    tx = optax.sgd(0.125, momentum=0.5)
    step = train.make_train_step(square_loss, tx, precision=policy, ema=0.5)
    state = state_of(tx, policy, [1.0, 0.0, 0.0], ema=0.5)
    good = {"x": np.eye(3, dtype=np.float32), "y": np.zeros(3, np.float32)}
    bad = {**good, "x": good["x"] * 1e6}  # beyond float16: infinite
    scales, counts, params = [], [], [np.asarray(state.params["w"])]
    for t in range(9):
        state, metrics = step(state, bad if t in (2, 3) else good)
        scales.append(float(state.loss_scale.scale))
        counts.append((int(state.skips.total), int(state.skips.in_a_row)))
        params.append(np.asarray(state.params["w"]))
        assert float(metrics["skipped"]) == float(t in (2, 3))
    assert scales == [8, 8, 4, 2, 2, 2, 4, 4, 4]
    assert counts[1:5] == [(0, 0), (1, 1), (2, 2), (2, 0)]
    np.testing.assert_array_equal(params[2], params[4])
    assert int(state.step) == 9
    # As if the two steps had never been: nine minus two of the recursion.
    w, trace = 1.0, 0.0
    for _ in range(7):
        trace = 0.5 * trace + 2 * w / 3
        w -= 0.125 * trace
    np.testing.assert_allclose(params[-1][0], w, rtol=2e-3)


def test_the_scale_stays_within_its_range():
    policy = train.Precision("float16", loss_scale=2.0**24, growth_interval=1)
    first = policy.init()
    assert first is not None
    assert float(policy.update(first, jnp.array(True)).scale) == 2.0**24
    first = first._replace(scale=jnp.array(1.0))
    assert float(policy.update(first, jnp.array(False)).scale) == 1.0


def test_the_scale_never_reaches_the_transformation(rng):
    """Unscaled before the clipping: a large scale does not change the step."""
    batch = {
        "x": rng.integers(-2, 3, (8, 3)).astype(np.float32),
        "y": np.ones(8, np.float32),
    }
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.25))
    steps = {}
    for scale in (1.0, 2.0**10):
        policy = train.Precision("float16", loss_scale=scale)
        step = train.make_train_step(square_loss, tx, precision=policy)
        state, metrics = step(state_of(tx, policy), batch)
        steps[scale] = np.asarray(state.params["w"]), float(metrics["loss"])
    np.testing.assert_allclose(steps[1.0][0], steps[2.0**10][0], rtol=1e-3)
    assert steps[1.0][1] == steps[2.0**10][1] == 1.0
    np.testing.assert_allclose(np.linalg.norm(steps[2.0**10][0]), 0.125, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"compute": "int8"}, TypeError, "floating dtype; got int8"),
        ({"compute": "half-ish"}, TypeError, "must be a dtype.*'half-ish'"),
        ({"compute": "float16", "loss_scale": 0.5}, ValueError, "between 1 and"),
        ({"compute": "float16", "growth_interval": 0}, ValueError, "at least 1 step"),
        ({"compute": "bfloat16", "keep": "("}, ValueError, "regular expression"),
    ],
)
def test_a_policy_checks_its_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        train.Precision(**arguments)


def test_an_unknown_precision_is_explained():
    with pytest.raises(ValueError, match="float32, bfloat16, float16.*'fp8'"):
        train.make_train_step(square_loss, optax.sgd(0.1), precision="fp8")
