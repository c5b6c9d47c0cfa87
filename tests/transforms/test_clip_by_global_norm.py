"""Clipping by the global norm: Optax where it is right, and where it is not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel.transforms import clip_by_global_norm


def update(grads, max_norm: Any = 1.0, **extra) -> Any:
    tx = clip_by_global_norm(max_norm)
    return tx.update(grads, tx.init(grads), None, **extra)[0]


def norm(tree):
    leaves = [np.asarray(leaf).astype(np.complex128) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum((np.abs(leaf) ** 2).sum() for leaf in leaves)))


def tree(rng, scale=1.0, dtypes=(jnp.float32, jnp.float32)) -> Any:
    return {
        "kernel": jnp.asarray(scale * rng.normal(size=(20, 10)), dtypes[0]),
        "bias": jnp.asarray(scale * rng.normal(size=10), dtypes[1]),
    }


@given(
    seed=st.integers(0, 10_000),
    log_scale=st.floats(-3, 3),
    max_norm=st.floats(1e-3, 1e3),
)
def test_equals_optax_in_float32(seed, log_scale, max_norm):
    grads = tree(np.random.default_rng(seed), 10.0**log_scale)
    ours = update(grads, max_norm)
    theirs, _ = optax.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * max_norm)


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e6, np.inf])
def test_norm_afterwards_and_direction(rng, max_norm):
    grads = tree(rng)
    updates = update(grads, max_norm)
    assert norm(updates) == pytest.approx(min(norm(grads), max_norm), rel=1e-6)
    dot = sum(float(jnp.vdot(grads[name], updates[name])) for name in grads)
    cosine = dot / (norm(grads) * norm(updates))
    assert cosine == pytest.approx(1, abs=1e-6)
    again = update(updates, max_norm)
    assert norm(optax.tree.sub(again, updates)) <= 1e-6 * norm(updates)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_within_the_bound_nothing_changes_a_bit(rng, dtype):
    grads = tree(rng, 1e-3, (dtype, dtype))
    # Subnormals, which a multiplication by 1 may flush, and signed zeros.
    tiny = float(jnp.finfo(dtype).tiny) / 4
    grads["bias"] = jnp.array([tiny, -tiny, 0.0, -0.0], dtype)
    for max_norm in (1.0, np.inf):
        updates = update(grads, max_norm)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_norm_equal_to_the_bound_fits():
    grads = {"a": jnp.array([3.0, 4.0])}
    assert (update(grads, 5.0)["a"] == grads["a"]).all()


def test_zero_gradients_and_a_zero_bound():
    zeros, ones = {"a": jnp.zeros(3)}, {"a": jnp.ones(3)}
    for max_norm in (0.0, 1.0, np.inf):
        assert not update(zeros, max_norm)["a"].any()
    assert not update(ones, 0.0)["a"].any()


@pytest.mark.parametrize("scale", [1e-5, 300.0])
def test_float16_norms_are_float32(rng, scale):
    grads = tree(rng, scale, (jnp.float16, jnp.float16))
    max_norm = norm(grads) / 2
    updates = update(grads, max_norm)
    # Half a unit in the last place, or half the smallest subnormal.
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        exact = np.asarray(g, np.float64) / 2
        error = np.abs(np.asarray(u, np.float64) - exact)
        assert (error <= 2.0**-10 * np.abs(exact) + 3.1e-8).all()


def test_many_bfloat16_leaves_do_not_lose_the_norm():
    grads = [jnp.full((10,), 0.1, jnp.bfloat16)] * 400
    assert norm(update(grads, 1.0)) == pytest.approx(1.0, rel=4e-3)


def test_compiled_size_grows_with_the_number_of_leaves_not_its_square():
    def size(leaves):
        tx = clip_by_global_norm(1.0)
        grads = [jnp.ones((10, 10))] * leaves
        compiled = jax.jit(lambda g: tx.update(g, optax.EmptyState())[0]).lower(grads)
        return len(str(compiled.compile().as_text()))

    assert size(80) < 2.5 * size(40)


def test_large_leaves_keep_the_norm():
    grads = {"kernel": jnp.full((3, 3, 512, 512), 0.1)}
    assert norm(update(grads, 1.0)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("max_norm", [jnp.float32(0.5), jnp.bfloat16(0.5), 0.5, 1])
def test_mixed_types_and_any_type_of_bound(rng, max_norm):
    grads = tree(rng, 1.0, (jnp.bfloat16, jnp.float32))
    grads["half"] = jnp.ones(4, jnp.float16)
    updates = update(grads, max_norm)
    assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(
        lambda g: g.dtype, grads
    )
    assert norm(updates) == pytest.approx(float(max_norm), rel=2e-3)


def test_a_scheduled_bound(rng):
    grads = tree(rng)
    tx = optax.inject_hyperparams(clip_by_global_norm)(lambda count: 1.0 / (count + 1))
    with jax.numpy_dtype_promotion("standard"):  # Optax divides by an int32 count.
        state = tx.init(grads)
        for expected in (1.0, 0.5):
            updates, state = tx.update(grads, state, grads)
            assert norm(updates) == pytest.approx(expected, rel=1e-6)


def test_a_norm_that_is_known_already(rng):
    grads = tree(rng)
    exact = jnp.float32(norm(grads))
    assert norm(optax.tree.sub(update(grads, norm=exact), update(grads))) < 1e-6
    halved = update(grads, norm=2 * exact)
    assert norm(halved) == pytest.approx(0.5, rel=1e-6)
    chained = optax.chain(optax.scale(1.0), clip_by_global_norm(1.0))
    updates, _ = chained.update(grads, chained.init(grads), grads, norm=2 * exact)
    assert norm(updates) == pytest.approx(0.5, rel=1e-6)
    with pytest.raises(ValueError, match=r"`norm`.*\(3,\)"):
        update(grads, norm=jnp.ones(3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_norm_that_is_not_finite_spoils_everything_loudly(rng, bad):
    grads = tree(rng)
    grads["bias"] = grads["bias"].at[0].set(bad)
    updates = update(grads)
    assert all(bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(updates))


def test_an_infinite_bound_passes_infinities():
    grads = {"a": jnp.array([1.0, jnp.inf])}
    assert (update(grads, np.inf)["a"] == grads["a"]).all()


def test_skipping_steps_that_are_not_finite(rng):
    tx: Any = optax.apply_if_finite(clip_by_global_norm(1.0), max_consecutive_errors=3)
    grads = {"a": jnp.array([1.0, jnp.inf])}
    updates, _ = tx.update(grads, tx.init(grads))
    assert not updates["a"].any()


def test_derivative_is_that_of_the_normalized_gradient():
    def clipped(g):
        tx: Any = clip_by_global_norm(1.0)
        return tx.update({"g": g}, optax.EmptyState())[0]["g"]

    g = jnp.array([3.0, 4.0])
    unit = np.array([0.6, 0.8])
    expected = (np.eye(2) - np.outer(unit, unit)) / 5
    np.testing.assert_allclose(jax.jacobian(clipped)(g), expected, atol=1e-7)
    np.testing.assert_allclose(jax.jacobian(clipped)(jnp.zeros(2)), np.eye(2))


def test_complex_gradients(rng):
    grads = {"a": jnp.array([3j, 4.0 + 0j], jnp.complex64), "b": jnp.array([12.0])}
    updates = update(grads, 1.0)
    np.testing.assert_allclose(updates["a"], np.array([3j, 4]) / 13, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [12 / 13], rtol=1e-6)


@pytest.mark.parametrize("max_norm", [-1.0, np.nan, jnp.ones(2), jnp.float32(-1)])
def test_bad_bounds(max_norm):
    with pytest.raises(ValueError, match="`max_norm` must be"):
        clip_by_global_norm(max_norm)


def test_bounds_of_a_wrong_type():
    for max_norm in ("1", None, True, 1j):
        with pytest.raises(TypeError):
            clip_by_global_norm(max_norm)  # pyright: ignore[reportArgumentType]


def test_derivative_without_a_bound_is_the_identity():
    def total(x):
        return jnp.sum(update({"a": x}, np.inf)["a"])

    np.testing.assert_array_equal(jax.grad(total)(jnp.arange(3.0)), np.ones(3))


def test_a_bound_of_zero_leaves_nothing_of_the_tiniest_gradient():
    # Its squares vanish in float32, so that its norm is 0 as well.
    grads = {"a": jnp.array([1e-25, 0.0])}
    np.testing.assert_array_equal(update(grads, 0.0)["a"], np.zeros(2))
