"""Formats of codes; scale and zero point from a range."""

import dataclasses
import functools
import math
from fractions import Fraction

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxaccel import quant
from jaxaccel.quant import QuantSpec

BITS = (2, 3, 4, 5, 6, 7, 8, 16)


def _name(value):
    """Names a test after what a spec does not leave at its default."""
    if not isinstance(value, QuantSpec):
        return None
    changed = (
        f"{field.name}={getattr(value, field.name)}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    )
    return ",".join(changed) or "default"


HWIO, DEPTHWISE, DENSE = (3, 3, 4, 6), (3, 3, 1, 6), (8, 6)


@pytest.mark.parametrize("bits", BITS)
def test_range_of_codes(bits):
    """As many codes as the bits tell, at the place that two's complement has."""
    half = 2 ** (bits - 1)
    signed = QuantSpec(bits=bits)
    assert (signed.qmin, signed.qmax) == (-half, half - 1)
    unsigned = QuantSpec(bits=bits, signed=False)
    assert (unsigned.qmin, unsigned.qmax) == (0, 2 * half - 1)
    narrow = QuantSpec(bits=bits, narrow_range=True)
    assert (narrow.qmin, narrow.qmax) == (1 - half, half - 1)


@pytest.mark.parametrize(
    "spec, dtype",
    [
        (QuantSpec(bits=2), "int8"),
        (QuantSpec(bits=4, signed=False), "uint8"),
        (QuantSpec(bits=16), "int16"),
        (QuantSpec(bits=16, signed=False), "uint16"),
        (quant.FP8_E4M3, "float8_e4m3fn"),
        (quant.FP8_E5M2, "float8_e5m2"),
    ],
)
def test_storage_dtype(spec, dtype):
    assert spec.storage_dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("spec", [quant.FP8_E4M3, quant.FP8_E5M2])
def test_floating_codes_end_at_their_largest_number(spec):
    assert spec.qmax == float(jnp.finfo(spec.storage_dtype).max)
    assert spec.qmin == -spec.qmax


def test_presets():
    weight, activation = quant.INT8_WEIGHT, quant.INT8_ACTIVATION
    assert (weight.qmin, weight.qmax, weight.channel_axis) == (-127, 127, -1)
    assert weight.symmetric and not activation.symmetric
    assert (activation.qmin, activation.qmax) == (-128, 127)
    assert activation.channel_axis is None
    assert (quant.UINT8_ACTIVATION.qmin, quant.UINT8_ACTIVATION.qmax) == (0, 255)
    assert (quant.INT4_WEIGHT.qmin, quant.INT4_WEIGHT.qmax) == (-7, 7)
    assert (quant.INT16_ACTIVATION.qmax, quant.INT16_ACTIVATION.symmetric) == (
        32767,
        True,
    )


@pytest.mark.usefixtures("unchecked")
def test_equal_specs_share_a_compilation():
    """A spec is a static argument; NumPy integers make no other one."""
    traced = []

    @functools.partial(jax.jit, static_argnums=1)
    def f(x, spec):
        traced.append(spec)
        return x * spec.qmax

    f(1.0, QuantSpec(bits=4, channel_axis=-1))
    f(1.0, QuantSpec(bits=np.int64(4), channel_axis=np.int32(-1)))  # type: ignore
    assert len(traced) == 1
    assert type(QuantSpec(bits=np.int64(4)).bits) is int  # type: ignore


@pytest.mark.parametrize(
    "shape, axis, block, wanted",
    [
        (HWIO, None, None, ()),
        (HWIO, -1, None, (6,)),
        (HWIO, 3, None, (6,)),
        (HWIO, -2, None, (4,)),
        (DEPTHWISE, -1, None, (6,)),
        (DENSE, -1, None, (6,)),
        (DENSE, 0, None, (8,)),
        (DENSE, -1, 4, (2, 6)),
        (DENSE, -1, 8, (1, 6)),
        (DENSE, None, 3, (8, 2)),
        (HWIO, -1, 2, (3, 3, 2, 6)),
        ((12,), None, 4, (3,)),
    ],
)
def test_shape_of_scales(shape, axis, block, wanted):
    spec = QuantSpec(channel_axis=axis, block_size=block)
    assert spec.params_shape(shape) == wanted


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bits": 1}, "bits must be 2 to 8, or 16; got 1"),
        ({"bits": 9}, "got 9"),
        ({"bits": 32}, "got 32"),
        ({"rounding": "floor"}, "rounding must be one of 'half_even'.*got 'floor'"),
        ({"number_format": "float8"}, "number_format must be one of.*got 'float8'"),
        ({"signed": False, "narrow_range": True}, "narrow_range=True.*signed=False"),
        ({"block_size": 0}, "block_size must be at least 1; got 0"),
        ({"number_format": "float8_e5m2"}, "float8_e5m2 needs symmetric=True"),
        (
            {"number_format": "float8_e5m2", "symmetric": True, "bits": 4},
            "float8_e5m2 has bits=8; got bits=4",
        ),
        (
            {
                "number_format": "float8_e4m3fn",
                "symmetric": True,
                "rounding": "half_up",
            },
            "rounds half to even; got rounding='half_up'",
        ),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bits": 8.0}, "bits must be an integer; got 8.0"),
        ({"bits": True}, "bits must be an integer; got True"),
        ({"bits": None}, "bits must be an integer; got None"),
        ({"signed": 1}, "signed must be True or False; got 1"),
        ({"channel_axis": "last"}, "channel_axis must be an integer; got 'last'"),
        ({"block_size": 2.5}, "block_size must be an integer; got 2.5"),
    ],
)
def test_bad_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        QuantSpec(**arguments)


