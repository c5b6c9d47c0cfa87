"""Quantizers with learned ranges, against their closed forms in float64."""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, PartitionSpec

from jaxaccel import quant
from jaxaccel.quant import QuantSpec

GROUPS = {
    "tensor": QuantSpec(bits=3, symmetric=True),
    "unsigned": QuantSpec(bits=4, symmetric=True, signed=False),
    "narrow": QuantSpec(bits=2, symmetric=True, narrow_range=True),
    "channel": QuantSpec(bits=4, symmetric=True, channel_axis=-1),
    "first_axis": QuantSpec(bits=4, symmetric=True, channel_axis=0),
    "block": QuantSpec(bits=4, symmetric=True, channel_axis=-1, block_size=4),
    "half_up": QuantSpec(bits=3, symmetric=True, rounding="half_up"),
}
every_group = pytest.mark.parametrize("spec", GROUPS.values(), ids=GROUPS)
SHAPE = (8, 6)


def _spread(scale, spec):
    """Each entry's scale, by indices alone."""
    wide = np.empty(SHAPE)
    for i, j in np.ndindex(*SHAPE):
        if spec.block_size:
            wide[i, j] = scale[i // spec.block_size, j]
        elif spec.channel_axis is not None:
            wide[i, j] = scale[j if spec.channel_axis == -1 else i]
        else:
            wide[i, j] = scale
    return wide


def _sum_to(values, spec):
    total = np.zeros(spec.params_shape(SHAPE))
    for i, j in np.ndindex(*SHAPE):
        if spec.block_size:
            total[i // spec.block_size, j] += values[i, j]
        elif spec.channel_axis is not None:
            total[j if spec.channel_axis == -1 else i] += values[i, j]
        else:
            total += values[i, j]
    return total


def _closed_form(x, scale, cotangent, spec):
    x, wide = x.astype(np.float64), _spread(scale.astype(np.float64), spec)
    v = x / wide
    rounded = np.floor(v + 0.5) if spec.rounding == "half_up" else np.round(v)
    q = np.clip(rounded, spec.qmin, spec.qmax)
    inside = (v >= spec.qmin) & (v <= spec.qmax)
    entries = x.size / max(1, np.size(scale))
    slope = (
        np.where(inside, rounded - v, q) * cotangent / math.sqrt(entries * spec.qmax)
    )
    return wide * q, inside * cotangent, _sum_to(slope, spec)


@functools.cache
def _lsq(spec):
    def both(x, scale, cotangent):
        y, pull = jax.vjp(lambda x, s: quant.lsq(x, s, spec), x, scale)
        return y, *pull(cotangent)

    return jax.jit(both)


@every_group
@given(seed=st.integers(0, 2**31))
def test_lsq_is_its_closed_form(spec, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SHAPE).astype(np.float32)
    cotangent = rng.normal(size=SHAPE).astype(np.float32)
    scale = rng.uniform(0.1, 0.6, spec.params_shape(SHAPE)).astype(np.float32)
    got = _lsq(spec)(x, scale, cotangent)
    wanted = _closed_form(x, scale, cotangent, spec)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=2e-6)


def test_lsq_passes_the_gradient_on_the_edges():
    spec = QuantSpec(bits=3, symmetric=True)
    x = np.array([-2.1, -2.0, 0.0, 1.5, 1.6], np.float32)
    gradient = jax.grad(lambda x: quant.lsq(x, 0.5, spec).sum())(x)
    assert gradient.tolist() == [0, 1, 1, 1, 0]


def test_lsq_is_a_fake_quantizer(rng):
    """One equation in a trace, the same numbers, so that exports see its scale."""
    spec = GROUPS["channel"]
    x = rng.normal(size=SHAPE).astype(np.float32)
    scale = quant.lsq_init(x, spec)
    fixed = quant.fake_quant(x, quant.QParams(scale, np.zeros(6, np.int32)), spec)
    np.testing.assert_array_equal(
        np.asarray(quant.lsq(x, scale, spec)), np.asarray(fixed)
    )
    traced = jax.make_jaxpr(lambda x: quant.lsq(x, scale, spec))(x)
    assert str(traced).count("fake_quant[") == 1


@every_group
def test_lsq_starts_at_twice_the_mean_magnitude(rng, spec):
    x = rng.normal(size=SHAPE)
    wanted = 2 * _sum_to(np.abs(x), spec) / math.sqrt(spec.qmax)
    wanted *= max(1, wanted.size) / x.size
    got = quant.lsq_init(x, spec)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5)


