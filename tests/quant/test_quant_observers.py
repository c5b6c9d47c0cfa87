"""Observers: ranges of many batches, inside of jit, over devices."""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel import quant
from jaxaccel.quant import QuantSpec

TENSOR, CHANNEL = QuantSpec(), QuantSpec(channel_axis=-1)
FACTORIES = {
    "minmax": quant.minmax,
    "ema": functools.partial(quant.ema_minmax, decay=0.9),
    "percentile": functools.partial(quant.percentile, percent=99.0, bins=256),
    "mse": functools.partial(quant.mse_range, candidates=20, bins=256),
}
every_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
# Histograms are updated alike, whatever is read off them.
every_update = pytest.mark.parametrize(
    "factory", list(FACTORIES.values())[:3], ids=list(FACTORIES)[:3]
)
every_spec = pytest.mark.parametrize(
    "spec", [TENSOR, CHANNEL], ids=["tensor", "channel"]
)


def _batches(seed=0, count=4, shape=(16, 3)):
    rng = np.random.default_rng(seed)
    # Of different magnitudes, so that histograms have to grow.
    sizes = 2.0 ** rng.uniform(-4, 6, count)
    return [(rng.normal(size=shape) * size).astype(np.float32) for size in sizes]


@functools.cache
def _compiled(factory, spec):
    observer = factory(spec)
    return observer, jax.jit(observer.update), jax.jit(observer.range)


def _observe(factory, spec, batches):
    observer, update, find = _compiled(factory, spec)
    state = observer.init(batches[0].shape)
    for batch in batches:
        state = update(state, batch)
    return state, tuple(np.asarray(end) for end in find(state))


def _channels(spec, batches):
    """What shares a scale, as one row of numbers a batch."""
    if spec.channel_axis is None:
        return [[b.ravel() for b in batches]]
    return [[b[..., c].ravel() for b in batches] for c in range(batches[0].shape[-1])]


# Each observer against an oracle of its own.


@every_spec
def test_minmax_is_that_of_all_numbers(spec):
    batches = _batches()
    state, (lo, hi) = _observe(quant.minmax, spec, batches)
    groups = [np.concatenate(rows) for rows in _channels(spec, batches)]
    np.testing.assert_array_equal(np.ravel(lo), [g.min() for g in groups])
    np.testing.assert_array_equal(np.ravel(hi), [g.max() for g in groups])
    assert state.count == 4 and lo.shape == spec.params_shape((16, 3))


@every_spec
def test_ema_starts_with_the_first_batch(spec):
    batches = _batches()
    _, (lo, hi) = _observe(FACTORIES["ema"], spec, batches)
    for c, rows in enumerate(_channels(spec, batches)):
        low, high = float(rows[0].min()), float(rows[0].max())
        for row in rows[1:]:
            low = 0.9 * low + 0.1 * float(row.min())
            high = 0.9 * high + 0.1 * float(row.max())
        np.testing.assert_allclose(np.ravel(lo)[c], low, rtol=1e-5)
        np.testing.assert_allclose(np.ravel(hi)[c], high, rtol=1e-5)


def test_ema_of_equal_batches_stays():
    """Also after many of them: no share is lost to rounding."""
    observer = quant.ema_minmax(TENSOR, decay=0.99)
    batch = jnp.array([-0.3, 0.7])

    def body(state, _):
        return observer.update(state, batch), None

    state, _ = jax.lax.scan(body, observer.init(()), length=3000)
    lo, hi = observer.range(state)
    assert (lo, hi) == (batch[0], batch[1]) and state.count == 3000


@pytest.mark.parametrize(
    "spec, percent", [(TENSOR, 99.0), (CHANNEL, 99.0), (CHANNEL, 90.0)]
)
def test_percentile_is_that_of_all_numbers(spec, percent):
    """To within a bin, which is at most 4 / bins of the largest magnitude."""
    batches = _batches(shape=(512, 3))
    factory = functools.partial(quant.percentile, percent=percent)
    state, (lo, hi) = _observe(factory, spec, batches)
    for c, rows in enumerate(_channels(spec, batches)):
        numbers = np.concatenate(rows).astype(np.float64)
        width = 4 / 2048 * np.abs(numbers).max()
        for end, share in ((lo, 100 - percent), (hi, percent)):
            below = np.percentile(numbers, share, method="lower")
            above = np.percentile(numbers, share, method="higher")
            assert below - width <= np.ravel(end)[c] <= above + width
        assert np.ravel(hi)[c] < 0.9 * numbers.max()
    assert float(state.counts.sum()) == 4 * 512 * 3