@pytest.mark.parametrize(
    "spec, shape, message",
    [
        (QuantSpec(channel_axis=2), (3, 4), "channel_axis=2 is out of range.*rank 2"),
        (QuantSpec(channel_axis=-3), (3, 4), "channel_axis=-3 is out of range"),
        (QuantSpec(channel_axis=0), (), "out of range for an array of rank 0"),
        (QuantSpec(channel_axis=-1, block_size=3), (8, 6), "3 does not divide axis 0"),
        (QuantSpec(channel_axis=0, block_size=2), (4,), "needs an axis to split"),
    ],
)
def test_axes_that_do_not_fit(spec, shape, message):
    with pytest.raises(ValueError, match=message):
        spec.params_shape(shape)


# Ranges. The oracle divides in float32 with NumPy, which rounds once.


def _oracle(lo, hi, spec):
    if spec.symmetric:
        return max(abs(lo), abs(hi)) / np.float32(spec.qmax), 0
    lo, hi = min(lo, np.float32(0)), max(hi, np.float32(0))
    steps = np.float32(spec.qmax - spec.qmin)
    scale = hi / steps - lo / steps
    return scale, int(np.clip(np.round(spec.qmin - lo / scale), spec.qmin, spec.qmax))


FORMATS = [
    QuantSpec(),
    QuantSpec(signed=False),
    QuantSpec(bits=4, narrow_range=True),
    QuantSpec(bits=2),
    QuantSpec(bits=16),
    QuantSpec(symmetric=True),
    QuantSpec(bits=3, symmetric=True, narrow_range=True),
    quant.FP8_E4M3,
]
BOUND = st.floats(-(2.0**100), 2.0**100, width=32)


@functools.cache
def _compiled(spec):
    return jax.jit(lambda lo, hi: quant.compute_qparams(lo, hi, spec))


@pytest.mark.parametrize("spec", FORMATS, ids=_name)
@given(st.tuples(BOUND, BOUND).map(sorted))
def test_qparams_are_those_of_numpy(spec, ends):
    """Bit for bit, outside and inside of jit, which must not divide otherwise."""
    lo, hi = map(np.float32, ends)
    if max(abs(lo), abs(hi)) < 1e-30:
        return
    scale, zero = _oracle(lo, hi, spec)
    for qparams in (
        quant.compute_qparams(lo, hi, spec),
        _compiled(spec)(lo, hi),
    ):
        assert np.asarray(qparams.scale) == scale
        assert np.asarray(qparams.zero_point) == zero
        assert (qparams.scale.dtype, qparams.zero_point.dtype) == ("float32", "int32")


def test_a_range_is_widened_to_hold_zero():
    positive = quant.compute_qparams(2.0, 5.1, quant.UINT8_ACTIVATION)
    np.testing.assert_allclose(positive.scale, 5.1 / 255, rtol=1e-6)
    assert positive.zero_point == 0
    negative = quant.compute_qparams(-5.1, -2.0, quant.UINT8_ACTIVATION)
    np.testing.assert_allclose(negative.scale, 5.1 / 255, rtol=1e-6)
    assert negative.zero_point == 255


