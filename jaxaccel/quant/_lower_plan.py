"""What the lowering decides: layers to come, with what each has absorbed."""

import dataclasses
from typing import Any

import numpy as np

from jaxaccel.quant._graph_weights import check_weight_spec
from jaxaccel.quant._lower_trace import Rounded, Step
from jaxaccel.quant._qparams import QParams
from jaxaccel.quant._qtensor import QTensor
from jaxaccel.quant._quantize import quantize
from jaxaccel.quant._spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class Given:
    """Scale and zero point that a quantizer in the network tells."""

    scale: float
    zero_point: int
    spec: QuantSpec

    @property
    def ends(self) -> tuple[float, float]:
        """Least and largest number that has a code."""
        spec, zero = self.spec, self.zero_point
        return self.scale * (spec.qmin - zero), self.scale * (spec.qmax - zero)

    @property
    def qparams(self) -> QParams:
        """Both as arrays."""
        return QParams(np.float32(self.scale), np.int32(self.zero_point))


@dataclasses.dataclass(frozen=True)
class Observed:
    """The range of the unknown with this index, over the calibration batches.

    Attributes:
      index: Of the unknown.
      source: Line of its step.
      preferred: Of a quantizer that one reader has but others have not; taken for
        all if it covers what is observed.
    """

    index: int
    source: str
    preferred: Given | None = None

    def choose(self, observed: Given) -> Given:
        """Returns the quantizer's range unless the other readers lose by it."""
        wanted = self.preferred
        if wanted is None or wanted.spec.bits < observed.spec.bits:
            return observed
        (low, high), (least, largest) = wanted.ends, observed.ends
        slack = (largest - least) / 16
        covers = low <= least + slack and high >= largest - slack
        return wanted if covers else observed


Range = Given | Observed | None


@dataclasses.dataclass(eq=False)
class Edge:
    """A tensor of codes to come: the layer that writes it, and its range.

    Attributes:
      kind: Method of `IntGraphBuilder`, or `"input"`.
      inputs: What the layer reads.
      range: Of the codes; None where they are those of the input.
      arguments: Of the method.
      layer: What the kernel and the bias are made of.
    """

    kind: str
    inputs: tuple["Edge", ...]
    range: Range
    arguments: dict[str, Any]
    layer: "Pending | None" = None

    @property
    def source_range(self) -> Range:
        """The range, looked for through layers that keep it."""
        edge = self
        while edge.range is None:
            edge = edge.inputs[0]
        return edge.range


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """A layer that may still absorb what follows it.

    Its numbers are `clip(gain * layer(inputs) + bias, lo, hi)`.

    Attributes:
      kind: `"conv"`, `"dense"`, `"add"`, `"affine"`, `"average_pool"` or `"sum"`, an
        average that lacks its division.
      inputs: What it reads.
      shape: Of its output, without the batch axis.
      kernel: Constant or `Rounded`; None without one.
      gain: float64, (channels,) or ().
      bias: float64, (channels,) or ().
      lo: Least number.
      hi: Largest number.
      arguments: Of the builder's method.
      reshaped: Shape that it is brought to afterwards, or None.
    """

    kind: str
    inputs: tuple[Edge, ...]
    shape: tuple[int, ...]
    kernel: Any = None
    gain: Any = 1.0
    bias: Any = 0.0
    lo: float = -np.inf
    hi: float = np.inf
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    reshaped: tuple[int, ...] | None = None

    @property
    def open(self) -> bool:
        """Whether nothing was clamped yet."""
        return self.lo == -np.inf and self.hi == np.inf

    def scaled(self, gain: Any, bias: Any) -> "Pending":
        """Returns the layer followed by `gain * y + bias`."""
        return dataclasses.replace(
            self, gain=self.gain * gain, bias=self.bias * gain + bias
        )

    def clamped(self, lo: float = -np.inf, hi: float = np.inf) -> "Pending":
        """Returns the layer followed by `clip(y, lo, hi)`."""
        low, high = (min(max(x, lo), hi) for x in (self.lo, self.hi))
        return dataclasses.replace(self, lo=low, hi=high)

    @property
    def identity(self) -> bool:
        """Whether gain and bias change nothing."""
        return bool((np.asarray(self.gain) == 1).all() and not np.any(self.bias))

    @property
    def plain(self) -> bool:
        """Whether this is a change of the scale alone."""
        return self.kind == "affine" and self.identity and self.open

    @property
    def activation(self) -> tuple[float | None, float | None] | None:
        """The clamp as `IntGraphBuilder` takes it."""
        if self.open:
            return None
        low, high = (x if np.isfinite(x) else None for x in (self.lo, self.hi))
        return low, high

    def finished(self, channels: int) -> tuple[Any, np.ndarray | None]:
        """Returns kernel, a number array or a `QTensor`, and bias.

        Raises:
          ValueError: If a code is to be negated that has no negative.
        """
        bias = np.broadcast_to(np.asarray(self.bias, np.float64), (channels,))
        gain = np.broadcast_to(np.asarray(self.gain, np.float64), (channels,))
        offset = bias if bias.any() else None
        if isinstance(self.kernel, Rounded):
            return _scaled_codes(self.kernel, gain), offset
        return np.asarray(self.kernel, np.float64) * gain, offset


