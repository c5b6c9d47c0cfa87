"""Codes together with what they mean."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._packing import packed_nbytes
from jaxaccel.quant._qparams import QParams
from jaxaccel.quant._quantize import dequantize, quantize
from jaxaccel.quant._ranges import array_qparams
from jaxaccel.quant._spec import QuantSpec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "qparams"],
    meta_fields=["spec"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized array: codes, scale, zero point and their format; a pytree.

    Attributes:
      values: Codes in `spec.storage_dtype`.
      qparams: Scale and zero point.
      spec: Format, static.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> tensor = quant.QTensor.of(np.array([[0.5], [-1.27]]), quant.INT8_WEIGHT)
      >>> print(tensor.values.ravel(), tensor.dequantize().ravel())
      [  50 -127] [ 0.5  -1.27]
      >>> tensor.nbytes_packed  # two codes and a scale
      6
    """

    values: Any
    qparams: QParams
    spec: QuantSpec

    @classmethod
    def of(
        cls, x: ArrayLike, spec: QuantSpec, *, key: jax.Array | None = None
    ) -> "QTensor":
        """Quantizes an array over the range of its own entries.

        Args:
          x: Floating numbers.
          spec: Format of the codes.
          key: For stochastic rounding.

        Returns:
          The codes, with `array_qparams(x, spec)`.

        Raises:
          TypeError: As `quantize`.
          ValueError: As `quantize` and `array_qparams`.
        """
        qparams = array_qparams(x, spec)
        return cls(quantize(x, qparams, spec, key=key), qparams, spec)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return np.shape(self.values)

    @property
    def nbytes_packed(self) -> int:
        """Bytes in a file: packed codes, float32 scales, zero points unless all 0."""
        scales = math.prod(np.shape(self.qparams.scale))
        zeros = 0 if self.spec.symmetric else self.spec.storage_dtype.itemsize
        codes = packed_nbytes(math.prod(self.shape), self.spec)
        return codes + scales * (4 + zeros)

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Returns the numbers that the codes stand for."""
        return dequantize(self.values, self.qparams, self.spec, dtype=dtype)
