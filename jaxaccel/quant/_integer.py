"""Runs an integer network with int32 arithmetic."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxaccel.quant._graph import IntGraph, has_sums
from jaxaccel.quant._graph_nodes import (
    Add,
    Affine,
    Argmax,
    AveragePool,
    Concat,
    Conv,
    Dense,
    Dequantize,
    MaxPool,
    Node,
    Reshape,
    Tensor,
)
from jaxaccel.quant._qparams import is_concrete
from jaxaccel.quant._requantize import check_rounding, requantize

Parameters = dict[str, dict[str, Any]]


def integer_apply(
    graph: IntGraph, x: ArrayLike, *, rounding: str = "single"
) -> jax.Array:
    """Runs an integer network: the reference that every export must equal.

    Jitted, with int32 arithmetic only (products of 64 bits are made of halves), so
    the result is the same on every backend, to the bit.

    Args:
      graph: Of `lower_integer` or `IntGraphBuilder`; static.
      x: Codes of the input, (batch, *shape), in its dtype: for most image networks
        the uint8 images themselves.
      rounding: Of the rescaling, `"single"` (as XNNPACK and plain C) or `"double"`
        (as TFLite-Micro); see `requantize`.

    Returns:
      Codes of the output, (batch, *shape), in its dtype; classes in int32 after
      `argmax`, float32 after `dequantize`.

    Raises:
      TypeError: If `x` is of another dtype.
      ValueError: If it is of another shape, or holds codes that the input's format
        does not (looked at outside of `jit` only); if `rounding` is another word.

    Examples:
      See `IntGraph`.
    """
    check_rounding(rounding)
    check_codes(graph, x)
    return _run(graph, parameters(graph), jnp.asarray(x), rounding)


def check_codes(graph: IntGraph, x: ArrayLike) -> None:
    """Raises unless `x` are codes of the network's input."""
    source = graph.input_tensor
    if jnp.result_type(x) != source.dtype:
        raise TypeError(
            f"x must be codes of dtype {source.dtype}; got {jnp.result_type(x)}: "
            "quantize it with graph.input_tensor's qparams and spec"
        )
    if np.shape(x)[1:] != source.shape or np.ndim(x) != len(source.shape) + 1:
        raise ValueError(f"x must be (batch, *{source.shape}); got {np.shape(x)}")
    spec = source.codes
    info = np.iinfo(source.dtype)
    if (spec.qmin, spec.qmax) != (info.min, info.max) and is_concrete(x):
        codes = np.asarray(x)
        bad = (codes < spec.qmin) | (codes > spec.qmax)
        if bad.any():
            raise ValueError(
                f"x must hold codes from {spec.qmin} to {spec.qmax}; got "
                f"{codes[bad].flat[0]}"
            )


def parameters(graph: IntGraph) -> Parameters:
    """Returns the arrays that a run needs, by node: arguments of the jitted function.

    As constants XLA would fold what it can of them, for seconds.
    """
    result = {}
    for node in graph.nodes:
        if has_sums(node):
            arrays = {"m0": node.m0, "shift": node.shift}  # pyright: ignore
            if isinstance(node, (Conv, Dense, Affine)):
                source = graph.tensors[node.inputs[0]]
                arrays |= {"kernel": node.kernel, "bias": _folded(node, source)}
            result[node.output] = arrays
    return result


def compute(
    graph: IntGraph, params: Parameters, x: jax.Array, rounding: str
) -> jax.Array:
    """Runs the nodes one after the other; to be jitted."""
    values = {graph.input: x}
    for node in graph.nodes:
        inputs = [values[name] for name in node.inputs]
        tensors = [graph.tensors[name] for name in node.inputs]
        output = graph.tensors[node.output]
        if has_sums(node):
            arrays = params[node.output]
            acc = _sum(node, inputs, tensors, arrays, rounding)
            last = slice(2, 3) if isinstance(node, Add) else slice(None)
            m0, shift = arrays["m0"], arrays["shift"]
            if isinstance(node, Add):
                m0, shift = m0[last][0], shift[last][0]
            scaled = requantize(acc, m0, shift, rounding=rounding)
            lo, hi, zero = node.lo, node.hi, output.zero_point  # pyright: ignore
            # Clipped first: a saturated number plus the zero point may overflow.
            codes = jnp.clip(scaled, lo - zero, hi - zero) + zero
            values[node.output] = codes.astype(output.dtype)
        else:
            values[node.output] = move(node, inputs, tensors[0], output)
    return values[graph.output]


_run = functools.partial(jax.jit, static_argnums=(0, 3))(compute)