def _scaled_codes(kernel: Rounded, gain: np.ndarray) -> QTensor:
    """Multiplies scales, which is exact: codes only change their signs."""
    check_weight_spec(kernel.spec, np.ndim(kernel.value), "a layer with a quantizer")
    qparams = QParams(kernel.scale, kernel.zero_point)
    codes = np.asarray(quantize(kernel.original, qparams, kernel.spec), np.int16)
    spec, scale = kernel.spec, np.asarray(kernel.scale, np.float64)
    if (gain != 1).any():
        codes = codes * np.sign(gain).astype(np.int16)
        scale = scale * np.where(gain == 0, 1.0, np.abs(gain))
        spec = dataclasses.replace(spec, channel_axis=-1, pow2_scale=False)
    if np.abs(codes).max(initial=0) > 127:
        raise ValueError(
            "a batch norm with a negative scale follows a kernel with a code of -128, "
            "which has no negative: quantize kernels with narrow_range=True, or fold "
            "the batch norm first"
        )
    scale = scale.astype(np.float32)
    zeros = np.zeros(scale.shape, np.int32)
    return QTensor(codes.astype(np.int8), QParams(scale, zeros), spec)


def fold_input(
    mapped: Pending, layer: Pending, groups: int, padded: bool
) -> Pending | None:
    """Returns a layer that takes over the map of its input's channels.

    Args:
      mapped: The map, `"affine"`.
      layer: What reads it, with a kernel (..., inputs / groups, outputs).
      groups: Of that layer.
      padded: Whether it pads with zeros, which an offset would not have been.

    Returns:
      The layer, or None where its result would not be the same.
    """
    rounded = isinstance(layer.kernel, Rounded)
    values = layer.kernel.value if rounded else layer.kernel
    values = np.asarray(values, np.float64)
    gain, bias = np.asarray(mapped.gain), np.asarray(mapped.bias)
    if not mapped.open or (padded and bias.any()) or (rounded and gain.ndim):
        return None
    per_group, outputs = values.shape[-2:]
    # Channel that each entry of (inputs / groups, outputs) reads.
    first = np.arange(outputs) // (outputs // groups) * per_group
    channel = np.arange(per_group)[:, None] + first
    offsets = np.broadcast_to(bias, (per_group * groups,))[channel]
    offset = (values * offsets).sum(tuple(range(values.ndim - 1)))
    if gain.ndim:
        scaled = dataclasses.replace(layer, kernel=values * gain[channel])
        return scaled.scaled(1.0, offset)
    # One gain for all inputs is one for the outputs: codes stay what they are.
    return layer.scaled(gain, offset)


def per_channel(constant: np.ndarray, step: Step) -> np.ndarray | None:
    """Returns a constant as a number for each channel; None if it varies more."""
    shape = step.output.shape
    full = np.broadcast_to(np.asarray(constant, np.float64), shape)
    if full.size == 0 or len(shape) < 2:
        return None
    row = full.reshape(-1, shape[-1])[0]
    if not (full == row).all():
        return None
    return row if (row != row[0]).any() else np.asarray(row[0])
