"""What every gradient transformation promises: one table, each test over each row.

A new transformation adds a row to `ENTRIES`; nothing else here names one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import transforms


class Entry(NamedTuple):
    """One row: a transformation, how to build it, and what it may not inject."""

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    kwargs: dict[str, Any]
    static_args: tuple[str, ...] = ()
    needs_params: bool = False
    measures: bool = False  # passes the gradients as they are

    def build(self):
        return self.factory(**self.kwargs)


ZNORM_STATIC = (
    *("scope", "ddof", "min_ndim", "min_size", "dims", "mask"),
    *("fuse_statistics", "axis_name"),
)
ENTRIES = [
    Entry("znorm", transforms.znorm, {}, ZNORM_STATIC),
    Entry("znorm_unit", transforms.znorm, {"scope": "unit", "ddof": 1}, ZNORM_STATIC),
    Entry(
        "znorm_pooled",
        transforms.znorm,
        {"scope": "pooled", "fuse_statistics": True},
        ZNORM_STATIC,
    ),
    Entry("centralize", transforms.centralize_gradients, {}, ("dims", "axis_name")),
    Entry("clip_by_value", transforms.clip_by_value, {"max_abs": 0.5}),
    Entry("clip_by_global_norm", transforms.clip_by_global_norm, {"max_norm": 0.5}),
    Entry("clip_by_layer_norm", transforms.clip_by_layer_norm, {"max_norm": 0.5}),
    Entry(
        "adaptive_grad_clip",
        transforms.adaptive_grad_clip,
        {"clipping": 0.01},
        ("dims",),
        needs_params=True,
    ),
    Entry("zclip", transforms.zclip, {"max_norm": 0.5}, ("warmup_steps",)),
    Entry("adagc", transforms.adagc, {"max_norm": 0.5}, ("warmup_steps",)),
    Entry("autoclip", transforms.autoclip, {"max_norm": 0.5}, ("history",)),
    Entry("grokfast_ema", transforms.grokfast_ema, {}, ("axis_name",)),
    Entry(
        "gradient_noise_scale",
        transforms.gradient_noise_scale,
        {"batch_size": 8, "micro_batches": 2},
        ("batch_size", "micro_batches", "data_axis", "axis_name"),
        measures=True,
    ),
    Entry(
        "gradient_statistics",
        transforms.gradient_statistics,
        {"inner": optax.identity(), "clip": transforms.clip_by_global_norm(1e6)},
        ("inner", "clip"),
        measures=True,
    ),
]
entries = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)

SHAPES = {
    "Conv_0": {"kernel": (3, 3, 4, 8), "bias": (8,)},
    "Dense_0": {"kernel": (16, 24), "bias": (24,)},
    "Embed_0": {"embedding": (7, 8)},
    "LayerNorm_0": {"scale": (8,)},
}


def make_tree(seed, dtype=jnp.float32, shapes=SHAPES, offset=0.3) -> Any:
    """Returns a tree of normal gradients with a mean, so that it can be removed."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(offset, 1.0, shape), dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def run(tx, grads, params=None, **extra) -> Any:
    """Returns the first updates of a transformation, without jit."""
    params = grads if params is None else params
    return tx.update(grads, tx.init(params), params, **extra)[0]


def assert_close(actual, expected, atol=2e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@entries
def test_changes_gradients_and_keeps_params_out(entry):
    grads = make_tree(0)
    updates = run(entry.build(), grads)
    if entry.measures:
        assert_same(updates, grads)
        return
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), updates, grads)
    assert any(jax.tree.leaves(moved))
    others = run(entry.build(), grads, jax.tree.map(jnp.zeros_like, grads))
    if not entry.needs_params:
        assert_same(others, updates)
        assert_same(entry.build().update(grads, entry.build().init(grads))[0], updates)
        return
    with pytest.raises(AssertionError):
        assert_same(others, updates)
    with pytest.raises(ValueError, match="you are not passing `params`"):
        entry.build().update(grads, entry.build().init(grads))


@entries
def test_ignores_unknown_extra_arguments(entry):
    tx, grads = entry.build(), make_tree(0)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    extra = {"value": jnp.float32(1.0), "batch": {}, "unheard_of": object()}
    assert_same(run(tx, grads, **extra), run(tx, grads))


@entries
def test_jit_agrees_with_eager_and_traces_once(entry):
    tx, traces = entry.build(), []

    @jax.jit
    def update(grads, state):
        traces.append(None)
        return tx.update(grads, state, grads)

    state = tx.init(make_tree(0))
    updates, state = update(make_tree(0), state)
    update(make_tree(1), state)
    assert len(traces) == 1
    assert_close(updates, run(tx, make_tree(0)))


