"""Writes an integer network as ONNX, in the quantize-dequantize form."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxaccel.quant._graph import IntGraph
from jaxaccel.quant._graph_nodes import (
    Add,
    Affine,
    Argmax,
    AveragePool,
    Concat,
    Conv,
    Dense,
    MaxPool,
    Node,
    Reshape,
    Tensor,
)
from jaxaccel.quant._onnx_writer import Writer, import_onnx

if TYPE_CHECKING:
    import onnx


def to_onnx_qdq(
    graph: IntGraph, *, opset: int = 19, activation: str | None = "uint8"
) -> "onnx.ModelProto":
    """Writes a network as an ONNX model that runtimes recognize as quantized.

    Kernels are stored as int8 and biases as int32, each with its scales, followed by
    `DequantizeLinear`; activations pass through `QuantizeLinear` and
    `DequantizeLinear`. ONNX Runtime makes integer layers of that. Convolutions, dense
    layers and maxima then give the codes of `integer_apply` (a product within 2**-24
    of the middle between two codes may round to the other); sums of two tensors,
    averages and `affine` it computes in floating numbers: 1 off at most, each.

    Input and output are the codes that `integer_apply` takes and returns, channels
    last, with the first axis free.

    Args:
      graph: Of `lower_integer` or `IntGraphBuilder`.
      opset: From 13 to 23. ONNX Runtime fails to load 8-bit signed activations from
        21 on; 16-bit activations need 21, and are computed in floating numbers.
      activation: Format of 8-bit activations inside: `"uint8"`, for which ONNX
        Runtime has integer layers on every processor (they mean the same numbers as
        int8, with codes 128 higher), `"int8"`, or None for those of the graph.

    Returns:
      An `onnx.ModelProto`; `onnx.save(model, path)` stores it.

    Raises:
      ImportError: Without onnx.
      ValueError: If `opset` or `activation` is not one of those, or they do not go
        together.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> builder = quant.IntGraphBuilder((2,), quant.QParams(1 / 255, 0))
      >>> logits = quant.compute_qparams(-1.0, 1.5, quant.INT8_ACTIVATION)
      >>> kernel = np.array([[0.5, -1.0], [1.0, 0.25]])
      >>> graph = builder.build(builder.dense(builder.input, kernel, output=logits))
      >>> model = quant.to_onnx_qdq(graph, activation="int8")
      >>> [node.op_type for node in model.graph.node][-2:]
      ['Gemm', 'QuantizeLinear']

    References:
      ONNX, operators QuantizeLinear and DequantizeLinear,
      https://onnx.ai/onnx/operators
    """
    if activation not in (None, "int8", "uint8"):
        raise ValueError(
            f"activation must be 'int8', 'uint8' or None; got {activation!r}"
        )
    if not 13 <= opset <= 23:
        raise ValueError(f"opset must be from 13 to 23; got {opset}")
    import_onnx()
    _check_formats(graph, opset, activation)
    writer = Writer(graph, activation)
    writer.begin()
    for node in graph.nodes:
        _emit(writer, node)
    return writer.finish(opset)


def _check_formats(graph: IntGraph, opset: int, activation: str | None) -> None:
    dtypes = {
        np.dtype(activation or t.dtype) if t.dtype.itemsize == 1 else t.dtype
        for t in graph.tensors.values()
        if t.kind == "codes"
    }
    if np.dtype(np.int16) in dtypes and opset < 21:
        raise ValueError(f"16-bit activations need opset=21 or more; got {opset}")
    if np.dtype(np.int8) in dtypes and opset >= 21:
        raise ValueError(
            "ONNX Runtime fails to load 8-bit signed activations from opset 21 on; got "
            f"opset={opset}: use opset=19 or activation='uint8'"
        )


def _emit(w: Writer, node: Node) -> None:
    """Writes one node."""
    x, y = w.tensors[node.inputs[0]], w.tensors[node.output]
    if isinstance(node, Conv):
        w.quantize(node, _conv(w, node, x), y)
    elif isinstance(node, Dense):
        weights = w.kernel(node, node.kernel, axis=1)
        inputs = [w.numbers(x.name), weights, w.bias(node, x)]
        w.quantize(node, w.add("Gemm", inputs), y)
    elif isinstance(node, Affine):
        w.quantize(node, _affine(w, node, x), y)
    elif isinstance(node, Add):
        w.quantize(node, w.add("Add", [w.numbers(n) for n in node.inputs]), y)
    elif isinstance(node, AveragePool):
        w.quantize(node, _average(w, node, x), y)
    elif isinstance(node, MaxPool):
        pooled = w.add("MaxPool", [w.numbers(x.name)], **_window(node))
        w.quantize(node, pooled, y)
    elif isinstance(node, Concat):
        axis = node.axis + 1
        if len(y.shape) == 3:
            axis = {1: 2, 2: 3, 3: 1}[axis]
        joined = w.add("Concat", [w.numbers(n) for n in node.inputs], axis=axis)
        w.quantize(node, joined, y)
    elif isinstance(node, Reshape):
        _reshape(w, node, x, y)
    elif isinstance(node, Argmax):
        axis = 1 if len(x.shape) == 3 else len(x.shape)
        # Numbers are in the order of their codes, and every runtime has their ArgMax.
        index = w.add("ArgMax", [w.numbers(x.name)], axis=axis, keepdims=0)
        w.codes[y.name] = w.add("Cast", [index], to=w.onnx_type(np.int32))
    else:
        w.codes[y.name] = w.numbers(x.name)


def _conv(w: Writer, node: Conv, x: Tensor) -> str:
    # HWIO to OIHW.
    kernel = w.kernel(node, node.kernel.transpose(3, 2, 0, 1), axis=0)
    inputs = [w.numbers(x.name), kernel, w.bias(node, x)]
    return w.add(
        "Conv",
        inputs,
        kernel_shape=node.kernel.shape[:2],
        strides=node.strides,
        pads=_pads(node.padding),
        dilations=node.dilation,
        group=node.groups,
    )


def _affine(w: Writer, node: Affine, x: Tensor) -> str:
    numbers = w.numbers(x.name)
    scale = node.kernel.astype(np.float32) * node.kernel_scale
    bias = node.bias.astype(np.float32) * (np.float32(x.scale) * node.kernel_scale)
    shape = (-1, 1, 1) if len(x.shape) == 3 else (-1,)
    if (scale != 1).any():
        numbers = w.add("Mul", [numbers, w.constant(scale.reshape(shape))])
    if bias.any():
        numbers = w.add("Add", [numbers, w.constant(bias.reshape(shape))])
    return numbers


def _average(w: Writer, node: AveragePool, x: Tensor) -> str:
    numbers = w.numbers(x.name)
    if node.window == x.shape[:2] and not any(map(any, node.padding)):
        return w.add("GlobalAveragePool", [numbers])
    count = int(node.count_include_pad)
    return w.add("AveragePool", [numbers], count_include_pad=count, **_window(node))


def _window(node: MaxPool | AveragePool) -> dict[str, Any]:
    return {
        "kernel_shape": node.window,
        "strides": node.strides,
        "pads": _pads(node.padding),
    }


def _pads(padding: Any) -> tuple[int, ...]:
    (top, bottom), (left, right) = padding
    return top, left, bottom, right


def _reshape(w: Writer, node: Reshape, x: Tensor, y: Tensor) -> None:
    codes = w.codes[x.name]
    # Flattened in the order of height, width, channels; no other where 1 x 1.
    if len(x.shape) == 3 and x.shape[:2] != (1, 1):
        codes = w.add("Transpose", [codes], perm=(0, 2, 3, 1))
    shape = w.constant(np.array([-1, *y.shape], np.int64))
    codes = w.add("Reshape", [codes, shape])
    if len(y.shape) == 3:
        codes = w.add("Transpose", [codes], perm=(0, 3, 1, 2))
    w.codes[y.name] = codes
