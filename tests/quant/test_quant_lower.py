"""Lowering against the floating network it was made of, from linen, NNX and jax."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import quant
from jaxaccel.quant._graph_nodes import Affine, AveragePool, Conv, MaxPool

INT8, WEIGHT = quant.INT8_ACTIVATION, quant.INT8_WEIGHT


class Sequential(nn.Module):
    """Normalization, batch norm, depthwise convolution, strides, pools, dropout."""

    @nn.compact
    def __call__(self, x, train=False):
        x = (x.astype(jnp.float32) / 255 - 0.3) / 0.25
        x = nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Conv(8, (3, 3), feature_group_count=8)(x)
        x = jax.nn.relu6(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.max_pool(x, (2, 2), strides=(1, 1), padding="SAME")
        x = nn.Conv(6, (3, 3), padding="VALID", kernel_dilation=2)(x)
        x = nn.avg_pool(x, (2, 2), padding="SAME", count_include_pad=False)
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(5)(jnp.clip(x, -1.0, 1.0))


class Block(nnx.Module):
    """Two convolutions and a shortcut of one tap."""

    def __init__(self, inputs, outputs, strides, rngs):
        norm = {"use_running_average": True, "rngs": rngs}
        self.a = nnx.Conv(inputs, outputs, (3, 3), strides=strides, rngs=rngs)
        self.b = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.shortcut = nnx.Conv(inputs, outputs, (1, 1), strides=strides, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(outputs, **norm) for _ in range(2)])

    def __call__(self, x):
        y = nnx.relu(self.norms[0](self.a(x)))
        y = self.norms[1](self.b(y))
        return nnx.relu(y + self.shortcut(x))


class Residual(nnx.Module):
    """Blocks, a concatenation and the mean over the image."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(3, 6, 1, rngs), Block(6, 8, 2, rngs)])
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        x = jnp.concatenate([x, nnx.max_pool(x, (3, 3), (1, 1), "SAME")], axis=-1)
        return self.head(x.mean(axis=(1, 2)))


def _fill(tree, rng):
    """Parameters and statistics with some negative scales, without running `init`."""

    def draw(path, x):
        name = jax.tree_util.keystr(path)
        noise = rng.normal(size=x.shape).astype(np.float32)
        if "var" in name:
            return jnp.asarray(np.exp(noise))
        if "scale" in name:
            return jnp.asarray(1 + 0.6 * noise)
        fan_in = np.prod(x.shape[:-1]) if "kernel" in name else 10
        return jnp.asarray(noise / np.sqrt(fan_in))

    return jax.tree_util.tree_map_with_path(draw, tree)


def _images(rng, *shape):
    """Smooth images: random noise alone averages out."""
    color = rng.integers(0, 256, (shape[0], 1, 1, shape[-1]))
    noise = rng.integers(-90, 90, shape)
    return np.clip(color + noise, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def linen():
    """`apply` and images of the sequential network."""
    rng = np.random.default_rng(3)
    images, model = _images(rng, 64, 12, 12, 1), Sequential()
    variables = _fill(jax.eval_shape(model.init, jax.random.key(0), images), rng)
    return lambda x: model.apply(variables, x), images


@pytest.fixture(scope="module")
def residual():
    """`apply` and images of the residual network, in [0, 1]."""
    rng = np.random.default_rng(4)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Residual(nnx.Rngs(0))))
    model = nnx.merge(graphdef, _fill(state, rng))
    return model, (_images(rng, 64, 8, 8, 3) / 255).astype(np.float32)


def _numbers(graph, codes):
    tensor = graph.output_tensor
    return np.asarray(quant.dequantize(codes, tensor.qparams, tensor.spec))


def _error(got, want):
    """Root mean square of the error, in units of the numbers' spread."""
    want = np.asarray(want)
    return np.sqrt(np.mean((got - want) ** 2)) / want.std()


