"""Writes an integer network as C that needs nothing but stdint."""

import os
import pathlib
from typing import Any

import numpy as np

from jaxaccel.quant._c_arena import arena_offsets, buffers
from jaxaccel.quant._c_templates import (
    CLAMP,
    CONV_STRUCT,
    HEAD,
    LAYERS,
    MAIN,
    POOL_STRUCT,
    SCALE_DOUBLE,
    SCALE_SINGLE,
    SHIFT_ONLY,
)
from jaxaccel.quant._graph import IntGraph, has_sums, multipliers
from jaxaccel.quant._graph_nodes import (
    Add,
    Affine,
    Argmax,
    AveragePool,
    Concat,
    Conv,
    Dense,
    MaxPool,
    Node,
    Tensor,
)
from jaxaccel.quant._requantize import check_rounding


def to_c(
    graph: IntGraph, directory: str | os.PathLike[str], *, rounding: str = "single"
) -> pathlib.Path:
    """Writes a network as C99: `net.c`, `net.h` and a `main.c` to try it.

    The code has integers only, of `stdint.h`, no library, no allocation and no
    recursion; it gives the codes of `integer_apply`, every bit. Activations share one
    static arena: a tensor's bytes are free again after the node that reads it last.
    `net.h` tells arena and weights in bytes and the multiply-accumulates of each
    layer, and has a line for the cycles that one takes on your processor. Products
    of 64 bits are needed for the rescaling, one an output, unless all scales are
    powers of two: then there are shifts alone. An `int` of 32 bits is assumed. With
    activations of 16 bits sums are int32 as well: the graph was refused if they
    could overflow.

    Args:
      graph: Of `lower_integer` or `IntGraphBuilder`. A last `dequantize` is left to
        the caller: scale and zero point are in `net.h`.
      directory: Where the three files go; made if there is none.
      rounding: See `integer_apply`; `"double"` rounds as TFLite-Micro does.

    Returns:
      The directory. `gcc -std=c99 -O3 net.c main.c -o net` builds a program that
      reads images from the standard input until its end, each as the input's codes
      row by row, channels last, and prints the output's codes, a line for each
      image; with `--class` the class.

    Raises:
      ValueError: If `rounding` is another word.

    Examples:
      >>> import pathlib, tempfile
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> builder = quant.IntGraphBuilder((2,), quant.QParams(1 / 255, 0))
      >>> logits = quant.compute_qparams(-1.0, 1.5, quant.INT8_ACTIVATION)
      >>> kernel = np.array([[0.5, -1.0], [1.0, 0.25]])
      >>> graph = builder.build(builder.dense(builder.input, kernel, output=logits))
      >>> folder = quant.to_c(graph, tempfile.mkdtemp())
      >>> sorted(path.name for path in folder.iterdir())
      ['main.c', 'net.c', 'net.h']

    References:
      Jacob et al., Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference, 2018, arXiv:1712.05877
    """
    check_rounding(rounding)
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.c").write_text(_source(graph, rounding))
    (folder / "net.h").write_text(_header(graph))
    (folder / "main.c").write_text(MAIN)
    return folder


def _source(graph: IntGraph, rounding: str) -> str:
    offsets, arena = arena_offsets(graph)
    data, functions, calls = [], {}, []
    for index, node in enumerate(graph.nodes):
        for kind, types, call, arrays in _emit(graph, node, index, offsets):
            data += arrays
            functions[kind, types] = None
            calls.append(f"  {call}\n")
    shifts = rounding == "single" and all(map(_is_shift, graph.nodes))
    text = ['#include "net.h"\n\n', HEAD]
    if any(map(has_sums, graph.nodes)):
        text += [SHIFT_ONLY if shifts else _scale(rounding), CLAMP]
    kinds = {kind for kind, _ in functions}
    if not any(map(has_sums, graph.nodes)):
        text = text[:1]
    text += [CONV_STRUCT] if "conv" in kinds else []
    text += [POOL_STRUCT] if kinds & {"max_pool", "average_pool"} else []
    text += [_function(kind, types, shifts) for kind, types in functions]
    text += ["\n", *data]
    if arena:
        # Aligned for 32 bits; codes of 8 bits may alias anything.
        text.append(f"\nstatic int32_t arena[{arena // 4}];\n")
    text.append("\nvoid net_run(const net_input_t *input, net_output_t *output) {\n")
    return "".join([*text, *calls, "}\n"])


def _scale(rounding: str) -> str:
    return SCALE_SINGLE if rounding == "single" else SCALE_DOUBLE


def _is_shift(node: Node) -> bool:
    return not has_sums(node) or bool((node.m0 == 2**30).all())  # pyright: ignore


