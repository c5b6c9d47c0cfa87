"""Requantization against Python's integers, which have no width."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel.quant import quantize_multiplier, requantize

LIMIT = 2**31 - 1
accumulators = st.one_of(
    st.integers(-LIMIT, LIMIT),
    st.sampled_from([-LIMIT, LIMIT, 0, -1, 1, -(2**30), 2**30]),
)
multipliers = st.one_of(
    st.floats(2.0**-30, 2.0**8), st.integers(-30, 8).map(lambda e: 2.0**e)
)


def _saturate(x):
    return max(-(2**31), min(2**31 - 1, x))


def _single(acc, m0, shift):
    return _saturate((acc * m0 + (1 << (shift - 1))) >> shift)


def _double(acc, m0, shift):
    """As gemmlowp writes it: doubling high multiplication, then a rounding divide."""
    acc = _saturate(acc << max(31 - shift, 0))
    nudge = 2**30 if acc * m0 >= 0 else 1 - 2**30
    high = _truncate(acc * m0 + nudge, 2**31)
    right = max(shift - 31, 0)
    half = (1 << right) >> 1
    return (high + half) >> right if high >= 0 else -((-high + half) >> right)


def _truncate(numerator, denominator):
    quotient = abs(numerator) // denominator
    return quotient if numerator >= 0 else -quotient


@given(st.lists(st.tuples(accumulators, multipliers), min_size=64, max_size=64))
def test_requantize_equals_integers(cases):
    acc = np.array([a for a, _ in cases], np.int32)
    m0, shift = quantize_multiplier(np.array([m for _, m in cases]))
    for rounding, oracle in (("single", _single), ("double", _double)):
        got = _requantize(acc, m0, shift, rounding)
        pairs = zip(acc.tolist(), m0.tolist(), shift.tolist(), strict=True)
        assert got.tolist() == [oracle(*pair) for pair in pairs]


@jax.jit
def _both(acc, m0, shift):
    return [requantize(acc, m0, shift, rounding=r) for r in ("single", "double")]


def _requantize(acc, m0, shift, rounding):
    return np.asarray(_both(acc, m0, shift)[rounding == "double"])


@given(st.floats(2.0**-32, 2.0**30, exclude_max=True))
def test_multiplier_is_within_31_bits(multiplier):
    m0, shift = quantize_multiplier(multiplier)
    assert 2**30 <= int(m0) < 2**31 and 1 <= int(shift) <= 62
    # Integers: m0 * 2**-shift in float64 is exact, and so is the difference.
    assert abs(math.ldexp(int(m0), -int(shift)) / multiplier - 1) <= 2.0**-31


def test_fraction_that_rounds_up_to_one():
    m0, shift = quantize_multiplier(1.0 - 2.0**-40)
    assert (int(m0), int(shift)) == (2**30, 30)


def test_powers_of_two_are_shifts():
    m0, shift = quantize_multiplier(2.0 ** np.arange(-30, 9))
    assert (m0 == 2**30).all()
    np.testing.assert_array_equal(shift, 30 - np.arange(-30, 9))


def test_tiny_multipliers_give_zero():
    m0, shift = quantize_multiplier(2.0**-33)
    acc = np.array([LIMIT, -LIMIT], np.int32)
    assert np.asarray(requantize(acc, m0, shift)).tolist() == [0, 0]


def test_saturates():
    m0, shift = quantize_multiplier(200.0)
    acc = np.array([LIMIT, -LIMIT, 2**25, -(2**25)], np.int32)
    got = np.asarray(requantize(acc, m0, shift)).tolist()
    assert got == [2**31 - 1, -(2**31), 2**31 - 1, -(2**31)]


def test_broadcasts_over_channels(rng):
    acc = rng.integers(-1000, 1000, (2, 3, 4)).astype(np.int32)
    m0, shift = quantize_multiplier(np.array([0.1, 0.2, 0.3, 0.4]))
    got = requantize(acc, m0, shift)
    for channel in range(4):
        alone = requantize(acc[..., channel], m0[channel], shift[channel])
        np.testing.assert_array_equal(got[..., channel], alone)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 2.0**30])
def test_bad_multipliers(bad):
    with pytest.raises(ValueError, match="multiplier must be in"):
        quantize_multiplier(np.array([1.0, bad]))


def test_bad_arguments():
    m0, shift = quantize_multiplier(0.5)
    with pytest.raises(ValueError, match="rounding must be .*; got 'even'"):
        requantize(np.int32(1), m0, shift, rounding="even")
    with pytest.raises(TypeError, match="acc must be int32; got int8"):
        requantize(np.int8(1), m0, shift)
