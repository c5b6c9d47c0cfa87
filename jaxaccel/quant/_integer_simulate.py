"""The same network in floating numbers, quantized after every layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxaccel.quant._graph import IntGraph, has_sums
from jaxaccel.quant._graph_nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Dense,
    Node,
    Tensor,
)
from jaxaccel.quant._integer import check_codes, move
from jaxaccel.quant._quantize import encode


def simulate(graph: IntGraph, x: ArrayLike) -> jax.Array:
    """Runs an integer network in float32, with fake-quant after each layer.

    What quantization-aware training computes: the codes are turned into numbers,
    multiplied with the kernel's numbers, and rounded to codes of the output with a
    true division. `integer_apply` gives the same codes but where a result lies so
    close to the middle between two that the rounding of the multiplier decides:
    they then differ by 1.

    Args:
      graph: Of `lower_integer` or `IntGraphBuilder`; static.
      x: Codes of the input, as for `integer_apply`.

    Returns:
      What `integer_apply` returns.

    Raises:
      TypeError: If `x` is of another dtype.
      ValueError: If it is of another shape.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> builder = quant.IntGraphBuilder((2,), quant.QParams(1 / 255, 0))
      >>> logits = quant.compute_qparams(-1.0, 1.5, quant.INT8_ACTIVATION)
      >>> kernel = np.array([[0.5, -1.0], [1.0, 0.25]])
      >>> graph = builder.build(builder.dense(builder.input, kernel, output=logits))
      >>> print(quant.simulate(graph, np.array([[255, 0]], np.uint8)))
      [[  25 -128]]
    """
    check_codes(graph, x)
    kernels = {
        node.output: _numbers(node)
        for node in graph.nodes
        if isinstance(node, (Conv, Dense, Affine))
    }
    return _run(graph, kernels, jnp.asarray(x))


@functools.partial(jax.jit, static_argnums=0)
def _run(graph: IntGraph, kernels: dict, x: jax.Array) -> jax.Array:
    values = {graph.input: x}
    for node in graph.nodes:
        inputs = [values[name] for name in node.inputs]
        tensors = [graph.tensors[name] for name in node.inputs]
        output = graph.tensors[node.output]
        if not has_sums(node):
            values[node.output] = move(node, inputs, tensors[0], output)
            continue
        numbers = [_decode(q, t) for q, t in zip(inputs, tensors, strict=True)]
        result = _float(node, numbers, kernels.get(node.output), tensors[0])
        scale, zero = np.float32(output.scale), np.int32(output.zero_point)
        args = (result, jnp.asarray(scale), jnp.asarray(zero), None)
        codes = encode(*args, spec=output.codes).astype(jnp.int32)
        codes = jnp.clip(codes, node.lo, node.hi)  # pyright: ignore
        values[node.output] = codes.astype(output.dtype)
    return values[graph.output]


def _numbers(node: Conv | Dense | Affine) -> tuple[np.ndarray, np.ndarray]:
    return node.kernel.astype(np.float32) * node.kernel_scale, node.bias


def _float(node: Node, xs: list[jax.Array], kernel, source: Tensor) -> jax.Array:
    x = xs[0]
    if isinstance(node, Add):
        return xs[0] + xs[1]
    if isinstance(node, AveragePool):
        window, strides = (1, *node.window, 1), (1, *node.strides, 1)
        padding = ((0, 0), *node.padding, (0, 0))
        args = (np.float32(0), lax.add, window, strides, padding)
        total = lax.reduce_window(x, *args)
        if node.count_include_pad:
            return total / np.float32(node.window[0] * node.window[1])
        return total / jnp.maximum(lax.reduce_window(jnp.ones_like(x), *args), 1.0)
    weights, bias = jnp.asarray(kernel[0]), kernel[1].astype(jnp.float32)
    assert isinstance(node, (Conv, Dense, Affine))
    bias = bias * (np.float32(source.scale) * node.kernel_scale)
    highest = lax.Precision.HIGHEST
    if isinstance(node, Affine):
        result = x * jnp.broadcast_to(weights, x.shape)
    elif isinstance(node, Dense):
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        result = lax.dot_general(x, weights, dims, precision=highest)
    else:
        result = lax.conv_general_dilated(
            x,
            weights,
            node.strides,
            node.padding,
            rhs_dilation=node.dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=node.groups,
            precision=highest,
        )
    return result + jnp.broadcast_to(bias, result.shape)


def _decode(codes: jax.Array, tensor: Tensor) -> jax.Array:
    steps = codes.astype(jnp.int32) - tensor.zero_point
    return steps.astype(jnp.float32) * np.float32(tensor.scale)
