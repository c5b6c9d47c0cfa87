"""Cross-layer equalization: the same function, and even ranges between layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxaccel import quant


def _chain(rng, widths):
    """Dense layers whose channels have ranges of many magnitudes."""
    kernels, biases = [], []
    for i, (wide, out) in enumerate(zip(widths, widths[1:], strict=False)):
        spread = 2.0 ** rng.uniform(-4, 4, out if i < len(widths) - 2 else 1)
        kernels.append(rng.normal(size=(wide, out)) * spread)
        biases.append(rng.normal(size=out) * spread)
    return kernels, biases


def _run(x, kernels, biases, activation):
    for i, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        x = x @ np.asarray(kernel, np.float64)
        x = x + (0 if bias is None else np.asarray(bias, np.float64))
        x = activation(x) if i < len(kernels) - 1 else x
    return x


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "leaky": lambda x: np.where(x > 0, x, 0.1 * x),
    "identity": lambda x: x,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_the_output_of_a_dense_chain_stays(activation, seed):
    rng = np.random.default_rng(seed)
    kernels, biases = _chain(rng, (5, 6, 7, 3))
    biases[1] = None
    x = rng.normal(size=(4, 5))
    found, shifts = quant.cross_layer_equalize(kernels, biases, passes=5)
    assert shifts[1] is None
    wanted = _run(x, kernels, biases, ACTIVATIONS[activation])
    got = _run(x, found, shifts, ACTIVATIONS[activation])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_afterwards_each_channel_is_as_wide_before_as_behind(seed):
    kernels, biases = _chain(np.random.default_rng(seed), (5, 6, 4, 3))
    found, _ = quant.cross_layer_equalize(kernels, biases)
    for first, second in zip(found, found[1:], strict=False):
        before = np.abs(np.asarray(first)).max(axis=0)
        after = np.abs(np.asarray(second)).max(axis=1)
        np.testing.assert_allclose(before, after, rtol=1e-3)


def test_one_pass_over_two_layers_is_the_closed_form(rng):
    (first, second), (bias, last) = _chain(rng, (5, 6, 3))
    ratio = np.sqrt(np.abs(first).max(0) / np.abs(second).max(1))
    found, shifts = quant.cross_layer_equalize([first, second], [bias, last], passes=1)
    np.testing.assert_allclose(found[0], first / ratio, rtol=1e-5)
    np.testing.assert_allclose(found[1], second * ratio[:, None], rtol=1e-5)
    for shift, wanted in zip(shifts, (bias / ratio, last), strict=True):
        assert shift is not None
        np.testing.assert_allclose(shift, wanted, rtol=1e-5)


def _conv(x, kernel, bias, groups=1):
    y = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    return y + bias[None, None, None, :]


@functools.cache
def _convolutions(multiplier):
    """A separable block and a dense layer on what it flattens to."""
    rng = np.random.default_rng(1)
    middle = 4 * multiplier
    shapes = [(3, 3, 2, 4), (3, 3, 1, middle), (1, 1, middle, 5), (4 * 3 * 5, 3)]
    kernels, biases = [], []
    for shape in shapes:
        scale = 2.0 ** rng.uniform(-4, 4, shape[-1])
        kernels.append((rng.normal(size=shape) * scale).astype(np.float32))
        biases.append((rng.normal(size=shape[-1]) * scale).astype(np.float32))
    return kernels, biases


def _run_convolutions(x, kernels, biases):
    for i, (kernel, bias) in enumerate(zip(kernels[:3], biases[:3], strict=True)):
        x = jax.nn.relu(_conv(x, kernel, bias, groups=4 if i == 1 else 1))
    return x.reshape(len(x), -1) @ kernels[3] + biases[3][None, :]


@pytest.mark.parametrize("multiplier", [1, 2])
def test_convolutions_depthwise_ones_and_flattening(multiplier, rng):
    kernels, biases = _convolutions(multiplier)
    found, shifts = quant.cross_layer_equalize(
        kernels, biases, depthwise=[False, True, False, False]
    )
    x = rng.normal(size=(2, 4, 3, 2)).astype(np.float32)
    wanted = _run_convolutions(x, kernels, biases)
    got = _run_convolutions(x, found, shifts)
    bound = 1e-4 * float(jnp.abs(wanted).max())
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=bound)
    flat = [np.abs(np.asarray(kernel)) for kernel in found]
    before = [kernel.reshape(-1, kernel.shape[-1]).max(axis=0) for kernel in flat]
    taps = flat[1].reshape(9, 4, multiplier).max(axis=(0, 2))
    np.testing.assert_allclose(before[0], taps, rtol=1e-3)
    np.testing.assert_allclose(before[1], flat[2].max(axis=(0, 1, 3)), rtol=1e-3)
    rows = flat[3].reshape(12, 5, 3).max(axis=(0, 2))
    np.testing.assert_allclose(before[2], rows, rtol=1e-3)


def test_one_scale_a_kernel_then_loses_little(rng):
    # The same function as an even network's, in channels of uneven ranges.
    even = [rng.normal(size=(16, 32)), rng.normal(size=(32, 8))]
    scales = 2.0 ** rng.uniform(-4, 4, 32)
    uneven = [even[0] * scales, even[1] / scales[:, None]]
    spec = quant.QuantSpec(symmetric=True, narrow_range=True)
    x, none = rng.normal(size=(64, 16)), [None, None]
    wanted = _run(x, even, none, ACTIVATIONS["relu"])

    def error(kernels):
        rounded = [quant.QTensor.of(k, spec).dequantize() for k in kernels]
        got = _run(x, rounded, none, ACTIVATIONS["relu"])
        return np.abs(got - wanted).mean() / np.abs(wanted).mean()

    found, _ = quant.cross_layer_equalize(uneven, none)
    assert error(found) < error(uneven) / 5
    assert error(found) < 2 * error(even)


def test_dead_channels_stay_finite():
    first = np.array([[0.0, 2.0, 1.0]])
    second = np.array([[3.0], [0.0], [4.0]])
    (a, b), _ = quant.cross_layer_equalize([first, second], [None, None])
    np.testing.assert_allclose(a, [[0, 2, 2]])
    np.testing.assert_allclose(b, [[3], [0], [2]])


def test_it_runs_inside_jit(rng):
    kernels, biases = _chain(rng, (3, 4, 2))
    eager = quant.cross_layer_equalize(kernels, biases, passes=2)
    jitted = jax.jit(functools.partial(quant.cross_layer_equalize, passes=2))(
        [jnp.float32(k) for k in kernels], [jnp.float32(b) for b in biases]
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), jitted, eager
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 4)], "two layers or more; got 1, 1 and 1"),
        ([(3, 4), (5, 2)], r"kernel 0 has 4 output channels.*\(5, 2\) of kernel 1"),
        ([(3, 4), (4, 3), (5, 2)], "kernel 1 has 3 output channels"),
        # Half the input channels: of two groups, which are not depthwise.
        ([(3, 3, 2, 4), (3, 3, 2, 4)], "kernel 0 has 4 output channels"),
        # Eight channels of input are not a flattened convolution's here.
        ([(3, 3, 2, 4), (3, 3, 8, 4)], "kernel 0 has 4 output channels"),
    ],
)
def test_layers_that_do_not_follow_each_other_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        quant.cross_layer_equalize(
            [np.ones(shape) for shape in shapes], [None] * len(shapes)
        )


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="equally long.*got 2, 1 and 2"):
        quant.cross_layer_equalize([np.ones((2, 2))] * 2, [None])


def test_a_bias_of_another_length_is_named():
    with pytest.raises(ValueError, match=r"biases\[0\] must be of shape \(3,\)"):
        quant.cross_layer_equalize(
            [np.ones((2, 3)), np.ones((3, 2))], [np.ones(2), None]
        )