def test_a_percentile_treats_both_ends_alike():
    """Its upper end is found from above, where float32 has digits for a small share."""
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    factory = functools.partial(quant.percentile, percent=99.999)
    _, (lo, hi) = _observe(factory, TENSOR, [x])
    _, (mirrored_lo, mirrored_hi) = _observe(factory, TENSOR, [-x])
    width = 2 * 8 / 2048
    assert abs(lo + mirrored_hi) < width and abs(hi + mirrored_lo) < width
    wanted = np.percentile(x.astype(np.float64), [0.001, 99.999])
    np.testing.assert_allclose([lo, hi], wanted, atol=width)


def test_a_hundred_percent_is_minmax():
    batches = _batches()
    every = functools.partial(quant.percentile, percent=100.0)
    wanted = _observe(quant.minmax, CHANNEL, batches)[1]
    np.testing.assert_array_equal(_observe(every, CHANNEL, batches)[1], wanted)


def _squared_error(numbers, lo, hi, spec):
    """Of quantizing the numbers themselves, in float64."""
    if spec.symmetric:
        scale, zero = max(-lo, hi) / spec.qmax, 0
    else:
        lo, hi = min(lo, 0), max(hi, 0)
        scale = (hi - lo) / (spec.qmax - spec.qmin)
        zero = np.round(spec.qmin - lo / scale)
    q = np.clip(np.round(numbers / scale) + zero, spec.qmin, spec.qmax)
    return float(np.mean((scale * (q - zero) - numbers) ** 2))


@pytest.mark.parametrize(
    "bits, axis, symmetric", [(2, None, True), (4, None, False), (4, -1, True)]
)
def test_mse_range_is_the_best_of_a_fine_search(bits, axis, symmetric):
    """Within a little, as it searches bins, and clearly below that of minmax."""
    spec = QuantSpec(bits=bits, symmetric=symmetric, channel_axis=axis)
    x = np.random.default_rng(0).laplace(size=(4096, 2)).astype(np.float32)
    x[:, 1] *= 100
    batches = [x[:1000], x[1000:]]
    _, (lo, hi) = _observe(quant.mse_range, spec, batches)
    for c, rows in enumerate(_channels(spec, batches)):
        numbers = np.concatenate(rows).astype(np.float64)
        shares = np.linspace(0.02, 1, 200)
        low, high = numbers.min(), numbers.max()
        errors = [_squared_error(numbers, s * low, s * high, spec) for s in shares]
        found = _squared_error(numbers, np.ravel(lo)[c], np.ravel(hi)[c], spec)
        assert found <= 1.03 * min(errors)
        assert found < 0.7 * errors[-1]


def test_mse_range_of_eight_bits_keeps_most_of_the_range():
    x = np.random.default_rng(0).uniform(0, 1, 4096).astype(np.float32)
    _, (lo, hi) = _observe(quant.mse_range, QuantSpec(signed=False), [x])
    assert 0.98 < hi <= x.max() and lo >= 0


def test_mse_range_for_other_formats(rng):
    x = rng.normal(size=512).astype(np.float32)
    for spec in (quant.FP8_E4M3, QuantSpec(bits=4, rounding="stochastic")):
        _, (lo, hi) = _observe(FACTORIES["mse"], spec, [x])
        assert x.min() <= lo < 0 < hi <= x.max()


# What they share.