@entries
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_keeps_the_gradient_type(entry, dtype):
    grads = make_tree(0, dtype)
    params = make_tree(1, jnp.float32)
    updates = run(entry.build(), grads, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    exact = run(entry.build(), wide, params)
    rounded = jax.tree.map(lambda u: u.astype(dtype), exact)
    # One rounding of an entry of size 4 at most is all that a type may cost.
    assert_close(updates, rounded, atol=4 * float(jnp.finfo(dtype).eps))


@entries
def test_mixed_types_in_one_tree(entry):
    grads = make_tree(0)
    grads["Dense_0"] = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads["Dense_0"])
    grads["Conv_0"]["bias"] = grads["Conv_0"]["bias"].astype(jnp.float16)
    updates = run(entry.build(), grads)
    assert jax.tree.map(lambda g: g.dtype, updates) == jax.tree.map(
        lambda g: g.dtype, grads
    )


@entries
def test_zero_gradients_give_zero(entry):
    grads = jax.tree.map(jnp.zeros_like, make_tree(0, jnp.float16))
    with jax.debug_nans(True):
        assert_same(run(entry.build(), grads), grads)


@entries
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_derivative_through_the_update_is_finite(entry, scale):
    tx, weights = entry.build(), make_tree(1)

    def objective(grads):
        updates = run(tx, grads)
        terms = jax.tree.map(lambda u, w: jnp.sum(u * w), updates, weights)
        return sum(jax.tree.leaves(terms))

    grads = jax.tree.map(lambda g: scale * g, make_tree(0))
    slope = jax.jit(jax.grad(objective))(grads)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(slope))
    direction = make_tree(2)
    _, forward = jax.jit(lambda g, d: jax.jvp(objective, (g,), (d,)))(grads, direction)
    terms = jax.tree.map(lambda s, d: jnp.sum(s * d), slope, direction)
    assert float(forward) == pytest.approx(float(sum(jax.tree.leaves(terms))), rel=1e-3)


@entries
def test_derivative_agrees_with_differences(entry):
    tx, weights, direction = entry.build(), make_tree(1), make_tree(2)

    @jax.jit
    def objective(step):
        grads = jax.tree.map(lambda g, d: g + step * d, make_tree(0), direction)
        terms = jax.tree.map(lambda u, w: jnp.sum(u * w), run(tx, grads), weights)
        return sum(jax.tree.leaves(terms))

    h = 1e-2
    difference = (objective(jnp.float32(h)) - objective(jnp.float32(-h))) / (2 * h)
    slope = jax.grad(objective)(jnp.float32(0))
    assert float(slope) == pytest.approx(float(difference), rel=2e-2, abs=2e-2)