@pytest.mark.parametrize("spec", FORMATS, ids=_name)
def test_a_range_of_zero_has_scale_one(spec):
    qparams = quant.compute_qparams(0.0, 0.0, spec)
    assert qparams.scale == 1
    q = quant.quantize(np.zeros(3, np.float32), qparams, spec)
    assert (quant.dequantize(q, qparams, spec) == 0).all()


@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(symmetric=True)], ids=_name)
@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-37, 3.4e38])
def test_extreme_ranges_give_usable_scales(spec, largest):
    """No scale that flushes to 0, and none that overflows."""
    qparams = quant.compute_qparams(np.float32(-largest), np.float32(largest), spec)
    assert 2.0**-126 <= float(qparams.scale) < math.inf
    x = np.array([largest], np.float32)
    q = quant.quantize(x, qparams, spec)
    error = abs(float(quant.dequantize(q, qparams, spec)[0]) - float(x[0]))
    assert error <= float(qparams.scale) / 2 * 1.00001 + largest * 2**-23


def _next_power_of_two(value: float) -> Fraction:
    mantissa, exponent = math.frexp(value)
    return Fraction(2) ** (exponent - (mantissa == 0.5))


@pytest.mark.parametrize("base", [QuantSpec(), QuantSpec(symmetric=True)], ids=_name)
@given(BOUND)
def test_powers_of_two_are_the_next_ones(base, largest):
    """2**ceil(log2(s)), exactly: the range is covered, and by less than twice."""
    if abs(largest) < 1e-30:
        return
    lo, hi = np.float32(-abs(largest)), np.float32(abs(largest))
    plain = float(quant.compute_qparams(lo, hi, base).scale)
    spec = QuantSpec(symmetric=base.symmetric, pow2_scale=True)
    for compute in (
        _compiled(spec),
        lambda lo, hi: quant.compute_qparams(lo, hi, spec),
    ):
        scale = float(compute(lo, hi).scale)
        assert Fraction(scale) == _next_power_of_two(plain)
        assert plain <= scale < 2 * plain


def test_powers_of_two_stay_what_they_are():
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    spec = QuantSpec(bits=2, symmetric=True, channel_axis=0, pow2_scale=True)
    scales = quant.compute_qparams(-powers, powers, spec).scale
    np.testing.assert_array_equal(scales, powers)


def test_the_largest_power_of_two_is_finite():
    spec = QuantSpec(bits=2, symmetric=True, pow2_scale=True)
    assert quant.compute_qparams(-3e38, 3e38, spec).scale == 2.0**127


def test_each_channel_by_itself():
    lo = np.array([-1.0, 0.0, -3.0], np.float32)
    hi = np.array([1.0, 2.0, -1.0], np.float32)
    spec = QuantSpec(channel_axis=-1)
    together = quant.compute_qparams(lo, hi, spec)
    for i in range(3):
        alone = quant.compute_qparams(lo[i], hi[i], QuantSpec())
        assert together.scale[i] == alone.scale
        assert together.zero_point[i] == alone.zero_point


def test_nan_inside_jit_gives_a_scale_of_nan():
    for spec in (QuantSpec(), QuantSpec(symmetric=True), QuantSpec(pow2_scale=True)):
        assert np.isnan(_compiled(spec)(np.float32(np.nan), np.float32(1)).scale)


@pytest.mark.parametrize(
    "lo, hi, spec, message",
    [
        (1.0, -1.0, QuantSpec(), "lo must not be above hi; got lo=1.0, hi=-1.0"),
        (math.nan, 1.0, QuantSpec(), "lo must be finite; got nan"),
        (0.0, math.inf, QuantSpec(), "hi must be finite; got inf"),
        (0.0, np.float64(1e300), QuantSpec(), "hi must be finite; got inf"),
        (np.zeros(2), np.ones(3), QuantSpec(channel_axis=0), r"\(2,\) and \(3,\)"),
        (
            np.array([0.0, -0.5]),
            np.ones(2),
            QuantSpec(signed=False, symmetric=True, channel_axis=0),
            "no negative numbers; got lo=-0.5",
        ),
    ],
)
def test_bad_ranges(lo, hi, spec, message):
    with pytest.raises(ValueError, match=message):
        quant.compute_qparams(lo, hi, spec)
