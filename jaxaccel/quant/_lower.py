"""Turns a trained network into an integer network."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._graph import IntGraph
from jaxaccel.quant._graph_builder import IntGraphBuilder
from jaxaccel.quant._graph_nodes import Tensor
from jaxaccel.quant._graph_weights import check_activation_spec, check_weight_spec
from jaxaccel.quant._lower_match import Matcher
from jaxaccel.quant._lower_plan import Edge, Given, Observed, Pending
from jaxaccel.quant._lower_trace import evaluate, record, trace
from jaxaccel.quant._observers import Observer, minmax
from jaxaccel.quant._qparams import QParams
from jaxaccel.quant._spec import (
    INT8_ACTIVATION,
    INT8_WEIGHT,
    UINT8_ACTIVATION,
    QuantSpec,
)


def lower_integer(
    apply: Callable[[Any], Any],
    example_input: ArrayLike | jax.ShapeDtypeStruct,
    *,
    calibration: Iterable[ArrayLike] | None = None,
    weight_spec: QuantSpec = INT8_WEIGHT,
    activation_spec: QuantSpec = INT8_ACTIVATION,
    observer: Callable[[QuantSpec], Observer] = minmax,
    input_qparams: QParams | None = None,
    input_spec: QuantSpec = UINT8_ACTIVATION,
) -> IntGraph:
    r"""Turns a network in evaluation mode into an integer network.

    The function is traced, not its module: linen, NNX or plain jax alike. Biases,
    batch norm in evaluation mode and other maps of each channel by constants go into
    the layer before (or, where nothing was rounded or clamped in between, the layer
    after; what neither can take is a layer of its own, one multiplication an entry).
    relu, relu6 and clip become the clamp of the layer before. One rounding is left
    for each layer, after bias and activation.

    Each `fake_quant`, `lsq` or `pact` in the network says how its weight or
    activation is rounded, exactly as it was trained; batch norm after a rounded
    kernel multiplies its scales. A tensor that one layer reads through a quantizer and
    another without, such as the shortcut of a block, has the quantizer's codes for
    both if they cover its range but for 1/16 at either end. Kernels without a
    quantizer are rounded over their own range, folded; activations without one get
    the range that `observer` finds in the calibration batches.

    Images of uint8 that `apply` itself normalizes, `(x / 255 - mean) / deviation`,
    stay uint8 in the integer network: one mean and one deviation go into the scale
    and the zero point of the input, and what is missing to a whole zero point, half a
    code at most, into the first layer's bias (its zero padding stands for the number
    that the zero point has). Means and deviations for each channel go into a first
    layer without padding; before one with padding, which needs one code for 0 in all
    channels, they are a layer of their own.

    Args:
      apply: `apply(x) -> logits` (or classes, with a last `argmax`), for example
        `lambda x: model.apply(variables, x, train=False)`, or an NNX model after
        `model.eval()`.
      example_input: An array or shape with the batch axis; of uint8 if `apply` takes
        images as they come, else floating.
      calibration: Batches of what `apply` takes; needed unless every activation has a
        quantizer in the network.
      weight_spec: Format of kernels without a quantizer.
      activation_spec: Format of activations without one.
      observer: `observer(activation_spec)` finds their range, such as `minmax` or
        `lambda spec: percentile(spec, percent=99.9)`.
      input_qparams: For floating input: scale and zero point of the codes that the
        integer network is fed, such as `QParams(1 / 255, 0)` for images that `apply`
        takes as x / 255. By default the network's own quantizer of its input, or
        what the calibration tells.
      input_spec: Their format.

    Returns:
      The network. It takes codes (for uint8 images the images) and returns codes;
      `graph.output_tensor.qparams` turns them into numbers.

    Raises:
      TypeError: If `apply` returns more than one array.
      ValueError: If an operation is not known, naming it and its line; if a kernel
        depends on the input, or a quantizer's scale does (freeze it); if calibration
        batches are needed and there are none; if a sum might overflow int32.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jaxaccel import quant
      >>> kernel = np.array([[1.0, -1.0], [0.5, 1.0]], np.float32)
      >>> def apply(x):
      ...     return jax.nn.relu(x.astype(jnp.float32) / 255 @ kernel)
      >>> images = np.array([[255, 0], [0, 255], [128, 255]], np.uint8)
      >>> graph = quant.lower_integer(apply, images, calibration=[images])
      >>> codes = quant.integer_apply(graph, images)
      >>> tensor = graph.output_tensor
      >>> print(quant.dequantize(codes, tensor.qparams, tensor.spec).round(2))
      [[1.  0. ]
       [0.5 1. ]
       [1.  0.5]]

    References:
      Jacob et al., Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference, 2018, arXiv:1712.05877
    """
    check_activation_spec(activation_spec, "activation_spec")
    check_weight_spec(weight_spec, 2, "weight_spec")
    given = None
    if input_qparams is not None:
        check_activation_spec(input_spec, "input_spec")
        zero = int(np.asarray(input_qparams.zero_point))
        given = Given(float(np.asarray(input_qparams.scale)), zero, input_spec)
    example = _example(example_input, given)
    steps, result = record(trace(apply, example))
    matcher = Matcher(steps, result, example.dtype, given)
    edges = matcher.run()
    unknown = {e.range.index: e.range for e in edges if isinstance(e.range, Observed)}
    if calibration is None:
        observed = _preferred(unknown)
    elif unknown:
        batches, seen = _batches(calibration, example), observer(activation_spec)
        observed = _observe(apply, sorted(unknown), batches, seen)
    else:
        observed = {}
    return _build(edges, example.shape[1:], observed, weight_spec, activation_spec)


def _example(x: Any, given: Given | None) -> jax.ShapeDtypeStruct:
    dtype = jnp.result_type(x.dtype)
    if len(x.shape) < 2 or 0 in x.shape:
        raise ValueError(
            f"example_input must be (batch, ...), not empty; got shape {x.shape}"
        )
    if dtype != jnp.uint8 and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"example_input must be uint8 or floating; got {dtype}")
    if dtype == jnp.uint8 and given is not None:
        raise ValueError(
            "input_qparams is for floating input; uint8 images stand for themselves"
        )
    # With a batch of one, the batch axis could not be told from others of length 1.
    return jax.ShapeDtypeStruct((max(2, x.shape[0]), *x.shape[1:]), dtype)


def _preferred(unknown: dict[int, Observed]) -> dict[int, Given]:
    """Returns the quantizers of some readers, where nothing was observed."""
    bare = [found for found in unknown.values() if found.preferred is None]
    if bare:
        raise ValueError(
            f"{len(bare)} activations have no quantizer, the first{bare[0].source}; "
            "give calibration=batches to find their ranges"
        )
    return {i: x.preferred for i, x in unknown.items() if x.preferred is not None}


def _batches(calibration: Any, example: Any) -> Iterable[Any]:
    if hasattr(calibration, "shape"):
        calibration = [calibration]
    for batch in calibration:
        dtype = jnp.result_type(batch)
        if np.shape(batch)[1:] != example.shape[1:] or dtype != example.dtype:
            raise ValueError(
                f"calibration batches must be (batch, *{example.shape[1:]}) of "
                f"{example.dtype}; got {np.shape(batch)} of {dtype}"
            )
        yield batch


def _observe(
    apply: Callable[[Any], Any],
    wanted: list[int],
    batches: Iterable[Any],
    observer: Observer,
) -> dict[int, Given]:
    @jax.jit
    def update(states: Any, x: Any) -> Any:
        values = evaluate(trace(apply, x), x)
        return [
            observer.update(state, values[index].astype(jnp.float32))
            for state, index in zip(states, wanted, strict=True)
        ]

    states, empty = [observer.init(()) for _ in wanted], True
    for batch in batches:
        states, empty = update(states, jnp.asarray(batch)), False
    if empty:
        raise ValueError("calibration holds no batches")
    result = {}
    for index, state in zip(wanted, states, strict=True):
        scale, zero = map(np.asarray, observer.qparams(state))
        result[index] = Given(float(scale), int(zero), observer.spec)
    return result


def _build(
    edges: list[Edge],
    shape: tuple[int, ...],
    observed: dict[int, Given],
    weight_spec: QuantSpec,
    activation_spec: QuantSpec,
) -> IntGraph:
    def find(edge: Edge) -> dict[str, Any]:
        if edge.range is None:
            return {}
        given = edge.range
        if isinstance(given, Observed):
            given = given.choose(observed[given.index])
        return {"output": given.qparams, "spec": given.spec}

    source = find(edges[0])
    builder = IntGraphBuilder(
        shape,
        source["output"],
        source["spec"],
        activation_spec=activation_spec,
        weight_spec=weight_spec,
    )
    tensors: dict[Edge, Tensor] = {edges[0]: builder.input}
    for edge in edges[1:]:
        inputs: list[Any] = [tensors[x] for x in edge.inputs]
        arguments = dict(edge.arguments) | find(edge)
        layer = edge.layer
        if layer is not None and layer.plain and _same(inputs[0], arguments):
            tensors[edge] = inputs[0]
            continue
        if layer is not None:
            arguments["activation"] = layer.activation
            if layer.kind in ("conv", "dense"):
                inputs += layer.finished(layer.shape[-1])
            elif layer.kind == "affine":
                inputs += _map(layer, inputs[0])
        if edge.kind == "concat":
            inputs = [inputs]
        tensors[edge] = getattr(builder, edge.kind)(*inputs, **arguments)
    return builder.build(tensors[edges[-1]])


def _same(x: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether a change of the scale would change nothing."""
    scale, zero = map(float, arguments["output"])
    return (x.scale, x.zero_point, x.spec) == (scale, zero, arguments["spec"])


def _map(layer: Pending, x: Tensor) -> list[np.ndarray | None]:
    if layer.identity:
        return [None, None]
    gain, bias = np.asarray(layer.gain), np.asarray(layer.bias)
    channels = (x.shape[-1],) if x.shape else (1,)
    return [np.broadcast_to(gain, channels), np.broadcast_to(bias, channels)]
