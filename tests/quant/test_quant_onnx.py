"""The ONNX export in ONNX Runtime, against the reference in jax."""

import sys

import numpy as np
import pytest

from jaxaccel import quant

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

INT8, UINT8 = quant.INT8_ACTIVATION, quant.UINT8_ACTIVATION


def _run(model, codes, *, optimize=True):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimize:
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"input": codes})[0]


def _check(graph, codes, *, most, share=0.0, values=10, **options):
    want = np.asarray(quant.integer_apply(graph, codes))
    got = _run(quant.to_onnx_qdq(graph, **options), codes)
    assert got.dtype == want.dtype and got.shape == want.shape
    difference = np.abs(got.astype(np.int64) - want)
    assert difference.max() <= most and (difference > 0).mean() <= share
    assert len(np.unique(want)) > values


@pytest.mark.parametrize(
    ("opset", "activation"),
    [(19, "uint8"), (13, "uint8"), (23, "uint8"), (17, "int8"), (19, None)],
)
def test_plain_network_is_equal(opset, activation, make_graph, random_codes):
    graph = make_graph("plain")
    codes = random_codes(graph, 32)
    _check(graph, codes, most=0, opset=opset, activation=activation)


def test_narrow_network_is_equal(make_graph, random_codes):
    graph = make_graph("narrow")
    codes = random_codes(graph, 32)
    _check(graph, codes, most=0, values=5)
    _check(graph, codes, most=0, values=5, activation="int8")


def test_network_becomes_integer_layers(make_graph, tmp_path):
    graph = make_graph("plain")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.graph_optimization_level = level
    data = quant.to_onnx_qdq(graph).SerializeToString()
    onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(options.optimized_model_filepath)
    kinds = [node.op_type for node in optimized.graph.node]
    assert kinds.count("QLinearConv") == 3 and kinds.count("QGemm") == 2
    assert not {"Conv", "Gemm"} & set(kinds)


def _one(shape, layer, spec=INT8):
    builder = quant.IntGraphBuilder(shape, quant.QParams(0.02, -20), spec)
    return builder.build(layer(builder, builder.input))


def _range(lo, hi):
    return quant.compute_qparams(lo, hi, INT8)


def _add(b, x):
    y = b.affine(x, output=_range(-3.0, 1.0))
    return b.add(x, y, output=_range(-5.0, 4.0))


SINGLE = {
    "add": _add,
    "average": lambda b, x: b.average_pool(x, 2, output=_range(-2.0, 2.5)),
    "padded average": lambda b, x: b.average_pool(
        x, 3, strides=2, padding="SAME", count_include_pad=False
    ),
    "global average": lambda b, x: b.global_average_pool(x, output=_range(-0.5, 0.7)),
    "affine": lambda b, x: b.affine(
        x, np.array([1.0, -0.3]), np.array([0.2, 0.0]), output=_range(-3.0, 3.0)
    ),
    "concat": lambda b, x: b.concat([x, x], axis=0, output=_range(-2.0, 3.0)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_float_layers_are_off_by_one_at_most(name, random_codes):
    graph = _one((7, 6, 2), SINGLE[name])
    # Means of two or four codes are often exactly in the middle of two.
    _check(graph, random_codes(graph, 32), most=1, share=0.3)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_map_comes_out_channels_last(kind, rng, random_codes):
    kernel = rng.normal(size=(3, 3, 1, 4)).astype(np.float32)

    def layer(b, x):
        return b.conv(x, kernel, output=_range(-8.0, 8.0), groups=2, strides=2)

    graph = _one((7, 6, 2), layer)
    _check(graph, random_codes(graph, 32), most=0, activation=kind)


def test_reshaped_ends_keep_the_callers_format(rng, random_codes):
    kernel = rng.normal(size=(84, 4)).astype(np.float32)

    def layer(b, x):
        y = b.dense(b.flatten(x), kernel, output=_range(-40.0, 40.0))
        return b.reshape(y, (1, 2, 2))

    graph = _one((7, 6, 2), layer)
    _check(graph, random_codes(graph, 32), most=0, activation="uint8")


def test_residual_network(make_graph, random_codes):
    graph = make_graph("residual")
    codes = random_codes(graph, 32)
    want = np.asarray(quant.integer_apply(graph, codes)).astype(int)
    got = _run(quant.to_onnx_qdq(graph), codes)
    # The last layer multiplies what the layers before are off by one.
    assert np.abs(got - want).max() <= 8 and np.abs(got - want).mean() < 1.5
    top = np.sort(want, axis=-1)
    clear = top[:, -1] - top[:, -2] > 8
    np.testing.assert_array_equal(got.argmax(-1)[clear], want.argmax(-1)[clear])
    assert clear.mean() > 0.3


@pytest.mark.parametrize("name", ["argmax", "dequantize"])
def test_last_nodes(name, make_graph, random_codes):
    graph = make_graph(name)
    codes = random_codes(graph, 32)
    want = np.asarray(quant.integer_apply(graph, codes))
    got = _run(quant.to_onnx_qdq(graph), codes)
    assert got.dtype == want.dtype and got.shape == want.shape
    if name == "argmax":
        assert (got == want).mean() > 0.8
    else:
        scale = graph.tensors[graph.nodes[-1].inputs[0]].scale
        np.testing.assert_allclose(got, want, atol=8.01 * scale)


def test_16_bits_need_opset_21(make_graph, random_codes):
    graph = make_graph("16x8")
    with pytest.raises(ValueError, match="16-bit activations need opset=21"):
        quant.to_onnx_qdq(graph)
    codes = random_codes(graph, 32)
    want = np.asarray(quant.integer_apply(graph, codes)).astype(int)
    # Optimized, its dense layers round activations to 8 bits (MatMulNBits).
    got = _run(quant.to_onnx_qdq(graph, opset=21), codes, optimize=False)
    assert np.abs(got - want).max() <= 1 and np.ptp(want) > 1000


def test_bad_arguments(make_graph):
    graph = make_graph("plain")
    for activation in ("int8", None):
        with pytest.raises(ValueError, match="fails to load .* got opset=21"):
            quant.to_onnx_qdq(graph, opset=21, activation=activation)
    with pytest.raises(ValueError, match="opset must be from 13 to 23; got 12"):
        quant.to_onnx_qdq(graph, opset=12)
    with pytest.raises(ValueError, match="activation must be .* got 'int4'"):
        quant.to_onnx_qdq(graph, activation="int4")


def test_missing_onnx(make_graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxaccel\[onnx\]'"):
        quant.to_onnx_qdq(make_graph("plain"))