def _function(kind: str, types: tuple[str, ...], shifts: bool) -> str:
    text = LAYERS[kind]
    if shifts:
        for i in ("0", "1", "2", "s"):
            text = text.replace(f", m0[{i}], ", ", ")
        # Kept for a caller that has them, so that both forms are called alike.
        text = text.replace(") {\n", ") {\n  (void)m0;\n", 1) if "m0" in text else text
    text = text.replace("$RESCALE", "rescale")
    first, last = types[0], types[-1]
    for key, value in (("$A", first), ("$B", last), ("$C", types[1])):
        text = text.replace(key, value)
    lowest = {"s8": "INT8_MIN", "u8": "0", "s16": "INT16_MIN", "u16": "0"}
    text = text.replace("$LOWEST", lowest.get(first, "INT32_MIN"))
    for key, value in (("$X", first), ("$Y", last), ("$Z", types[1])):
        text = text.replace(key, _C_TYPES.get(value, ""))
    return text


_C_TYPES = {"s8": "int8_t", "u8": "uint8_t", "s16": "int16_t", "s32": "int32_t"}


def _short(tensor: Tensor) -> str:
    dtype = np.dtype(np.int32) if tensor.kind == "classes" else tensor.dtype
    return f"{'u' if dtype.kind == 'u' else 's'}{8 * dtype.itemsize}"


Call = tuple[str, tuple[str, ...], str, list[str]]


def _emit(
    graph: IntGraph, node: Node, index: int, offsets: dict[str, int]
) -> list[Call]:
    """Returns the calls of a node: function, types, statement, and its data."""
    tensors = [graph.tensors[name] for name in (*node.inputs, node.output)]
    x, y = tensors[0], tensors[-1]
    types = tuple(_short(t) for t in tensors)
    source, *more = [_pointer(graph, t, offsets) for t in tensors]
    target = more[-1]
    if isinstance(node, (Conv, Dense)):
        arrays = _arrays(node, index)
        struct = _conv_struct(node, x, y, index)
        args = f"kernel_{index}, bias_{index}, m0_{index}, shift_{index}, &conv_{index}"
        call = f"conv_{types[0]}_{types[1]}({source}, {target}, {args});"
        return [("conv", (types[0], types[1], types[1]), call, [*arrays, struct])]
    if isinstance(node, Affine):
        scales = multipliers(node)
        args = (
            f"{x.size}, {x.shape[-1] if x.shape else 1}, kernel_{index}, "
            f"bias_{index}, {node.kernel.size}, m0_{index}, shift_{index}, {scales}, "
            f"{x.zero_point}, {y.zero_point}, {node.lo}, {node.hi}"
        )
        call = f"affine_{types[0]}_{types[1]}({source}, {target}, {args});"
        return [("affine", (types[0], "", types[1]), call, _arrays(node, index))]
    if isinstance(node, Add):
        zeros = ", ".join(str(t.zero_point) for t in tensors)
        args = (
            f"{x.size}, {zeros}, m0_{index}, shift_{index}, {node.left_shift}, "
            f"{node.lo}, {node.hi}"
        )
        call = f"add_{'_'.join(types)}({source}, {more[0]}, {target}, {args});"
        return [("add", types, call, _multipliers(node.m0, node.shift, index))]
    if isinstance(node, (MaxPool, AveragePool)):
        return [_pool(node, x, y, index, types, source, target)]
    if isinstance(node, Concat):
        return _concat(node, tensors, [source, *more], types)
    if isinstance(node, Argmax):
        channels = x.shape[-1]
        call = f"argmax_{types[0]}_{types[1]}({source}, {target}, "
        call += f"{x.size // channels}, {channels});"
        return [("argmax", (types[0], "", types[1]), call, [])]
    return _copy(graph, x, y, source, types)


def _copy(graph: IntGraph, x: Tensor, y: Tensor, source: str, types: Any) -> list[Call]:
    """Nothing to do for a reshape, unless the input itself is what comes out."""
    if y.name != graph.output or buffers(graph)[y.name] != graph.input:
        return []
    call = f"place_{types[0]}_{types[0]}({source}, output, 1, {x.size}, {x.size});"
    return [("place", (types[0], "", types[0]), call, [])]


def _pool(node: Any, x: Tensor, y: Tensor, index: int, types, source, target) -> Call:
    (top, _), (left, _) = node.padding
    sizes = (*x.shape, *y.shape[:2], *node.window, *node.strides, top, left)
    struct = f"static const struct pool pool_{index} = {{{_list(sizes)}}};\n"
    name = "max_pool" if isinstance(node, MaxPool) else "average_pool"
    args, arrays = f"&pool_{index}", [struct]
    if isinstance(node, AveragePool):
        arrays += _multipliers(node.m0, node.shift, index)
        args += (
            f", m0_{index}, shift_{index}, {int(node.m0.size > 1)}, {x.zero_point}, "
            f"{y.zero_point}, {node.lo}, {node.hi}"
        )
    call = f"{name}_{types[0]}_{types[1]}({source}, {target}, {args});"
    return name, (types[0], "", types[1]), call, arrays