def test_lsq_of_zeros_starts_at_one():
    assert quant.lsq_init(np.zeros(5), GROUPS["tensor"]) == 1
    tiny = quant.lsq_init(np.full(5, 1e-44, np.float32), GROUPS["tensor"])
    assert tiny >= 2.0**-126


@pytest.mark.parametrize("start", [4.0, 0.02])
def test_descending_the_gradient_finds_a_better_scale(rng, start):
    """From far too large and far too small to near the least squared error.

    Not onto it: the straight-through gradient of a scale is another one.
    """
    spec = QuantSpec(bits=3, symmetric=True)
    x = rng.normal(size=512).astype(np.float32)

    def error(scale):
        return jnp.mean((quant.lsq(x, scale, spec) - x) ** 2)

    @jax.jit
    def descend(scale):
        # The gradient is scaled down, and undone here, so that steps are plain.
        factor = math.sqrt(x.size * spec.qmax)

        def body(scale, _):
            return scale - 0.05 * factor * jax.grad(error)(scale), None

        return jax.lax.scan(body, scale, length=200)[0]

    best = min(float(error(s)) for s in np.linspace(0.2, 1.0, 33, dtype=np.float32))
    found = float(error(descend(jnp.float32(start))))
    assert found < 1.5 * best < 0.2 * float(error(jnp.float32(start)))


def test_a_scale_that_training_made_negative_counts_as_its_magnitude():
    spec = QuantSpec(bits=3, symmetric=True)
    x = np.array([0.2, 0.7, 9.0], np.float32)

    @jax.jit
    def both(scale):
        return jax.value_and_grad(lambda s: quant.lsq(x, s, spec).sum())(scale)

    value, slope = both(jnp.float32(0.5))
    mirrored, opposite = both(jnp.float32(-0.5))
    assert mirrored == value and opposite == -slope != 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_lsq_and_pact_keep_dtypes(dtype):
    x, scale = jnp.ones(4, dtype), jnp.float32(0.3)
    symmetric = QuantSpec(symmetric=True)
    unsigned = QuantSpec(symmetric=True, signed=False)
    for f, spec in ((quant.lsq, symmetric), (quant.pact, unsigned)):
        y, pull = jax.vjp(lambda x, s, f=f, spec=spec: f(x, s, spec), x, scale)
        gradients = pull(y)
        assert y.dtype == gradients[0].dtype == dtype
        assert gradients[1].dtype == jnp.float32


@pytest.mark.parametrize("function", [quant.lsq, quant.pact])
def test_a_replicated_scale_gathers_the_gradient_of_all_devices(rng, function):
    spec = QuantSpec(bits=4, symmetric=True, signed=False)
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
    )
    x = rng.normal(size=(4, 8)).astype(np.float32)
    replicated, split = PartitionSpec(), PartitionSpec("data")

    def local(x, scale):
        return jax.lax.psum(function(x, scale, spec).sum(), "data")

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(split, replicated), out_specs=replicated
    )
    got = jax.jit(jax.grad(mapped, argnums=1))(x, jnp.float32(0.4))
    alone = [
        jax.grad(lambda s, row=row: function(row, s, spec).sum())(jnp.float32(0.4))
        for row in x
    ]
    np.testing.assert_allclose(float(got), np.sum(alone), rtol=1e-5)


# PACT.

