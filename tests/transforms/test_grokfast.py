"""Grokfast's filter against a float64 loop, and its policy for bad gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel.transforms import grokfast_ema


def oracle(grads, alpha, lamb):
    """The published code: the average starts as the first gradient."""
    ema, out = grads[0], []
    for grad in grads:
        ema = alpha * ema + (1 - alpha) * grad
        out.append(grad + lamb * ema)
    return out, ema


@given(
    alpha=st.floats(0, 0.99),
    lamb=st.floats(0, 5),
    shape=st.sampled_from([(), (3,), (2, 4), (2, 1, 3)]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(alpha, lamb, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    grads = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(6)]
    tx = grokfast_ema(alpha, lamb)
    state: Any = tx.init({"g": grads[0]})
    expected, ema = oracle([np.asarray(g, np.float64) for g in grads], alpha, lamb)
    for grad, want in zip(grads, expected, strict=True):
        updates: Any
        updates, state = tx.update({"g": grad}, state)
        error = np.abs(np.asarray(updates["g"], np.float64) - want)
        limit = float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-5
        assert updates["g"].dtype == dtype and (error <= limit).all()
    assert state.ema["g"].dtype == jnp.float32 and int(state.count) == 6
    np.testing.assert_allclose(np.asarray(state.ema["g"]), ema, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("at", [0, 2])
def test_a_norm_that_is_not_finite_touches_nothing(rng, bad, at):
    tx = grokfast_ema(0.5)
    params: Any = {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
    grads = [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        for _ in range(4)
    ]
    clean = tx.init(params)
    for grad in grads:
        expected, clean = tx.update(grad, clean)
    state = tx.init(params)
    for i, grad in enumerate(grads):
        if i == at:
            spoilt = grad | {"kernel": grad["kernel"].at[1, 1].set(bad)}
            updates, after = tx.update(spoilt, state)
            assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
            same = jax.tree.map(lambda a, b: bool((a == b).all()), after, state)
            assert jax.tree.all(same)
            state = after
        updates, state = tx.update(grad, state)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), updates, expected)
    )


def test_amplifies_the_slow_and_passes_the_fast():
    tx = grokfast_ema(0.98, 2.0)
    state: Any = tx.init({"g": jnp.zeros(2)})
    for i in range(400):
        updates: Any
        updates, state = tx.update({"g": jnp.array([1.0, (-1.0) ** i])}, state)
    assert float(updates["g"][0]) == pytest.approx(3, abs=1e-5)
    assert float(updates["g"][1]) == pytest.approx(-1, abs=0.03)


def test_no_average_changes_nothing_and_no_memory_scales(rng):
    grads = {"g": jnp.asarray(rng.normal(size=7), jnp.float32)}
    for tx, factor in ((grokfast_ema(lamb=0.0), 1), (grokfast_ema(0.0, 1.0), 2)):
        updates: Any = tx.update(grads, tx.init(grads))[0]
        assert (updates["g"] == factor * grads["g"]).all()


def test_masked_leaves_have_no_average():
    params = {"a": jnp.ones(3), "b": jnp.ones(4)}
    tx = optax.masked(grokfast_ema(), {"a": True, "b": False})
    state: Any = tx.init(params)
    assert isinstance(state.inner_state.ema["b"], optax.MaskedNode)
    updates: Any = tx.update(params, state)[0]
    assert (updates["a"] == 3).all() and (updates["b"] == 1).all()


@pytest.mark.parametrize(
    "kwargs,name",
    [
        ({"alpha": 1.0}, "alpha"),
        ({"alpha": -0.1}, "alpha"),
        ({"alpha": np.nan}, "alpha"),
        ({"lamb": -1.0}, "lamb"),
        ({"lamb": np.inf}, "lamb"),
    ],
)
def test_bad_numbers(kwargs, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        grokfast_ema(**kwargs)
