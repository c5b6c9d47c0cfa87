"""Clips by value, by leaf and by unit: Optax where it is right, and where it is not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel.transforms import (
    KernelDims,
    adaptive_grad_clip,
    clip_by_layer_norm,
    clip_by_value,
    override_dims,
    torch_dims,
)


def run(tx, grads, params=None) -> Any:
    return tx.update(grads, tx.init(grads if params is None else params), params)[0]


def normal(rng, shape, scale=1.0, dtype=jnp.float32):
    return jnp.asarray(scale * rng.normal(size=shape), dtype)


def wide(x):
    return np.asarray(x).astype(np.float64)


def tree(seed, scale=1.0, dtype=jnp.float32) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "Dense_0": {
            "kernel": normal(rng, (12, 7), scale, dtype),
            "bias": normal(rng, (7,), scale, dtype),
        },
        "Conv_0": {"kernel": normal(rng, (3, 3, 4, 5), scale, dtype)},
        "Conv_3d": {"kernel": normal(rng, (2, 2, 2, 3, 4), scale, dtype)},
        "temperature": normal(rng, (), scale, dtype),
    }


def assert_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(wide(a), wide(b), **tolerance)


# By value.


@given(seed=st.integers(0, 1000), max_abs=st.floats(0, 10), scale=st.floats(-4, 4))
def test_value_equals_optax_and_numpy(seed, max_abs, scale):
    grads = tree(seed, 10.0**scale)
    updates = run(clip_by_value(max_abs), grads)
    theirs: Any = optax.clip(max_abs).update(grads, optax.EmptyState())[0]
    assert_close(updates, theirs, rtol=0, atol=0)
    bound = float(np.float32(max_abs))
    expected = jax.tree.map(lambda g: np.clip(np.asarray(g), -bound, bound), grads)
    assert_close(updates, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_value_passes_what_is_within_the_bound_bitwise(dtype):
    tiny = float(jnp.finfo(dtype).tiny) / 4
    grads = {"a": jnp.array([tiny, -tiny, 0.0, -0.0, 0.5, -1.0], dtype)}
    for max_abs in (1.0, np.inf, jnp.bfloat16(1.0)):
        updates = run(clip_by_value(max_abs), grads)
        assert np.asarray(updates["a"]).tobytes() == np.asarray(grads["a"]).tobytes()


def test_value_and_what_is_not_finite():
    grads = {"a": jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])}
    updates = np.asarray(run(clip_by_value(2.0), grads)["a"])
    np.testing.assert_array_equal(updates, [2.0, -2.0, np.nan, 1.0])


def test_value_refuses_complex_gradients_and_bad_bounds():
    with pytest.raises(TypeError, match=r"clip_by_value.*\['a'\] is complex64"):
        run(clip_by_value(1.0), {"a": jnp.ones(3, jnp.complex64)})
    for bad in (-1.0, np.nan, jnp.ones(2)):
        with pytest.raises(ValueError, match="`max_abs` must be"):
            clip_by_value(bad)


# By leaf.


@given(
    seed=st.integers(0, 1000), log_scale=st.floats(-6, 6), log_bound=st.floats(-3, 3)
)
def test_leaf_norms_are_bounded_one_by_one(seed, log_scale, log_bound):
    grads, bound = tree(seed, 10.0**log_scale), 10.0**log_bound
    updates = run(clip_by_layer_norm(bound), grads)
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        exact = wide(g) * min(1, bound / np.linalg.norm(wide(g)))
        np.testing.assert_allclose(wide(u), exact, rtol=2e-6, atol=1e-6 * bound)
        if np.linalg.norm(wide(g)) < bound * (1 - 1e-6):
            assert np.asarray(u).tobytes() == np.asarray(g).tobytes()
    assert_close(run(clip_by_layer_norm(bound), updates), updates, rtol=1e-6)


def test_leaf_by_leaf_equals_the_global_clip_of_each_leaf():
    grads = tree(0)
    alone: Any = optax.clip_by_global_norm(0.5)
    expected = jax.tree.map(lambda g: alone.update(g, optax.EmptyState())[0], grads)
    assert_close(run(clip_by_layer_norm(0.5), grads), expected, rtol=1e-6)


def test_leaf_norms_at_zero_and_infinity():
    zeros = jax.tree.map(jnp.zeros_like, tree(0))
    for bound in (0.0, 1.0, np.inf):
        assert_close(run(clip_by_layer_norm(bound), zeros), zeros, rtol=0)
    assert_close(run(clip_by_layer_norm(0.0), tree(0)), zeros, rtol=0)
    assert_close(run(clip_by_layer_norm(np.inf), tree(0)), tree(0), rtol=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_leaf_that_is_not_finite_spoils_itself_alone(bad):
    grads = tree(0)
    grads["Dense_0"]["bias"] = grads["Dense_0"]["bias"].at[1].set(bad)
    updates = run(clip_by_layer_norm(0.5), grads)
    assert jnp.isnan(updates["Dense_0"].pop("bias")).all()
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(updates))


def test_leaf_norms_refuse_bad_bounds():
    for bad in (-1.0, np.nan, jnp.ones(2)):
        with pytest.raises(ValueError, match="`max_norm` must be"):
            clip_by_layer_norm(bad)


# By unit.


def agc_oracle(grad, param, axes, clipping, eps=1e-3):
    grad, param = wide(grad), wide(param)
    grad_norm = np.sqrt((grad**2).sum(axes, keepdims=True))
    limit = clipping * np.maximum(np.sqrt((param**2).sum(axes, keepdims=True)), eps)
    scale = np.where(
        grad_norm > limit, limit / np.where(grad_norm > 0, grad_norm, 1), 1
    )
    return grad * scale


@given(
    seed=st.integers(0, 1000), log_scale=st.floats(-4, 3), clipping=st.floats(1e-3, 1)
)
def test_units_equal_optax_where_it_goes_by_the_right_axes(seed, log_scale, clipping):
    grads, params = tree(seed, 10.0**log_scale), tree(seed + 1)
    ours = run(adaptive_grad_clip(clipping), grads, params)
    theirs, _ = optax.adaptive_grad_clip(clipping).update(
        grads, optax.EmptyState(), params
    )
    assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


LAYOUTS = [
    ("query", (12, 2, 4), None, (0,)),
    ("out", (2, 4, 12), None, (0, 1)),
    ("Conv_1d", (5, 4, 8), None, (0, 1)),
    ("Conv_depthwise", (3, 3, 1, 8), None, (0, 1, 2)),
    ("Dense_0", (1, 6), None, (0,)),
    ("scanned", (5, 12, 7), KernelDims((1,), (2,), batch=(0,)), (1,)),
    ("up", (3, 3, 6, 4), KernelDims((0, 1, 3), (2,)), (0, 1, 3)),
]


@pytest.mark.parametrize("name,shape,dims,axes", LAYOUTS, ids=lambda x: str(x))
def test_units_by_the_layout_of_the_kernel(rng, name, shape, dims, axes):
    grad, param = normal(rng, shape), normal(rng, shape, 0.3)
    resolver = None if dims is None else override_dims({"kernel": dims})
    tx = adaptive_grad_clip(0.5, dims=resolver)
    grads, params = ({name: {"kernel": x}} for x in (grad, param))
    actual = wide(run(tx, grads, params)[name]["kernel"])
    expected = agc_oracle(grad, param, axes, 0.5)
    assert np.abs(actual - expected).max() <= 2e-6
    norms = np.sqrt((actual**2).sum(axes)), np.sqrt((wide(param) ** 2).sum(axes))
    assert (norms[0] <= 0.5 * np.maximum(norms[1], 1e-3) * (1 + 1e-6)).all()


def test_units_of_other_leaves_are_the_whole_leaf(rng):
    shapes = {"bias": (6,), "embedding": (7, 4), "scale": (3,)}
    for name, shape in shapes.items():
        grads, params = {name: normal(rng, shape)}, {name: normal(rng, shape, 0.1)}
        actual = run(adaptive_grad_clip(0.1), grads, params)[name]
        whole = tuple(range(len(shape)))
        expected = agc_oracle(grads[name], params[name], whole, 0.1)
        np.testing.assert_allclose(actual, expected, rtol=2e-6)


def test_units_of_a_stacked_bias_by_its_dims(rng):
    # A bias has no output axis: its entries are the unit, its layers are not.
    dims = override_dims({"bias": KernelDims((1,), (), batch=(0,))})
    grads, params = {"bias": normal(rng, (3, 6))}, {"bias": normal(rng, (3, 6), 0.1)}
    actual = run(adaptive_grad_clip(0.1, dims=dims), grads, params)["bias"]
    expected = agc_oracle(grads["bias"], params["bias"], (1,), 0.1)
    np.testing.assert_allclose(actual, expected, rtol=2e-6)


def test_units_of_torch_layouts(rng):
    grads, params = {"w": normal(rng, (6, 4, 3, 3))}, {"w": normal(rng, (6, 4, 3, 3))}
    actual = run(adaptive_grad_clip(0.1, dims=torch_dims), grads, params)["w"]
    expected = agc_oracle(grads["w"], params["w"], (1, 2, 3), 0.1)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-7)


def test_units_within_the_bound_pass_bitwise():
    params = tree(0)
    grads = jax.tree.map(lambda p: 0.099 * p, params)
    updates = run(adaptive_grad_clip(0.1, eps=0.0), grads, params)
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert np.asarray(u).tobytes() == np.asarray(g).tobytes()


def test_units_that_start_at_zero_can_leave_it():
    params = {"kernel": jnp.zeros((4, 2))}
    grads = {"kernel": jnp.ones((4, 2))}
    updates = run(adaptive_grad_clip(0.1, eps=1e-2), grads, params)["kernel"]
    np.testing.assert_allclose(jnp.linalg.norm(updates, axis=0), 1e-3, rtol=1e-6)
    assert not run(adaptive_grad_clip(0.1, eps=0.0), grads, params)["kernel"].any()
    zeros = jax.tree.map(jnp.zeros_like, grads)
    assert not run(adaptive_grad_clip(0.1, eps=0.0), zeros, params)["kernel"].any()


def test_tiny_norms_are_clipped_to_the_bound_and_no_further():
    # Optax divides by 1e-6 at least, and so clips this one five times too much.
    params = {"kernel": jnp.zeros((1, 1))}
    grads = {"kernel": jnp.full((1, 1), 2e-7)}
    updates = run(adaptive_grad_clip(1e-4), grads, params)["kernel"]
    assert float(updates[0, 0]) == pytest.approx(1e-7, rel=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1e-5, 300.0])
def test_units_of_half_precision_keep_their_type(rng, dtype, scale):
    grads = {"kernel": normal(rng, (300, 4), scale, dtype)}
    params = {"kernel": normal(rng, (300, 4), scale)}
    actual = run(adaptive_grad_clip(0.5, eps=0.0), grads, params)["kernel"]
    assert actual.dtype == dtype
    expected = agc_oracle(grads["kernel"], params["kernel"], (0,), 0.5, 0.0)
    error = np.abs(wide(actual) - expected)
    assert (error <= float(jnp.finfo(dtype).eps) * np.abs(expected) + 3.1e-8).all()


def test_units_with_an_array_as_bound_and_mixed_types():
    grads, params = tree(0), tree(1)
    grads["Dense_0"] = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads["Dense_0"])
    for clipping in (jnp.float32(0.1), jnp.bfloat16(0.1), np.float64(0.1)):
        updates = run(adaptive_grad_clip(clipping), grads, params)
        kinds = [jax.tree.map(lambda x: x.dtype, t) for t in (updates, grads)]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_unit_that_is_not_finite_spoils_itself_alone(rng, bad):
    grads = {"kernel": normal(rng, (8, 4)).at[2, 1].set(bad)}
    updates = run(adaptive_grad_clip(0.1), grads, {"kernel": normal(rng, (8, 4))})
    spoilt = np.isnan(np.asarray(updates["kernel"]))
    assert spoilt[:, 1].all() and spoilt.sum() == 8


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_derivatives_at_zero_are_finite(fill):
    def total(grads, params):
        updates = run(adaptive_grad_clip(0.1), grads, params)
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    zeros = jax.tree.map(jnp.zeros_like, tree(0))
    grads = jax.tree.map(lambda g: g + fill, zeros)
    slopes = jax.jit(jax.grad(total, argnums=(0, 1)))(grads, zeros)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P("x", "y")], ids=str)
def test_units_on_an_explicit_mesh(spec):
    # Optax raises here: it compares with norms broadcast to the leaf's shape.
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    grads, params = ({"kernel": normal(rng, (8, 16))} for _ in range(2))
    tx = adaptive_grad_clip(0.1)
    expected = run(tx, grads, params)["kernel"]
    with jax.set_mesh(mesh):
        grads, params = (
            jax.device_put(x, {"kernel": NamedSharding(mesh, spec)})
            for x in (grads, params)
        )
        actual = jax.jit(lambda g, p: run(tx, g, p))(grads, params)["kernel"]
    assert actual.sharding.is_equivalent_to(grads["kernel"].sharding, 2)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-6)


def test_units_without_update_and_the_last_layer_left_out():
    grads, params = tree(0), tree(1, 0.01)
    for hole in (None, optax.MaskedNode()):
        grads["Conv_0"]["kernel"] = hole
        updates = run(adaptive_grad_clip(0.1), grads, params)
        assert updates["Conv_0"] == {"kernel": hole}
    mask = {name: name != "Dense_0" for name in params}
    tx = optax.masked(adaptive_grad_clip(0.1), mask)
    updates = run(tx, tree(0), params)
    assert_close(updates["Dense_0"], tree(0)["Dense_0"], rtol=0)
    assert jnp.abs(updates["Conv_0"]["kernel"]).max() < 0.1


def test_what_does_not_fit_together_is_named():
    grads, params = tree(0), tree(1)
    tx = adaptive_grad_clip(0.1)
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        run(tx, grads)
    with pytest.raises(ValueError, match="updates and params are trees of different"):
        run(tx, {"Dense_0": grads["Dense_0"]}, params)
    params["Dense_0"]["bias"] = jnp.ones(3)
    with pytest.raises(ValueError, match=r"\['bias'\] has shape \(7,\).*\(3,\)"):
        run(tx, grads, params)
    with pytest.raises(ValueError, match=r"rules.*no_such.*find no parameter"):
        adaptive_grad_clip(0.1, dims=override_dims({"no_such": None})).init(grads)
    bad = override_dims({"Dense_0/kernel": KernelDims((0, 1), (2,))})
    with pytest.raises(ValueError, match=r"Dense_0.*does not fit.*rank 2"):
        adaptive_grad_clip(0.1, dims=bad).init(grads)


@pytest.mark.parametrize(
    "kwargs", [{"clipping": -1.0}, {"clipping": np.inf}, {"eps": -1.0}, {"eps": np.nan}]
)
def test_bad_ratios(kwargs):
    with pytest.raises(ValueError, match=f"`{next(iter(kwargs))}` must be finite"):
        adaptive_grad_clip(**({"clipping": 0.1} | kwargs))


def test_complex_units(rng):
    grad = rng.normal(size=(6, 4)) + 1j * rng.normal(size=(6, 4))
    tx = adaptive_grad_clip(0.1)
    grads = {"kernel": jnp.asarray(grad, jnp.complex64)}
    updates = run(tx, grads, {"kernel": jnp.ones((6, 4), jnp.complex64)})["kernel"]
    assert updates.dtype == jnp.complex64
    norms = np.linalg.norm(np.asarray(updates), axis=0)
    np.testing.assert_allclose(norms, 0.1 * np.sqrt(6), rtol=1e-6)
