"""The integer network: its nodes in order, checks, and what it weighs."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxaccel.quant._graph_nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Dense,
    Linear,
    Node,
    Tensor,
)


@dataclasses.dataclass(frozen=True, eq=False)
class IntGraph:
    r"""A network of integer arithmetic only, from codes to codes.

    Each tensor holds codes :math:`q` for numbers :math:`r = s (q - z)`, and a
    convolution or dense layer computes

    .. math:: q_y = \mathrm{clip}\Big(z_y + \Big\lfloor M \big(\textstyle\sum
        (q_x - z_x) q_w + b\big) \Big\rceil\Big), \qquad M = s_x s_w / s_y

    with an int32 sum and M as a 31-bit multiplier and a shift. `integer_apply` runs
    it, `to_c`, `to_onnx_qdq` and `to_stablehlo` export it. Made by `lower_integer`
    from a trained network or step by step by `IntGraphBuilder`; hashed by identity,
    so that it may be a static argument.

    Args:
      tensors: All tensors by name.
      nodes: In the order of execution.
      input: Name of the input.
      output: Name of the output.

    Raises:
      ValueError: If a node reads what is not computed yet, two write the same
        tensor, the output is not computed, or a sum might leave int32: then the
        layer and its bound are named.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> images = quant.QParams(np.float32(1 / 255), np.int32(0))
      >>> builder = quant.IntGraphBuilder((2,), images)
      >>> kernel = np.array([[0.5, -1.0], [1.0, 0.25]])
      >>> logits = quant.compute_qparams(-1.0, 1.5, quant.INT8_ACTIVATION)
      >>> graph = builder.build(builder.dense(builder.input, kernel, output=logits))
      >>> print(quant.integer_apply(graph, np.array([[255, 0]], np.uint8)))
      [[  25 -128]]
      >>> graph.macs, graph.nbytes
      (4, 17)

    References:
      Jacob et al., Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference, 2018, arXiv:1712.05877
    """

    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    input: str
    output: str

    def __post_init__(self) -> None:
        _check_order(self)
        for node in self.nodes:
            check_accumulator(node, self.tensors[node.inputs[0]])

    @property
    def input_tensor(self) -> Tensor:
        """What the network reads."""
        return self.tensors[self.input]

    @property
    def output_tensor(self) -> Tensor:
        """What it writes; its `qparams` turn codes into numbers."""
        return self.tensors[self.output]

    @functools.cached_property
    def macs(self) -> int:
        """Multiply-accumulates of one example."""
        return sum(layer.macs for layer in self.size_report().layers)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all parameters: codes, biases, multipliers and shifts."""
        return self.size_report().nbytes

    def size_report(self) -> "GraphSize":
        """Returns what each layer weighs and computes; print it for a table.

        Returns:
          A `GraphSize`.

        Examples:
          See `GraphSize`.
        """
        layers = tuple(_layer_size(node, self.tensors) for node in self.nodes)
        return GraphSize(tuple(layer for layer in layers if layer.parameters))


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """What one layer weighs.

    Attributes:
      name: Of its output.
      kind: Of the node.
      shape: Of its output.
      macs: Multiply-accumulates of one example.
      parameters: Entries of kernel and bias.
      nbytes: Bytes of codes (1 each), biases and multipliers (4 each), shifts (1
        each), as the C export stores them.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    macs: int
    parameters: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GraphSize:
    """What a network weighs, layer by layer.

    Attributes:
      layers: Those with parameters.

    Examples:
      >>> from jaxaccel.quant._graph import GraphSize, LayerSize
      >>> report = GraphSize((LayerSize("logits", "Dense", (10,), 5120, 5130, 5250),))
      >>> print(report)
      layer   kind   output   MACs  parameters  bytes  float32 / bytes
      logits  Dense  10      5,120       5,130  5,250             3.91
      total                  5,120       5,130  5,250             3.91
    """

    layers: tuple[LayerSize, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def float32_nbytes(self) -> int:
        """Bytes of the same parameters in float32."""
        return 4 * sum(layer.parameters for layer in self.layers)

    @property
    def ratio(self) -> float:
        """How many times smaller than float32."""
        return self.float32_nbytes / max(self.nbytes, 1)

    def __str__(self) -> str:
        head = ("layer", "kind", "output", "MACs", "parameters", "bytes")
        rows = [(*head, "float32 / bytes")]
        rows += [_row(layer) for layer in self.layers]
        total = LayerSize(
            "total",
            "",
            (),
            sum(layer.macs for layer in self.layers),
            sum(layer.parameters for layer in self.layers),
            self.nbytes,
        )
        rows.append(_row(total))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 3 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


def ending_with(
    output: str, tensors: Mapping[str, Tensor], nodes: Sequence[Node], source: str
) -> IntGraph:
    """Returns the network of those nodes that an output needs."""
    needed, kept = {output}, []
    for node in reversed(nodes):
        if node.output in needed:
            needed.update(node.inputs)
            kept.append(node)
    names = {source, *(node.output for node in kept)}
    found = {name: tensor for name, tensor in tensors.items() if name in names}
    return IntGraph(found, tuple(reversed(kept)), source, output)


def check_accumulator(node: Node, source: Tensor) -> None:
    """Raises ValueError if the node's sum might leave int32, for any input."""
    if isinstance(node, (Conv, Dense, Affine)):
        axes = tuple(range(node.kernel.ndim - 1))
        weights = np.abs(node.kernel.astype(np.int64)).sum(axis=axes)
        bound = weights * farthest(source) + np.abs(node.bias.astype(np.int64))
        remedy = "fewer inputs, or activations of 8 bits instead of 16"
    elif isinstance(node, AveragePool):
        bound = np.asarray(math.prod(node.window) * farthest(source))
        remedy = "a smaller window"
    else:
        return
    if bound.max(initial=0) >= 2**31:
        raise ValueError(
            f"the int32 sum of {type(node).__name__} {node.output!r} might reach "
            f"{bound.max()}, beyond 2**31 - 1; use {remedy}"
        )


