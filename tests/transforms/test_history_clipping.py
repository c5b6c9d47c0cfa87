"""Clips that remember past norms, against float64 traces, spikes and NaN included."""

import functools
import json
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

from jaxaccel.transforms import adagc, autoclip, zclip

STEPS = 40
SPIKES = (13, 25, 26)
BROKEN = {2: np.nan, 18: np.inf, 19: -np.inf, 30: np.nan}
SHAPES = {"kernel": (4, 3), "bias": (3,)}


def gradients(seed=0, broken=True) -> dict[str, np.ndarray]:
    """Stacks of gradients that drift, with spikes and what is not finite."""
    rng = np.random.default_rng(seed)
    size = 2.0 * 0.98 ** np.arange(STEPS) * rng.lognormal(0, 0.3, STEPS)
    size[list(SPIKES)] *= 100
    grads = {
        name: (rng.normal(size=(STEPS, *shape)).T * size).T.astype(np.float32)
        for name, shape in SHAPES.items()
    }
    # A spike of one leaf alone, and a leaf without any gradient for a while.
    grads["bias"][32] *= 50
    grads["bias"][:4] = 0
    grads["bias"][20:22] = 0
    for step, value in BROKEN.items() if broken else ():
        grads["kernel"][step, 1, 2] = value
    return grads


def trace(tx, grads) -> Any:
    """Updates and states of all steps, by one scan."""

    def step(state, grad):
        updates, state = tx.update(grad, state)
        return state, (updates, state)

    first = jax.tree.map(lambda g: g[0], grads)
    return jax.jit(lambda g: jax.lax.scan(step, tx.init(first), g)[1])(grads)


def tree_norm(step) -> float:
    return float(np.sqrt(sum((leaf**2).sum() for leaf in step.values())))


def at_step(grads, step):
    return {name: leaf[step].astype(np.float64) for name, leaf in grads.items()}


def scaled(step, factor):
    if not np.isfinite(factor):
        return {name: np.zeros_like(leaf) for name, leaf in step.items()}
    return {name: leaf * factor for name, leaf in step.items()}


def oracle_zclip(
    grads, z_threshold=2.5, decay=0.97, max_norm=1.0, eps=1e-6, warmup_steps=25
):
    """The published procedure: a list of norms first, averages afterwards."""
    seen: list[float] = []
    mean = variance = 0.0
    count = 0
    for step in range(STEPS):
        grad = at_step(grads, step)
        norm = tree_norm(grad)
        if not np.isfinite(norm):
            yield scaled(grad, np.nan), (count, mean, variance)
            continue
        bound = norm
        if count < warmup_steps:
            seen.append(norm)
            mean, variance = float(np.mean(seen)), float(np.var(seen))
        else:
            std = np.sqrt(variance)
            score = (norm - mean) / (std + eps)
            if score > z_threshold:
                bound = mean + z_threshold * std / (score / z_threshold)
            mean = decay * mean + (1 - decay) * bound
            variance = decay * variance + (1 - decay) * (bound - mean) ** 2
        count += 1
        yield scaled(grad, min(1, min(bound, max_norm) / norm)), (count, mean, variance)


def oracle_autoclip(grads, percentile=10.0, history=1000, max_norm=np.inf):
    seen: list[float] = []
    for step in range(STEPS):
        grad = at_step(grads, step)
        norm = tree_norm(grad)
        if not np.isfinite(norm):
            yield scaled(grad, np.nan), (len(seen), ring(seen, history))
            continue
        seen.append(norm)
        bound = min(np.percentile(seen[-history:], percentile), max_norm)
        yield scaled(grad, min(1, bound / norm)), (len(seen), ring(seen, history))


def ring(seen, history):
    values = np.zeros(history)
    for i, norm in enumerate(seen):
        values[i % history] = norm
    return values


