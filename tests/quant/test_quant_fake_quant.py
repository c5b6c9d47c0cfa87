"""Fake quantization: its numbers, its gradient, the transformations of jax."""

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel import quant
from jaxaccel.quant import QParams, QuantSpec

SPECS = {
    "int8": QuantSpec(),
    "uint8": QuantSpec(signed=False),
    "int8_weight": quant.INT8_WEIGHT,
    "int4_weight": quant.INT4_WEIGHT,
    "int2": QuantSpec(bits=2, symmetric=True),
    "int16": QuantSpec(bits=16, symmetric=True),
    "int4_blocks": QuantSpec(bits=4, channel_axis=-1, block_size=4),
    "half_up_pow2": QuantSpec(rounding="half_up", pow2_scale=True),
    "float8": quant.FP8_E4M3,
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def _params(scale: Any = 1.0, zero=0):
    return QParams(np.float32(scale), np.int32(zero))


@functools.cache
def _covered(spec):
    """Fake-quantizes over the array's own range; gives the gradient too."""

    def f(x):
        qparams = jax.lax.stop_gradient(quant.array_qparams(x, spec))
        return quant.fake_quant(x, qparams, spec)

    def both(x, cotangent):
        y, pull = jax.vjp(f, x)
        return y, pull(cotangent)[0]

    return jax.jit(both)


@every_spec
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30))
def test_is_quantize_then_dequantize(spec, seed, exponent):
    x = np.random.default_rng(seed).normal(size=(8, 6)) * 2.0**exponent
    x = x.astype(np.float32)
    y, _ = _covered(spec)(x, x)
    tensor = _of(spec)(x)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(tensor))


@functools.cache
def _of(spec):
    return jax.jit(lambda x: quant.QTensor.of(x, spec).dequantize())


# The gradient.


