"""Integer networks that several test files run."""

import numpy as np
import pytest

from jaxaccel import quant

INT8, UINT8 = quant.INT8_ACTIVATION, quant.UINT8_ACTIVATION
POW2 = quant.QuantSpec(symmetric=True, pow2_scale=True)
POW2_WEIGHT = quant.QuantSpec(
    symmetric=True, narrow_range=True, channel_axis=-1, pow2_scale=True
)


def _range(lo, hi, spec=INT8):
    return quant.compute_qparams(lo, hi, spec)


def _kernel(rng, *shape):
    fan_in = np.prod(shape[:-1])
    return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)


def _plain(rng, spec=INT8, weight_spec=quant.INT8_WEIGHT):
    """Convolutions with SAME padding and strides, max pooling, dense layers."""
    images = quant.QParams(np.float32(1 / 100), np.int32(100))
    if spec.symmetric:
        images = quant.QParams(np.float32(1 / 128), np.int32(0))
    source = UINT8 if not spec.symmetric else spec
    b = quant.IntGraphBuilder(
        (9, 8, 3), images, source, activation_spec=spec, weight_spec=weight_spec
    )
    x = b.conv(
        b.input,
        _kernel(rng, 3, 3, 3, 8),
        rng.normal(size=8) / 4,
        output=_range(-1.5, 2.0, spec),
        activation=(-1.0, 1.5),
    )
    x = b.conv(
        x, _kernel(rng, 3, 3, 8, 6), output=_range(-0.5, 2.0, spec), strides=2,
        activation="relu",
    )  # fmt: skip
    x = b.max_pool(x, 3, strides=1, padding="SAME")
    x = b.conv(
        x, _kernel(rng, 2, 3, 3, 4), output=_range(-2.0, 2.0, spec), groups=2,
        padding=((1, 0), (2, 1)), dilation=(1, 2),
    )  # fmt: skip
    x = b.flatten(x)
    x = b.dense(
        x, _kernel(rng, x.size, 12), rng.normal(size=12), output=_range(0.0, 3.0, spec),
        activation="relu6",
    )  # fmt: skip
    return b.build(b.dense(x, _kernel(rng, 12, 5), output=_range(-4.0, 4.0, spec)))


def _residual(rng, last="codes"):
    """Adds, a depthwise convolution, average pools, concatenation, an affine map."""
    b = quant.IntGraphBuilder((8, 8, 3), quant.QParams(1 / 64, -10), INT8)
    x = b.affine(
        b.input,
        np.array([1.0, -0.5, 0.7]),
        np.array([0.1, 0.0, -0.2]),
        output=_range(-2.5, 2.0),
    )
    x = b.conv(
        x, _kernel(rng, 3, 3, 3, 6), rng.normal(size=6) / 4, output=_range(-0.3, 2.5),
        activation=(-0.2, None),
    )  # fmt: skip
    y = b.conv(
        x, _kernel(rng, 3, 3, 1, 6), output=_range(-3.0, 2.0), groups=6, strides=2
    )
    z = b.average_pool(
        x, 3, strides=2, padding="SAME", count_include_pad=False,
        output=_range(-0.1, 1.5, UINT8), spec=UINT8,
    )  # fmt: skip
    x = b.add(y, z, output=_range(-1.5, 3.0), activation="relu")
    w = b.conv(x, _kernel(rng, 3, 3, 1, 12), output=_range(-2.0, 2.5), groups=6)
    x = b.concat([x, w, b.relu(x)], output=_range(-2.0, 3.0))
    x = b.average_pool(x, (1, 2), strides=1, padding=((0, 0), (1, 0)))
    x = b.global_average_pool(x, output=_range(-0.6, 1.0))
    x = b.dense(x, 6 * _kernel(rng, 24, 5), output=_range(-3.0, 3.0))
    ends = {"codes": lambda x: x, "argmax": b.argmax, "dequantize": b.dequantize}
    return b.build(ends[last](x))


def _narrow(rng):
    """4-bit weights, 5-bit activations, one scale a kernel."""
    five = quant.QuantSpec(bits=5)
    weights = quant.QuantSpec(bits=4, symmetric=True)
    return _plain(rng, five, weights)


GRAPHS = {
    "plain": _plain,
    "residual": _residual,
    "argmax": lambda rng: _residual(rng, "argmax"),
    "narrow": _narrow,
    "power of two": lambda rng: _plain(rng, POW2, POW2_WEIGHT),
    "16x8": lambda rng: _plain(rng, quant.INT16_ACTIVATION),
    "dequantize": lambda rng: _residual(rng, "dequantize"),
}


@pytest.fixture(scope="session")
def make_graph():
    """`make_graph(name) -> graph`, of fixed kernels; each is made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = GRAPHS[name](np.random.default_rng(7))
        return made[name]

    return make


@pytest.fixture
def random_codes(rng):
    """`random_codes(graph, batch) -> codes` all over the input's range."""

    def draw(graph, batch):
        source = graph.input_tensor
        shape, spec = (batch, *source.shape), source.codes
        # A color and noise: means over the image then differ too.
        color = rng.integers(spec.qmin, spec.qmax + 1, (batch, 1, 1, shape[-1]))
        noise = rng.integers(spec.qmin, spec.qmax + 1, shape) // 2
        codes = np.clip(color + noise, spec.qmin, spec.qmax)
        # Corners as well: images of one code each.
        codes[0], codes[1] = spec.qmin, spec.qmax
        return codes.astype(source.dtype)

    return draw
