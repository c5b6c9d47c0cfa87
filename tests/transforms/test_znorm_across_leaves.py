"""ZNorm's statistics across leaves and devices: pooled, fused, in shard_map."""

import re
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
    centralize_gradients,
    override_dims,
    znorm,
)

STACK = KernelDims((1,), (2,), batch=(0,))


def run(tx, grads) -> Any:
    return tx.update(grads, tx.init(grads))[0]


def pooled(grads, eps=1e-8, ddof=0):
    """The definition, in float64: own means, one deviation of all entries."""
    centred = {k: g - g.mean() for k, g in grads.items()}
    entries = np.concatenate([c.ravel() for c in centred.values()])
    std = np.sqrt((entries**2).sum() / (entries.size - ddof))
    return {k: c / (std + eps) for k, c in centred.items()}


def as_kernels(grads, dtype=jnp.float32) -> Any:
    return {k: {"kernel": jnp.asarray(g, dtype)} for k, g in grads.items()}


def assert_close(actual, expected, atol=2e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=atol
        )


@given(
    log_scale=st.floats(-4, 4),
    log_ratio=st.floats(-2, 2),
    ddof=st.sampled_from([0, 1]),
    fuse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pooled_agrees_with_float64(log_scale, log_ratio, ddof, fuse, seed):
    rng = np.random.default_rng(seed)
    scale, ratio = 10.0**log_scale, 10.0**log_ratio
    grads = {
        "dense": scale * rng.normal(0.5, 1, (6, 5)),
        "conv": scale * ratio * rng.normal(0.1, 1, (3, 3, 2, 4)),
    }
    grads = {k: g.astype(np.float32).astype(np.float64) for k, g in grads.items()}
    tx = znorm(1e-12, scope="pooled", ddof=ddof, fuse_statistics=fuse)
    assert_close(run(tx, as_kernels(grads)), pooled(grads, 1e-12, ddof), atol=1e-5)


def test_pooled_keeps_the_sizes_of_the_kernels_and_sums_batches(rng):
    grads = {"a": rng.normal(size=(40, 30)), "b": 0.01 * rng.normal(size=(40, 30))}
    z = run(znorm(scope="pooled"), as_kernels(grads))
    assert float(z["a"]["kernel"].std() / z["b"]["kernel"].std()) == pytest.approx(
        grads["a"].std() / grads["b"].std(), rel=1e-5
    )
    together = {"c": jnp.asarray(np.stack([grads["a"], grads["b"]]), jnp.float32)}
    stacked = run(znorm(scope="pooled", dims=override_dims({"": STACK})), together)["c"]
    assert_close(list(stacked), [z["a"]["kernel"], z["b"]["kernel"]], atol=2e-6)


@pytest.mark.parametrize("fuse", [False, True])
def test_pooled_constant_kernels_are_exactly_zero_and_do_not_count(rng, fuse):
    still = jnp.full((1000, 7), 123.4, jnp.float32)
    moving = jnp.asarray(1e-6 * rng.normal(size=(100, 7)), jnp.float32)
    tx = znorm(0.0, scope="pooled", fuse_statistics=fuse)
    z = run(tx, {"still": {"kernel": still}, "moving": {"kernel": moving}})
    assert not z["still"]["kernel"].any()
    expected = np.asarray(moving, np.float64)
    expected = (expected - expected.mean()) / expected.std() * np.sqrt(7700 / 700)
    assert_close(z["moving"]["kernel"], expected, atol=3e-5)
    assert not run(tx, {"kernel": still})["kernel"].any()


def test_pooled_not_finite_spoils_all_kernels(rng):
    grads = as_kernels({"a": rng.normal(size=(8, 4)), "b": rng.normal(size=(8, 4))})
    grads["a"]["kernel"] = grads["a"]["kernel"].at[1, 1].set(jnp.nan)
    z = run(znorm(scope="pooled"), grads)
    assert all(bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(z))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_fusing_mixes_types(rng, dtype):
    grads = as_kernels({"a": rng.normal(size=(8, 4)), "b": rng.normal(size=(8, 4))})
    grads["a"] = jax.tree.map(lambda g: g.astype(dtype), grads["a"])
    fused = run(znorm(fuse_statistics=True), grads)
    assert fused["a"]["kernel"].dtype == dtype
    assert_close(fused, run(znorm(), grads), atol=4 * float(jnp.finfo(dtype).eps))


def test_units_cannot_be_fused():
    with pytest.raises(ValueError, match="statistics of units stay"):
        znorm(scope="unit", fuse_statistics=True)


def many_leaves(rng, count=12) -> Any:
    return as_kernels({f"l{i:02}": rng.normal(0.3, 1, (16, 8)) for i in range(count)})


def all_reduces(tx, grads):
    update = jax.jit(lambda grads: tx.update(grads, optax.EmptyState())[0])
    text = str(update.lower(grads).compile().as_text())
    return len(re.findall(r" all-reduce(?:-start)?\(", text)), update(grads)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("scope", ["tensor", "pooled"])
@pytest.mark.parametrize("spec,fewest", [(P("x", None), 2), (P("x", "y"), 4)], ids=str)
def test_fused_statistics_take_two_collectives(rng, axis_type, scope, spec, fewest):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    grads = many_leaves(rng)
    expected = run(znorm(scope=scope), grads)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(grads, NamedSharding(mesh, spec))
        one_by_one, _ = all_reduces(znorm(scope=scope), sharded)
        fused, updates = all_reduces(znorm(scope=scope, fuse_statistics=True), sharded)
    # Of each mesh axis one for the sums and one for the squares.
    assert fused == fewest < 12 < one_by_one
    assert_close(updates, expected, atol=1e-6)
    shardings = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(updates)}
    assert shardings == {str(spec)}