@every_update
def test_inside_scan(factory):
    """States keep their shapes and dtypes, and give what a loop gives."""
    batches = _batches()
    observer, update, _ = _compiled(factory, CHANNEL)
    wanted, _ = _observe(factory, CHANNEL, batches)

    def body(state, x):
        return update(state, x), None

    state, _ = jax.lax.scan(body, observer.init((16, 3)), np.stack(batches))
    for a, b in zip(state, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


@pytest.mark.parametrize("name", ["minmax", "percentile"])
@given(order=st.permutations(range(4)), seed=st.integers(0, 2**31))
def test_the_order_of_batches_does_not_matter(name, order, seed):
    batches = _batches(seed)
    batches[1][...] = 0
    state, _ = _observe(FACTORIES[name], CHANNEL, batches)
    other, _ = _observe(FACTORIES[name], CHANNEL, [batches[i] for i in order])
    for a, b in zip(state, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", ["minmax", "percentile"])
@every_spec
def test_merged_observers_know_what_one_would(name, spec):
    batches = _batches(count=8)
    # Exactly on a power of two, where a histogram has to grow.
    batches[2][0, 0] = batches[5][0, 0] = 64
    observer, update, find = _compiled(FACTORIES[name], spec)
    wanted, ends = _observe(FACTORIES[name], spec, batches)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="devices")
    def run(x):
        start = observer.init((16, 3))
        state, _ = jax.lax.scan(lambda s, b: (update(s, b), None), start, x)
        return observer.merge(state, "devices")

    merged = run(np.stack(batches).reshape(4, 2, 16, 3))
    merged = jax.tree.map(lambda x: x[1], merged)
    for a, b in zip(merged[:-1], wanted[:-1], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_array_equal(np.asarray(find(merged)), ends)


@every_spec
def test_merged_averages_are_the_mean_of_devices_that_saw_data(spec):
    batches = _batches(count=3)
    observer, update, _ = _compiled(FACTORIES["ema"], spec)

    def one(x, idle):
        start = observer.init((16, 3))
        state = update(start, x)
        state = jax.tree.map(lambda a, b: jnp.where(idle, a, b), start, state)
        return observer.merge(state, "devices")

    idle = np.array([False, True, False])
    merged = jax.vmap(one, axis_name="devices")(np.stack(batches), idle)
    single = [_observe(FACTORIES["ema"], spec, [b])[0] for b in batches]
    for end in ("lo", "hi"):
        wanted = (getattr(single[0], end) + getattr(single[2], end)) / 2
        for device in range(3):
            got = getattr(merged, end)[device]
            np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-6)


@pytest.mark.parametrize("name", ["minmax", "ema"])
def test_ranges_may_be_merged_again_and_again(name):
    observer, update, _ = _compiled(FACTORIES[name], TENSOR)
    batch = _batches(count=1)[0]

    def one(x):
        once = observer.merge(update(observer.init(()), x), "devices")
        return once, observer.merge(once, "devices")

    once, twice = jax.vmap(one, axis_name="devices")(np.stack([batch] * 3))
    for a, b in zip(once, twice, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@every_update
def test_merging_states_that_saw_nothing(factory):
    observer = factory(TENSOR)
    merged = jax.vmap(
        lambda _: observer.merge(observer.init(()), "devices"), axis_name="devices"
    )(jnp.zeros(2))
    state = jax.tree.map(lambda x: x[0], merged)
    with pytest.raises(ValueError, match="never updated"):
        observer.qparams(state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "name, spec",
    [("ema", CHANNEL), ("percentile", TENSOR), ("percentile", CHANNEL)],
    ids=["ema", "percentile", "percentile_of_channels"],
)
def test_split_batches_give_the_same_range(name, spec, kind):
    """Under jit a batch on many devices is one batch: nothing to merge."""
    factory, batch = FACTORIES[name], _batches(count=1)[0]
    _, wanted = _observe(factory, spec, [batch])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    observer = factory(spec)
    with jax.set_mesh(mesh):
        split = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))

        @jax.jit
        def run(x):
            return observer.range(observer.update(observer.init(x.shape), x))

        got = run(split)
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-6)


@every_factory
def test_qparams_cover_the_range(factory):
    spec = CHANNEL
    observer, _, _ = _compiled(factory, spec)
    state, (lo, hi) = _observe(factory, spec, _batches())
    scale, zero = map(np.asarray, jax.jit(observer.qparams)(state))
    wanted = quant.compute_qparams(lo, hi, spec)
    np.testing.assert_array_equal(scale, np.asarray(wanted.scale))
    np.testing.assert_array_equal(zero, np.asarray(wanted.zero_point))
    assert scale.shape == spec.params_shape((16, 3)) and observer.spec == spec


@every_factory
def test_each_channel_is_observed_by_itself(factory):
    batches = _batches()
    together = _observe(factory, CHANNEL, batches)[1]
    for c in range(3):
        alone = _observe(factory, TENSOR, [b[:, c].copy() for b in batches])[1]
        np.testing.assert_allclose([end[c] for end in together], alone, rtol=1e-6)


