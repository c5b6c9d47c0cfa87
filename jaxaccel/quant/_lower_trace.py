"""Runs through a traced network: constants are computed, the rest is reported."""

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxaccel.quant._fake_quant import fake_quant_p
from jaxaccel.quant._spec import QuantSpec

INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
    "remat2",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown:
    """What depends on the network's input.

    Attributes:
      index: In the order of the steps; the input is 0.
      shape: With the batch axis.
      value: The array, while batches run through.
    """

    index: int
    shape: tuple[int, ...]
    value: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Rounded:
    """A constant that a quantizer has rounded, with what the quantizer saw."""

    value: Any
    original: Any
    scale: Any
    zero_point: Any
    spec: QuantSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation on what depends on the input.

    Attributes:
      kind: Name of the primitive.
      inputs: Unknowns, constants as arrays, or `Rounded`.
      params: Of the primitive.
      output: What it computes.
      source: File and line of the user's code, if known.
    """

    kind: str
    inputs: tuple[Any, ...]
    params: dict[str, Any]
    output: Unknown
    source: str


Emit = Callable[[Any, list[Any]], list[Any]]


def trace(apply: Callable[..., Any], x: Any) -> ClosedJaxpr:
    """Returns the jaxpr of a function of one array that returns one.

    Raises:
      TypeError: If it returns something else.
    """
    closed, shape = jax.make_jaxpr(lambda x: apply(x), return_shape=True)(x)
    if len(closed.jaxpr.outvars) != 1 or not hasattr(shape, "dtype"):
        raise TypeError(
            f"apply must return one array; got {jax.tree.structure(shape)}: return "
            "the logits alone"
        )
    return closed


def record(closed: ClosedJaxpr) -> tuple[list[Step], Any]:
    """Returns the steps of a network, and its result."""
    steps: list[Step] = []

    def emit(eqn: Any, inputs: list[Any]) -> list[Any]:
        if len(eqn.outvars) != 1:
            raise unsupported(eqn.primitive.name, _source(eqn))
        output = Unknown(len(steps) + 1, tuple(eqn.outvars[0].aval.shape))
        arguments = tuple(
            x if isinstance(x, (Unknown, Rounded)) else np.asarray(x) for x in inputs
        )
        kind, source = eqn.primitive.name, _source(eqn)
        steps.append(Step(kind, arguments, dict(eqn.params), output, source))
        return [output]

    start = Unknown(0, tuple(closed.jaxpr.invars[0].aval.shape))
    (result,) = _walk(closed.jaxpr, closed.consts, [start], emit)
    return steps, result


def evaluate(closed: ClosedJaxpr, x: Any) -> list[Any]:
    """Returns the value of each unknown, by its index; to be jitted."""
    values = [x]

    def emit(eqn: Any, inputs: list[Any]) -> list[Any]:
        plain = [i.value if isinstance(i, Unknown) else _plain(i) for i in inputs]
        (value,) = _bind(eqn, plain)
        values.append(value)
        return [Unknown(len(values) - 1, value.shape, value)]

    _walk(closed.jaxpr, closed.consts, [Unknown(0, x.shape, x)], emit)
    return values


def unsupported(kind: str, source: str, why: str = "") -> ValueError:
    """Returns the error that names an operation and where it is."""
    return ValueError(
        f"lower_integer cannot turn {kind!r}{source} into integers"
        f"{': ' + why if why else ''}; it knows convolutions, dense layers, sums, "
        "maps of each channel by constants (biases, batch norm in evaluation mode), "
        "relu, relu6, clip, max, average and global pooling, reshape, concatenate "
        "and argmax"
    )


def _walk(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], emit: Emit
) -> list[Any]:
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        inputs = [read(var) for var in eqn.invars]
        inner = _inner(eqn)
        if inner is not None:
            outputs = _walk(inner.jaxpr, inner.consts, inputs, emit)
        elif any(isinstance(x, Unknown) for x in inputs):
            outputs = emit(eqn, inputs)
        else:
            outputs = _constants(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _inner(eqn: Any) -> ClosedJaxpr | None:
    if eqn.primitive.name not in INLINED:
        return None
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):
            return value
        if isinstance(value, Jaxpr):
            return ClosedJaxpr(value, ())
    return None


def _constants(eqn: Any, inputs: list[Any]) -> list[Any]:
    outputs = _bind(eqn, [_plain(x) for x in inputs])
    if eqn.primitive is fake_quant_p:
        x, scale, zero_point = (_plain(x) for x in inputs[:3])
        spec = eqn.params["spec"]
        return [Rounded(outputs[0], x, scale, zero_point, spec)]
    rounded = [x for x in inputs if isinstance(x, Rounded)]
    if not rounded:
        return outputs
    kept = ("convert_element_type", "copy", "copy_p", "stop_gradient")
    if eqn.primitive.name in kept:
        return [dataclasses.replace(rounded[0], value=outputs[0])]
    if np.ndim(rounded[0].value) > 1:
        raise ValueError(
            f"a kernel's quantizer is followed by {eqn.primitive.name!r}{_source(eqn)}"
            ", so the kernel that is used has no codes; quantize the result instead"
        )
    return outputs


def _bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    params = eqn.primitive.get_bind_params(eqn.params)
    outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, Rounded) else x


# What stands between the user's line and the primitive.
_LIBRARIES = ("/jax/", "/jax/_src/", "/flax/", "/jaxaccel/quant/", "/jaxtyping/")


def _source(eqn: Any) -> str:
    trace = getattr(eqn.source_info, "traceback", None)
    if trace is None:
        return ""
    frames = traceback.extract_tb(trace.as_python_traceback())
    for frame in reversed(frames):
        path = frame.filename.replace("\\", "/")
        if not any(part in path for part in _LIBRARIES):
            return f" ({path}:{frame.lineno})"
    return ""