def farthest(tensor: Tensor) -> int:
    """Returns the largest distance of a code from the zero point."""
    spec = tensor.codes
    return max(spec.qmax - tensor.zero_point, tensor.zero_point - spec.qmin)


def _check_order(graph: IntGraph) -> None:
    known = {graph.input}
    for node in graph.nodes:
        missing = [name for name in node.inputs if name not in known]
        if missing:
            raise ValueError(
                f"{type(node).__name__} {node.output!r} reads {missing[0]!r}, which no "
                "node before it writes"
            )
        if node.output in known:
            raise ValueError(f"two nodes write tensor {node.output!r}")
        known.add(node.output)
    if graph.output not in known or graph.output == graph.input:
        raise ValueError(f"output {graph.output!r} is not computed by any node")
    unnamed = known - set(graph.tensors)
    if unnamed:
        raise ValueError(f"tensors lacks {sorted(unnamed)[0]!r}")


def _layer_size(node: Node, tensors: Mapping[str, Tensor]) -> LayerSize:
    output = tensors[node.output]
    kind, parameters, macs, nbytes = type(node).__name__, 0, 0, 0
    if isinstance(node, (Conv, Dense, Affine)):
        parameters = node.kernel.size + node.bias.size
        per_output = 1 if isinstance(node, Affine) else node.kernel[..., 0].size
        macs = output.size * per_output
        nbytes = node.kernel.size + 4 * node.bias.size + 5 * multipliers(node)
    return LayerSize(node.output, kind, output.shape, macs, parameters, nbytes)


def multipliers(node: Linear) -> int:
    """Returns how many multipliers the C export stores: one, if they are equal."""
    same = (node.m0 == node.m0[0]).all() and (node.shift == node.shift[0]).all()
    return 1 if same else node.m0.size


def _row(layer: LayerSize) -> tuple[str, ...]:
    ratio = 4 * layer.parameters / max(layer.nbytes, 1)
    return (
        layer.name,
        layer.kind,
        "x".join(map(str, layer.shape)),
        f"{layer.macs:,}",
        f"{layer.parameters:,}",
        f"{layer.nbytes:,}",
        f"{ratio:.2f}",
    )


def has_sums(node: Node) -> bool:
    """Whether the node rescales sums, and so has a multiplier."""
    return isinstance(node, (Conv, Dense, Affine, Add, AveragePool))