def mapped(tx, specs, check_vma=True):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return jax.jit(
        jax.shard_map(
            lambda grads: tx.update(grads, optax.EmptyState())[0],
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=check_vma,
        )
    )


MIXED = {
    "rows": {"kernel": P("x", None)},
    "both": {"kernel": P("x", "y")},
    "joined": {"kernel": P(("x", "y"), None)},
    "whole": {"kernel": P()},
}


def spec_of(path, leaf):
    return MIXED[path[0].key]["kernel"]


@pytest.mark.parametrize("scope", ["tensor", "pooled"])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("how", ["names", "function", "unchecked"])
def test_in_shard_map_as_on_one_device(rng, scope, fuse, how):
    grads = as_kernels({k: rng.normal(0.3, 1, (16, 8)) for k in MIXED})
    expected = run(znorm(scope=scope, ddof=1), grads)
    axis_name: Any = ("x", "y") if how == "names" else spec_of
    tx = znorm(scope=scope, ddof=1, fuse_statistics=fuse, axis_name=axis_name)
    updates = mapped(tx, MIXED, check_vma=how != "unchecked")(grads)
    assert_close(updates, expected, atol=1e-6)


def test_in_shard_map_without_axis_name_statistics_are_local(rng):
    grads = as_kernels({k: rng.normal(0.3, 1, (16, 8)) for k in MIXED})
    updates = mapped(znorm(), MIXED)(grads)
    assert jnp.abs(updates["rows"]["kernel"][:4].mean()) < 1e-6
    assert_close(updates["whole"], run(znorm(), grads)["whole"])
    difference = updates["rows"]["kernel"] - run(znorm(), grads)["rows"]["kernel"]
    assert jnp.abs(difference).max() > 0.05


@pytest.mark.parametrize(
    "build", [lambda **kw: znorm(scope="unit", **kw), centralize_gradients]
)
def test_units_in_shard_map(rng, build):
    grads = as_kernels({k: rng.normal(0.3, 1, (16, 8)) for k in MIXED})
    expected = run(build(), grads)
    updates = mapped(build(axis_name=spec_of), MIXED)(grads)
    assert_close(updates, expected, atol=1e-6)
    rows = {"rows": MIXED["rows"]}
    named = mapped(build(axis_name="x"), rows)({"rows": grads["rows"]})
    assert_close(named["rows"], expected["rows"], atol=1e-6)


def test_entries_are_counted_on_all_devices(rng):
    # A unit has two entries on each device, and eight in all: enough.
    grads = as_kernels({"rows": rng.normal(size=(8, 4))})
    tx = znorm(scope="unit", axis_name="x")
    updates = mapped(tx, {"rows": MIXED["rows"]})(grads)
    assert_close(updates, run(znorm(scope="unit"), grads), atol=1e-6)


def test_stacks_split_over_devices_share_the_pool(rng):
    grads = {"layers": jnp.asarray(rng.normal(0.3, 1, (8, 6, 4)), jnp.float32)}
    dims = override_dims({"layers": STACK})
    expected = run(znorm(scope="pooled", dims=dims), grads)
    tx = znorm(scope="pooled", dims=dims, axis_name=lambda path, leaf: P("x"))
    assert_close(mapped(tx, {"layers": P("x")})(grads), expected, atol=1e-6)


def test_axis_names_are_checked(rng, unchecked):
    grads = as_kernels({"rows": rng.normal(size=(16, 8))})
    wrong: Any
    for wrong in (3, (), ("x", 1)):
        with pytest.raises(TypeError, match="`axis_name` must be the name"):
            znorm(axis_name=wrong)
    with pytest.raises(ValueError, match="inside jax.shard_map only"):
        run(znorm(axis_name="x"), grads)
    wrong = lambda path, leaf: "x"  # noqa: E731
    with pytest.raises(TypeError, match=r"\['rows'\].*PartitionSpec"):
        run(centralize_gradients(axis_name=wrong), grads)
