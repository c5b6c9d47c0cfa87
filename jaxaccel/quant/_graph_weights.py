"""Kernels and biases as integers, and the bounds of a clamp as codes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._graph_nodes import Tensor
from jaxaccel.quant._qparams import QParams, check_qparams
from jaxaccel.quant._qtensor import QTensor
from jaxaccel.quant._requantize import quantize_multiplier
from jaxaccel.quant._spec import QuantSpec

Activation = str | tuple[float | None, float | None] | None

# A bias may use all but one bit of the sum it is added to.
BIAS_LIMIT = 2.0**30


def encode_linear(
    kernel: Any,
    bias: ArrayLike | None,
    source: Tensor,
    output: Tensor,
    activation: Activation,
    weight_spec: QuantSpec,
) -> dict[str, Any]:
    """Returns the integer fields of a layer.

    The bias becomes int32 in the units of the sum, `scale of x * scale of kernel`.
    A channel whose bias is too large for that gets a larger scale: its weights are
    then far below the bias, and coarser codes of them lose nothing.
    """
    tensor = as_qtensor(kernel, weight_spec, output.name)
    codes = np.asarray(tensor.values, np.int8)
    channels = codes.shape[-1] if codes.ndim else 1
    scale = np.asarray(tensor.qparams.scale, np.float32)
    scale = np.broadcast_to(scale, (channels,))
    offset = np.zeros(channels) if bias is None else np.asarray(bias, np.float64)
    if offset.shape != (channels,) or not np.isfinite(offset).all():
        raise ValueError(
            f"bias of {output.name!r} must be {channels} finite numbers; got shape "
            f"{offset.shape}, {offset}"
        )
    unit = scale.astype(np.float64) * source.scale
    small = np.abs(offset) > BIAS_LIMIT * unit
    if small.any():
        unit = np.where(small, np.abs(offset) / BIAS_LIMIT, unit)
        wider = (unit / source.scale).astype(np.float32)
        codes = np.rint(codes * (scale.astype(np.float64) / wider)).astype(np.int8)
        scale, unit = wider, wider.astype(np.float64) * source.scale
    m0, shift = quantize_multiplier(unit / output.scale)
    lo, hi = clamp_codes(activation, output)
    return {
        "kernel": codes,
        "bias": np.rint(offset / unit).astype(np.int32),
        "kernel_scale": np.array(scale),
        "m0": m0,
        "shift": shift,
        "lo": lo,
        "hi": hi,
    }


def as_qtensor(kernel: Any, weight_spec: QuantSpec, name: str) -> QTensor:
    """Returns the kernel's codes, checked to be what the integer layers can use.

    Raises:
      ValueError: If codes are not integers of up to 8 bits with zero point 0, or
        scales are neither one nor one for each output channel; if the kernel holds
        NaN or infinity.
    """
    if isinstance(kernel, QTensor):
        check_weight_spec(kernel.spec, len(kernel.shape), name)
        return kernel
    kernel = np.asarray(kernel, np.float32)
    check_weight_spec(weight_spec, kernel.ndim, name)
    if not np.isfinite(kernel).all():
        raise ValueError(f"kernel of {name!r} must be finite")
    return QTensor.of(kernel, weight_spec)


def check_weight_spec(spec: QuantSpec, rank: int, name: str) -> None:
    """Raises ValueError unless codes of this format can be a layer's kernel."""
    wanted = []
    if spec.is_float or spec.bits > 8 or not spec.signed:
        wanted.append("signed integers of 2 to 8 bits")
    if not spec.symmetric:
        wanted.append("symmetric=True")
    if spec.rounding == "stochastic":
        wanted.append("rounding that is not stochastic")
    if spec.block_size is not None:
        wanted.append("block_size=None")
    elif spec.channel_axis is not None:
        if spec.positive_channel_axis(rank) != rank - 1:
            wanted.append("channel_axis=-1 (or None)")
    if wanted:
        raise ValueError(
            f"the kernel of {name!r} must have {', '.join(wanted)}; got {spec}"
        )


def check_activation_spec(spec: QuantSpec, name: str) -> None:
    """Raises ValueError unless codes of this format can be an activation."""
    wanted = []
    if spec.is_float:
        wanted.append("number_format='integer'")
    if spec.channel_axis is not None or spec.block_size is not None:
        wanted.append("one scale (channel_axis=None, block_size=None)")
    if spec.bits == 16 and not (spec.symmetric and spec.signed):
        wanted.append("symmetric=True, signed=True for 16 bits")
    if spec.rounding == "stochastic":
        wanted.append("rounding that is not stochastic")
    if wanted:
        raise ValueError(f"activation {name!r} needs {', '.join(wanted)}; got {spec}")


def describe(
    name: str, shape: Sequence[int], qparams: QParams, spec: QuantSpec
) -> Tensor:
    """Returns a tensor, checked to be one that integer layers can read and write."""
    check_activation_spec(spec, name)
    scale = np.asarray(qparams.scale, np.float32)
    zero = np.asarray(qparams.zero_point)
    check_qparams(QParams(scale, zero), (), spec)
    sizes = tuple(int(n) for n in shape)
    return Tensor(name, sizes, float(scale), int(zero), spec)


def same_codes(x: Tensor, y: Tensor) -> bool:
    """Whether a code means the same number in both tensors."""
    a, b = x.codes, y.codes
    same = (x.scale, x.zero_point) == (y.scale, y.zero_point)
    return same and (a.qmin, a.qmax, x.dtype) == (b.qmin, b.qmax, y.dtype)


def clamp_codes(activation: Activation, output: Tensor) -> tuple[int, int]:
    """Returns the least and the largest code of an output after its activation."""
    low, high = clamp_numbers(activation)
    spec = output.codes
    lo = spec.qmin if low is None else _code(low, output)
    hi = spec.qmax if high is None else _code(high, output)
    return lo, hi


def clamp_numbers(activation: Activation) -> tuple[float | None, float | None]:
    """Returns the bounds of an activation, None for one that there is not.

    Raises:
      ValueError: If it is no clamp.
    """
    if activation is None:
        return None, None
    if isinstance(activation, str):
        if activation not in ("relu", "relu6"):
            raise ValueError(
                f"activation must be 'relu', 'relu6', (lo, hi) or None; got "
                f"{activation!r}"
            )
        return 0.0, 6.0 if activation == "relu6" else None
    low, high = activation
    if low is not None and high is not None and low > high:
        raise ValueError(f"activation has lo > hi: {activation}")
    return low, high


def _code(number: float, output: Tensor) -> int:
    spec = output.codes
    code = np.rint(np.float64(number) / output.scale) + output.zero_point
    return int(np.clip(code, spec.qmin, spec.qmax))
