"""Bias correction: the mean of a quantized layer's output is that of the float one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel import quant

INT2 = quant.QuantSpec(bits=2, symmetric=True, channel_axis=-1)


def _rounded(kernel):
    return np.asarray(quant.QTensor.of(kernel, INT2).dequantize())


@given(seed=st.integers(0, 2**31), has_bias=st.booleans())
def test_the_mean_output_of_a_dense_layer_is_restored(seed, has_bias):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(32, 6)) + rng.normal(size=6)
    kernel = rng.normal(size=(6, 4))
    bias = rng.normal(size=4) if has_bias else None
    start = np.zeros(4) if bias is None else bias
    rounded = _rounded(kernel)
    found = quant.bias_correction(kernel, rounded, bias, x.mean(axis=0))
    wanted = (x @ kernel + start).mean(axis=0)
    got = (x @ rounded.astype(np.float64) + np.asarray(found)).mean(axis=0)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    assert found.dtype == np.float32


@pytest.mark.parametrize(("groups", "out"), [(1, 5), (2, 4), (6, 6), (6, 12)])
def test_convolutions_of_any_groups(groups, out, rng):
    # Each channel is one number all over, so that borders do not matter.
    means = rng.normal(size=6)
    x = jnp.broadcast_to(jnp.asarray(means, jnp.float32), (1, 5, 5, 6))
    kernel = rng.normal(size=(3, 3, 6 // groups, out)).astype(np.float32)

    def conv(kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    rounded = _rounded(kernel)
    shift = quant.bias_correction(kernel, rounded, None, means)
    np.testing.assert_allclose(
        np.asarray(conv(rounded)) + np.asarray(shift),
        conv(kernel),
        rtol=1e-4,
        atol=1e-4,
    )
    assert np.abs(conv(rounded) - conv(kernel)).max() > 0.1


def test_the_same_kernel_needs_no_correction(rng):
    kernel, bias = rng.normal(size=(3, 2)), np.array([1, 2], np.float32)
    np.testing.assert_array_equal(
        quant.bias_correction(kernel, kernel, bias, np.ones(3)), bias
    )


@pytest.mark.parametrize(
    ("kernel", "quantized", "mean", "message"),
    [
        ((3, 2), (2, 3), 3, r"one shape.*\(3, 2\) and \(2, 3\)"),
        ((3,), (3,), 3, r"\(\.\.\., in, out\)"),
        ((3, 2), (3, 2), 2, r"input_mean must.*got \(2,\)"),
        ((3, 3, 2, 4), (3, 3, 2, 4), 3, r"input_mean must.*got \(3,\)"),
        # Three groups would not share four outputs.
        ((3, 3, 2, 4), (3, 3, 2, 4), 6, r"input_mean must.*got \(6,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kernel, quantized, mean, message):
    with pytest.raises(ValueError, match=message):
        quant.bias_correction(np.ones(kernel), np.ones(quantized), None, np.ones(mean))


def test_a_bias_of_another_length_is_refused():
    kernel = np.ones((3, 2))
    with pytest.raises(ValueError, match=r"bias must be of shape \(2,\); got \(1,\)"):
        quant.bias_correction(kernel, kernel, np.ones(1), np.ones(3))