def oracle_adagc(grads, ratio=1.05, decay=0.98, max_norm=1.0, warmup_steps=100):
    gamma = dict.fromkeys(grads, 0.0)
    count = 0
    for step in range(STEPS):
        grad = at_step(grads, step)
        total = tree_norm(grad)
        if not np.isfinite(total):
            yield scaled(grad, np.nan), (count, gamma)
            continue
        update, gamma = {}, dict(gamma)
        for name, leaf in grad.items():
            norm = tree_norm({"": leaf})
            if norm == 0:
                update[name] = leaf
                continue
            if count < warmup_steps:
                factor = min(1, max_norm / total)
            else:
                bound = ratio * gamma[name] if gamma[name] else max_norm
                factor = min(1, bound / norm)
            update[name] = factor * leaf
            clipped = factor * norm
            if not gamma[name]:
                gamma[name] = clipped
            elif count < warmup_steps:
                gamma[name] = min(gamma[name], clipped)
            else:
                gamma[name] = decay * gamma[name] + (1 - decay) * clipped
        count += 1
        yield update, (count, gamma)


def assert_follows(tx, oracle, grads):
    updates, states = trace(tx, grads)
    for step, (expected, state) in enumerate(oracle):
        actual = jax.tree.map(lambda u: np.asarray(u)[step], updates)  # noqa: B023
        for name in SHAPES:
            np.testing.assert_allclose(
                actual[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=str(step)
            )
        mine = jax.tree.leaves(jax.tree.map(lambda s: np.asarray(s)[step], states))  # noqa: B023
        for a, b in zip(mine, jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=str(step))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"warmup_steps": 5},
        {"warmup_steps": 5, "max_norm": np.inf},
        {"max_norm": 3.0},
        {"warmup_steps": 2, "max_norm": np.inf, "decay": 0.5, "z_threshold": 1.0},
        {"warmup_steps": 8, "max_norm": np.inf, "eps": 0.1, "decay": 0.0},
    ],
    ids=str,
)
def test_zclip_follows_the_published_procedure(kwargs):
    assert_follows(zclip(**kwargs), oracle_zclip(gradients(), **kwargs), gradients())


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"percentile": 90.0, "history": 7},
        {"percentile": 0, "history": 12},
        {"percentile": 100.0, "history": 3},
        {"percentile": 33.3, "history": 1},
        {"percentile": 50.0, "max_norm": 1.5},
    ],
    ids=str,
)
def test_autoclip_follows_numpy_percentile(kwargs):
    assert_follows(
        autoclip(**kwargs), oracle_autoclip(gradients(), **kwargs), gradients()
    )


@pytest.mark.parametrize(
    "kwargs",
    [
        {"warmup_steps": 6},
        {"warmup_steps": 6, "max_norm": np.inf, "ratio": 1.5, "decay": 0.8},
        {"warmup_steps": 1, "decay": 0.0},
        {"warmup_steps": 2, "ratio": 1},
        {},
    ],
    ids=str,
)
def test_adagc_follows_the_published_procedure(kwargs):
    assert_follows(adagc(**kwargs), oracle_adagc(gradients(), **kwargs), gradients())


METHODS: dict[str, Any] = {
    "zclip": lambda: zclip(warmup_steps=4, max_norm=np.inf),
    "adagc": lambda: adagc(warmup_steps=4, max_norm=10.0),
    "autoclip": lambda: autoclip(50.0, history=8),
}
methods = pytest.mark.parametrize("build", METHODS.values(), ids=METHODS)


def small(scale=1.0, dtype=jnp.float32) -> Any:
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(scale * rng.normal(size=shape), dtype)
        for name, shape in SHAPES.items()
    }


@functools.cache
def warmed(name) -> tuple[Any, Any]:
    """A transformation and its state after ten steps of ordinary norms."""
    tx: Any = METHODS[name]()
    rng = np.random.default_rng(2)
    sizes = jnp.asarray(rng.uniform(0.8, 1.2, 10), jnp.float32)
    state, _ = jax.jit(
        lambda state: jax.lax.scan(
            lambda state, size: (tx.update(small_scaled(size), state)[1], None),
            state,
            sizes,
        )
    )(tx.init(small()))
    return tx, state


