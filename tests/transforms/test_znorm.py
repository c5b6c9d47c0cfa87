"""ZNorm against a float64 oracle, and what its formula promises."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel.transforms import KernelDims, override_dims, torch_dims, znorm


def oracle(grad, axes, eps=1e-8, ddof=0):
    g = np.asarray(grad, np.float64)
    mean = g.mean(axes, keepdims=True)
    return (g - mean) / (g.std(axes, keepdims=True, ddof=ddof) + eps)


def update(grad, **kwargs) -> Any:
    """Returns the update of one kernel whose last axis is the output."""
    ndim = np.ndim(grad)
    dims = KernelDims(tuple(range(max(ndim - 1, 1))), (ndim - 1,) if ndim > 1 else ())
    options: Any = {"dims": lambda path, leaf: dims, "min_ndim": 1} | kwargs
    tx: Any = znorm(**options)
    grads = {"g": grad}
    return tx.update(grads, tx.init(grads))[0]["g"]


def normal(rng, shape, mean=0.0, std=1.0, dtype=jnp.float32):
    return jnp.asarray(rng.normal(mean, std, shape), dtype)


SHAPES = [(50,), (12, 9), (3, 8, 5), (3, 3, 4, 6), (2, 3, 3, 4, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ddof", [0, 1])
def test_agrees_with_float64(rng, shape, ddof):
    grad = normal(rng, shape, mean=1e-3, std=1e-2)
    whole = tuple(range(len(shape)))
    actual = np.asarray(update(grad, ddof=ddof))
    assert np.abs(actual - oracle(grad, whole, ddof=ddof)).max() <= 2e-6
    unit = np.asarray(update(grad, ddof=ddof, scope="unit"))
    fan_in = whole[:-1] or (0,)
    assert np.abs(unit - oracle(grad, fan_in, ddof=ddof)).max() <= 2e-6


ANY_SHAPES = [(1, 1), (7, 1), (8, 3), (1, 9), (3, 2, 5), (2, 4, 1), (2, 3, 2, 9)]


@given(
    shape=st.sampled_from(ANY_SHAPES),
    log_scale=st.floats(-4, 4),
    offset=st.floats(-3, 3),
    scope=st.sampled_from(["tensor", "unit"]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_scale(shape, log_scale, offset, scope, seed):
    rng = np.random.default_rng(seed)
    scale = 10.0**log_scale
    grad = (scale * rng.normal(offset, 1, shape)).astype(np.float32)
    axes = tuple(range(len(shape) - (scope == "unit")))
    count = np.prod([shape[axis] for axis in axes])
    tx: Any = znorm(scope=scope, eps=1e-12)
    grads = {"conv": {"kernel": jnp.asarray(grad)}}
    # Without init: a tree in which all leaves are too small is refused there.
    actual = np.asarray(tx.update(grads, optax.EmptyState())[0]["conv"]["kernel"])
    if count < 8:
        np.testing.assert_array_equal(actual, grad)
    else:
        expected = oracle(grad, axes, eps=1e-12)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scope,axes", [("tensor", (0, 1)), ("unit", (0,))])
def test_mean_is_zero_and_deviation_one(rng, scope, axes):
    z = np.asarray(update(normal(rng, (300, 20), 0.5, 2.0), scope=scope), np.float64)
    assert np.abs(z.mean(axes)).max() < 1e-6
    assert np.abs(np.sqrt((z**2).mean(axes)) - 1).max() < 1e-6


@pytest.mark.parametrize("factor", [1e-3, 0.5, 7.0, 1e3])
def test_scale_and_shift_do_not_matter(rng, factor):
    grad = normal(rng, (40, 20))
    z = update(grad)
    assert jnp.abs(update(factor * grad) - z).max() < 1e-4 * (factor < 1) + 2e-6
    assert jnp.abs(update(grad + 3.0) - z).max() < 5e-6
    assert (update(-grad) == -z).all()
    assert jnp.abs(update(z) - z).max() < 2e-6


@given(seed=st.integers(0, 10_000), std=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]))
def test_is_a_descent_direction(seed, std):
    grad = normal(np.random.default_rng(seed), (6, 5), mean=std, std=std)
    assert float(jnp.vdot(grad, update(grad))) > 0


@pytest.mark.parametrize("shape", [(2,), (7,), (10, 100), (1001, 999), (1_000_003,)])
@pytest.mark.parametrize("value", [1e-6, 0.1, -0.3, 123.4, 1e6])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_constant_gradients_give_exactly_zero(shape, value, eps):
    z = update(jnp.full(shape, value, jnp.float32), eps=eps, min_size=2)
    assert not z.any()


def test_the_floor_is_relative_and_can_be_chosen(rng):
    noise = 1 + 1e-4 * normal(rng, (50, 20))
    assert update(noise).std() == pytest.approx(1, abs=1e-3)
    assert not update(noise, rel_floor=1e-3).any()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_zero_gradients_give_zero_and_a_finite_derivative(dtype, eps):
    zeros = jnp.zeros((8, 8), dtype)
    slope = jax.grad(lambda g: jnp.sum(update(g, eps=eps)))(zeros)
    assert not update(zeros, eps=eps).any()
    assert bool(jnp.isfinite(slope).all())


@pytest.mark.parametrize("std", [1e-5, 1.0, 300.0])
def test_float16_neither_overflows_nor_vanishes(rng, std):
    grad = normal(rng, (64, 32), std=std, dtype=jnp.float16)
    expected = oracle(np.asarray(grad), (0, 1))
    assert np.abs(np.asarray(update(grad), np.float64) - expected).max() <= 4e-3


def test_bfloat16_costs_one_rounding(rng):
    grad = normal(rng, (64, 32), dtype=jnp.bfloat16)
    expected = oracle(np.asarray(grad, np.float32), (0, 1))
    error = np.abs(np.asarray(update(grad), np.float64) - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 1e-6).all()


def test_large_means_do_not_cancel(rng):
    grad = normal(rng, (300, 30), mean=1000.0)
    assert np.abs(np.asarray(update(grad)) - oracle(grad, (0, 1))).max() < 2e-3


def test_other_leaves_pass_bitwise():
    grads: Any = {
        "Dense_0": {"kernel": jnp.arange(32.0).reshape(8, 4), "bias": jnp.arange(9.0)},
        "Dense_1": {"kernel": jnp.arange(7.0).reshape(7, 1)},
        "Dense_2": {"kernel": jnp.arange(16.0).reshape(2, 8)},
        "Embed_0": {"embedding": jnp.arange(20.0).reshape(5, 4)},
        "attention": {"query": {"bias": jnp.arange(16.0).reshape(4, 4)}},
        "scalar": jnp.float32(3.0),
    }
    tx: Any = znorm(scope="unit")
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates["Dense_0"]["kernel"].std() == pytest.approx(1, abs=1e-6)
    grads["Dense_0"]["kernel"] = updates["Dense_0"]["kernel"]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), updates, grads))


def test_min_size_counts_the_entries_behind_one_statistic():
    def changed(**kwargs) -> Any:
        grads = {"kernel": jnp.arange(18.0).reshape(2, 9)}
        return znorm(**kwargs).update(grads, optax.EmptyState())[0]

    assert (changed(scope="unit")["kernel"].ravel() == jnp.arange(18.0)).all()
    assert changed()["kernel"].std() == pytest.approx(1, abs=1e-6)
    signs = changed(scope="unit", min_size=2)["kernel"]
    assert np.allclose(signs, [[-1.0] * 9, [1.0] * 9])


def test_stacked_kernels_agree_with_a_loop_and_vmap(rng):
    grad = normal(rng, (3, 8, 5)) * jnp.array([1.0, 10.0, 100.0])[:, None, None]
    dims = override_dims({"": KernelDims((1,), (2,), batch=(0,))})
    for scope in ("tensor", "unit"):
        stacked = update(grad, dims=dims, scope=scope)
        loop = jnp.stack([update(layer, scope=scope) for layer in grad])
        assert jnp.abs(stacked - loop).max() < 1e-6
        mapped = jax.vmap(lambda g, scope=scope: update(g, scope=scope))(grad)
        assert jnp.abs(stacked - mapped).max() < 1e-6


def test_torch_layout(rng):
    grad = normal(rng, (6, 4, 3, 3))
    z = update(grad, dims=torch_dims, scope="unit")
    assert np.abs(np.asarray(z) - oracle(grad, (1, 2, 3))).max() < 2e-6


def test_weight_sums_stay_with_momentum(rng):
    tx: Any = optax.chain(znorm(), optax.sgd(0.1, momentum=0.9))
    start: Any = {"kernel": normal(rng, (20, 10)), "bias": jnp.zeros(10)}
    params = start
    state = tx.init(params)
    for _ in range(10):
        grads = {"kernel": normal(rng, (20, 10), 1.0), "bias": jnp.ones(10)}
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    assert abs(float(params["kernel"].sum() - start["kernel"].sum())) < 1e-3
    assert jnp.abs(params["kernel"] - start["kernel"]).max() > 0.5


def test_decay_after_znorm_does_not_depend_on_the_gradient_scale(rng):
    tx: Any = optax.chain(znorm(), optax.add_decayed_weights(0.1), optax.scale(-0.1))
    params = {"kernel": normal(rng, (20, 10))}
    grads = {"kernel": normal(rng, (20, 10))}
    small, _ = tx.update(grads, tx.init(params), params)
    large, _ = tx.update(
        jax.tree.map(lambda g: 1000 * g, grads), tx.init(params), params
    )
    assert jnp.abs(small["kernel"] - large["kernel"]).max() < 1e-6


def test_masks_as_in_optax(rng):
    grads = {name: {"kernel": normal(rng, (8, 4), 1.0)} for name in ("a", "b")}
    mask = {"a": {"kernel": True}, "b": {"kernel": False}}
    for given_mask in (mask, lambda params: mask):
        tx: Any = znorm(mask=given_mask)
        updates, _ = tx.update(grads, tx.init(grads), grads, unknown=1)
        assert abs(float(updates["a"]["kernel"].mean())) < 1e-6
        assert (updates["b"]["kernel"] == grads["b"]["kernel"]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("scope,spoilt", [("tensor", 32), ("unit", 8)])
def test_what_is_not_finite_spoils_its_statistic_loudly(rng, bad, scope, spoilt):
    grad = normal(rng, (8, 4)).at[2, 1].set(bad)
    assert int(jnp.isnan(update(grad, scope=scope)).sum()) == spoilt


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"eps": -1e-8}, "`eps` must be finite and >= 0, got -1e-08"),
        ({"eps": np.nan}, "`eps`.*nan"),
        ({"eps": np.inf}, "`eps`.*inf"),
        ({"eps": jnp.ones(2)}, r"`eps` must be one number.*\(2,\)"),
        ({"rel_floor": -1.0}, "`rel_floor`"),
        ({"scope": "layer"}, r"must be one of \['pooled', 'tensor', 'unit'\]"),
        ({"ddof": -1}, "`ddof` must be at least 0"),
        ({"min_size": 1}, "`min_size` must be at least 2"),
        ({"ddof": 8}, "`min_size` must be at least 9"),
        ({"min_ndim": -1}, "`min_ndim`"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        znorm(**kwargs)


def test_arguments_of_a_wrong_type():
    wrong: list[Any] = [
        {"eps": "small"},
        {"eps": 1j},
        {"ddof": 0.5},
        {"min_size": None},
    ]
    for kwargs in wrong:
        with pytest.raises(TypeError):
            znorm(**kwargs)


def test_complex_gradients_are_refused():
    with pytest.raises(TypeError, match=r"znorm.*\['kernel'\] is complex64"):
        znorm().init({"kernel": jnp.ones((4, 4), jnp.complex64)})
