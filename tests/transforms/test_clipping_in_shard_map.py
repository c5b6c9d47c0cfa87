"""Clips inside shard_map: with `axis_name` the same as on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxaccel import transforms

SPECS = {
    "rows": {"kernel": P("x", None), "bias": P()},
    "replicated": {"kernel": P(), "bias": P()},
}
BOTH = {
    **SPECS,
    "both": {"kernel": P("x", "y"), "bias": P("y")},
    "joined": {"kernel": P(("x", "y"), None), "bias": P()},
}
CLIPS: dict[str, Any] = {
    "global": lambda **kw: transforms.clip_by_global_norm(1.0, **kw),
    "layer": lambda **kw: transforms.clip_by_layer_norm(1.0, **kw),
    "adaptive": lambda **kw: transforms.adaptive_grad_clip(0.1, **kw),
    "zclip": lambda **kw: transforms.zclip(warmup_steps=2, **kw),
    "adagc": lambda **kw: transforms.adagc(warmup_steps=2, **kw),
    "autoclip": lambda **kw: transforms.autoclip(50.0, **kw),
}


def tree(seed, specs) -> Any:
    rng = np.random.default_rng(seed)
    return {
        name: {
            "kernel": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=16), jnp.float32),
        }
        for name in specs
    }


def three_steps(tx):
    """Updates of the last of three steps, the last a spike, and the state."""

    def steps(params, grads):
        state = tx.init(params)
        for size in (1.0, 1.1, 50.0):
            scaled = jax.tree.map(lambda g: size * g, grads)  # noqa: B023
            updates, state = tx.update(scaled, state, params)
        return updates, state

    return steps


def shard_mapped(tx, specs, **kwargs):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return jax.jit(
        jax.shard_map(
            three_steps(tx),
            mesh=mesh,
            in_specs=(specs, specs),
            out_specs=(specs, P()),
            **kwargs,
        )
    )


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", CLIPS)
def test_names_alone_where_replicated_leaves_are_tracked(name):
    # The fan-in is split in some kernels, and the output axis in none.
    specs = {k: v for k, v in BOTH.items() if k != "both" or name != "adaptive"}
    params, grads = tree(0, specs), tree(1, specs)
    expected = jax.jit(three_steps(CLIPS[name]()))(params, grads)
    tx = CLIPS[name](axis_name=("x", "y"))
    assert_close(shard_mapped(tx, specs)(params, grads), expected)


@pytest.mark.parametrize("name", CLIPS)
def test_specs_where_nothing_is_tracked(name):
    specs = {**BOTH, "columns": {"kernel": P(None, "y"), "bias": P("y")}}
    params, grads = tree(0, specs), tree(1, specs)
    expected = jax.jit(three_steps(CLIPS[name]()))(params, grads)

    def spec_of(path, leaf):
        return specs[path[0].key][path[1].key]

    tx = CLIPS[name](axis_name=spec_of)
    actual = shard_mapped(tx, specs, check_vma=False)(params, grads)
    assert_close(actual, expected)


@pytest.mark.parametrize("name", CLIPS)
def test_one_collective_for_all_leaves_that_share_the_axes(name):
    specs = {str(i): {"kernel": P("x", None), "bias": P("x")} for i in range(3)}
    params, grads = tree(0, specs), tree(1, specs)
    tx = CLIPS[name](axis_name="x")

    def step(params, grads):
        return tx.update(grads, tx.init(params), params)[0]

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    count = str(jax.make_jaxpr(mapped)(params, grads)).count("psum")
    # Clips that let a leaf go before the others are known sum leaf by leaf.
    leaf_by_leaf = {"layer": 6, "adaptive": 12}
    assert count == leaf_by_leaf.get(name, 1)


@pytest.mark.parametrize("name", ["global", "layer", "adaptive"])
def test_without_a_name_the_norm_is_that_of_the_shard(name):
    params, grads = tree(0, SPECS), tree(1, SPECS)
    whole, _ = jax.jit(three_steps(CLIPS[name]()))(params, grads)
    # With check_vma shard_map itself refuses replicated leaves scaled differently.
    local, _ = shard_mapped(CLIPS[name](), SPECS, check_vma=False)(params, grads)
    difference = local["rows"]["kernel"] - whole["rows"]["kernel"]
    assert float(jnp.abs(difference).max()) > 1e-2


@pytest.mark.parametrize("name", CLIPS)
def test_a_name_that_is_no_axis_here(name):
    tx, grads = CLIPS[name](axis_name="rows"), tree(0, SPECS)
    with pytest.raises(ValueError, match=r"`axis_name`.*rows.*shard_map"):
        tx.update(grads, tx.init(grads), grads)
