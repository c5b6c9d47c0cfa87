"""Collects the nodes and constants of an ONNX model with quantized activations."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxaccel.quant._graph import IntGraph
from jaxaccel.quant._graph_nodes import Conv, Dense, Node, Tensor
from jaxaccel.quant._spec import QuantSpec

if TYPE_CHECKING:
    import onnx


def import_onnx() -> Any:
    """Returns the module onnx, or raises ImportError with the remedy."""
    try:
        import onnx
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise ImportError(
            "to_onnx_qdq needs onnx; pip install 'jaxaccel[onnx]'"
        ) from error
    return onnx


class Writer:
    """Nodes and constants in the order of writing.

    Images are channels first inside, as ONNX has them.

    Attributes:
      tensors: Of the network, in the format that is written.
      codes: Name of the ONNX value with the codes of each tensor.
    """

    def __init__(self, graph: IntGraph, activation: str | None) -> None:
        self.graph = graph
        self._onnx = import_onnx()
        self.tensors = {
            name: _as_format(tensor, activation)
            for name, tensor in graph.tensors.items()
        }
        self.codes: dict[str, str] = {}
        self._numbers: dict[str, str] = {}
        self._nodes, self._constants = [], []

    def begin(self) -> None:
        """Names the input, and brings channels to the front."""
        source = self.graph.input_tensor
        codes = "input"
        if len(source.shape) == 3:
            codes = self.add("Transpose", [codes], perm=(0, 3, 1, 2))
        self.codes[source.name] = self._convert(codes, source, self.tensors)

    def finish(self, opset: int) -> "onnx.ModelProto":
        """Returns the checked model."""
        output = self.graph.output_tensor
        inside = self.tensors[output.name]
        outside = self.graph.tensors
        codes = self._convert(self.codes[output.name], inside, outside)
        if len(output.shape) == 3:
            codes = self.add("Transpose", [codes], perm=(0, 2, 3, 1))
        self._nodes.append(self._onnx.helper.make_node("Identity", [codes], ["output"]))
        self._drop_identity()
        graph = self._onnx.helper.make_graph(
            self._nodes,
            "network",
            [self._value("input", self.graph.input_tensor)],
            [self._value("output", output)],
            self._constants,
        )
        model = self._onnx.helper.make_model(
            graph,
            opset_imports=[self._onnx.helper.make_opsetid("", opset)],
            producer_name="jaxaccel",
            # Runtimes refuse a newer format than they know.
            ir_version=min(self._onnx.IR_VERSION, 10 if opset >= 21 else 9),
        )
        self._onnx.checker.check_model(model)
        return model

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds a node; returns the name of its output."""
        name = f"{kind}_{len(self._nodes)}"
        node = self._onnx.helper.make_node(kind, inputs, [name], name, **attributes)
        self._nodes.append(node)
        return name

    def constant(self, values: np.ndarray) -> str:
        """Adds a constant; returns its name."""
        name = f"constant_{len(self._constants)}"
        values = np.asarray(values, order="C")
        self._constants.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def numbers(self, name: str) -> str:
        """Returns the value with the numbers of a tensor's codes."""
        if name not in self._numbers:
            tensor = self.tensors[name]
            inputs = [self.codes[name], *self._params(tensor)]
            self._numbers[name] = self.add("DequantizeLinear", inputs)
        return self._numbers[name]

    def quantize(self, node: Node, numbers: str, tensor: Tensor) -> None:
        """Adds codes of a node's numbers, clamped as the node says."""
        info = np.iinfo(tensor.dtype)
        spec = self.graph.tensors[tensor.name].codes
        shift = tensor.zero_point - self.graph.tensors[tensor.name].zero_point
        bounds = [getattr(node, "lo", spec.qmin), getattr(node, "hi", spec.qmax)]
        bounds = [code + shift for code in bounds]
        clamped = bounds != [info.min, info.max]
        if clamped and tensor.dtype.itemsize > 1:
            # ONNX Runtime has no Clip of 16 bits.
            scale, zero = np.float32(tensor.scale), tensor.zero_point
            ends = [self.constant(np.asarray((c - zero) * scale)) for c in bounds]
            numbers = self.add("Clip", [numbers, *ends])
        codes = self.add("QuantizeLinear", [numbers, *self._params(tensor)])
        if clamped and tensor.dtype.itemsize == 1:
            # On codes: the pattern before it stays one that runtimes know.
            ends = [self.constant(np.array(c, tensor.dtype)) for c in bounds]
            codes = self.add("Clip", [codes, *ends])
        self.codes[tensor.name] = codes

    def kernel(self, node: Conv | Dense, codes: np.ndarray, axis: int) -> str:
        """Adds a kernel as codes and what dequantizes them."""
        zeros = np.zeros(node.kernel_scale.shape, np.int8)
        inputs = [self.constant(codes), self.constant(node.kernel_scale)]
        inputs.append(self.constant(zeros))
        return self.add("DequantizeLinear", inputs, axis=axis)

    def bias(self, node: Conv | Dense, source: Tensor) -> str:
        """Adds a bias as int32, in the units of the sum."""
        scale = np.float32(source.scale) * node.kernel_scale
        zeros = np.zeros(scale.shape, np.int32)
        inputs = [self.constant(node.bias), self.constant(scale)]
        return self.add("DequantizeLinear", [*inputs, self.constant(zeros)], axis=0)

    def onnx_type(self, dtype: Any) -> int:
        """Returns ONNX's number for a dtype."""
        return self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def _convert(self, codes: str, tensor: Tensor, formats: Mapping) -> str:
        """Returns codes in another format; the network's ends keep the caller's."""
        wanted = formats[tensor.name]
        if tensor.dtype == wanted.dtype:
            return codes
        numbers = self.add("DequantizeLinear", [codes, *self._params(tensor)])
        return self.add("QuantizeLinear", [numbers, *self._params(wanted)])

    def _params(self, tensor: Tensor) -> list[str]:
        scale = np.array(tensor.scale, np.float32)
        zero = np.array(tensor.zero_point, tensor.dtype)
        return [self.constant(scale), self.constant(zero)]

    def _value(self, name: str, tensor: Tensor) -> Any:
        shape = ["batch", *tensor.shape]
        make = self._onnx.helper.make_tensor_value_info
        return make(name, self.onnx_type(tensor.dtype), shape)

    def _drop_identity(self) -> None:
        """Lets the last node write the output itself."""
        last = self._nodes.pop()
        if self._nodes and list(self._nodes[-1].output) == list(last.input):
            self._nodes[-1].output[0] = "output"
        else:
            self._nodes.append(last)


def _as_format(tensor: Tensor, activation: str | None) -> Tensor:
    if activation is None or tensor.kind != "codes" or tensor.dtype.itemsize > 1:
        return tensor
    if tensor.dtype == np.dtype(activation):
        return tensor
    spec = tensor.codes
    shift = 128 if activation == "uint8" else -128
    # The range is the clamp's business here, so the format may be the whole byte.
    whole = QuantSpec(signed=activation == "int8")
    assert spec.bits <= 8
    return dataclasses.replace(tensor, zero_point=tensor.zero_point + shift, spec=whole)