UNSIGNED = QuantSpec(bits=4, signed=False, symmetric=True)


@given(seed=st.integers(0, 2**31), alpha=st.floats(0.5, 3.0, width=32))
def test_pact_is_its_closed_form(seed, alpha):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=64) * 2).astype(np.float32)
    cotangent = rng.normal(size=64).astype(np.float32)
    y, dx, dalpha = _pact(x, np.float32(alpha), cotangent)
    step = alpha / 15
    wanted = step * np.round(np.clip(x.astype(np.float64), 0, alpha) / step)
    # Next to a tie float32 may round to either side.
    tie = abs(np.abs(np.clip(x, 0, alpha) / step % 1) - 0.5) < 1e-4
    np.testing.assert_allclose(np.asarray(y)[~tie], wanted[~tie], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(dx), cotangent * ((x >= 0) & (x < alpha)))
    np.testing.assert_allclose(dalpha, cotangent[x >= alpha].sum(), atol=1e-5)


@jax.jit
def _pact(x, alpha, cotangent):
    y, pull = jax.vjp(lambda x, a: quant.pact(x, a, UNSIGNED), x, alpha)
    return y, *pull(cotangent)


def test_pact_on_its_bound():
    """There the bound has the gradient, not the activation."""
    x = np.array([0.0, 2.0], np.float32)
    dx, dalpha = jax.grad(lambda x, a: quant.pact(x, a, UNSIGNED).sum(), (0, 1))(x, 2.0)
    assert dx.tolist() == [1, 0] and dalpha == 1


# Straight through.


def test_ste_round():
    x = np.array([-1.5, -0.2, 0.5, 2.5, 7.7], np.float32)
    y, slope = jax.jvp(quant.ste_round, (x,), (x,))
    np.testing.assert_array_equal(np.asarray(y), np.round(x))
    np.testing.assert_array_equal(np.asarray(slope), x)
    gradient = jax.grad(lambda x: (quant.ste_round(x) ** 2).sum())(x)
    np.testing.assert_array_equal(np.asarray(gradient), 2 * np.round(x))
    assert quant.ste_round(jnp.bfloat16(1.4)).dtype == jnp.bfloat16


# Bad input.

X = np.ones(3, np.float32)


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(),
        quant.FP8_E4M3,
        QuantSpec(symmetric=True, rounding="stochastic"),
        QuantSpec(symmetric=True, pow2_scale=True),
    ],
)
def test_formats_that_cannot_be_learned(spec):
    with pytest.raises(ValueError, match="lsq needs symmetric=True, pow2_scale=False"):
        quant.lsq(X, 1.0, spec)
    with pytest.raises(ValueError, match="pact needs symmetric=True, pow2_scale=False"):
        quant.pact(X, 1.0, spec)


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(symmetric=True),
        QuantSpec(symmetric=True, signed=False, channel_axis=-1),
    ],
)
def test_pact_is_for_activations(spec):
    with pytest.raises(ValueError, match="pact needs signed=False.*one scale"):
        quant.pact(X, 1.0, spec)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales_are_positive(scale):
    with pytest.raises(ValueError, match=f"scale must be positive.*got {scale}"):
        quant.lsq(X, scale, QuantSpec(symmetric=True))
    with pytest.raises(ValueError, match="must be positive"):
        quant.pact(X, scale, UNSIGNED)


def test_shapes_and_dtypes_of_learned_quantizers():
    with pytest.raises(ValueError, match=r"scale must be of shape \(3,\).*got \(\)"):
        quant.lsq(X, 1.0, QuantSpec(symmetric=True, channel_axis=-1))
    with pytest.raises(ValueError, match=r"must be of shape \(\).*got \(3,\)"):
        quant.pact(X, X, UNSIGNED)
    for function in (quant.lsq, quant.pact):
        with pytest.raises(TypeError, match="x must be floating numbers; got int32"):
            function(X.astype(np.int32), 1.0, UNSIGNED)