@entries
def test_vmap_agrees_with_a_loop(entry):
    tx = entry.build()
    trees = [make_tree(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    updates = jax.vmap(functools.partial(run, tx))(stacked)
    for i, tree in enumerate(trees):
        assert_close(jax.tree.map(lambda u: u[i], updates), run(tx, tree))  # noqa: B023


@entries
def test_none_leaves_and_masked_nodes_pass(entry):
    tx, grads = entry.build(), make_tree(0)
    whole = run(tx, grads)
    grads["Missing"] = {"kernel": None}
    grads["Masked"] = {"kernel": optax.MaskedNode()}
    updates = run(tx, grads)
    assert updates.pop("Missing") == {"kernel": None}
    assert updates.pop("Masked") == {"kernel": optax.MaskedNode()}
    assert_same(updates, whole)


@entries
def test_empty_trees_pass(entry):
    for empty in ({}, {"Dense_0": {"kernel": None}}):
        assert run(entry.build(), empty) == empty


@entries
def test_empty_leaves_pass(entry):
    grads = make_tree(0)
    whole = run(entry.build(), grads)
    grads["Dense_1"] = {"kernel": jnp.zeros((0, 4)), "bias": jnp.zeros((0,))}
    grads["Dense_2"] = {"kernel": jnp.zeros((16, 0))}
    updates = run(entry.build(), grads)
    assert updates.pop("Dense_1")["kernel"].shape == (0, 4)
    assert updates.pop("Dense_2")["kernel"].shape == (16, 0)
    assert_same(updates, whole)


@entries
def test_composes_in_a_chain(entry):
    grads = make_tree(0)
    chained = run(optax.chain(entry.build(), optax.scale(-0.5)), grads)
    alone = run(entry.build(), grads)
    assert_same(chained, jax.tree.map(lambda u: -0.5 * u, alone))


@entries
def test_masked_changes_only_the_masked_leaves(entry):
    grads = make_tree(0)
    mask = {name: jax.tree.map(lambda _: False, grads[name]) for name in grads}
    mask["Dense_0"] = {"kernel": True, "bias": True}
    updates = run(optax.masked(entry.build(), mask), grads)
    alone = run(entry.build(), {"Dense_0": grads["Dense_0"]})
    assert_close(updates.pop("Dense_0"), alone["Dense_0"])
    grads.pop("Dense_0")
    assert_same(updates, grads)


@entries
def test_partition_by_groups_without_kernels(entry):
    grads = make_tree(0)
    labels = jax.tree.map(lambda g: "vector" if g.ndim < 2 else "matrix", grads)
    tx = optax.partition({"matrix": entry.build(), "vector": entry.build()}, labels)
    updates = run(tx, grads)
    moved = (updates["Dense_0"]["kernel"] != grads["Dense_0"]["kernel"]).any()
    assert bool(moved) != entry.measures
    assert jax.tree.structure(updates) == jax.tree.structure(grads)


@entries
def test_multi_steps_transforms_the_mean(entry):
    first, second = make_tree(0), make_tree(1)
    tx = optax.MultiSteps(entry.build(), every_k_schedule=2)
    with jax.numpy_dtype_promotion("standard"):  # Optax divides by an int32 count.
        state = tx.init(first)
        held, state = tx.update(first, state, first)
        updates, state = tx.update(second, state, first)
    assert_same(held, jax.tree.map(jnp.zeros_like, first))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    assert_close(updates, run(entry.build(), mean, first), atol=1e-5)


@entries
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_inject_hyperparams_agrees(entry, dtype):
    grads = make_tree(0)
    grads["Dense_0"] = jax.tree.map(lambda g: g.astype(dtype), grads["Dense_0"])
    injected = optax.inject_hyperparams(entry.factory, static_args=entry.static_args)
    tx = injected(**entry.kwargs)
    with jax.numpy_dtype_promotion("standard"):  # Optax promotes the trees' types.
        updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
        jax.jit(tx.update)(grads, state, grads)
    assert_close(
        updates, run(entry.build(), grads), atol=4 * float(jnp.finfo(dtype).eps)
    )


@entries
def test_state_is_stable_under_scan_and_cond(entry):
    tx, grads = entry.build(), make_tree(0)

    def step(state, use):
        update = functools.partial(tx.update, params=grads)
        updates, state = jax.lax.cond(
            use, update, lambda grads, state: (grads, state), grads, state
        )
        return state, updates

    state, updates = jax.lax.scan(step, tx.init(grads), jnp.array([True, False]))
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(grads))
    assert_close(jax.tree.map(lambda u: u[0], updates), run(tx, grads))
    assert_same(jax.tree.map(lambda u: u[1], updates), grads)


@entries
def test_abstract_init_has_the_state_of_a_concrete_one(entry):
    tx, params = entry.build(), make_tree(0)
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    expected = jax.tree.map(lambda s: (s.shape, s.dtype), tx.init(params))
    for state in (tx.init(abstract), jax.eval_shape(tx.init, params)):
        assert jax.tree.map(lambda s: (s.shape, s.dtype), state) == expected


@entries
def test_donated_gradients(entry):
    tx = entry.build()
    expected = run(tx, make_tree(0))
    update = jax.jit(functools.partial(run, tx), donate_argnums=0)
    grads = make_tree(0)
    assert_close(update(grads), expected)
    assert grads["Dense_0"]["kernel"].is_deleted()


@entries
def test_integer_gradients_are_refused(entry):
    grads = make_tree(0)
    grads["Dense_0"]["kernel"] = jnp.ones((16, 24), jnp.int32)
    with pytest.raises(TypeError, match=r"Dense_0.*kernel.*int32"):
        entry.build().update(grads, optax.EmptyState(), grads)


SPECS = [P(), P("x"), P(None, "x"), P("x", "y"), P(("x", "y"), None)]
SHARDED = {
    "Conv_0": {"kernel": (8, 8, 4, 8), "bias": (8,)},
    "Dense_0": {"kernel": (16, 32), "bias": (32,)},
}


@entries
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sharded_gradients(entry, axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    grads, tx = make_tree(0, shapes=SHARDED), entry.build()
    expected = run(tx, grads)
    with jax.set_mesh(mesh):
        sharded = jax.tree.map(
            lambda g: jax.device_put(
                g, NamedSharding(mesh, spec if g.ndim > 1 else P())
            ),
            grads,
        )
        update = jax.jit(functools.partial(run, tx))
        updates = update(sharded)
        assert "all-gather" not in str(update.lower(sharded).compile().as_text())
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(sharded), strict=True):
        assert u.sharding.is_equivalent_to(g.sharding, g.ndim)
    assert_close(updates, expected, atol=1e-6)