@pytest.mark.parametrize("name", ["int8_weight", "int4_weight", "int2", "int16"])
@given(seed=st.integers(0, 2**31))
def test_the_gradient_reaches_the_largest_weight(name, seed):
    """It sits on the edge, where a clip would give half of it, or nothing."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(8, 6)) * 2.0 ** rng.uniform(-20, 20)).astype(np.float32)
    cotangent = rng.normal(size=x.shape).astype(np.float32)
    _, gradient = _covered(SPECS[name])(x, cotangent)
    np.testing.assert_array_equal(np.asarray(gradient), cotangent)


@pytest.mark.parametrize(
    "spec, zero", [(QuantSpec(), 3), (QuantSpec(bits=4, signed=False), 5)]
)
@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3])
def test_the_gradient_is_one_inside_and_zero_outside(spec, zero, scale):
    scale = np.float32(scale)
    lo, hi = (spec.qmin - zero) * scale, (spec.qmax - zero) * scale
    x = np.array([lo * 1.001, lo, lo * 0.999, 0, hi * 0.999, hi, hi * 1.001])
    x = x.astype(np.float32)
    cotangent = np.arange(1.0, 8.0).astype(np.float32)
    f = functools.partial(quant.fake_quant, qparams=_params(scale, zero), spec=spec)
    _, pull = jax.vjp(f, x)
    assert pull(cotangent)[0].tolist() == [0, 2, 3, 4, 5, 6, 0]


@given(seed=st.integers(0, 2**31), zero=st.integers(-128, 127))
def test_the_mask_is_that_of_the_range(seed, zero):
    x = (np.random.default_rng(seed).normal(size=64) * 20).astype(np.float32)
    scale = np.float32(0.1)
    gradient = np.asarray(_masked(x, scale, np.int32(zero)))
    ratio = x.astype(np.float64) / float(scale) + zero
    near = np.minimum(abs(ratio + 128), abs(ratio - 127)) < 1e-3
    wanted = (ratio >= -128) & (ratio <= 127)
    np.testing.assert_array_equal(gradient[~near], wanted[~near])
    assert 0 < gradient.sum()


@jax.jit
def _masked(x, scale, zero):
    def total(x):
        return quant.fake_quant(x, QParams(scale, zero), QuantSpec()).sum()

    return jax.grad(total)(x)


def test_float8_passes_the_gradient_up_to_its_largest_number():
    x = np.array([-500.0, -448.0, 1.0, 448.0, 449.0], np.float32)
    gradient = jax.grad(lambda x: quant.fake_quant(x, _params(), quant.FP8_E4M3).sum())(
        x
    )
    assert gradient.tolist() == [0, 1, 1, 1, 0]


def test_scale_and_zero_point_have_no_gradient():
    x = np.array([0.3, 5.0], np.float32)

    def f(scale):
        return quant.fake_quant(x, QParams(scale, np.int32(0)), QuantSpec(bits=2)).sum()

    assert jax.grad(f)(jnp.float32(0.7)) == 0


@every_spec
def test_nan_and_infinity(spec):
    """Infinity is the last number; NaN stays, for whoever checks for it."""
    if spec.channel_axis is not None:
        spec = QuantSpec(bits=spec.bits, symmetric=True)
    x = np.array([np.inf, -np.inf, np.nan], np.float32)
    y, pull = jax.vjp(lambda x: quant.fake_quant(x, _params(0.5), spec), x)
    assert y[:2].tolist() == [spec.qmax / 2, spec.qmin / 2]
    assert np.isnan(y[2])
    assert pull(np.ones(3, np.float32))[0].tolist() == [0, 0, 0]


# Dtypes.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers_compute_in_float32(rng, dtype):
    x = jnp.asarray(rng.normal(size=512) * 40, dtype)
    qparams, spec = _params(0.1, 3), QuantSpec(bits=16)
    y, pull = jax.vjp(lambda x: quant.fake_quant(x, qparams, spec), x)
    wide = quant.fake_quant(x.astype(jnp.float32), qparams, spec)
    assert y.dtype == dtype and pull(y)[0].dtype == dtype
    np.testing.assert_array_equal(np.asarray(y), np.asarray(wide.astype(dtype)))
    narrow = jnp.round(x / jnp.asarray(0.1, dtype)) * jnp.asarray(0.1, dtype)
    assert (narrow != y).any()


@pytest.mark.parametrize("x", [np.float32(0.26), np.float64(0.26), 0.26])
def test_numbers_of_numpy_and_python(x):
    y = quant.fake_quant(x, QParams(np.float64(0.1), 0), QuantSpec())
    assert (y.dtype, y.weak_type) == (jnp.float32, False)
    np.testing.assert_allclose(y, 0.3, rtol=1e-6)


# Transformations.


@pytest.mark.parametrize("name", ["int8", "int4_weight", "int4_blocks"])
def test_vmap_is_a_loop(rng, name):
    x = rng.normal(size=(3, 8, 6)).astype(np.float32)
    together, slope = jax.vmap(_covered(SPECS[name]))(x, x)
    for i in range(3):
        alone, alone_slope = _covered(SPECS[name])(x[i], x[i])
        np.testing.assert_array_equal(np.asarray(together[i]), np.asarray(alone))
        np.testing.assert_array_equal(np.asarray(slope[i]), np.asarray(alone_slope))


def test_vmap_over_scales_alone():
    x, scales = np.array([0.26, -5.0], np.float32), np.array([0.1, 0.5], np.float32)
    spec = QuantSpec()
    together = jax.vmap(lambda s: quant.fake_quant(x, QParams(s, 0), spec))(scales)
    for scale, row in zip(scales, together, strict=True):
        alone = quant.fake_quant(x, _params(scale), spec)
        np.testing.assert_array_equal(np.asarray(row), np.asarray(alone))


def test_scan_remat_and_donation(rng):
    x = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    spec, qparams = QuantSpec(bits=3), _params(0.4)

    def layers(x, quantize):
        def body(carry, _):
            return quantize(carry * 1.5), None

        return jax.lax.scan(body, x, length=3)[0].sum()

    def fake(x):
        return quant.fake_quant(x, qparams, spec)

    wanted = np.asarray(jax.grad(layers)(x, fake))
    again = jax.jit(jax.grad(lambda x: layers(x, jax.checkpoint(fake))))(x)
    np.testing.assert_array_equal(np.asarray(again), wanted)
    assert set(wanted.ravel().tolist()) >= {0.0, 1.5**3}
    y = np.asarray(fake(x))
    donated = jax.jit(fake, donate_argnums=0)(x)
    np.testing.assert_array_equal(np.asarray(donated), y)
    assert x.is_deleted()


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


@pytest.mark.parametrize("compile", [False, True])
def test_a_trace_shows_each_quantizer_as_one_equation(compile):
    """With its format, scale and zero point: what integer networks are made from."""
    spec = QuantSpec(bits=4, channel_axis=-1)
    qparams = QParams(np.full(3, 0.5, np.float32), np.full(3, 2, np.int32))

    def f(x):
        y = quant.fake_quant(jnp.tanh(x), qparams, spec)
        return quant.fake_quant(y, _params(), QuantSpec())

    function = jax.jit(f) if compile else f
    traced = jax.make_jaxpr(function)(jnp.ones((2, 3)))
    found = [e for e in _equations(traced.jaxpr) if e.primitive.name == "fake_quant"]
    assert [e.params["spec"] for e in found] == [spec, QuantSpec()]
    assert [v.aval.shape for v in found[0].invars] == [(2, 3), (3,), (3,)]
    assert "round" not in {e.primitive.name for e in _equations(traced.jaxpr)}


def test_exports_as_plain_operations():
    """What was serialized runs where this package is not installed."""
    f = jax.jit(lambda x: quant.fake_quant(x, _params(0.1), QuantSpec()))
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert "stablehlo.divide" in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    x = np.array([0.26, -99.0, 0.04], np.float32)
    np.testing.assert_array_equal(np.asarray(again.call(x)), np.asarray(f(x)))


# Devices.


def _mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_split_arrays_stay_split(rng, kind):
    x = rng.normal(size=(8, 6)).astype(np.float32)
    wanted, slope = _covered(quant.INT4_WEIGHT)(x, x)
    mesh = _mesh(kind)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        y, gradient = _covered(quant.INT4_WEIGHT)(split, split)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(wanted))
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(slope))
    assert y.sharding.is_equivalent_to(split.sharding, 2)


def test_inside_shard_map(rng):
    """A replicated x with each device's own scale varies over the devices."""
    x = rng.normal(size=6).astype(np.float32)
    scales = np.array([0.02, 0.1, 0.2, 0.4], np.float32)
    spec, mesh = QuantSpec(bits=4), _mesh(AxisType.Auto)

    def local(x, scale):
        return quant.fake_quant(x, QParams(scale[0], jnp.int32(0)), spec)[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )
    y = jax.jit(mapped)(x, scales)
    gradient = jax.jit(jax.grad(lambda x: mapped(x, scales).sum()))(x)
    slopes = np.zeros(6)
    for i, scale in enumerate(scales):
        alone = functools.partial(quant.fake_quant, qparams=_params(scale), spec=spec)
        np.testing.assert_array_equal(np.asarray(y[i]), np.asarray(alone(x)))
        slopes += np.asarray(jax.grad(lambda x, f=alone: f(x).sum())(x))
    np.testing.assert_array_equal(np.asarray(gradient), slopes)
    assert len(set(slopes)) > 1


