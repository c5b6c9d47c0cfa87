"""Builds an integer network by hand, one layer after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant import _graph_nodes as nodes
from jaxaccel.quant._graph import IntGraph, ending_with
from jaxaccel.quant._graph_nodes import Node, Tensor
from jaxaccel.quant._graph_weights import (
    Activation,
    clamp_codes,
    describe,
    encode_linear,
    same_codes,
)
from jaxaccel.quant._graph_windows import (
    Padding,
    count_entries,
    count_windows,
    pair,
    pool_windows,
    resolve,
)
from jaxaccel.quant._qparams import QParams
from jaxaccel.quant._qtensor import QTensor
from jaxaccel.quant._requantize import quantize_multiplier
from jaxaccel.quant._spec import (
    INT8_ACTIVATION,
    INT8_WEIGHT,
    UINT8_ACTIVATION,
    QuantSpec,
)


class IntGraphBuilder:
    """Adds layers to a network; each method takes tensors and returns the next.

    Kernels are floating numbers, quantized here, or a `QTensor` of codes. `output` is
    the scale and the zero point of what a layer gives, after its bias and its
    activation, which is a clamp: `"relu"`, `"relu6"`, `(lo, hi)` (None: no bound) or
    None. Padding is that of `jax.lax`: `"SAME"`, `"VALID"`, or pairs; it holds the
    number 0, whichever code that has.

    Args:
      input_shape: Of one example, without the batch axis.
      input_qparams: Scale and zero point of the input's codes. For images as they
        come, uint8 that stand for x / 255, it is `QParams(1 / 255, 0)`; a
        normalization by one mean and deviation goes in there too, if 0 then has a
        code.
      input_spec: Format of the input's codes.
      activation_spec: Format of the others.
      weight_spec: Format of kernels that are not a `QTensor`.

    Attributes:
      input: The input's `Tensor`.

    Raises:
      ValueError: If a format cannot be computed with: one scale for each activation,
        16 bits symmetric only; kernels symmetric, of up to 8 bits, with one scale or
        one for each output channel. Methods raise where shapes do not fit.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> builder = quant.IntGraphBuilder((4, 4, 1), quant.QParams(1 / 255, 0))
      >>> unit = quant.compute_qparams(0.0, 1.0, quant.INT8_ACTIVATION)
      >>> blur = np.full((3, 3, 1, 1), 1 / 9)
      >>> x = builder.conv(builder.input, blur, output=unit, activation="relu")
      >>> graph = builder.build(builder.global_average_pool(x))
      >>> print(quant.integer_apply(graph, np.full((1, 4, 4, 1), 255, np.uint8)))
      [[49]]
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        input_qparams: QParams,
        input_spec: QuantSpec = UINT8_ACTIVATION,
        *,
        activation_spec: QuantSpec = INT8_ACTIVATION,
        weight_spec: QuantSpec = INT8_WEIGHT,
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._nodes: list[Node] = []
        self.activation_spec, self.weight_spec = activation_spec, weight_spec
        self.input = describe("input", input_shape, input_qparams, input_spec)
        self._tensors["input"] = self.input

    def conv(
        self,
        x: Tensor,
        kernel: ArrayLike | QTensor,
        bias: ArrayLike | None = None,
        *,
        output: QParams,
        spec: QuantSpec | None = None,
        strides: int | Sequence[int] = 1,
        padding: Padding = "SAME",
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        activation: Activation = None,
    ) -> Tensor:
        """Convolves; `groups` of the number of input channels is depthwise.

        Args:
          x: Of shape (height, width, channels).
          kernel: (height, width, channels / groups, outputs).
          bias: (outputs,).
          output: Scale and zero point of the result.
          spec: Its format; by default the builder's.
          strides: Of height and width.
          padding: Of height and width.
          dilation: Of the kernel.
          groups: Parts that channels are split into.
          activation: Clamp.

        Returns:
          Tensor of shape (height, width, outputs).
        """
        shape = np.shape(kernel.values if isinstance(kernel, QTensor) else kernel)
        fits = len(x.shape) == 3 and len(shape) == 4
        if not fits or x.shape[2] != shape[2] * groups or shape[3] % groups:
            raise ValueError(
                f"a kernel of shape {shape} with groups={groups} does not fit an input "
                f"of shape {x.shape}; kernels are (height, width, channels / groups, "
                "outputs)"
            )
        strides, dilation = pair(strides), pair(dilation)
        extent = [(k - 1) * d + 1 for k, d in zip(shape[:2], dilation, strict=True)]
        padding = resolve(padding, x.shape[:2], extent, strides)
        height, width = count_windows(x.shape[:2], extent, strides, padding)
        y = self._next("conv", (height, width, shape[3]), output, spec)
        fields = encode_linear(kernel, bias, x, y, activation, self.weight_spec)
        fields |= {"strides": strides, "padding": padding, "dilation": dilation}
        return self._add(nodes.Conv((x.name,), y.name, groups=groups, **fields), y)

    def dense(
        self,
        x: Tensor,
        kernel: ArrayLike | QTensor,
        bias: ArrayLike | None = None,
        *,
        output: QParams,
        spec: QuantSpec | None = None,
        activation: Activation = None,
    ) -> Tensor:
        """Multiplies by a kernel of shape (inputs, outputs); see `conv`."""
        shape = np.shape(kernel.values if isinstance(kernel, QTensor) else kernel)
        if len(shape) != 2 or x.shape != shape[:1]:
            raise ValueError(
                f"a kernel of shape {shape} does not fit an input of shape {x.shape}; "
                "flatten first"
            )
        y = self._next("dense", shape[1:], output, spec)
        fields = encode_linear(kernel, bias, x, y, activation, self.weight_spec)
        return self._add(nodes.Dense((x.name,), y.name, **fields), y)

    def affine(
        self,
        x: Tensor,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        *,
        output: QParams,
        spec: QuantSpec | None = None,
        activation: Activation = None,
    ) -> Tensor:
        """Computes `scale * x + offset` for each channel, the last axis.

        Args:
          x: Of any shape.
          scale: (channels,); None changes scale and zero point only.
          offset: (channels,).
          output: Scale and zero point of the result.
          spec: Its format; by default the builder's.
          activation: Clamp.

        Returns:
          Tensor of the shape of `x`.
        """
        y = self._next("affine", x.shape, output, spec)
        codes = np.ones(1) if scale is None and offset is None else np.ones(x.shape[-1])
        codes = codes if scale is None else np.asarray(scale, np.float64)
        # Codes of +-127 with the scale in the multiplier: no number is rounded.
        exact = QTensor(
            (127 * np.sign(codes)).astype(np.int8),
            QParams(np.float32(np.where(codes == 0, 1, np.abs(codes)) / 127), 0),
            INT8_WEIGHT,
        )
        fields = encode_linear(exact, offset, x, y, activation, INT8_WEIGHT)
        return self._add(nodes.Affine((x.name,), y.name, **fields), y)

    def relu(self, x: Tensor) -> Tensor:
        """Clamps at 0; cheaper as the `activation` of the layer before."""
        return self.affine(x, output=x.qparams, spec=x.spec, activation="relu")

    def relu6(self, x: Tensor) -> Tensor:
        """Clamps to [0, 6]; cheaper as the `activation` of the layer before."""
        return self.affine(x, output=x.qparams, spec=x.spec, activation="relu6")

    def add(
        self,
        x: Tensor,
        y: Tensor,
        *,
        output: QParams,
        spec: QuantSpec | None = None,
        activation: Activation = None,
    ) -> Tensor:
        """Adds two tensors of one shape, whatever their scales are."""
        if x.shape != y.shape:
            raise ValueError(f"cannot add shapes {x.shape} and {y.shape}")
        total = self._next("add", x.shape, output, spec)
        wide = max(x.codes.bits, y.codes.bits) > 8
        # The distance of a code from zero takes 9 bits, or 16: the sum, 30.
        left = 14 if wide else 20
        unit = 2 * max(x.scale, y.scale)
        multipliers = [x.scale / unit, y.scale / unit, unit / 2**left / total.scale]
        m0, shift = quantize_multiplier(np.array(multipliers))
        lo, hi = clamp_codes(activation, total)
        node = nodes.Add((x.name, y.name), total.name, m0, shift, left, lo, hi)
        return self._add(node, total)

    def max_pool(
        self,
        x: Tensor,
        window: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = None,
        padding: Padding = "VALID",
    ) -> Tensor:
        """Takes the largest of each window; `strides` are those of the window.

        Args:
          x: Of shape (height, width, channels).
          window: Height and width.
          strides: By default the window's size.
          padding: Never the largest.

        Returns:
          Tensor with the scale and zero point of `x`.
        """
        sizes, steps, pads, shape = pool_windows(x.shape, window, strides, padding)
        y = self._next("max_pool", shape, x.qparams, x.codes)
        return self._add(nodes.MaxPool((x.name,), y.name, sizes, steps, pads), y)

    def average_pool(
        self,
        x: Tensor,
        window: int | Sequence[int],
        *,
        output: QParams | None = None,
        spec: QuantSpec | None = None,
        strides: int | Sequence[int] | None = None,
        padding: Padding = "VALID",
        count_include_pad: bool = True,
        activation: Activation = None,
    ) -> Tensor:
        """Takes the mean of each window.

        Args:
          x: Of shape (height, width, channels).
          window: Height and width.
          output: Scale and zero point of the result; by default those of `x`.
          spec: Its format; by default that of `x` or, with `output`, the builder's.
          strides: By default the window's size.
          padding: Zeros.
          count_include_pad: Whether they count in the mean.
          activation: Clamp.

        Returns:
          Tensor of the means.
        """
        sizes, steps, pads, shape = pool_windows(x.shape, window, strides, padding)
        if output is None:
            output, spec = x.qparams, spec or x.codes
        y = self._next("average_pool", shape, output, spec)
        counts = np.asarray(sizes[0] * sizes[1])
        if not count_include_pad and any(map(any, pads)):
            counts = count_entries(x.shape[:2], sizes, steps, pads)
        m0, shift = quantize_multiplier(x.scale / (counts * y.scale))
        fields = (sizes, steps, pads, count_include_pad, m0, shift)
        lo, hi = clamp_codes(activation, y)
        return self._add(nodes.AveragePool((x.name,), y.name, *fields, lo, hi), y)

    def global_average_pool(
        self,
        x: Tensor,
        *,
        output: QParams | None = None,
        spec: QuantSpec | None = None,
        activation: Activation = None,
    ) -> Tensor:
        """Takes the mean over height and width, of shape (channels,)."""
        pooled = self.average_pool(
            x, x.shape[:2], output=output, spec=spec, activation=activation
        )
        return self.flatten(pooled)

    def flatten(self, x: Tensor) -> Tensor:
        """Makes one axis of all."""
        return self.reshape(x, (x.size,))

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Gives the codes another shape, without the batch axis."""
        y = self._next("reshape", shape, x.qparams, x.codes)
        if y.size != x.size:
            raise ValueError(f"cannot reshape {x.shape} into {y.shape}")
        return self._add(nodes.Reshape((x.name,), y.name), y)

    def concat(
        self,
        xs: Sequence[Tensor],
        *,
        output: QParams | None = None,
        spec: QuantSpec | None = None,
        axis: int = -1,
    ) -> Tensor:
        """Joins tensors; those of another scale than the output's are rescaled.

        Args:
          xs: Of one shape but for the axis.
          output: Scale and zero point of the result; by default those of `xs[0]`.
          spec: Its format; by default that of `xs[0]` or, with `output`, the
            builder's.
          axis: Without the batch axis.

        Returns:
          The joined tensor.
        """
        if output is None:
            output, spec = xs[0].qparams, spec or xs[0].codes
        rank = len(xs[0].shape)
        axis = axis % rank if -rank <= axis < rank else rank
        rest = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in xs}
        if axis == rank or len(rest) > 1 or any(len(x.shape) != rank for x in xs):
            shapes = [x.shape for x in xs]
            raise ValueError(f"cannot join shapes {shapes} along axis {axis}")
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        wanted = describe("", shape, output, spec or self.activation_spec)
        xs = [
            x if same_codes(x, wanted) else self.affine(x, output=output, spec=spec)
            for x in xs
        ]
        y = self._next("concat", shape, output, spec)
        return self._add(nodes.Concat(tuple(x.name for x in xs), y.name, axis), y)

    def argmax(self, x: Tensor) -> Tensor:
        """Finds the class: the index of the largest code along the last axis."""
        x.codes  # noqa: B018 (raises without codes)
        y = Tensor(self._name("argmax"), x.shape[:-1], kind="classes")
        return self._add(nodes.Argmax((x.name,), y.name), y)

    def dequantize(self, x: Tensor) -> Tensor:
        """Turns the last codes into float32; the C export leaves it to its caller."""
        x.codes  # noqa: B018
        y = Tensor(self._name("numbers"), x.shape, kind="numbers")
        return self._add(nodes.Dequantize((x.name,), y.name), y)

    def build(self, output: Tensor) -> IntGraph:
        """Returns the network that ends with a tensor, without what it needs not.

        Args:
          output: What a method returned.

        Returns:
          The `IntGraph`.

        Raises:
          ValueError: See `IntGraph`.
        """
        return ending_with(output.name, self._tensors, self._nodes, self.input.name)

    def _add(self, node: Node, output: Tensor) -> Tensor:
        for name in node.inputs:
            if name not in self._tensors:
                raise ValueError(f"tensor {name!r} is not of this builder")
        self._nodes.append(node)
        self._tensors[output.name] = output
        return output

    def _next(
        self, kind: str, shape: Any, qparams: QParams, spec: QuantSpec | None
    ) -> Tensor:
        spec = self.activation_spec if spec is None else spec
        return describe(self._name(kind), shape, qparams, spec)

    def _name(self, kind: str) -> str:
        return f"{kind}_{len(self._nodes)}"
