"""Statistics of gradients and updates against NumPy, and how they are read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel import train
from jaxaccel.transforms import (
    clip_by_layer_norm,
    clip_by_value,
    gradient_statistics,
    write_gradient_statistics,
)

NAMES = ("gradient_norm", "gradient_mean", "gradient_std", "update_ratio")


def tree(rng, scale=1.0, dtype=jnp.float32) -> Any:
    return {
        "Dense_0": {
            "kernel": jnp.asarray(scale * rng.normal(0.3, 1, (8, 5)), dtype),
            "bias": jnp.asarray(scale * rng.normal(0.3, 1, 5), dtype),
        }
    }


def numpy_statistics(grad, update, weight):
    g, u, w = (np.asarray(x, np.float64) for x in (grad, update, weight))
    norm = np.linalg.norm
    return norm(g), g.mean(), g.std(), norm(u) / norm(w)


@given(
    log_scale=st.floats(-4, 4),
    offset=st.floats(-100, 100),
    shape=st.sampled_from([(), (1,), (9,), (4, 5), (2, 3, 4)]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(log_scale, offset, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    grad = jnp.asarray(10.0**log_scale * rng.normal(offset, 1, shape), dtype)
    weight = jnp.asarray(rng.normal(size=shape), jnp.float32)
    tx = gradient_statistics(optax.scale(-0.125))
    state: Any = tx.init({"g": weight})
    updates: Any
    updates, state = tx.update({"g": grad}, state, {"g": weight})
    assert (updates["g"] == -0.125 * grad).all()
    expected = numpy_statistics(grad, updates["g"], weight)
    for name, value in zip(NAMES, expected, strict=True):
        found = optax.tree.get(state, name)["g"]
        assert found.dtype == jnp.float32 and found.shape == ()
        np.testing.assert_allclose(
            float(found), value, rtol=2e-6, atol=1e-6 * abs(expected[1])
        )


def test_the_share_of_entries_that_are_clipped(rng):
    params, grads = tree(rng), tree(rng)
    for clip in (clip_by_value(0.5), clip_by_layer_norm(2.5)):
        tx = gradient_statistics(optax.sgd(0.1), clip=clip)
        state: Any = tx.init(params)
        updates: Any
        updates, state = tx.update(grads, state, params)
        alone: Any = clip.update(grads, clip.init(params), params)[0]
        for layer in ("kernel", "bias"):
            g, c = grads["Dense_0"][layer], alone["Dense_0"][layer]
            share = float(state.fraction_clipped["Dense_0"][layer])
            assert share == pytest.approx(np.mean(np.asarray(g) != np.asarray(c)))
            assert jnp.allclose(updates["Dense_0"][layer], -0.1 * c, rtol=1e-6)
    kernel_norm = float(jnp.linalg.norm(grads["Dense_0"]["kernel"]))
    clipped = state.fraction_clipped["Dense_0"]
    assert kernel_norm > 2.5 and float(clipped["kernel"]) == 1
    assert (
        optax.tree.get(
            gradient_statistics(optax.sgd(0.1)).init(params), "fraction_clipped"
        )
        is None
    )


def test_wraps_a_chain_without_changing_it(rng):
    params = tree(rng)
    chain = optax.chain(clip_by_value(0.5), optax.sgd(1e-2, momentum=0.9))
    tx = gradient_statistics(chain)
    state, plain = tx.init(params), chain.init(params)
    for _ in range(3):
        grads = tree(rng)
        updates, state = jax.jit(tx.update)(grads, state, params)
        expected, plain = jax.jit(chain.update)(grads, plain, params)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), updates, expected)
        assert jax.tree.all(same)


def test_running_averages_start_unbiased(rng):
    params, tx = tree(rng), gradient_statistics(optax.sgd(0.1), decay=0.9)
    state: Any = tx.init(params)
    total = weight = 0.0
    for _ in range(12):
        grads = tree(rng)
        state = tx.update(grads, state, params)[1]
        kernel = np.asarray(grads["Dense_0"]["kernel"], np.float64)
        total, weight = 0.9 * total + 0.1 * kernel.std(), 0.9 * weight + 0.1
        found = float(state.gradient_std["Dense_0"]["kernel"])
        assert found == pytest.approx(total / weight, rel=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_is_counted_and_left_out(rng, bad):
    params, tx = tree(rng), gradient_statistics(optax.sgd(0.1), decay=0.5)
    state: Any = tx.update(tree(rng), tx.init(params), params)[1]
    grads = tree(rng)
    grads["Dense_0"]["bias"] = grads["Dense_0"]["bias"].at[1].set(bad)
    updates: Any
    after: Any
    updates, after = tx.update(grads, state, params)
    bias = -0.1 * grads["Dense_0"]["bias"]
    np.testing.assert_array_equal(updates["Dense_0"]["bias"], bias)
    assert int(after.skipped) == 1 and int(after.count) == 1
    for name in NAMES:
        old, new = getattr(state, name), getattr(after, name)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), old, new))


def test_weights_of_zero_have_the_ratio_zero(rng):
    params = jax.tree.map(jnp.zeros_like, tree(rng))
    tx = gradient_statistics(optax.sgd(0.1))
    state: Any = tx.update(tree(rng), tx.init(params), params)[1]
    assert not any(leaf for leaf in jax.tree.leaves(state.update_ratio))
    assert int(state.skipped) == 0


def test_is_sent_to_a_writer_in_one_call(rng):
    calls = []

    class Writer:
        def scalars(self, step, values):
            calls.append((step, values))

    params, grads = tree(rng), tree(rng)
    tx = optax.chain(gradient_statistics(optax.sgd(0.1), clip=clip_by_value(0.5)))
    state = tx.update(grads, tx.init(params), params)[1]
    write_gradient_statistics(Writer(), 3, state)
    ((step, values),) = calls
    assert step == 3 and all(type(value) is float for value in values.values())
    names = (*NAMES, "fraction_clipped")
    assert set(values) == {
        f"{name}/Dense_0/{leaf}" for name in names for leaf in ("kernel", "bias")
    } | {"skipped_updates"}
    kernel = np.asarray(grads["Dense_0"]["kernel"], np.float64)
    found = values["gradient_norm/Dense_0/kernel"]
    assert found == pytest.approx(np.linalg.norm(kernel), rel=1e-6)


def test_tensorboard_takes_them(rng, tmp_path):
    params, tx = tree(rng), gradient_statistics(optax.sgd(0.1))
    state = tx.update(tree(rng), tx.init(params), params)[1]
    with train.TensorBoardWriter(tmp_path) as writer:
        write_gradient_statistics(writer, 0, state)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    assert b"update_ratio/Dense_0/kernel" in written


def test_errors_say_what_to_do(rng, unchecked):
    params = tree(rng)
    tx = gradient_statistics(optax.sgd(0.1))
    with pytest.raises(ValueError, match="holds 0 of gradient_statistics"):
        write_gradient_statistics(None, 0, optax.sgd(0.1).init(params))  # pyright: ignore[reportArgumentType]
    both = optax.chain(tx, tx).init(params)
    with pytest.raises(ValueError, match="holds 2 of gradient_statistics"):
        write_gradient_statistics(None, 0, both)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="compares updates with weights"):
        tx.update(params, tx.init(params))
    wrong: Any
    for wrong in (None, 3, optax.MultiSteps(optax.sgd(0.1), 2)):
        with pytest.raises(TypeError, match="`inner` must be"):
            gradient_statistics(wrong)
    with pytest.raises(TypeError, match="`clip` must be"):
        gradient_statistics(optax.sgd(0.1), clip=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`decay` must be"):
        gradient_statistics(optax.sgd(0.1), decay=1.0)


def test_the_compiled_program_grows_with_the_leaves_alone():
    def reductions(count):
        leaf = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        grads = {f"l{i}": leaf for i in range(count)}
        tx = gradient_statistics(optax.sgd(0.1))
        state = jax.eval_shape(tx.init, grads)
        text = str(jax.jit(tx.update).lower(grads, state, grads).compile().as_text())
        return text.count(" reduce(")

    # Fused into each of the scalars that are stored, they would be squared.
    assert reductions(12) <= 3.5 * reductions(4)
