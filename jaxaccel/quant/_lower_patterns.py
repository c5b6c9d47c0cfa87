"""What the steps of a network say, one by one."""

import dataclasses
from typing import Any

import numpy as np

from jaxaccel.quant._graph_windows import count_entries
from jaxaccel.quant._lower_plan import Edge, Given, Pending
from jaxaccel.quant._lower_trace import Rounded, Step, Unknown, unsupported


def given(step: Step) -> Given:
    """Returns what a quantizer in the network tells.

    Raises:
      ValueError: If its scale is not one constant.
    """
    if any(isinstance(x, Unknown) for x in step.inputs[1:]):
        why = "its scale depends on the input; use a frozen one"
        raise unsupported(step.kind, step.source, why)
    scale, zero = (np.asarray(getattr(x, "value", x)) for x in step.inputs[1:3])
    if scale.ndim or zero.ndim:
        raise unsupported(step.kind, step.source, "an activation needs one scale")
    return Given(float(scale), int(zero), step.params["spec"])


def within_half_a_code(mapped: Pending, source: Edge) -> bool:
    """Whether a map only moves the input by what no zero point can express."""
    found = source.range
    if mapped.inputs[0] is not source or not isinstance(found, Given):
        return False
    moved = not np.ndim(mapped.gain) and mapped.gain == 1
    return bool(moved and np.abs(mapped.bias).max() <= 0.5001 * found.scale)


def average(step: Step, pending: Pending, values: Any, first: bool) -> Pending:
    """Recognizes the division that makes a sum over windows an average."""
    if step.kind == "mul":
        counts = 1.0 / values
    elif step.kind == "div" and first:
        counts = values
    else:
        raise unsupported(step.kind, step.source, "a sum must be divided first")
    arguments = dict(pending.arguments)
    sizes, window = arguments.pop("sizes"), arguments["window"]
    full = np.broadcast_to(counts, step.output.shape)[0]
    same = np.allclose(full, np.prod(window), rtol=1e-5)
    if not same and full.ndim == 3:
        padding = arguments.get("padding", ((0, 0), (0, 0)))
        strides = arguments.get("strides", window)
        expected = count_entries(sizes, window, strides, padding)
        same = np.allclose(full, np.broadcast_to(expected, full.shape), rtol=1e-5)
        arguments["count_include_pad"] = False
    if not same:
        why = "a sum over windows must be divided by their size"
        raise unsupported(step.kind, step.source, why)
    return dataclasses.replace(pending, kind="average_pool", arguments=arguments)


def window(step: Step) -> dict[str, Any]:
    """Returns the arguments of pooling over height and width."""
    p = step.params
    window, strides, padding = (
        p["window_dimensions"],
        p["window_strides"],
        tuple(map(tuple, p["padding"])),
    )
    ends = (window[0], window[-1], strides[0], strides[-1])
    dilated = set(p["base_dilation"]) | set(p["window_dilation"]) != {1}
    if len(window) != 4 or set(ends) != {1} or dilated or any(map(sum, padding[::3])):
        raise unsupported(step.kind, step.source, "windows are of height and width")
    return {"window": window[1:3], "strides": strides[1:3], "padding": padding[1:3]}


def keeps_order(step: Step) -> bool:
    """Whether a broadcast only inserts axes."""
    dims = step.params.get("broadcast_dimensions")
    return dims is None or list(dims) == sorted(dims)


def one_tap(kernel: Any) -> Any:
    """Returns a dense kernel as that of a convolution of one tap."""
    if not isinstance(kernel, Rounded):
        return kernel[None, None]
    spec = kernel.spec
    if spec.channel_axis == 1:
        spec = dataclasses.replace(spec, channel_axis=-1)
    value, original = (np.asarray(x) for x in (kernel.value, kernel.original))
    return dataclasses.replace(
        kernel, value=value[None, None], original=original[None, None], spec=spec
    )


def live_steps(steps: list[Step], result: Any) -> list[Step]:
    """Returns the steps that the result depends on."""
    needed, live = {getattr(result, "index", 0)}, []
    for step in reversed(steps):
        if step.output.index in needed:
            needed.update(x.index for x in step.inputs if isinstance(x, Unknown))
            live.append(step)
    return live[::-1]