def small_scaled(size) -> Any:
    return jax.tree.map(lambda g: g * size, small())


names = pytest.mark.parametrize("name", METHODS)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@names
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_touches_nothing(name, bad):
    tx, state = warmed(name)
    for before in (tx.init(small()), state):
        grads = small()
        grads["bias"] = grads["bias"].at[0].set(bad)
        updates, after = tx.update(grads, before)
        assert bits(after) == bits(before)
        assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


@names
def test_a_spike_is_clipped_and_hardly_remembered(name):
    tx, state = warmed(name)
    updates, after = tx.update(small(100.0), state)
    ratio = tree_norm({k: np.asarray(u) for k, u in updates.items()}) / tree_norm(
        {k: np.asarray(u) for k, u in small().items()}
    )
    assert 0.7 < ratio < 1.5
    if name == "autoclip":  # It records what came, as the authors do.
        assert float(jnp.max(after.norms)) > 50
        return
    before = [state.mean] if name == "zclip" else jax.tree.leaves(state.gamma)
    now = [after.mean] if name == "zclip" else jax.tree.leaves(after.gamma)
    for a, b in zip(now, before, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-2)


@names
def test_ordinary_gradients_pass_bitwise(name):
    tx, state = warmed(name)
    grads = small(0.5)
    updates, _ = tx.update(grads, state)
    assert bits(updates) == bits(grads)


@names
@given(scale=st.floats(-6, 6), seed=st.integers(0, 100))
def test_never_longer_and_never_turned(name, scale, seed):
    tx, state = warmed(name)
    rng = np.random.default_rng(seed)
    grads = {
        k: jnp.asarray(10.0**scale * rng.normal(size=shape), jnp.float32)
        for k, shape in SHAPES.items()
    }
    updates, _ = _update(name)(grads, state)
    # AdaGC turns the whole gradient, but no leaf.
    for k in SHAPES:
        g, u = np.asarray(grads[k], np.float64), np.asarray(updates[k], np.float64)
        length = np.linalg.norm(u)
        assert length <= np.linalg.norm(g) * (1 + 1e-6)
        assert (g * u).sum() == pytest.approx(np.linalg.norm(g) * length, rel=1e-5)


@functools.cache
def _update(name):
    return jax.jit(warmed(name)[0].update)


@names
def test_state_is_small_plain_and_of_fixed_types(name):
    tx, state = warmed(name)
    assert type(state).__name__.endswith("State")
    kinds = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert kinds == {jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)}
    for dtype in (jnp.bfloat16, jnp.float16):
        _, after = tx.update(small(1.0, dtype), state)
        assert jax.tree.map(lambda s: (s.shape, s.dtype), after) == jax.tree.map(
            lambda s: (s.shape, s.dtype), state
        )
    assert int(state.count) == 10
    full = state._replace(count=jnp.asarray(np.iinfo(np.int32).max, jnp.int32))
    assert int(tx.update(small(), full)[1].count) == np.iinfo(np.int32).max


