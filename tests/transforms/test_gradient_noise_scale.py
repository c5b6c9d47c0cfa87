"""The noise scale of gradients whose mean and covariance are known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxaccel.transforms import estimate_gradient_noise, gradient_noise_scale


@given(
    signal=st.floats(0, 100),
    trace=st.floats(0, 1e3),
    small=st.integers(1, 64),
    ratio=st.integers(2, 32),
)
def test_expected_squares_give_back_signal_and_noise(signal, trace, small, ratio):
    # E |G_B|^2 = |G|^2 + tr(S) / B, whatever the batch size B.
    big = ratio * small
    noise = estimate_gradient_noise(
        signal + trace / small, signal + trace / big, small, big
    )
    atol = 1e-5 * (signal + trace) + 1e-30
    np.testing.assert_allclose(float(noise.gradient_square), signal, 1e-5, atol)
    np.testing.assert_allclose(float(noise.noise_trace), trace, 1e-5, small * 2 * atol)


@pytest.mark.parametrize("batches", [(0, 8), (8, 8), (16, 8), (-1, 8)])
def test_batch_sizes_must_differ(batches):
    with pytest.raises(ValueError, match="0 < small < big"):
        estimate_gradient_noise(1.0, 1.0, *batches)


def examples(rng, count):
    """Gradients of single examples: mean (1, 1, 1, 1), trace of covariance 8."""
    return rng.normal(1, np.sqrt(2), (count, 4)).astype(np.float32)


def split(gradient):
    return {"kernel": jnp.asarray(gradient[:2].reshape(2, 1)), "b": gradient[2:]}


def oracle(small_gradients, batch_size, micro_batches, decay):
    """Debiased averages of both estimators, in float64."""
    groups = small_gradients.astype(np.float64).reshape(-1, micro_batches, 4)
    big = batch_size * micro_batches
    signal = trace = weight = 0.0
    for group in groups:
        small_square = (group**2).sum(1).mean()
        big_square = (group.mean(0) ** 2).sum()
        s = (big * big_square - batch_size * small_square) / (big - batch_size)
        t = (small_square - big_square) / (1 / batch_size - 1 / big)
        signal, trace = (
            decay * signal + (1 - decay) * s,
            decay * trace + (1 - decay) * t,
        )
        weight = decay * weight + 1 - decay
    return signal / weight, trace / weight


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_micro_batches_agree_with_float64(rng, decay):
    gradients = examples(rng, 8 * 30).reshape(30, 8, 4).mean(1)
    tx = gradient_noise_scale(8, micro_batches=3, decay=decay)
    state: Any = tx.init(split(gradients[0]))
    update = jax.jit(tx.update)
    for i, gradient in enumerate(gradients):
        updates, state = update(split(gradient), state)
        assert (updates["b"] == gradient[2:]).all()
        assert int(state.count) == (i + 1) // 3
        assert int(state.micro_count) == (i + 1) % 3
    signal, trace = oracle(gradients, 8, 3, decay)
    assert float(state.gradient_square) == pytest.approx(signal, rel=1e-4)
    assert float(state.noise_trace) == pytest.approx(trace, rel=1e-4)
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.total))
    scale = optax.tree.get(state, "noise_scale")
    assert float(scale) == pytest.approx(max(trace, 0) / signal, rel=1e-4)


def test_finds_the_noise_scale_of_a_known_distribution(rng):
    tx = gradient_noise_scale(2, micro_batches=4, decay=0.999)
    gradients = jnp.asarray(examples(rng, 2 * 4 * 2000).reshape(-1, 2, 4).mean(1))

    def step(state, gradient):
        return tx.update({"g": gradient}, state)[1], None

    state: Any = jax.lax.scan(step, tx.init({"g": jnp.zeros(4)}), gradients)[0]
    # tr(S) / |G|^2 = 8 / 4
    assert float(state.noise_scale) == pytest.approx(2, rel=0.1)


def test_around_multi_steps(rng):
    inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    tx = optax.chain(gradient_noise_scale(8, micro_batches=2), inner)
    params = {"g": jnp.zeros(4)}
    gradients = examples(rng, 2)
    state: Any = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):  # Optax divides by an int32 count.
        for gradient in gradients:
            updates: Any
            updates, state = tx.update({"g": jnp.asarray(gradient)}, state, params)
    np.testing.assert_allclose(updates["g"], -0.1 * gradients.mean(0), 1e-5, 1e-6)
    _, trace = oracle(gradients, 8, 2, 0.0)
    found = optax.tree.get(state, "noise_trace")
    assert float(found) == pytest.approx(trace, rel=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_large_batch_that_is_not_finite_is_left_out(rng, bad):
    tx = gradient_noise_scale(8, micro_batches=2)
    clean = spoilt = tx.init({"g": jnp.zeros(4)})
    for gradient in examples(rng, 2):
        clean = tx.update({"g": jnp.asarray(gradient)}, clean)[1]
    spoilt: Any = clean
    for gradient in (np.full(4, bad, np.float32), examples(rng, 1)[0]):
        updates: Any
        updates, spoilt = tx.update({"g": jnp.asarray(gradient)}, spoilt)
        np.testing.assert_array_equal(updates["g"], gradient)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), clean, spoilt)
    assert jax.tree.all(same)


def test_without_a_signal_the_scale_is_infinite():
    tx = gradient_noise_scale(8, micro_batches=2)
    state: Any = tx.init({"g": jnp.zeros(1)})
    assert float(state.noise_scale) == 0
    for gradient in (1.0, -1.0):
        state = tx.update({"g": jnp.array([gradient])}, state)[1]
    assert np.isposinf(float(state.noise_scale))


def on_devices(fn, specs, check_vma=True):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_across_devices_agrees_with_float64(rng, check_vma):
    gradients = examples(rng, 4)
    spec = P("data", "model")
    tx = gradient_noise_scale(
        8, data_axis="data", axis_name=lambda path, leaf: P("model"), decay=0.0
    )

    def noise(rows):
        state: Any = tx.update({"g": rows[0]}, tx.init({"g": rows[0]}))[1]
        return state.gradient_square, state.noise_trace, state.count

    found = on_devices(noise, (spec,), check_vma)(jnp.asarray(gradients))
    signal, trace = oracle(gradients, 8, 4, 0.0)
    assert float(found[0]) == pytest.approx(signal, rel=1e-4)
    assert float(found[1]) == pytest.approx(trace, rel=1e-4)
    assert int(found[2]) == 1


def test_gradients_of_parameters_made_varying_are_local(rng):
    data = jnp.asarray(examples(rng, 4))
    tx = gradient_noise_scale(1, data_axis="data")

    def loss(params, rows):
        return jnp.sum(params["g"] * rows[0])

    def trace(varying, params, rows):
        if varying:
            params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(loss)(params, rows)
        state: Any = tx.update(grads, tx.init(grads))[1]
        return state.noise_trace

    params, specs = {"g": jnp.zeros(4)}, (P(), P("data"))
    found = on_devices(lambda p, x: trace(True, p, x), specs)(params, data)
    expected = oracle(np.asarray(data), 1, 4, 0.0)[1]
    assert float(found) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match=r"\['g'\] is the same on all devices.*pcast"):
        on_devices(lambda p, x: trace(False, p, x), specs)(params, data)


def test_bad_arguments():
    for kwargs in ({}, {"micro_batches": 2, "data_axis": "x"}):
        with pytest.raises(ValueError, match="exactly one"):
            gradient_noise_scale(8, **kwargs)
    with pytest.raises(ValueError, match="`micro_batches` must be at least 2"):
        gradient_noise_scale(8, micro_batches=1)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        gradient_noise_scale(0, micro_batches=2)
    with pytest.raises(ValueError, match="`decay` must be"):
        gradient_noise_scale(8, micro_batches=2, decay=1.0)
    grads = {"g": jnp.ones(2)}
    tx = gradient_noise_scale(8, data_axis="data")
    with pytest.raises(ValueError, match="inside jax.shard_map only"):
        tx.update(grads, tx.init(grads))
