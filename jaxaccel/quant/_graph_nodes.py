"""What an integer network is made of: tensors of codes, and the nodes between them.

Nodes are plain data, resolved as far as can be: padding is explicit, multipliers and
shifts are integers, bounds of the clamp are codes. `IntGraphBuilder` makes them.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxaccel.quant._qparams import QParams
from jaxaccel.quant._spec import QuantSpec

Pairs = tuple[tuple[int, int], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An activation of the network: the codes' shape and what they mean.

    Attributes:
      name: Unique in the graph, a C identifier.
      shape: Without the batch axis: (height, width, channels), or (features,).
      scale: One for the tensor; a float32 value.
      zero_point: Code of the number 0.
      spec: Format of the codes; None where there are none: classes, numbers.
      kind: `"codes"`, `"classes"` (int32, of `Argmax`) or `"numbers"` (float32, of
        `Dequantize`).
    """

    name: str
    shape: tuple[int, ...]
    scale: float = 1.0
    zero_point: int = 0
    spec: QuantSpec | None = None
    kind: str = "codes"

    @property
    def dtype(self) -> Any:
        """Dtype of the entries."""
        if self.spec is not None:
            return np.dtype(self.spec.storage_dtype)
        return np.dtype(np.int32 if self.kind == "classes" else np.float32)

    @property
    def size(self) -> int:
        """Number of entries of one example."""
        return math.prod(self.shape)

    @property
    def qparams(self) -> QParams:
        """Scale and zero point."""
        return QParams(np.float32(self.scale), np.int32(self.zero_point))

    @property
    def codes(self) -> QuantSpec:
        """Format of the codes; ValueError where there are none."""
        if self.spec is None:
            raise ValueError(f"tensor {self.name!r} holds {self.kind}, no codes")
        return self.spec


@dataclasses.dataclass(frozen=True, eq=False)
class Conv:
    """Convolution; depthwise with as many groups as input channels.

    `y = clip(zy + requantize(sum((x - zx) * kernel) + bias, m0, shift), lo, hi)`,
    padded with the code of 0, `zx`.

    Attributes:
      inputs: Name of the one input.
      output: Name of the output.
      kernel: int8 of shape (height, width, inputs / groups, outputs).
      bias: int32 of shape (outputs,), in units of scale of input times kernel.
      kernel_scale: float32, one for each output.
      m0: int32 of shape (outputs,).
      shift: int32 of shape (outputs,).
      lo: Least code of the output.
      hi: Largest code of the output.
      strides: Of height and width.
      padding: Before and after, of height and of width.
      dilation: Of the kernel.
      groups: Parts that channels are split into.
    """

    inputs: tuple[str]
    output: str
    kernel: np.ndarray
    bias: np.ndarray
    kernel_scale: np.ndarray
    m0: np.ndarray
    shift: np.ndarray
    lo: int
    hi: int
    strides: tuple[int, int]
    padding: Pairs
    dilation: tuple[int, int]
    groups: int


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """Matrix product; as `Conv`, with a kernel of shape (inputs, outputs)."""

    inputs: tuple[str]
    output: str
    kernel: np.ndarray
    bias: np.ndarray
    kernel_scale: np.ndarray
    m0: np.ndarray
    shift: np.ndarray
    lo: int
    hi: int


@dataclasses.dataclass(frozen=True, eq=False)
class Affine:
    """`y = a * x + b` for each channel; the change of scale alone with a kernel of 1.

    As a depthwise convolution of one tap, on tensors of any rank. Kernel, bias and
    kernel_scale have the shape (channels,) or ().
    """

    inputs: tuple[str]
    output: str
    kernel: np.ndarray
    bias: np.ndarray
    kernel_scale: np.ndarray
    m0: np.ndarray
    shift: np.ndarray
    lo: int
    hi: int


@dataclasses.dataclass(frozen=True, eq=False)
class Add:
    """Sum of two tensors of any scales.

    Each is shifted left by `left_shift` and brought to twice the larger scale with
    m0[0] and m0[1]; the sum, to the output's with m0[2]: as TFLite does.
    """

    inputs: tuple[str, str]
    output: str
    m0: np.ndarray
    shift: np.ndarray
    left_shift: int
    lo: int
    hi: int


@dataclasses.dataclass(frozen=True, eq=False)
class MaxPool:
    """Largest code of each window; scale and zero point stay."""

    inputs: tuple[str]
    output: str
    window: tuple[int, int]
    strides: tuple[int, int]
    padding: Pairs


@dataclasses.dataclass(frozen=True, eq=False)
class AveragePool:
    """Sum over each window, divided by its size and rescaled in one multiplication.

    Attributes:
      inputs: Name of the one input.
      output: Name of the output.
      window: Height and width.
      strides: Of height and width.
      padding: Before and after, of height and of width.
      count_include_pad: Whether padding counts in the window's size.
      m0: int32 of shape (), or (height, width, 1) where the size varies.
      shift: int32 of the shape of `m0`.
      lo: Least code of the output.
      hi: Largest code of the output.
    """

    inputs: tuple[str]
    output: str
    window: tuple[int, int]
    strides: tuple[int, int]
    padding: Pairs
    count_include_pad: bool
    m0: np.ndarray
    shift: np.ndarray
    lo: int
    hi: int


@dataclasses.dataclass(frozen=True, eq=False)
class Reshape:
    """The same codes in another shape, such as flattened."""

    inputs: tuple[str]
    output: str


@dataclasses.dataclass(frozen=True, eq=False)
class Concat:
    """Tensors of one scale and zero point after each other.

    Attributes:
      inputs: Names.
      output: Name of the output.
      axis: Without the batch axis, from the front.
    """

    inputs: tuple[str, ...]
    output: str
    axis: int


@dataclasses.dataclass(frozen=True, eq=False)
class Argmax:
    """Index of the largest code along the last axis, of the first among equals."""

    inputs: tuple[str]
    output: str


@dataclasses.dataclass(frozen=True, eq=False)
class Dequantize:
    """The numbers that the codes stand for; at the end of a graph only."""

    inputs: tuple[str]
    output: str


Linear = Conv | Dense | Affine
Node = Linear | Add | MaxPool | AveragePool | Reshape | Concat | Argmax | Dequantize
