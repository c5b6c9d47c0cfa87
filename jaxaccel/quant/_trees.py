"""Whole trees of parameters: quantized, fake-quantized, weighed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.quant._fake_quant import fake_quant
from jaxaccel.quant._policy import Rules
from jaxaccel.quant._qtensor import QTensor
from jaxaccel.quant._ranges import array_qparams
from jaxaccel.quant._spec import INT8_WEIGHT, QuantSpec

PyTree = Any
TreePolicy = QuantSpec | Mapping[str, QuantSpec | None]

KERNELS = {r"(^|/)kernel(/value)?$": INT8_WEIGHT}
"""The default policy: Flax kernels, 8 bits, a scale for each output channel. Biases,
normalization parameters and embeddings stay as they are."""


def quantize_params(params: PyTree, policy: TreePolicy = KERNELS) -> PyTree:
    """Replaces the arrays that a policy names by `QTensor`s.

    Args:
      params: A tree of arrays, of NumPy or jax: of linen, an `nnx.State`, or any other.
      policy: A format for each pattern, a regular expression found in the path
        (`"dense/kernel"`), None to leave alone; the first that fits counts. A single
        format is for all floating arrays. Arrays without a rule stay, and so do
        `QTensor`s.

    Returns:
      The tree with `QTensor`s, over the range of each array's own entries.

    Raises:
      TypeError: If a named array is not floating or quantized already, or a rule is
        of another kind.
      ValueError: If a rule fits nothing, or an array holds NaN.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> params = {"dense": {"kernel": np.eye(8), "bias": np.zeros(8)}}
      >>> quantized = quant.quantize_params(params)
      >>> quantized["dense"]["kernel"].values.dtype, quantized["dense"]["bias"].dtype
      (dtype('int8'), dtype('float64'))
      >>> float(quant.dequantize_params(quantized)["dense"]["kernel"].sum())
      8.0
    """
    return _map(lambda x, spec: QTensor.of(x, spec), params, policy)


def fake_quant_params(params: PyTree, policy: TreePolicy = KERNELS) -> PyTree:
    """Rounds the arrays that a policy names to what their codes stand for.

    The gradient passes straight through; scales follow from the current entries, and
    have none. In a loss, `loss(fake_quant_params(params), ...)` is quantization-aware
    training of the weights.

    Args:
      params: As for `quantize_params`.
      policy: As for `quantize_params`.

    Returns:
      The tree, of the same shapes and dtypes.

    Raises:
      TypeError: As `quantize_params`.
      ValueError: As `quantize_params`.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=2, symmetric=True)
      >>> print(quant.fake_quant_params({"w": np.array([1.0, 0.4])}, {"w": spec})["w"])
      [1. 0.]
    """

    def replace(x: Any, spec: QuantSpec) -> jax.Array:
        x = jnp.asarray(x)
        return fake_quant(x, array_qparams(jax.lax.stop_gradient(x), spec), spec)

    return _map(replace, params, policy)


def dequantize_params(params: PyTree) -> PyTree:
    """Replaces every `QTensor` by its float32 numbers."""
    return jax.tree.map(
        lambda x: x.dequantize() if isinstance(x, QTensor) else x,
        params,
        is_leaf=_is_quantized,
    )


@dataclasses.dataclass(frozen=True)
class SizeReport:
    """What a tree weighs in a file.

    Attributes:
      nbytes: Bytes of all leaves, codes packed.
      float32_nbytes: Bytes if every entry were float32.
      by_format: Bytes for each dtype, or number of bits of packed codes.
    """

    nbytes: int
    float32_nbytes: int
    by_format: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """How many times smaller than float32."""
        return self.float32_nbytes / max(self.nbytes, 1)

    def __str__(self) -> str:
        rows = [*self.by_format.items(), ("total", self.nbytes)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {size:>13,} bytes" for name, size in rows]
        lines.append(f"{self.ratio:.2f} times smaller than float32")
        return "\n".join(lines)


def size_report(params: PyTree) -> SizeReport:
    """Weighs a tree of arrays and `QTensor`s, as a file would hold them.

    Args:
      params: The tree; abstract arrays (`jax.ShapeDtypeStruct`) do.

    Returns:
      A `SizeReport`: packed codes, their float32 scales and zero points (none where
      all are 0), and other arrays as they are.

    Raises:
      ValueError: If there is no array.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> params = {"kernel": np.ones((64, 32)), "bias": np.ones(32, np.float32)}
      >>> print(quant.size_report(quant.quantize_params(params)))
      int8             2,176 bytes
      float32            128 bytes
      total            2,304 bytes
      3.61 times smaller than float32
    """
    leaves = jax.tree.leaves(params, is_leaf=_is_quantized)
    if not leaves:
        raise ValueError("there is no array to weigh")
    sizes: dict[str, int] = {}
    entries = 0
    for leaf in leaves:
        size = int(np.prod(np.shape(leaf), dtype=np.int64))
        entries += size
        if isinstance(leaf, QTensor):
            name, own = _format_name(leaf.spec), leaf.nbytes_packed
        else:
            dtype = jnp.result_type(leaf)
            name, own = str(dtype), size * dtype.itemsize
        sizes[name] = sizes.get(name, 0) + own
    by_size = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    return SizeReport(sum(sizes.values()), 4 * entries, by_size)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QTensor)


def _format_name(spec: QuantSpec) -> str:
    if spec.is_float:
        return spec.number_format
    return f"{'int' if spec.signed else 'uint'}{spec.bits}"


def _map(function: Any, params: PyTree, policy: TreePolicy) -> PyTree:
    every = isinstance(policy, QuantSpec)
    rules = Rules(policy, QuantSpec)
    paths = []

    def replace(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        paths.append(name)
        spec = rules.find(name)
        if spec is None:
            return leaf
        if isinstance(leaf, QTensor):
            if every:
                return leaf
            raise TypeError(f"{name} is quantized already")
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            if every:
                return leaf
            raise TypeError(f"{name} must be floating to be quantized; got {dtype}")
        try:
            return function(leaf, spec)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    result = jax.tree_util.tree_map_with_path(replace, params, is_leaf=_is_quantized)
    rules.check_all_used(paths)
    return result
