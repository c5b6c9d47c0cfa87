"""SmoothQuant scales: outliers of activations move into the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel import quant


@given(
    seed=st.integers(0, 2**31),
    alpha=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    taps=st.sampled_from([(), (3,), (3, 2)]),
)
def test_scales_are_the_closed_form(seed, alpha, taps):
    rng = np.random.default_rng(seed)
    largest, kernel = rng.uniform(0.1, 9, 5), rng.normal(size=(*taps, 5, 4))
    scales = quant.smoothquant_scales(largest, kernel, alpha=alpha)
    weights = np.abs(kernel).max(axis=(*range(len(taps)), -1))
    np.testing.assert_allclose(
        scales, largest**alpha / weights ** (1 - alpha), rtol=1e-5
    )


def test_at_one_half_both_sides_get_the_same_range(rng):
    x = rng.normal(size=(64, 6)) * 10.0 ** rng.uniform(-2, 2, 6)
    kernel = rng.normal(size=(6, 4))
    scales = np.asarray(quant.smoothquant_scales(np.abs(x).max(axis=0), kernel))
    smooth, rows = x / scales, kernel * scales[:, None]
    np.testing.assert_allclose(smooth @ rows, x @ kernel, rtol=1e-6)
    np.testing.assert_allclose(
        np.abs(smooth).max(axis=0), np.abs(rows).max(axis=1), rtol=1e-5
    )


def test_outliers_cost_less_after_smoothing(rng):
    x = rng.normal(size=(256, 8))
    x[:, 3] *= 100
    kernel = rng.normal(size=(8, 5))
    spec = quant.QuantSpec(symmetric=True)

    def error(x, kernel):
        x, kernel = (
            np.asarray(quant.QTensor.of(a, s).dequantize())
            for a, s in ((x, spec), (kernel, quant.INT8_WEIGHT))
        )
        return np.abs(x @ kernel - wanted)[:, :].mean()

    wanted = x @ kernel
    scales = np.asarray(quant.smoothquant_scales(np.abs(x).max(axis=0), kernel))
    assert error(x / scales, kernel * scales[:, None]) < error(x, kernel) / 2


def test_channels_of_zeros_have_scale_one():
    kernel = np.array([[1.0], [0.0], [2.0]])
    scales = quant.smoothquant_scales(np.array([0.0, 5.0, 8.0]), kernel)
    np.testing.assert_allclose(scales, [1, 1, 2])


def test_it_runs_inside_jit(rng):
    largest, kernel = rng.uniform(1, 9, 5), rng.normal(size=(5, 4))
    jitted = jax.jit(quant.smoothquant_scales)(jnp.float32(largest), kernel)
    np.testing.assert_allclose(
        jitted, quant.smoothquant_scales(largest, kernel), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("largest", "shape", "alpha", "message"),
    [
        (np.ones(4), (3, 2), 0.5, r"one number for each input channel.*\(4,\)"),
        (np.ones(3), (3,), 0.5, "one number for each input channel"),
        (np.ones(3), (3, 2), 1.5, "alpha must be from 0 to 1; got 1.5"),
        (-np.ones(3), (3, 2), 0.5, "must not be negative; got -1"),
    ],
)
def test_bad_input_is_refused(largest, shape, alpha, message):
    with pytest.raises(ValueError, match=message):
        quant.smoothquant_scales(largest, np.ones(shape), alpha=alpha)
