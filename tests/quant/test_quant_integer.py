"""The int32 reference against int64 loops of NumPy; the builder and its errors."""

import itertools

import jax
import numpy as np
import pytest

from jaxaccel import quant
from jaxaccel.quant._graph import check_accumulator
from jaxaccel.quant._graph_nodes import Add, Affine, AveragePool, Conv, Dense, MaxPool

INT8, UINT8 = quant.INT8_ACTIVATION, quant.UINT8_ACTIVATION
ONE = quant.QParams(np.float32(1), np.int32(0))


def _scale(acc, m0, shift):
    """Single rounding with 64-bit integers."""
    shift = np.asarray(shift, np.int64)
    return (acc * np.asarray(m0, np.int64) + (1 << (shift - 1))) >> shift


def _windows(x, window, strides, padding, dilation=(1, 1), fill=0):
    """Yields each tap's entries of all windows, as (batch, height, width, channels)."""
    x = np.pad(x, ((0, 0), *padding, (0, 0)), constant_values=fill)
    extent = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    sizes = [(n - e) // s + 1 for n, e, s in zip(x.shape[1:3], extent, strides,
                                                strict=True)]  # fmt: skip
    for i, j in itertools.product(*map(range, window)):
        top, left = i * dilation[0], j * dilation[1]
        rows = top + np.arange(sizes[0]) * strides[0]
        columns = left + np.arange(sizes[1]) * strides[1]
        yield i, j, x[:, rows[:, None], columns]


def _oracle(graph, codes):
    values = {graph.input: codes.astype(np.int64)}
    for node in graph.nodes:
        tensors = [graph.tensors[name] for name in node.inputs]
        x, y = values[node.inputs[0]], graph.tensors[node.output]
        zeroed = x - tensors[0].zero_point
        if isinstance(node, Conv):
            acc = _convolve(zeroed, node)
        elif isinstance(node, Dense):
            acc = zeroed @ node.kernel.astype(np.int64) + node.bias
        elif isinstance(node, Affine):
            acc = zeroed * node.kernel + node.bias
        elif isinstance(node, AveragePool):
            taps = _windows(zeroed, node.window, node.strides, node.padding)
            acc = sum(part for _, _, part in taps)
        elif isinstance(node, Add):
            other = values[node.inputs[1]] - tensors[1].zero_point
            acc = sum(
                _scale(v << node.left_shift, node.m0[i], node.shift[i])
                for i, v in enumerate((zeroed, other))
            )
        else:
            values[node.output] = _move(node, [values[n] for n in node.inputs], y)
            continue
        last = -1 if isinstance(node, Add) else ...
        scaled = _scale(acc, node.m0[last], node.shift[last])
        values[node.output] = np.clip(scaled + y.zero_point, node.lo, node.hi)
    return values[graph.output]


def _convolve(x, node):
    kernel = node.kernel.astype(np.int64)
    per_group, outputs = kernel.shape[2], kernel.shape[3] // node.groups
    acc = 0
    for i, j, part in _windows(x, kernel.shape[:2], node.strides, node.padding,
                               node.dilation):  # fmt: skip
        groups = [
            part[..., g * per_group : (g + 1) * per_group]
            @ kernel[i, j, :, g * outputs : (g + 1) * outputs]
            for g in range(node.groups)
        ]
        acc = acc + np.concatenate(groups, axis=-1)
    return acc + node.bias


def _move(node, inputs, y):
    kind = type(node).__name__
    if isinstance(node, MaxPool):
        args = (inputs[0], node.window, node.strides, node.padding)
        parts = [part for _, _, part in _windows(*args, fill=-(2**40))]
        return np.max(parts, axis=0)
    if kind == "Reshape":
        return inputs[0].reshape(len(inputs[0]), *y.shape)
    return np.concatenate(inputs, axis=node.axis + 1)


@pytest.mark.parametrize(
    "name", ["plain", "residual", "narrow", "power of two", "16x8"]
)
def test_integer_apply_equals_loops(name, make_graph, random_codes):
    graph = make_graph(name)
    codes = random_codes(graph, 32)
    got = quant.integer_apply(graph, codes)
    assert got.dtype == graph.output_tensor.dtype
    np.testing.assert_array_equal(got, _oracle(graph, codes))
    assert len(np.unique(got)) > 4


@pytest.mark.parametrize("name", ["plain", "narrow", "power of two", "16x8"])
def test_twin_is_off_by_one_at_most(name, make_graph, random_codes):
    graph = make_graph(name)
    codes = random_codes(graph, 32)
    want = np.asarray(quant.integer_apply(graph, codes)).astype(int)
    difference = np.abs(np.asarray(quant.simulate(graph, codes)).astype(int) - want)
    assert difference.max() <= 1 and (difference > 0).mean() <= 0.06


def test_roundings_differ_by_little(make_graph, random_codes):
    graph = make_graph("plain")
    codes = random_codes(graph, 32)
    single, double = (
        np.asarray(quant.integer_apply(graph, codes, rounding=r)).astype(int)
        for r in ("single", "double")
    )
    difference = np.abs(single - double)
    assert 0 < difference.max() <= 2 and (difference > 0).mean() < 0.2