def test_linen_network(linen):
    apply, images = linen
    graph = quant.lower_integer(apply, images, calibration=[images])
    assert graph.input_tensor.dtype == np.uint8
    # The mean of 0.3 is the code 76.5: 0 has a code, and the rest is in the bias.
    assert graph.input_tensor.zero_point == 76
    assert abs(graph.input_tensor.scale - 1 / 255 / 0.25) < 1e-7
    kinds = [type(node).__name__ for node in graph.nodes]
    assert kinds == ["Conv", "Conv", "MaxPool", "Conv", "AveragePool", "Reshape",
                     "Affine", "Dense"]  # fmt: skip
    codes = quant.integer_apply(graph, images)
    assert _error(_numbers(graph, codes), jax.jit(apply)(images)) < 0.03
    twin = np.asarray(quant.simulate(graph, images)).astype(int)
    difference = np.abs(np.asarray(codes).astype(int) - twin)
    assert difference.max() <= 1 and (difference > 0).mean() <= 0.06


def test_nnx_residual_network(residual):
    model, images = residual
    uint8 = quant.QParams(np.float32(1 / 255), np.int32(0))
    graph = quant.lower_integer(
        model, images, calibration=np.split(images, 4), input_qparams=uint8
    )
    kinds = [type(node).__name__ for node in graph.nodes]
    assert kinds.count("Conv") == 6 and kinds.count("Add") == 2
    assert "Affine" not in kinds
    codes = quant.integer_apply(graph, np.rint(images * 255).astype(np.uint8))
    assert _error(_numbers(graph, codes), jax.jit(model)(images)) < 0.06


@pytest.mark.slow
def test_residual_without_input_codes(residual):
    model, images = residual
    percentile = quant.lower_integer(
        model,
        jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32),
        calibration=images,
        observer=lambda spec: quant.percentile(spec, percent=99.99),
        weight_spec=quant.QuantSpec(symmetric=True),
    )
    source = percentile.input_tensor
    assert source.codes == INT8
    codes = quant.quantize(images, source.qparams, source.codes)
    got = _numbers(percentile, quant.integer_apply(percentile, codes))
    assert _error(got, jax.jit(model)(images)) < 0.1


# Networks with quantizers: the integers must be what was trained.


def _fake(x, scale, zero=0, spec=INT8):
    return quant.fake_quant(x, quant.QParams(jnp.float32(scale), jnp.int32(zero)), spec)


def _fake_kernel(kernel, spec=WEIGHT):
    return quant.fake_quant(kernel, quant.array_qparams(kernel, spec), spec)


def _conv(x, kernel, strides=1, groups=1):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (strides, strides),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@pytest.fixture
def trained(rng):
    """A network with its quantizers, batch norm after rounded kernels."""

    def draw(*shape):
        fan_in = np.prod(shape[:-1])
        return jnp.asarray((rng.normal(size=shape) / np.sqrt(fan_in)), jnp.float32)

    kernels = [draw(3, 3, 2, 6), draw(3, 3, 1, 6), draw(6, 4), draw(64, 5)]
    gain, bias = draw(6) * 3, draw(6)
    per_tensor = quant.QuantSpec(symmetric=True, narrow_range=True)
    steps = kernels[2].std(axis=0) / 40

    def apply(x):
        x = _fake(x, 0.02, -28)
        x = _conv(x, _fake_kernel(kernels[0], per_tensor), strides=2)
        x = _fake(jax.nn.relu(x * gain[None, None, None] + bias[None, None, None]),
                  0.0153, -128)  # fmt: skip
        y = _conv(x, _fake_kernel(kernels[1]), groups=6)
        y = _fake(y - bias[None, None, None], 0.029, 10)
        x = _fake(jax.nn.relu(x + y), 0.0311, -120)
        x = x @ quant.lsq(kernels[2], steps, WEIGHT)
        x = quant.pact(
            x, jnp.float32(2.5), quant.QuantSpec(signed=False, symmetric=True)
        )
        x = x.reshape(x.shape[0], -1)
        return _fake(x @ _fake_kernel(kernels[3]), 0.02, 3)

    return apply, steps