@every_factory
def test_zeros_have_scale_one(factory):
    observer, _, _ = _compiled(factory, TENSOR)
    state, _ = _observe(factory, TENSOR, [np.zeros((16, 3), np.float32)])
    assert observer.qparams(state).scale == 1


@every_update
def test_narrow_numbers_and_numpy(factory):
    batch = jnp.asarray(_batches(count=1)[0], jnp.bfloat16)
    observer, update, _ = _compiled(factory, TENSOR)
    narrow = update(observer.init(()), batch)
    wide = update(observer.init(()), np.asarray(batch, np.float64))
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_zeros_leave_the_histogram_fine():
    """As a batch in which a unit is dead, before the one in which it is not."""
    zeros, x = np.zeros(100, np.float32), np.linspace(0, 1e-4, 100).astype(np.float32)
    _, (_, hi) = _observe(FACTORIES["percentile"], TENSOR, [zeros, x])
    numbers = np.concatenate([zeros, x])
    assert abs(hi - np.percentile(numbers, 99)) < 4 / 256 * 1e-4


@pytest.mark.parametrize("name", ["percentile", "mse"])
@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e10, 1e30, 3e38])
def test_histograms_of_any_magnitude(name, size):
    x = (np.linspace(-1, 1, 201) * size).astype(np.float32)
    state, (lo, hi) = _observe(FACTORIES[name], TENSOR, [x])
    assert float(state.counts.sum()) == 201
    assert -size <= lo < -0.2 * size and 0.2 * size < hi <= size


# Bad input.


@every_factory
def test_an_observer_that_saw_nothing(factory):
    observer, _, find = _compiled(factory, CHANNEL)
    state = observer.init((16, 3))
    with pytest.raises(ValueError, match="observer was never updated; show it"):
        observer.qparams(state)
    assert np.isnan(find(state)).all()


@every_factory
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_data_that_is_not_finite(factory, value):
    """Found when the range is used, however many good batches there are."""
    good = np.ones((16, 3), np.float32)
    bad = good.copy()
    bad[2, 1] = value
    observer, _, _ = _compiled(factory, TENSOR)
    state, _ = _observe(factory, TENSOR, [good, bad, good])
    with pytest.raises(ValueError, match="must be finite; got"):
        observer.qparams(state)


@every_factory
def test_arrays_that_do_not_fit(factory):
    observer = factory(CHANNEL)
    state = observer.init((16, 3))
    with pytest.raises(ValueError, match=r"scales of shape \(3,\).*\(16, 4\)"):
        observer.update(state, np.ones((16, 4), np.float32))
    with pytest.raises(ValueError, match="channel_axis=-1 is out of range"):
        observer.update(state, np.float32(1))
    with pytest.raises(ValueError, match="array without entries has no range"):
        observer.update(state, np.ones((0, 3), np.float32))


@every_factory
def test_blocks_are_not_observed(factory):
    with pytest.raises(ValueError, match="got block_size=4: use array_qparams"):
        factory(QuantSpec(block_size=4))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: quant.ema_minmax(TENSOR, decay=1.0), "decay must be >= 0.*got 1.0"),
        (lambda: quant.ema_minmax(TENSOR, decay=-0.1), "got -0.1"),
        (lambda: quant.percentile(TENSOR, percent=50.0), "percent must be.*got 50.0"),
        (lambda: quant.percentile(TENSOR, percent=100.1), "at most 100; got 100.1"),
        (lambda: quant.percentile(TENSOR, bins=1000), "power of two.*got 1000"),
        (lambda: quant.percentile(TENSOR, bins=4), "at least 8; got 4"),
        (lambda: quant.mse_range(TENSOR, candidates=1), "candidates.*got 1"),
        (lambda: quant.mse_range(TENSOR, bins=0), "bins must be.*got 0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_negative_data_needs_a_sign():
    observer = quant.minmax(QuantSpec(signed=False, symmetric=True))
    state = observer.update(observer.init(()), np.array([-0.5, 1.0]))
    with pytest.raises(ValueError, match="no negative numbers; got lo=-0.5"):
        observer.qparams(state)