def test_last_nodes(make_graph, random_codes):
    codes = random_codes(make_graph("residual"), 32)
    logits = quant.integer_apply(make_graph("residual"), codes)
    classes = quant.integer_apply(make_graph("argmax"), codes)
    np.testing.assert_array_equal(classes, np.argmax(logits, axis=-1))
    tensor = make_graph("residual").output_tensor
    numbers = quant.integer_apply(make_graph("dequantize"), codes)
    want = quant.dequantize(logits, tensor.qparams, tensor.codes)
    np.testing.assert_array_equal(numbers, want)


def test_inside_jit_and_vmap(make_graph, random_codes):
    graph = make_graph("plain")
    codes = random_codes(graph, 32)
    want = quant.integer_apply(graph, codes)

    def apply(x):
        return quant.integer_apply(graph, x)

    np.testing.assert_array_equal(jax.jit(apply)(codes), want)
    one = jax.vmap(lambda x: apply(x[None])[0])(codes)
    np.testing.assert_array_equal(one, want)


def test_same_padding_holds_the_zero_point():
    """An image of zeros stays one, whatever code 0 has; so do its edges."""
    qparams = quant.QParams(np.float32(0.1), np.int32(77))
    b = quant.IntGraphBuilder((5, 5, 1), qparams, INT8)
    kernel = np.ones((3, 3, 1, 1), np.float32)
    x = b.conv(b.input, kernel, output=quant.QParams(np.float32(0.1), np.int32(-5)))
    graph = b.build(x)
    zeros = quant.integer_apply(graph, np.full((1, 5, 5, 1), 77, np.int8))
    assert (np.asarray(zeros) == -5).all()


def test_kernel_of_codes(rng):
    kernel = rng.normal(size=(6, 4)).astype(np.float32)
    tensor = quant.QTensor.of(kernel, quant.INT4_WEIGHT)
    b = quant.IntGraphBuilder((6,), ONE, INT8, weight_spec=quant.INT4_WEIGHT)
    graphs = [b.build(b.dense(b.input, k, output=ONE)) for k in (kernel, tensor)]
    for graph in graphs:
        (node,) = graph.nodes
        assert isinstance(node, Dense)
        np.testing.assert_array_equal(node.kernel, tensor.values)
        np.testing.assert_array_equal(node.kernel_scale, tensor.qparams.scale)


def test_huge_bias_gets_a_larger_scale():
    """A dead channel keeps its bias, though its kernel's own scale is tiny."""
    b = quant.IntGraphBuilder((2,), ONE, INT8)
    kernel = np.array([[1e-20, 1.0], [1e-21, 1.0]], np.float32)
    output = quant.compute_qparams(-8.0, 8.0, INT8)
    graph = b.build(b.dense(b.input, kernel, np.array([5.0, 0.0]), output=output))
    codes = quant.integer_apply(graph, np.array([[3, 1]], np.int8))
    numbers = quant.dequantize(codes, output, INT8)
    np.testing.assert_allclose(numbers, [[5.0, 4.0]], atol=0.04)


def test_size_report(make_graph):
    report = make_graph("plain").size_report()
    assert [layer.kind for layer in report.layers] == ["Conv"] * 3 + ["Dense"] * 2
    first = report.layers[0]
    assert (first.parameters, first.macs) == (27 * 8 + 8, 72 * 8 * 27)
    # Codes, biases, multipliers and shifts.
    assert first.nbytes == 27 * 8 + 4 * 8 + 5 * 8
    assert report.nbytes == sum(layer.nbytes for layer in report.layers)
    assert report.float32_nbytes == 4 * sum(x.parameters for x in report.layers)
    assert "total" in str(report).splitlines()[-1]


# Errors.


def test_overflow_is_found_when_built():
    images = quant.QParams(np.float32(1), np.int32(0))
    b = quant.IntGraphBuilder((600,), images, quant.INT16_ACTIVATION)
    x = b.dense(b.input, np.ones((600, 2), np.float32), output=ONE)
    # 600 inputs, codes of 127, distances of 2**15.
    with pytest.raises(ValueError, match=f"Dense 'dense_0' might .* {600 * 127 << 15}"):
        b.build(x)
    sparse = np.zeros((600, 2), np.float32)
    sparse[:515] = 1
    b = quant.IntGraphBuilder((600,), images, quant.INT16_ACTIVATION)
    graph = b.build(b.dense(b.input, sparse, output=quant.QParams(np.float32(9e5), 0)))
    lowest = np.full((1, 600), -(2**15), np.int16)
    want = np.floor(-(2.0**15) * 515 / 9e5 + 0.5)
    np.testing.assert_array_equal(quant.integer_apply(graph, lowest), [[want, want]])