def test_quantizers_survive(trained, rng):
    apply, steps = trained
    graph = quant.lower_integer(apply, np.zeros((1, 8, 8, 2), np.float32))
    scales = {(t.scale, t.zero_point) for t in graph.tensors.values()}
    given = [(0.02, -28), (0.0153, -128), (0.029, 10), (0.0311, -120), (0.02, 3)]
    given = {(float(np.float32(s)), z) for s, z in given}
    assert given < scales and len(scales) == 6
    third = [n for n in graph.nodes if isinstance(n, Conv)][2]
    np.testing.assert_array_equal(third.kernel_scale, steps)
    images = rng.normal(size=(128, 8, 8, 2)).astype(np.float32)
    images *= rng.uniform(0.2, 2, (128, 1, 1, 1)).astype(np.float32)
    source = graph.input_tensor
    codes = quant.quantize(images, source.qparams, source.codes)
    got = np.asarray(quant.integer_apply(graph, codes)).astype(int)
    want = np.rint(np.asarray(jax.jit(apply)(images)) / np.float32(0.02)) + 3
    difference = np.abs(got - want)
    assert difference.max() <= 1 and (difference > 0).mean() <= 0.06
    assert len(np.unique(want)) > 50


class Plain(nn.Module):
    """Convolutions, a maximum, dense layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(6, (3, 3), strides=2)(x.astype(jnp.float32) / 255)
        x = nn.relu(nn.Conv(8, (3, 3))(nn.relu(x)))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return nn.Dense(5)(nn.relu(nn.Dense(16)(x)))


def test_layers_of_fake_quantize(rng):
    images, model = _images(rng, 64, 8, 8, 3), Plain()
    # The last batch of uint8 has both of its ends.
    images[-1, 0, 0], images[-1, 0, 1] = 0, 255
    with quant.fake_quantize(quant.LayerRule(observer=quant.minmax)):
        shapes = jax.eval_shape(model.init, jax.random.key(0), images)
        params: dict[str, Any] = {"params": _fill(shapes["params"], rng)}
        _, stats = model.apply(params, images, mutable=["quant_stats"])
        variables = params | dict(stats)

        def apply(x):
            return model.apply(variables, x)

        graph = quant.lower_integer(apply, images, calibration=[images])
        numbers = jax.jit(apply)(images)
    assert [type(node).__name__ for node in graph.nodes] == [
        "Conv", "Conv", "MaxPool", "Reshape", "Dense", "Dense"
    ]  # fmt: skip
    tensor = graph.output_tensor
    want = np.asarray(quant.quantize(numbers, tensor.qparams, tensor.codes), int)
    got = np.asarray(quant.integer_apply(graph, images), int)
    difference = np.abs(got - want)
    assert difference.max() <= 1 and (difference > 0).mean() <= 0.06


@pytest.mark.parametrize(("step", "rescaled"), [(0.03, 2), (0.2, 1)])
def test_two_quantizers_of_one_tensor(step, rescaled, rng):
    """Two layers, of which a shortcut reads the sum as it is."""
    kernel = rng.normal(size=(6, 6)).astype(np.float32)

    def apply(x):
        x = x.astype(jnp.float32) / 255
        y = _fake(x, 1 / 255, -128) @ kernel + _fake(x, 1 / 255, -128) @ kernel.T
        return _fake(y, step) @ kernel + _fake(y, 0.06) @ kernel + y

    images = rng.integers(0, 256, (64, 6)).astype(np.uint8)
    graph = quant.lower_integer(apply, images, calibration=images)
    kinds = [type(node).__name__ for node in graph.nodes]
    # A quantizer that cuts off what the shortcut adds is not shared with it.
    assert kinds.count("Affine") == rescaled and kinds.count("Add") == 3
    assert graph.input_tensor.scale == float(np.float32(1 / 255))
    got = _numbers(graph, quant.integer_apply(graph, images))
    assert _error(got, jax.jit(apply)(images)) < 0.04


def test_negative_gain_of_the_lowest_code():
    wide = quant.QuantSpec(symmetric=True)

    def apply(x):
        kernel = jnp.array([[-1.28, 0.5], [0.3, 1.0]])
        params = quant.QParams(jnp.float32(0.01), jnp.int32(0))
        y = x @ quant.fake_quant(kernel, params, wide)
        return _fake(y * jnp.array([[-1.0, 1.0]]), 0.1)

    with pytest.raises(ValueError, match="code of -128.*narrow_range=True"):
        quant.lower_integer(lambda x: apply(_fake(x, 0.1)), np.zeros((1, 2), "f4"))


# Where the normalization of the input goes.


def _normalized(rng, padding, mean, deviation, spec=None):
    kernel = rng.normal(size=(3, 3, 3, 4)).astype(np.float32) / 5
    mean, deviation = (np.float32(v).reshape(1, 1, 1, -1) for v in (mean, deviation))

    def apply(x):
        x = (x.astype(jnp.float32) / 255 - mean) / deviation
        if spec is not None:
            x = _fake(x, *spec)
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    images = _images(rng, 16, 6, 6, 3)
    graph = quant.lower_integer(apply, images, calibration=[images])
    got = _numbers(graph, quant.integer_apply(graph, images))
    return graph, _error(got, jax.jit(apply)(images))


MEAN, DEVIATION = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def test_channels_go_into_a_convolution_without_padding(rng):
    graph, error = _normalized(rng, "VALID", MEAN, DEVIATION)
    assert len(graph.nodes) == 1 and error < 0.01
    assert graph.input_tensor.scale == 1


def test_channels_are_a_layer_before_padding(rng):
    graph, error = _normalized(rng, "SAME", MEAN, DEVIATION)
    assert [type(node) for node in graph.nodes] == [Affine, Conv]
    assert error < 0.01


@pytest.mark.parametrize("mean", [0.0, 0.1307, 0.45])
def test_one_mean_goes_into_the_zero_point(rng, mean):
    graph, error = _normalized(rng, "SAME", mean, 0.3081)
    assert len(graph.nodes) == 1 and error < 0.01
    assert graph.input_tensor.zero_point == round(mean * 255)


def test_zero_outside_of_the_codes_is_a_layer(rng):
    graph, error = _normalized(rng, "SAME", -0.2, 0.5)
    assert [type(node) for node in graph.nodes] == [Affine, Conv]
    assert error < 0.01


def test_quantizer_of_the_input_is_absorbed(rng):
    deviation = 0.5
    scale, zero = 1 / 255 / deviation, -128 + 51
    graph, error = _normalized(rng, "SAME", 51 / 255, deviation, (scale, zero))
    assert len(graph.nodes) == 1 and error < 0.01
    source = graph.input_tensor
    assert (source.scale, source.zero_point) == (float(np.float32(scale)), 51)
    # One of another scale is a layer.
    graph, _ = _normalized(rng, "SAME", 51 / 255, deviation, (scale * 1.5, zero))
    assert [type(node) for node in graph.nodes] == [Affine, Conv]


def test_input_of_two_readers_keeps_its_scale(rng):
    kernel = rng.normal(size=(6, 4)).astype(np.float32)

    def apply(x):
        x = x.astype(jnp.float32)
        return jnp.concatenate([x / 255 @ kernel, (x - 100) / 50 @ kernel], axis=-1)

    images = rng.integers(0, 256, (32, 6)).astype(np.uint8)
    graph = quant.lower_integer(apply, images, calibration=images)
    got = _numbers(graph, quant.integer_apply(graph, images))
    assert _error(got, apply(images)) < 0.02
    assert (graph.input_tensor.scale, graph.input_tensor.zero_point) == (1.0, 0)


# Single patterns.


def _lowered(apply, x, **options):
    graph = quant.lower_integer(apply, x, calibration=[x], **options)
    source = graph.input_tensor
    codes = quant.quantize(x, source.qparams, source.codes)
    return graph, np.asarray(quant.integer_apply(graph, codes))


PATTERNS = {
    "clip of the input": lambda x: jnp.clip(x, -0.5, 0.75),
    "minimum": lambda x: jnp.minimum(jnp.maximum(x, -0.25), 2.0) * 2.0,
    "subtracted from": lambda x: 1.0 - x,
    "negated": lambda x: jax.nn.relu(-x),
    "keepdims": lambda x: x.mean((1, 2), keepdims=True) * 3.0,
    "global maximum": lambda x: nn.max_pool(x, (4, 4)).reshape(-1, 3),
    "average": lambda x: (
        jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
        * 0.25
    ),
    "average without padding": lambda x: nn.avg_pool(
        x, (3, 3), (2, 2), padding="SAME", count_include_pad=False
    ),
    "rows joined": lambda x: jnp.concatenate([x, jax.nn.relu(x)], axis=1),
    "dense on images": lambda x: x @ (jnp.arange(6.0).reshape(3, 2) - 2),
    "squeezed": lambda x: jnp.squeeze(nn.max_pool(x, (4, 4)), (1, 2))[:, None],
    "checkpointed": lambda x: jax.checkpoint(jax.nn.relu)(x),
    "unused": lambda x: (jnp.tanh(x), jax.nn.relu(x))[1],
    "branches": lambda x: jax.nn.relu(x) + jnp.minimum(x, 0.5),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, rng):
    apply = PATTERNS[name]
    x = rng.normal(size=(16, 4, 4, 3)).astype(np.float32)
    graph, codes = _lowered(apply, x)
    want = np.asarray(apply(jnp.asarray(x)))
    assert codes.shape == want.shape
    # Half a step of the input, as far as it reaches the output, and one of that.
    step = (1.1 * max(np.ptp(want), np.ptp(x)) + np.ptp(want)) / 255
    np.testing.assert_allclose(_numbers(graph, codes), want, atol=step)


def test_max_pool_keeps_the_codes(rng):
    def apply(x):
        return nn.max_pool(x * 2.0, (2, 2)).reshape(x.shape[0], -1)

    x = rng.normal(size=(4, 4, 4, 2)).astype(np.float32)
    graph, _ = _lowered(apply, x)
    tensors = [graph.tensors[node.output] for node in graph.nodes]
    assert [type(node) for node in graph.nodes][1] == MaxPool
    assert len({(t.scale, t.zero_point) for t in tensors}) == 1


def test_argmax_is_the_last_node(rng):
    kernel = rng.normal(size=(6, 4)).astype(np.float32)
    x = rng.normal(size=(32, 6)).astype(np.float32)
    graph, codes = _lowered(lambda x: (x @ kernel).argmax(-1), x)
    assert codes.dtype == np.int32
    assert (codes == (x @ kernel).argmax(-1)).mean() > 0.9


@pytest.mark.parametrize(
    ("activation_spec", "weight_spec", "most"),
    [
        (quant.UINT8_ACTIVATION, quant.INT8_WEIGHT, 0.03),
        (quant.INT16_ACTIVATION, quant.INT8_WEIGHT, 0.02),
        pytest.param(
            quant.QuantSpec(bits=4), quant.INT4_WEIGHT, 0.4, marks=pytest.mark.slow
        ),
        pytest.param(
            quant.QuantSpec(symmetric=True, pow2_scale=True),
            quant.QuantSpec(symmetric=True, pow2_scale=True, channel_axis=-1),
            0.06,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_formats(linen, activation_spec, weight_spec, most):
    apply, images = linen
    graph = quant.lower_integer(
        apply,
        images,
        calibration=[images],
        activation_spec=activation_spec,
        weight_spec=weight_spec,
    )
    got = _numbers(graph, quant.integer_apply(graph, images))
    assert _error(got, jax.jit(apply)(images)) < most
    pools = [node for node in graph.nodes if isinstance(node, AveragePool)]
    assert graph.tensors[pools[0].output].spec == activation_spec


# Errors.


def _error_of(apply, x=None, **options):
    x = np.ones((2, 4, 4, 3), np.float32) if x is None else x
    options.setdefault("calibration", [x])
    with pytest.raises((ValueError, TypeError)) as caught:
        quant.lower_integer(apply, x, **options)
    return str(caught.value)


def test_unknown_operation_is_named_with_its_line():
    message = _error_of(lambda x: jnp.tanh(x))
    assert "'tanh'" in message and "test_quant_lower.py:" in message
    assert "relu6" in message


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda x: x * x, "of two activations"),
        (lambda x: 1.0 / x, "divides by an activation"),
        (lambda x: x + jnp.arange(4.0).reshape(1, 4, 1, 1), "for each channel"),
        (lambda x: x.mean(1), "over height and width"),
        (lambda x: x.sum((1, 2)), "divide by the number of entries"),
        (lambda x: x.sum((1, 2)) / 3.0, "divided by their size"),
        (lambda x: jnp.concatenate([x, jnp.zeros_like(x)], -1), "batches or constants"),
        (lambda x: jnp.concatenate([x, x], 0), "batches or constants"),
        (lambda x: x.reshape(-1, 3), "moves the batch"),
        (lambda x: jnp.broadcast_to(x[:, None], (2, 5, 4, 4, 3)), "moves the batch"),
        (lambda x: jnp.maximum(x, jnp.arange(3.0).reshape(1, 1, 1, 3)), "one constant"),
        (lambda x: x.argmax(1), "over the last axis"),
        (lambda x: jnp.einsum("bhwc,bhwc->b", x, x), "no dense layer"),
        (lambda x: x.reshape(2, 4, 12) @ jnp.ones((12, 3)), r"\(batch, n, channels\)"),
        (lambda x: (x, x), "must return one array"),
        (lambda x: jnp.ones(3), "from its input"),
        (lambda x: _fake(x, jnp.abs(x).max()), "use a frozen one"),
        (
            lambda x: x @ (_fake_kernel(jnp.eye(3)) * 2.0),
            "quantizer is followed by 'mul'",
        ),
        (
            lambda x: x @ _fake_kernel(jnp.eye(3), quant.QuantSpec(channel_axis=-1)),
            "symmetric=True",
        ),
    ],
)
def test_refused(apply, message):
    assert re.search(message, _error_of(apply))


def test_calibration_is_needed():
    def apply(x):
        return _fake(jax.nn.relu(_fake(x, 0.1)) + 1.0, 0.1)

    x = np.ones((2, 4), np.float32)
    assert "1 activations have no quantizer" in _error_of(apply, x, calibration=None)
    assert "holds no batches" in _error_of(apply, x, calibration=[])
    assert "must be (batch, *(4,))" in _error_of(apply, x, calibration=[x[:, :3]])
    nan = np.full((2, 4), np.nan, np.float32)
    assert "must be finite" in _error_of(apply, x, calibration=[nan])


def test_bad_examples():
    def apply(x):
        return x

    assert "(batch, ...)" in _error_of(apply, np.ones(3, np.float32))
    assert "uint8 or floating" in _error_of(apply, np.ones((2, 3), np.int32))
    qparams = quant.QParams(np.float32(1), np.int32(0))
    x = np.ones((2, 3), np.uint8)
    assert "for floating input" in _error_of(apply, x, input_qparams=qparams)
    spec = quant.QuantSpec(channel_axis=-1)
    assert "needs one scale" in _error_of(apply, x, activation_spec=spec)