def _sum(
    node: Node,
    inputs: list[jax.Array],
    tensors: list[Tensor],
    arrays: dict[str, Any],
    rounding: str,
) -> jax.Array:
    x, source = inputs[0], tensors[0]
    if isinstance(node, Conv):
        return _conv(x, node, source, arrays)
    if isinstance(node, Dense):
        return _spread(arrays["bias"], _by_bytes(_dot, x, source, arrays["kernel"]))
    distance = x.astype(jnp.int32) - source.zero_point
    if isinstance(node, Affine):
        kernel = jnp.asarray(arrays["kernel"]).astype(jnp.int32)
        return distance * _row(kernel, distance) + _row(arrays["bias"], distance)
    if isinstance(node, AveragePool):
        window, strides = (1, *node.window, 1), (1, *node.strides, 1)
        padding = ((0, 0), *node.padding, (0, 0))
        return lax.reduce_window(
            distance, np.int32(0), lax.add, window, strides, padding
        )
    assert isinstance(node, Add)
    other = inputs[1].astype(jnp.int32) - tensors[1].zero_point
    terms = [
        requantize(
            part << node.left_shift,
            arrays["m0"][i],
            arrays["shift"][i],
            rounding=rounding,
        )
        for i, part in enumerate((distance, other))
    ]
    return terms[0] + terms[1]


def _conv(
    x: jax.Array, node: Conv, source: Tensor, arrays: dict[str, Any]
) -> jax.Array:
    pads = ((0, 0, 0), *((lo, hi, 0) for lo, hi in node.padding), (0, 0, 0))
    x = lax.pad(x, jnp.asarray(source.zero_point, x.dtype), pads)
    if node.groups == source.shape[2] and node.groups > 1:
        return _spread(arrays["bias"], _depthwise(x, node, source, arrays["kernel"]))

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            node.strides,
            "VALID",
            rhs_dilation=node.dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=node.groups,
            preferred_element_type=jnp.int32,
        )

    return _spread(arrays["bias"], _by_bytes(convolve, x, source, arrays["kernel"]))


def _depthwise(x: jax.Array, node: Conv, source: Tensor, kernel: Any) -> jax.Array:
    """Sums shifted products: XLA's own integer convolution is slow in groups."""
    kernel = jnp.asarray(kernel).astype(jnp.int32)
    x = jnp.repeat(_signed(x).astype(jnp.int32), kernel.shape[3] // node.groups, axis=3)
    height, width = (
        (n - (k - 1) * d - 1) // s + 1
        for n, k, d, s in zip(
            x.shape[1:3], kernel.shape[:2], node.dilation, node.strides, strict=True
        )
    )
    total = jnp.zeros((x.shape[0], height, width, x.shape[3]), jnp.int32)
    for i in range(kernel.shape[0]):
        for j in range(kernel.shape[1]):
            top, left = i * node.dilation[0], j * node.dilation[1]
            rows = slice(top, top + (height - 1) * node.strides[0] + 1, node.strides[0])
            columns = slice(
                left, left + (width - 1) * node.strides[1] + 1, node.strides[1]
            )
            part = x[:, rows, columns]
            total = total + part * _row(kernel[i, j, 0], part)
    return total


def _by_bytes(product: Any, x: jax.Array, source: Tensor, kernel: Any) -> jax.Array:
    """Multiplies by an int8 kernel with int8 operands, which XLA is fast at."""
    kernel = jnp.asarray(kernel)
    x = _signed(x)
    if x.dtype == jnp.int8:
        return product(x, kernel)
    # 16 bits as two signed bytes: x = 256 high + low + 128. What leaves int32 on
    # the way comes back, since the sum itself fits.
    high = (x >> 8).astype(jnp.int8)
    low = ((x & 0xFF) - 128).astype(jnp.int8)
    total = (product(high, kernel) << 8) + product(low, kernel)
    per_output = kernel.astype(jnp.int32).sum(range(kernel.ndim - 1))
    return total + 128 * _row(per_output, total)


def _dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, kernel, dims, preferred_element_type=jnp.int32)


def _signed(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.uint8:
        return (x.astype(jnp.int32) - 128).astype(jnp.int8)
    return x


def _folded(node: Any, source: Tensor) -> np.ndarray:
    """Returns the bias with the zero point's part of the sum in it."""
    if isinstance(node, Affine):
        return node.bias
    zero = source.zero_point - (128 if source.dtype == np.uint8 else 0)
    per_output = node.kernel.astype(np.int64).sum(tuple(range(node.kernel.ndim - 1)))
    return (node.bias.astype(np.int64) - zero * per_output).astype(np.int32)


def _spread(bias: Any, total: jax.Array) -> jax.Array:
    return total + _row(bias, total)


def _row(values: Any, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values), like.shape)


def move(
    node: Node, inputs: list[jax.Array], source: Tensor, output: Tensor
) -> jax.Array:
    """Computes what needs no multiplication."""
    x = inputs[0]
    if isinstance(node, MaxPool):
        lowest = np.asarray(np.iinfo(source.dtype).min, source.dtype)
        window, strides = (1, *node.window, 1), (1, *node.strides, 1)
        padding = ((0, 0), *node.padding, (0, 0))
        return lax.reduce_window(x, lowest, lax.max, window, strides, padding)
    if isinstance(node, Reshape):
        return x.reshape(x.shape[0], *output.shape)
    if isinstance(node, Concat):
        return jnp.concatenate(inputs, axis=node.axis + 1)
    if isinstance(node, Argmax):
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    assert isinstance(node, Dequantize)
    steps = x.astype(jnp.int32) - source.zero_point
    return steps.astype(jnp.float32) * np.float32(source.scale)