def test_accumulator_bound_counts_the_zero_point():
    qparams = quant.QParams(np.float32(1), np.int32(-128))
    b = quant.IntGraphBuilder((4096 * 16,), qparams, INT8)
    x = b.dense(b.input, np.ones((4096 * 16, 1), np.float32), output=ONE)
    (node,) = b.build(x).nodes
    centered = quant.IntGraphBuilder((1,), ONE, INT8).input
    check_accumulator(node, centered)
    b = quant.IntGraphBuilder((67_000,), qparams, INT8)
    x = b.dense(b.input, np.ones((67_000, 1), np.float32), output=ONE)
    with pytest.raises(ValueError, match="might reach 2169795000"):
        b.build(x)


def test_bad_codes(make_graph):
    graph = make_graph("plain")
    shape = graph.input_tensor.shape
    with pytest.raises(TypeError, match="dtype uint8; got int8"):
        quant.integer_apply(graph, np.zeros((1, *shape), np.int8))
    with pytest.raises(ValueError, match=r"x must be \(batch, \*\(9, 8, 3\)\)"):
        quant.simulate(graph, np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="rounding must be"):
        quant.integer_apply(graph, np.zeros((1, *shape), np.uint8), rounding="up")
    b = quant.IntGraphBuilder((2,), ONE, quant.QuantSpec(bits=4))
    narrow = b.build(b.relu(b.input))
    with pytest.raises(ValueError, match="codes from -8 to 7; got 9"):
        quant.integer_apply(narrow, np.array([[0, 9]], np.int8))


def _refuse(message, act):
    b = quant.IntGraphBuilder((6, 6, 2), ONE, INT8)
    with pytest.raises(ValueError, match=message):
        act(b, b.input)


KERNEL = np.ones((3, 3, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("message", "act"),
    [
        ("does not fit an input", lambda b, x: b.conv(x, KERNEL[:, :, :1], output=ONE)),
        ("flatten first", lambda b, x: b.dense(x, KERNEL[0, 0], output=ONE)),
        ("must be finite", lambda b, x: b.conv(x, KERNEL * np.nan, output=ONE)),
        (
            "4 finite numbers",
            lambda b, x: b.conv(x, KERNEL, np.zeros(3), output=ONE),
        ),
        (
            "activation must be 'relu'",
            lambda b, x: b.conv(x, KERNEL, output=ONE, activation="tanh"),
        ),
        (
            "lo > hi",
            lambda b, x: b.conv(x, KERNEL, output=ONE, activation=(1.0, 0.0)),
        ),
        (
            "scale must be positive",
            lambda b, x: b.conv(x, KERNEL, output=quant.QParams(np.float32(0), 0)),
        ),
        (
            "zero_point must be from",
            lambda b, x: b.conv(x, KERNEL, output=quant.QParams(np.float32(1), 128)),
        ),
        (
            "needs one scale",
            lambda b, x: b.conv(x, KERNEL, output=ONE, spec=quant.INT8_WEIGHT),
        ),
        (
            "needs symmetric=True, signed=True for 16 bits",
            lambda b, x: b.conv(x, KERNEL, output=ONE, spec=quant.QuantSpec(bits=16)),
        ),
        (
            r"channel_axis=-1 \(or None\)",
            lambda b, x: b.conv(
                x,
                quant.QTensor.of(KERNEL, quant.QuantSpec(symmetric=True,
                                                         channel_axis=0)),
                output=ONE,
            ),
        ),
        ("cannot add shapes", lambda b, x: b.add(x, b.flatten(x), output=ONE)),
        ("does not fit", lambda b, x: b.max_pool(x, 7)),
        ("pooling needs", lambda b, x: b.max_pool(b.flatten(x), 2)),
        ("at least 1", lambda b, x: b.max_pool(x, (2, 0))),
        ("not be negative", lambda b, x: b.max_pool(x, 2, padding=((0, 0), (-1, 0)))),
        ("cannot reshape", lambda b, x: b.reshape(x, (71,))),
        ("cannot join", lambda b, x: b.concat([x, b.flatten(x)])),
        ("cannot join", lambda b, x: b.concat([x, x], axis=3)),
        ("holds classes, no codes", lambda b, x: b.argmax(b.argmax(x))),
        ("is not computed by any node", lambda b, x: b.build(x)),
        (
            "is not of this builder",
            lambda b, x: b.relu(quant.IntGraphBuilder((1,), ONE, INT8).relu(
                quant.IntGraphBuilder((1,), ONE, INT8).input)),
        ),
        (
            "too far apart",
            lambda b, x: b.affine(x, output=quant.QParams(np.float32(1e-12), 0)),
        ),
    ],
)  # fmt: skip
def test_builder_refuses(message, act):
    _refuse(message, act)


def test_graph_refuses_nodes_out_of_order(make_graph):
    graph = make_graph("plain")
    with pytest.raises(ValueError, match="which no node before it writes"):
        quant.IntGraph(graph.tensors, graph.nodes[::-1], graph.input, graph.output)
    twice = (*graph.nodes, graph.nodes[0])
    with pytest.raises(ValueError, match="two nodes write tensor 'conv_0'"):
        quant.IntGraph(graph.tensors, twice, graph.input, graph.output)
