"""Stores an integer network as StableHLO, with its weights in it."""

import jax
from jax import export

from jaxaccel.quant._graph import IntGraph
from jaxaccel.quant._integer import compute, parameters
from jaxaccel.quant._requantize import check_rounding


def to_stablehlo(graph: IntGraph, *, rounding: str = "single") -> bytes:
    """Returns a network as an archive that jax, and what else reads it, can run.

    Convolutions are of int8 with sums in int32, all the rest is int32 and uint32.
    The batch size is free. `jax.export.deserialize(data).call(codes)` gives what
    `integer_apply` gives, without this library.

    Args:
      graph: Of `lower_integer` or `IntGraphBuilder`.
      rounding: See `integer_apply`.

    Returns:
      The serialized archive of `jax.export`, which later versions of jax can read.

    Raises:
      ValueError: If `rounding` is another word.

    Examples:
      >>> import jax, numpy as np
      >>> from jaxaccel import quant
      >>> builder = quant.IntGraphBuilder((2,), quant.QParams(1 / 255, 0))
      >>> logits = quant.compute_qparams(-1.0, 1.5, quant.INT8_ACTIVATION)
      >>> kernel = np.array([[0.5, -1.0], [1.0, 0.25]])
      >>> graph = builder.build(builder.dense(builder.input, kernel, output=logits))
      >>> network = jax.export.deserialize(quant.to_stablehlo(graph))
      >>> print(network.call(np.array([[255, 0]], np.uint8)))
      [[  25 -128]]

    References:
      OpenXLA, StableHLO specification, https://openxla.org/stablehlo/spec
    """
    check_rounding(rounding)
    source = graph.input_tensor
    sizes = ", ".join(("batch", *map(str, source.shape)))
    shape = export.symbolic_shape(sizes)

    def network(codes: jax.Array) -> jax.Array:
        return compute(graph, parameters(graph), codes, rounding)

    spec = jax.ShapeDtypeStruct(shape, source.dtype)
    return bytes(export.export(jax.jit(network))(spec).serialize())