@names
def test_state_survives_json_npz_and_orbax(name, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx, state = warmed(name)
    leaves, treedef = jax.tree.flatten(state)
    template = tx.init(small())

    written = json.dumps([np.asarray(leaf).tolist() for leaf in leaves])
    from_json = treedef.unflatten(
        [
            jnp.asarray(value, leaf.dtype)
            for value, leaf in zip(
                json.loads(written), jax.tree.leaves(template), strict=True
            )
        ]
    )
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as file:
        from_npz = treedef.unflatten([jnp.asarray(file[key]) for key in file.files])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
        checkpointer.wait_until_finished()
        from_orbax = checkpointer.restore(tmp_path / "orbax", template)

    expected = bits(tx.update(small(100.0), state))
    for restored in (from_json, from_npz, from_orbax):
        assert type(restored) is type(state)
        assert bits(restored) == bits(state)
        assert bits(tx.update(small(100.0), restored)) == expected


@names
def test_warm_state_under_cond_and_without_a_second_trace(name):
    tx, state = warmed(name)
    traces = []

    @jax.jit
    def step(grads, state, use):
        traces.append(None)
        return jax.lax.cond(use, tx.update, lambda g, s: (g, s), grads, state)

    updates, after = step(small(100.0), state, True)
    kept, same = step(small(100.0), state, False)
    step(updates, after, True)
    assert len(traces) == 1
    assert bits(kept) == bits(small(100.0)) and bits(same) == bits(state)
    assert bits(after) != bits(state)


@names
def test_warm_state_under_vmap(name):
    tx, state = warmed(name)
    trees = [small(0.5), small(100.0)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    updates, states = jax.vmap(tx.update, in_axes=(0, None))(stacked, state)
    for i, tree in enumerate(trees):
        expected = tx.update(tree, state)
        actual = jax.tree.map(lambda x: x[i], (updates, states))  # noqa: B023
        for a, b in zip(
            jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@names
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_derivatives_through_a_warm_update_are_finite_and_right(name, scale):
    tx, state = warmed(name)

    def total(step):
        grads = jax.tree.map(lambda g: g * (scale + step), small())
        updates, _ = tx.update(grads, state)
        terms = jax.tree.map(lambda u, w: jnp.sum(u * w), updates, weights)
        return sum(jax.tree.leaves(terms))

    weights = small(0.3)
    slope = float(jax.jit(jax.grad(total))(jnp.float32(0)))
    assert np.isfinite(slope)
    h = 1e-2 * max(scale, 1)
    difference = float(total(jnp.float32(h)) - total(jnp.float32(-h))) / (2 * h)
    assert slope == pytest.approx(difference, rel=2e-2, abs=2e-3)


@names
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_warm_state_with_sharded_gradients(name, axis_type):
    tx, state = warmed(name)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    grads = small(100.0)
    expected = tx.update(grads, state)
    with jax.set_mesh(mesh):
        sharded = dict(grads)
        sharded["kernel"] = jax.device_put(
            grads["kernel"], NamedSharding(mesh, P("x", None))
        )
        update = jax.jit(tx.update)
        actual = update(sharded, state)
        assert "all-gather" not in str(update.lower(sharded, state).compile().as_text())
    kernel = actual[0]["kernel"]
    assert kernel.sharding.is_equivalent_to(sharded["kernel"].sharding, 2)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-6)


@methods
def test_float16_norms_are_float32(build):
    tx = build()
    grads = {"kernel": jnp.full((40, 30), 300.0, jnp.float16)}
    state = tx.init(grads)
    for _ in range(5):
        updates, state = tx.update(grads, state)
    assert bool(jnp.isfinite(updates["kernel"]).all()) and bool(updates["kernel"].any())
    if hasattr(state, "mean"):
        assert float(state.mean) == pytest.approx(300 * np.sqrt(1200), rel=1e-5)


@methods
def test_equal_norms_are_never_outliers(build):
    tx = build()
    grads = jax.tree.map(lambda g: 1e4 * g, small())
    state = tx.init(grads)
    grads = jax.tree.map(lambda g: g / 1e4, grads)
    for _ in range(12):
        updates, state = tx.update(grads, state)
    for name in SHAPES:
        np.testing.assert_allclose(updates[name], grads[name], rtol=1e-6)


def test_a_hyper_parameter_can_follow_a_schedule():
    tx: Any = optax.inject_hyperparams(autoclip, static_args=("history",))(
        percentile=lambda count: 100.0 * (count > 4), history=50
    )
    with jax.numpy_dtype_promotion("standard"):
        state = tx.init(small())
        for size in (1.0, 2.0, 3.0, 4.0, 5.0):
            updates, state = tx.update(small(size), state)
        np.testing.assert_allclose(updates["bias"], small()["bias"], rtol=1e-6)
        updates, state = tx.update(small(6.0), state)
    assert bits(updates) == bits(small(6.0))


def test_adagc_lets_a_leaf_start_that_had_no_gradient():
    tx: Any = adagc(max_norm=1.0, warmup_steps=2)
    state = tx.init(small())
    for _ in range(4):
        grads = small(0.1)
        grads["bias"] = jnp.zeros(3)
        _, state = tx.update(grads, state)
    assert float(state.gamma["bias"]) == 0 and float(state.gamma["kernel"]) > 0
    updates, state = tx.update(small(10.0), state)
    assert float(jnp.linalg.norm(updates["bias"])) == pytest.approx(1.0, rel=1e-6)
    assert float(state.gamma["bias"]) == pytest.approx(1.0, rel=1e-6)


def test_adagc_keeps_the_average_of_a_leaf_without_update():
    tx, state = warmed("adagc")
    grads: Any = small()
    for hole in (None, optax.MaskedNode()):
        grads["bias"] = hole
        updates, after = tx.update(grads, state)
        assert updates["bias"] == hole
        assert bits(after.gamma["bias"]) == bits(state.gamma["bias"])
        assert bits(after.gamma["kernel"]) != bits(state.gamma["kernel"])
    with pytest.raises(ValueError, match="adagc: updates and the state are trees"):
        tx.update({"kernel": grads["kernel"]}, state)


@pytest.mark.parametrize(
    "build,message",
    [
        (lambda: zclip(-1.0), "`z_threshold` must be finite and >= 0, got -1.0"),
        (lambda: zclip(np.nan), "`z_threshold`.*nan"),
        (lambda: zclip(decay=1.0), "`decay` must be >= 0 and < 1, got 1.0"),
        (lambda: zclip(decay=np.nan), "`decay`.*nan"),
        (lambda: zclip(max_norm=-1.0), "`max_norm` must be >= 0"),
        (lambda: zclip(eps=np.inf), "`eps`.*inf"),
        (lambda: zclip(warmup_steps=1), "`warmup_steps` must be at least 2"),
        (lambda: adagc(0.99), "`ratio` must be finite and >= 1.0, got 0.99"),
        (lambda: adagc(np.inf), "`ratio`.*inf"),
        (lambda: adagc(np.nan), "`ratio`.*nan"),
        (lambda: adagc(decay=-0.1), "`decay`"),
        (lambda: adagc(max_norm=np.nan), "`max_norm`.*nan"),
        (lambda: adagc(warmup_steps=0), "`warmup_steps` must be at least 1"),
        (lambda: autoclip(101.0), "`percentile` must be from 0 to 100, got 101.0"),
        (lambda: autoclip(np.nan), "`percentile`.*nan"),
        (lambda: autoclip(jnp.ones(2)), r"`percentile` must be one number.*\(2,\)"),
        (lambda: autoclip(history=0), "`history` must be at least 1"),
        (lambda: autoclip(max_norm=-1.0), "`max_norm`"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_arguments_of_a_wrong_type(unchecked):
    wrong: list[Any] = [
        lambda: zclip(warmup_steps=2.5),  # pyright: ignore[reportArgumentType]
        lambda: autoclip(history=jnp.int32(3)),  # pyright: ignore[reportArgumentType]
        lambda: autoclip("10"),  # pyright: ignore[reportArgumentType]
        lambda: adagc(axis_name=3),  # pyright: ignore[reportArgumentType]
        lambda: zclip(axis_name=()),
        lambda: zclip(decay=1j),  # pyright: ignore[reportArgumentType]
    ]
    for build in wrong:
        with pytest.raises(TypeError):
            build()
