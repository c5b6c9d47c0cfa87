"""Recognizes layers in the steps of a traced network."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxaccel.quant._lower_input import absorb_quantizer, settle
from jaxaccel.quant._lower_patterns import (
    average,
    given,
    keeps_order,
    live_steps,
    one_tap,
    window,
    within_half_a_code,
)
from jaxaccel.quant._lower_plan import (
    Edge,
    Given,
    Observed,
    Pending,
    Range,
    fold_input,
    per_channel,
)
from jaxaccel.quant._lower_trace import Rounded, Step, Unknown, unsupported
from jaxaccel.quant._spec import UINT8_ACTIVATION

SAME = (
    "convert_element_type",
    "copy",
    "copy_p",
    "stop_gradient",
    "sharding_constraint",
    "name",
)
SHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
# A rounding commutes with these: it may come before or after.
COMMUTING = (*SAME, *SHAPES, "reduce_window_max", "concatenate")


class Matcher:
    """Goes through the steps once, and keeps for each unknown what computes it.

    That is an `Edge`, a tensor of codes that is decided, or a `Pending` layer, which
    the next step may still go into if nothing else reads it.
    """

    def __init__(
        self, steps: list[Step], result: Any, dtype: Any, codes: Given | None
    ) -> None:
        self.steps, self.result = steps, result
        self.readers: dict[int, list[Step]] = {}
        self.live = live_steps(steps, result)
        for step in self.live:
            for x in step.inputs:
                if isinstance(x, Unknown):
                    self.readers.setdefault(x.index, []).append(step)
        if np.dtype(dtype) == np.uint8:
            codes = Given(1.0, 0, UINT8_ACTIVATION)
        self.edges = [Edge("input", (), codes or self._range(0, ""), {})]
        self.values: dict[int, Edge | Pending] = {0: self.edges[0]}
        self.changed: dict[tuple[Edge, Given], Edge] = {}

    def run(self) -> list[Edge]:
        """Returns the layers in order: the input first, the output last.

        Raises:
          ValueError: If a step is none that integers can compute.
        """
        for step in self.live:
            self.values[step.output.index] = self._match(step)
        if not isinstance(self.result, Unknown) or not self.result.index:
            raise ValueError("apply must compute its result from its input")
        last = self._edge(self.result.index)
        if last is not self.edges[-1]:
            # What comes after it is not used.
            self.edges = self.edges[: self.edges.index(last) + 1]
        return self.edges

    def _match(self, step: Step) -> Edge | Pending:
        kind, inputs = step.kind, step.inputs
        unknown = [x for x in inputs if isinstance(x, Unknown)]
        if kind in SAME:
            return self._value(unknown[0])
        if kind == "fake_quant":
            return self._quantizer(step)
        if kind in ("add", "sub", "mul", "div", "neg"):
            return self._arithmetic(step, unknown)
        if kind in ("max", "min", "clamp"):
            return self._clamp(step)
        handler: Callable[[Step], Any] | None = {
            "conv_general_dilated": self._conv,
            "dot_general": self._dense,
            "reduce_window_max": self._max_pool,
            "reduce_window_sum": self._sum_pool,
            "reduce_sum": self._global_sum,
            "concatenate": self._concat,
            "argmax": self._argmax,
            **dict.fromkeys(SHAPES, self._reshape),
        }.get(kind)
        if handler is None:
            raise unsupported(kind, step.source)
        return handler(step)

    # What a step reads.

    def _value(self, x: Unknown) -> Edge | Pending:
        """Returns the layer itself where the step is all that reads it."""
        value = self.values[x.index]
        if isinstance(value, Pending) and self._shared(x.index):
            return self._edge(x.index)
        return value

    def _pending(self, x: Unknown) -> Pending:
        value = self._value(x)
        if isinstance(value, Pending):
            return value
        return Pending("affine", (value,), x.shape[1:])

    def _edge(self, index: int, wanted: Range = None) -> Edge:
        """Returns the tensor of codes of an unknown, decided now if not yet."""
        value = self.values[index]
        if isinstance(value, Edge):
            return value
        if value.kind == "sum":
            raise ValueError(
                "lower_integer knows sums over windows as averages only: divide by the "
                "number of entries right after"
            )
        if value.kind == "affine" and wanted is None and self._movable(index):
            value = settle(value, self.edges[0], exact=True)
            if isinstance(value, Edge):
                return self._keep(index, value)
        source = self.steps[index - 1].source if index else ""
        wanted = wanted or self._range(index, source)
        arguments = dict(value.arguments)
        edge = Edge(value.kind, value.inputs, wanted, arguments, value)
        self.edges.append(edge)
        if value.reshaped is not None:
            edge = Edge("reshape", (edge,), None, {"shape": value.reshaped})
            self.edges.append(edge)
        return self._keep(index, edge)

    def _keep(self, index: int, edge: Edge) -> Edge:
        self.values[index] = edge
        return edge

    def _append(self, kind: str, *inputs: Edge, **arguments: Any) -> Edge:
        edge = Edge(kind, inputs, None, arguments)
        self.edges.append(edge)
        return edge

    # Ranges.

    def _range(self, index: int, source: str) -> Given | Observed:
        """Returns the range of an unknown's codes.

        That of the quantizer that reads it, perhaps after steps that a rounding
        commutes with; else the one to be observed, after those steps.
        """
        while True:
            readers = self.readers.get(index, [])
            quantizers = [step for step in readers if step.kind == "fake_quant"]
            if quantizers:
                found = given(quantizers[0])
                if len(quantizers) == len(readers) and not self._is_result(index):
                    return found
                return Observed(index, source, preferred=found)
            if self._shared(index) or not readers or readers[0].kind not in COMMUTING:
                return Observed(index, source)
            index = readers[0].output.index

    def _movable(self, index: int) -> bool:
        """Whether the input may get another scale for what this unknown makes of it.

        Not so if something else reads the input, or what was made of it on the way.
        """
        while index:
            sources = [
                x for x in self.steps[index - 1].inputs if isinstance(x, Unknown)
            ]
            if len(sources) > 1 or self._shared(sources[0].index):
                return False
            index = sources[0].index
        return True

    def _is_result(self, index: int) -> bool:
        return isinstance(self.result, Unknown) and self.result.index == index

    def _shared(self, index: int) -> bool:
        """Whether more than one layer reads an unknown; equal quantizers are one."""
        readers, last = self.readers.get(index, []), self._is_result(index)
        if not last and readers and all(r.kind == "fake_quant" for r in readers):
            return len({given(step) for step in readers}) > 1
        return len(readers) + last > 1

    def _quantizer(self, step: Step) -> Edge:
        # A scale that depends on the input is refused before the rest is looked at.
        wanted, x = given(step), step.inputs[0]
        value = self.values[x.index]
        if value is self.edges[0]:
            value = Pending("affine", (self.edges[0],), x.shape[1:])
        if isinstance(value, Pending) and value.kind == "affine":
            source, alone = self.edges[0], not self._shared(x.index)
            movable = alone and self._movable(x.index)
            if movable and absorb_quantizer(value, source, wanted):
                return self._keep(x.index, source)
            if alone:
                return self._edge(x.index, wanted)
        edge = self._edge(x.index)
        if edge.source_range == wanted:
            return edge
        key = edge, wanted
        if key not in self.changed:
            layer = Pending("affine", (), ())
            self.changed[key] = Edge("affine", (edge,), wanted, {}, layer)
            self.edges.append(self.changed[key])
        return self.changed[key]

    # Layers.

    def _conv(self, step: Step) -> Pending:
        x, kernel = step.inputs
        p = step.params
        dims = p["dimension_numbers"]
        layout = (dims.lhs_spec, dims.rhs_spec, dims.out_spec)
        if layout != ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)):
            raise unsupported(step.kind, step.source, "it is not NHWC, HWIO")
        if set(p["lhs_dilation"]) != {1} or p["batch_group_count"] != 1:
            raise unsupported(step.kind, step.source, "it is transposed")
        groups, padding = p["feature_group_count"], tuple(map(tuple, p["padding"]))
        layer = Pending(
            "conv",
            (),
            step.output.shape[1:],
            self._kernel(step, x, kernel),
            arguments={
                "strides": p["window_strides"],
                "padding": padding,
                "dilation": p["rhs_dilation"],
                "groups": groups,
            },
        )
        return self._linear(x, layer, groups, any(map(any, padding)))

    def _dense(self, step: Step) -> Pending:
        x, kernel = step.inputs
        rank = len(x.shape) if isinstance(x, Unknown) else 0
        dims = step.params["dimension_numbers"]
        contract = tuple(tuple(axes) for axes in dims[0])
        if contract != ((rank - 1,), (0,)) or any(map(len, dims[1])) or rank > 4:
            raise unsupported(step.kind, step.source, "it is no dense layer")
        kernel = self._kernel(step, x, kernel)
        layer = Pending("dense", (), step.output.shape[1:], kernel)
        if rank == 2:
            return self._linear(x, layer, 1, padded=False)
        if rank == 3:
            raise unsupported(
                step.kind, step.source, "its input is (batch, n, channels)"
            )
        layer = dataclasses.replace(
            layer, kind="conv", kernel=one_tap(kernel), arguments={"padding": "VALID"}
        )
        return self._linear(x, layer, 1, padded=False)

    def _kernel(self, step: Step, x: Any, kernel: Any) -> Any:
        if isinstance(kernel, Unknown) or not isinstance(x, Unknown):
            raise unsupported(step.kind, step.source, "its kernel depends on the input")
        return kernel

    def _linear(self, x: Unknown, layer: Pending, groups: int, padded: bool) -> Pending:
        value = self._value(x)
        if isinstance(value, Pending) and value.kind == "affine":
            if self._movable(x.index):
                value = settle(value, self.edges[0], exact=False)
            if isinstance(value, Pending):
                small = within_half_a_code(value, self.edges[0])
                folded = fold_input(value, layer, groups, padded and not small)
                if folded is not None:
                    return dataclasses.replace(folded, inputs=value.inputs)
            else:
                return dataclasses.replace(layer, inputs=(value,))
        return dataclasses.replace(layer, inputs=(self._edge(x.index),))

    def _arithmetic(self, step: Step, unknown: list[Unknown]) -> Pending:
        kind, source = step.kind, step.source
        if len(unknown) == 2:
            if kind != "add" or unknown[0].shape != unknown[1].shape:
                raise unsupported(kind, source, "it is of two activations")
            edges = tuple(self._edge(x.index) for x in unknown)
            return Pending("add", edges, step.output.shape[1:])
        if unknown[0].shape != step.output.shape:
            raise unsupported(kind, source, "it changes the activation's shape")
        if kind == "neg":
            return self._scaled(unknown[0], -1.0, 0.0)
        constant = next(x for x in step.inputs if not isinstance(x, Unknown))
        values = constant.value if isinstance(constant, Rounded) else constant
        first = isinstance(step.inputs[0], Unknown)
        pending = self.values[unknown[0].index]
        if isinstance(pending, Pending) and pending.kind == "sum":
            return average(step, pending, np.asarray(values, np.float64), first)
        row = per_channel(values, step)
        if row is None or not np.isfinite(row).all() or (kind == "div" and 0 in row):
            raise unsupported(
                kind, source, "its constant is not one finite number for each channel"
            )
        if kind == "add":
            return self._scaled(unknown[0], 1.0, row)
        if kind == "sub":
            gain, offset = (1.0, -row) if first else (-1.0, row)
            return self._scaled(unknown[0], gain, offset)
        if kind == "mul":
            return self._scaled(unknown[0], row, 0.0)
        if not first:
            raise unsupported(kind, source, "it divides by an activation")
        return self._scaled(unknown[0], 1.0 / row, 0.0)

    def _scaled(self, x: Unknown, gain: Any, bias: Any) -> Pending:
        pending = self._pending(x)
        if not pending.open or pending.kind in ("add", "average_pool"):
            pending = Pending("affine", (self._edge(x.index),), x.shape[1:])
        return pending.scaled(gain, bias)

    def _clamp(self, step: Step) -> Pending:
        bounds = [x for x in step.inputs if not isinstance(x, Unknown)]
        (x,) = [x for x in step.inputs if isinstance(x, Unknown)][:1]
        sizes = [np.unique(np.asarray(getattr(b, "value", b))) for b in bounds]
        expected = 2 if step.kind == "clamp" else 1
        if len(bounds) != expected or any(len(size) != 1 for size in sizes):
            raise unsupported(step.kind, step.source, "its bound is not one constant")
        numbers = [float(size[0]) for size in sizes]
        pending = self._pending(x)
        if pending.kind == "sum":
            self._edge(x.index)
        if step.kind == "clamp":
            return pending.clamped(*numbers)
        name = "lo" if step.kind == "max" else "hi"
        return pending.clamped(**{name: numbers[0]})

    # Pooling.

    def _max_pool(self, step: Step) -> Edge:
        return self._append("max_pool", self._input(step), **window(step))

    def _sum_pool(self, step: Step) -> Pending:
        edge, arguments = self._input(step), window(step)
        arguments["sizes"] = step.inputs[0].shape[1:3]
        return Pending("sum", (edge,), step.output.shape[1:], arguments=arguments)

    def _global_sum(self, step: Step) -> Pending:
        (x,) = step.inputs
        if step.params["axes"] != (1, 2) or len(x.shape) != 4:
            raise unsupported(step.kind, step.source, "it is not over height and width")
        arguments = {"window": x.shape[1:3], "sizes": x.shape[1:3]}
        shape = (1, 1, x.shape[3])
        edge = self._input(step)
        reshaped = step.output.shape[1:]
        return Pending("sum", (edge,), shape, arguments=arguments, reshaped=reshaped)

    # Shapes.

    def _reshape(self, step: Step) -> Edge | Pending:
        (x,) = step.inputs
        old, new = x.shape, step.output.shape
        whole = np.prod(old[1:], dtype=int) == np.prod(new[1:], dtype=int)
        if not new or old[0] != new[0] or not whole or not keeps_order(step):
            raise unsupported(step.kind, step.source, "it moves the batch or repeats")
        value = self._value(x)
        if old == new:
            return value
        if isinstance(value, Pending) and value.kind == "sum":
            return dataclasses.replace(value, reshaped=new[1:])
        return self._append("reshape", self._edge(x.index), shape=new[1:])

    def _concat(self, step: Step) -> Edge:
        axis = step.params["dimension"]
        if axis == 0 or not all(isinstance(x, Unknown) for x in step.inputs):
            raise unsupported(step.kind, step.source, "it joins batches or constants")
        edges = tuple(self._edge(x.index) for x in step.inputs)
        wanted = self._range(step.output.index, step.source)
        edge = Edge("concat", edges, wanted, {"axis": axis - 1})
        self.edges.append(edge)
        return edge

    def _argmax(self, step: Step) -> Edge:
        (x,) = step.inputs
        if step.params["axes"] != (len(x.shape) - 1,):
            raise unsupported(step.kind, step.source, "it is not over the last axis")
        if step.output.index != getattr(self.result, "index", None):
            raise unsupported(step.kind, step.source, "it is not the result")
        return self._append("argmax", self._edge(x.index))

    def _input(self, step: Step) -> Edge:
        (x,) = step.inputs[:1]
        return self._edge(x.index)