# Stochastic rounding.

STOCHASTIC = QuantSpec(rounding="stochastic")


def test_stochastic_rounding_draws_from_the_key(key):
    x = np.full(20_000, 0.3, np.float32)
    f = functools.partial(quant.fake_quant, x, _params(), STOCHASTIC)
    y = np.asarray(f(key=key))
    assert set(y.tolist()) == {0.0, 1.0}
    assert abs(y.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(x))
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(key=key)), y)
    gradient = jax.grad(
        lambda x: quant.fake_quant(x, _params(), STOCHASTIC, key=key).sum()
    )(np.array([0.3, 400.0], np.float32))
    assert gradient.tolist() == [1, 0]


def test_stochastic_rounding_under_vmap(key):
    x = np.full((2, 4000), 0.5, np.float32)
    keys = jax.random.split(key, 2)

    def f(x, key):
        return quant.fake_quant(x, _params(), STOCHASTIC, key=key)

    y = np.asarray(jax.vmap(f)(x, keys))
    for i in range(2):
        np.testing.assert_array_equal(y[i], np.asarray(f(x[i], keys[i])))
    assert (y[0] != y[1]).any()


def test_stochastic_rounding_needs_a_key():
    with pytest.raises(ValueError, match="rounding='stochastic' needs a key"):
        quant.fake_quant(np.ones(3, np.float32), _params(), STOCHASTIC)


def test_shapes_are_checked_inside_jit():
    """What shapes tell is known while tracing, so it is an error there as well."""
    spec = QuantSpec(channel_axis=-1)
    with pytest.raises(ValueError, match=r"scale must be of shape \(3,\)"):
        jax.jit(lambda x, s: quant.fake_quant(x, QParams(s, 0), spec))(
            np.ones((2, 3), np.float32), np.float32(1)
        )
