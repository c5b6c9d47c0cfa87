"""What a quantizer's codes are: their number, range, granularity and rounding."""

import dataclasses
import operator
from typing import Any

import jax.numpy as jnp

ROUNDINGS = ("half_even", "half_up", "stochastic")
FLOAT8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
FORMATS = ("integer", *FLOAT8_MAX)


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    r"""Format of quantized numbers, hashable, so that it may be a static argument.

    An integer code :math:`q` in `[qmin, qmax]` stands for the real number

    .. math:: r = s \, (q - z)

    with a scale :math:`s > 0` and an integer zero point :math:`z`, one of each for
    the array, for each channel, or for each block of a channel.

    Args:
      bits: Bits of a code: 2 to 8, or 16.
      signed: Codes from :math:`-2^{b-1}` to :math:`2^{b-1}-1`, else from 0 to
        :math:`2^b-1`.
      symmetric: The zero point is 0 and the range :math:`\pm` the largest
        magnitude, whose code is `qmax`.
      narrow_range: Leave out the lowest code, so that signed codes are symmetric
        about 0: -127 to 127 for 8 bits.
      channel_axis: Axis with a scale for each of its entries; -1, the output
        features, for every kernel of Flax. None has one scale for the whole array.
      block_size: Neighbouring entries that share a scale, along the last axis other
        than `channel_axis`; every index of the other axes then has scales of its
        own. None does not split.
      rounding: `"half_even"` (as ONNX and jax round), `"half_up"` (as integer
        hardware shifts) or `"stochastic"` (unbiased, needs a key).
      pow2_scale: Scales are powers of two, rounded up so that the range is covered:
        rescaling is then a shift.
      number_format: `"integer"`; or `"float8_e4m3fn"` or `"float8_e5m2"`, whose
        codes are floating numbers: 8 bits, symmetric, rounded half to even.

    Raises:
      TypeError: If an argument is of the wrong kind.
      ValueError: If a value is not in the lists above, or two exclude each other.

    Examples:
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=4, symmetric=True, narrow_range=True)
      >>> spec.qmin, spec.qmax, str(spec.storage_dtype)
      (-7, 7, 'int8')
      >>> quant.INT8_WEIGHT.params_shape((3, 3, 16, 32))
      (32,)

    References:
      Jacob et al., Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference, 2018, arXiv:1712.05877
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = False
    narrow_range: bool = False
    channel_axis: int | None = None
    block_size: int | None = None
    rounding: str = "half_even"
    pow2_scale: bool = False
    number_format: str = "integer"

    def __post_init__(self) -> None:
        self._check_types()
        if self.bits not in (2, 3, 4, 5, 6, 7, 8, 16):
            raise ValueError(f"bits must be 2 to 8, or 16; got {self.bits}")
        _check_choice("rounding", self.rounding, ROUNDINGS)
        _check_choice("number_format", self.number_format, FORMATS)
        if self.narrow_range and not self.signed:
            raise ValueError(
                "narrow_range=True makes signed codes symmetric; with signed=False "
                "leave it out"
            )
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size must be at least 1; got {self.block_size}")
        if self.is_float:
            self._check_float8()

    @property
    def is_float(self) -> bool:
        """Whether codes are 8-bit floating numbers."""
        return self.number_format != "integer"

    @property
    def qmin(self) -> int:
        """Lowest code; for floating codes the most negative number."""
        if self.is_float:
            return -self.qmax
        return -(2 ** (self.bits - 1)) + self.narrow_range if self.signed else 0

    @property
    def qmax(self) -> int:
        """Highest code; for floating codes the largest number."""
        if self.is_float:
            return int(FLOAT8_MAX[self.number_format])
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def storage_dtype(self) -> Any:
        """Dtype of codes in memory; narrower ones take a byte until packed."""
        if self.is_float:
            return jnp.dtype(self.number_format)
        width = 16 if self.bits == 16 else 8
        return jnp.dtype(f"{'int' if self.signed else 'uint'}{width}")

    def params_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scale and the zero point of an array.

        Args:
          shape: That of the array.

        Returns:
          `()` for the whole array, `(channels,)` for one a channel; with blocks the
          array's shape with the split axis divided by `block_size`.

        Raises:
          ValueError: If the array lacks the axis, or blocks do not divide it.
        """
        if self.block_size is not None:
            axis = self.block_axis(shape)
            return (*shape[:axis], shape[axis] // self.block_size, *shape[axis + 1 :])
        if self.channel_axis is None:
            return ()
        return (shape[self.positive_channel_axis(len(shape))],)

    def positive_channel_axis(self, rank: int) -> int:
        """Returns `channel_axis` counted from the front, or raises ValueError."""
        assert self.channel_axis is not None
        if not -rank <= self.channel_axis < rank:
            raise ValueError(
                f"channel_axis={self.channel_axis} is out of range for an array of "
                f"rank {rank}"
            )
        return self.channel_axis % rank

    def block_axis(self, shape: tuple[int, ...]) -> int:
        """Returns the axis that blocks split, ValueError if they do not divide it."""
        assert self.block_size is not None
        rank, channel = len(shape), None
        if self.channel_axis is not None:
            channel = self.positive_channel_axis(rank)
        axes = [axis for axis in range(rank) if axis != channel]
        if not axes:
            raise ValueError(
                f"block_size={self.block_size} needs an axis to split, other than "
                f"channel_axis={self.channel_axis}; got an array of shape {shape}"
            )
        if shape[axes[-1]] % self.block_size:
            raise ValueError(
                f"block_size={self.block_size} does not divide axis {axes[-1]} of an "
                f"array of shape {shape}; choose a divisor of {shape[axes[-1]]}"
            )
        return axes[-1]

    def _check_types(self) -> None:
        for name in ("signed", "symmetric", "narrow_range", "pow2_scale"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False; got {value!r}")
        for name in ("bits", "channel_axis", "block_size"):
            value = getattr(self, name)
            if value is None and name != "bits":
                continue
            if (
                value is None
                or isinstance(value, bool)
                or not hasattr(value, "__index__")
            ):
                raise TypeError(f"{name} must be an integer; got {value!r}")
            # A NumPy integer hashes alike but prints and pickles differently.
            object.__setattr__(self, name, operator.index(value))

    def _check_float8(self) -> None:
        wanted = {"bits": 8, "signed": True, "narrow_range": False}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{self.number_format} has {name}={value}; got "
                    f"{name}={getattr(self, name)}"
                )
        if not self.symmetric:
            raise ValueError(f"{self.number_format} needs symmetric=True")
        if self.rounding != "half_even":
            raise ValueError(
                f"{self.number_format} rounds half to even; got "
                f"rounding={self.rounding!r}"
            )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}"
        )


INT8_WEIGHT = QuantSpec(symmetric=True, narrow_range=True, channel_axis=-1)
"""Kernels: signed, symmetric, -127 to 127, a scale for each output channel."""

INT8_ACTIVATION = QuantSpec()
"""Activations: signed, with a zero point, one scale."""

UINT8_ACTIVATION = QuantSpec(signed=False)
"""Activations: 0 to 255, with a zero point, one scale."""

INT4_WEIGHT = QuantSpec(bits=4, symmetric=True, narrow_range=True, channel_axis=-1)
"""Kernels of 4 bits: -7 to 7, a scale for each output channel."""

INT16_ACTIVATION = QuantSpec(bits=16, symmetric=True)
"""Activations of 16 bits for signal processors, symmetric, one scale."""

FP8_E4M3 = QuantSpec(symmetric=True, number_format="float8_e4m3fn")
"""8-bit floating numbers up to 448, of 3 bits of mantissa."""

FP8_E5M2 = QuantSpec(symmetric=True, number_format="float8_e5m2")
"""8-bit floating numbers up to 57344, of 2 bits of mantissa."""