def _concat(node: Concat, tensors: list[Tensor], pointers: list[str], types) -> list:
    y, calls, offset = tensors[-1], [], 0
    inner = int(np.prod(y.shape[node.axis + 1 :]))
    rows, stride = int(np.prod(y.shape[: node.axis])), y.shape[node.axis] * inner
    for tensor, pointer, kind in zip(tensors[:-1], pointers, types, strict=False):
        part = tensor.shape[node.axis] * inner
        call = f"place_{kind}_{types[-1]}({pointer}, {pointers[-1]} + {offset}, "
        call += f"{rows}, {part}, {stride});"
        calls.append(("place", (kind, "", types[-1]), call, []))
        offset += part
    return calls


def _conv_struct(node: Conv | Dense, x: Tensor, y: Tensor, index: int) -> str:
    if isinstance(node, Dense):
        sizes = (1, 1, x.size, 1, 1, y.size, 1, 1, 1, 1, 0, 0, 1, 1, 1)
    else:
        (top, _), (left, _) = node.padding
        sizes = (*x.shape, *y.shape, *node.kernel.shape[:2], *node.strides)
        sizes += (top, left, *node.dilation, node.groups)
    fields = (
        *sizes,
        int(multipliers(node) > 1),
        x.zero_point,
        y.zero_point,
        node.lo,
        node.hi,
    )
    return f"static const struct conv conv_{index} = {{{_list(fields)}}};\n"


def _arrays(node: Any, index: int) -> list[str]:
    # Outputs first: a sum then reads its weights in order.
    kernel = np.moveaxis(node.kernel, -1, 0)
    count = multipliers(node)
    return [
        _array("int8_t", f"kernel_{index}", kernel),
        _array("int32_t", f"bias_{index}", node.bias),
        *_multipliers(node.m0[:count], node.shift[:count], index),
    ]


def _multipliers(m0: np.ndarray, shift: np.ndarray, index: int) -> list[str]:
    return [
        _array("int32_t", f"m0_{index}", m0),
        _array("uint8_t", f"shift_{index}", shift),
    ]


def _array(kind: str, name: str, values: np.ndarray) -> str:
    numbers = [_number(n) for n in np.ravel(values).tolist()]
    rows = [", ".join(numbers[i : i + 16]) for i in range(0, len(numbers), 16)]
    body = ",\n  ".join(rows)
    return f"static const {kind} {name}[{len(numbers)}] = {{\n  {body}}};\n"


def _number(n: int) -> str:
    # The literal 2147483648 is no int32, so its negative is not one either.
    return "INT32_MIN" if n == -(2**31) else str(n)


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def _pointer(graph: IntGraph, tensor: Tensor, offsets: dict[str, int]) -> str:
    owner = buffers(graph)
    name = owner[tensor.name]
    if name == graph.input:
        return "input"
    if name == owner[graph.output]:
        return "output"
    return f"({_C_TYPES[_short(tensor)]} *)arena + {_elements(tensor, offsets[name])}"


def _elements(tensor: Tensor, offset: int) -> int:
    return offset // tensor.dtype.itemsize


def _header(graph: IntGraph) -> str:
    x, y = graph.input_tensor, _last_codes(graph)
    _, arena = arena_offsets(graph)
    report = graph.size_report()
    table = "\n".join(f"   {line}" for line in str(report).splitlines())
    output = (
        "the class"
        if y.kind == "classes"
        else f"codes q for the numbers {y.scale!r} * (q - {y.zero_point})"
    )
    return f"""\
/* An integer network.

   Input: {_shape(x)} codes, row by row, channels last;
   q stands for {x.scale!r} * (q - {x.zero_point}).
   Output: {_shape(y)}, {output}.

{table}
*/
#ifndef NET_H
#define NET_H

#include <stdint.h>

#define NET_INPUT_SIZE {x.size}
#define NET_OUTPUT_SIZE {y.size}
#define NET_IS_CLASS {int(y.kind == "classes")}
#define NET_ARENA_BYTES {arena}
#define NET_PARAMETER_BYTES {report.nbytes}
#define NET_MACS {graph.macs}

/* Measured on your processor; the network then takes about NET_CYCLES. */
#ifndef NET_CYCLES_PER_MAC
#define NET_CYCLES_PER_MAC 1
#endif
#define NET_CYCLES (NET_CYCLES_PER_MAC * NET_MACS)

typedef {_C_TYPES[_short(x)]} net_input_t;
typedef {_C_TYPES[_short(y)]} net_output_t;

/* Not reentrant: activations are in a static buffer of NET_ARENA_BYTES. */
void net_run(const net_input_t *input, net_output_t *output);

#endif
"""


def _last_codes(graph: IntGraph) -> Tensor:
    y = graph.output_tensor
    if y.kind == "numbers":
        return graph.tensors[graph.nodes[-1].inputs[0]]
    return y


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "1"
