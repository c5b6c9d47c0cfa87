"""Centralization against the official rule, layout by layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel.transforms import (
    KernelDims,
    centralize_gradients,
    override_dims,
    torch_dims,
)


def update(grads, **kwargs) -> Any:
    tx = centralize_gradients(**kwargs)
    return tx.update(grads, tx.init(grads))[0]


def official(grad):
    """The published rule, for PyTorch's layout: mean over all axes but the first."""
    return grad - grad.mean(tuple(range(1, grad.ndim)), keepdims=True)


def at_path(names, leaf) -> Any:
    for name in reversed(names):
        leaf = {name: leaf}
    return leaf


# The layout, and the transposition that brings it to PyTorch's (out, ...).
LAYOUTS = [
    ("Dense_0", (12, 7), (1, 0)),
    ("Conv_0", (3, 3, 4, 8), (3, 2, 0, 1)),
    ("Conv_depthwise", (3, 3, 1, 8), (3, 2, 0, 1)),
    ("Conv_1d", (5, 4, 8), (2, 1, 0)),
    ("Conv_3d", (3, 3, 3, 4, 6), (4, 3, 0, 1, 2)),
    ("ConvTranspose_0", (2, 2, 4, 6), (3, 2, 0, 1)),
]


@pytest.mark.parametrize("name,shape,to_torch", LAYOUTS, ids=lambda case: str(case))
def test_flax_layouts_follow_the_official_rule(rng, name, shape, to_torch):
    grad = rng.normal(0.5, 1, shape)
    expected = official(grad.transpose(to_torch)).transpose(np.argsort(to_torch))
    grads = at_path((name, "kernel"), jnp.asarray(grad, jnp.float32))
    actual = update(grads)[name]["kernel"]
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name,shape,dims,axes",
    [
        ("query", (12, 2, 4), None, (0,)),
        ("out", (2, 4, 12), None, (0, 1)),
        ("up", (3, 3, 6, 4), KernelDims((0, 1, 3), (2,)), (0, 1, 3)),
        ("scanned", (5, 12, 7), KernelDims((1,), (2,), batch=(0,)), (1,)),
        ("scanned", (12, 5, 7), KernelDims((0,), (2,), batch=(1,)), (0,)),
    ],
)
def test_layouts_that_torch_does_not_have(rng, name, shape, dims, axes):
    grad = rng.normal(0.5, 1, shape)
    resolver = override_dims({name: dims}) if dims else None
    grads = at_path((name, "kernel"), jnp.asarray(grad, jnp.float32))
    actual = np.asarray(update(grads, dims=resolver)[name]["kernel"])
    expected = grad - grad.mean(axes, keepdims=True)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


@given(
    shape=st.sampled_from([(), (5,), (2, 6), (6, 2), (4, 3, 2), (5, 2, 3, 4)]),
    seed=st.integers(0, 1000),
)
def test_torch_layout_equals_optax(shape, seed):
    rng = np.random.default_rng(seed)
    grads = {
        "anything": jnp.asarray(rng.normal(1, 2, shape), jnp.float32),
        "weight": jnp.asarray(rng.normal(1, 2, (3, 4)), jnp.float32),
    }
    ours = update(grads, dims=torch_dims)
    theirs: Any = optax.centralize().update(grads, optax.EmptyState())[0]
    for name in grads:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_differs_from_optax_on_a_flax_kernel(rng):
    grads = {"kernel": jnp.asarray(rng.normal(0, 1, (12, 7)), jnp.float32)}
    theirs: Any = optax.centralize().update(grads, optax.EmptyState())[0]
    assert jnp.abs(update(grads)["kernel"] - theirs["kernel"]).max() > 0.1


@given(seed=st.integers(0, 10_000))
def test_is_an_orthogonal_projection(seed):
    rng = np.random.default_rng(seed)
    a, b = (
        {"conv": {"kernel": jnp.asarray(rng.normal(1, 1, (3, 3, 4, 5)), jnp.float32)}}
        for _ in range(2)
    )
    pa, pb = update(a), update(b)
    again = update(pa)["conv"]["kernel"]
    a, b, pa, pb = (tree["conv"]["kernel"] for tree in (a, b, pa, pb))
    assert jnp.abs(again - pa).max() < 1e-6
    assert float(jnp.vdot(pa, b)) == pytest.approx(float(jnp.vdot(a, pb)), abs=1e-3)
    assert float(jnp.vdot(pa, pa)) <= float(jnp.vdot(a, a))


def test_sums_of_units_stay_with_momentum(rng):
    tx: Any = optax.chain(centralize_gradients(), optax.sgd(0.1, momentum=0.9))
    kernel = jnp.asarray(rng.normal(0, 1, (20, 10)), jnp.float32)
    params = start = {"kernel": kernel}
    state = tx.init(params)
    for _ in range(10):
        grads = {"kernel": jnp.asarray(rng.normal(1, 1, (20, 10)), jnp.float32)}
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    drift = params["kernel"].sum(0) - start["kernel"].sum(0)
    assert jnp.abs(drift).max() < 1e-4
    assert jnp.abs(params["kernel"] - start["kernel"]).max() > 0.5


def test_other_leaves_pass_bitwise():
    grads: Any = {
        "Dense_0": {"kernel": jnp.eye(4), "bias": jnp.arange(4.0)},
        "Dense_1": {"kernel": jnp.arange(4.0).reshape(1, 4)},
        "Embed_0": {"embedding": jnp.arange(8.0).reshape(2, 4)},
        "LayerNorm_0": {"scale": jnp.arange(4.0)},
        "key": {"bias": jnp.arange(8.0).reshape(2, 4)},
    }
    updates = update(grads)
    assert (updates["Dense_0"]["kernel"] == jnp.eye(4) - 0.25).all()
    grads["Dense_0"]["kernel"] = updates["Dense_0"]["kernel"]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), updates, grads))


def test_constant_gradients_of_a_large_kernel_vanish():
    grads = {"conv": {"kernel": jnp.full((3, 3, 512, 64), 0.1)}}
    assert jnp.abs(update(grads)["conv"]["kernel"]).max() < 1e-7


@pytest.mark.parametrize("std", [1e-5, 300.0])
def test_float16_is_summed_in_float32(rng, std):
    grad = jnp.asarray(rng.normal(std, std, (2000, 4)), jnp.float16)
    exact = np.asarray(grad, np.float64)
    exact -= exact.mean(0)
    actual = np.asarray(update({"kernel": grad})["kernel"], np.float64)
    # Half a unit in the last place, or half the smallest subnormal.
    assert (np.abs(actual - exact) <= 2.0**-11 * np.abs(exact) + 3.1e-8).all()


def test_complex_gradients(rng):
    grad = rng.normal(size=(6, 4)) + 1j * rng.normal(size=(6, 4))
    actual = update({"kernel": jnp.asarray(grad, jnp.complex64)})["kernel"]
    assert actual.dtype == jnp.complex64
    np.testing.assert_allclose(actual, grad - grad.mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_unit_alone(bad):
    grad = jnp.ones((8, 4)).at[2, 1].set(bad)
    updates = update({"kernel": grad})["kernel"]
    assert not jnp.isfinite(updates[2, 1])
    assert jnp.isfinite(jnp.delete(updates, 1, axis=1)).all()
