"""Operations, traffic and scope of the instructions of a compiled program."""

import math
import re
from collections.abc import Mapping

from jaxaccel.train._hlo import (
    Instruction,
    Message,
    Program,
    number,
    numbers,
    parse,
)

# One operation an element of the result, as XLA counts them.
_ELEMENTWISE = frozenset(
    "abs add subtract multiply divide maximum minimum negate power remainder sign "
    "floor ceil round-nearest-afz round-nearest-even compare select clamp".split()
)
_REDUCTIONS = frozenset({"reduce", "reduce-window", "select-and-scatter", "scatter"})
# Run others; their time is that of what they run.
CONTROL = frozenset({"while", "conditional", "call", "async-start", "async-done"})

# How many steps from an instruction without a name one with a name is looked for.
_REACH = 4

# Segments that jax puts into a name without the user: calls, loops, recomputation.
_PLUMBING = re.compile(
    r"(while|body|cond|cond_fun|body_fun|closed_call|core_call|checkpoint|remat\d*|"
    r"rematted_computation|branch_\d+_fun|shard_map|custom_[jv][jv]p_call\w*|p?jit)"
    r"(\(.*\))?$"
)
_TRANSFORM = re.compile(
    r"^(jvp|transpose|vmap|remat|checkpoint|rematted_computation)\("
)


def find(program: Program, name: str) -> tuple[Instruction, str] | None:
    """Finds an instruction and the computation that it is in."""
    for computation, instructions in program.computations.items():
        if name in instructions:
            return instructions[name], computation
    return None


def count(program: Program, instruction: Instruction, computation: str) -> float | None:
    """Counts the operations of one run of an instruction.

    Returns:
      The number; None for calls of libraries, which do not tell.
    """
    inside = program.computations[computation]
    if instruction.opcode == "fusion":
        return _called(program, instruction)
    if instruction.opcode == "custom-call":
        return None
    elements = sum(map(math.prod, instruction.shapes))
    if instruction.opcode == "dot":
        return 2.0 * elements * _contracted(instruction, inside)
    if instruction.opcode == "convolution":
        return _convolution(instruction, inside)
    if instruction.opcode in _REDUCTIONS:
        # What a reduction calls does one element of each of its results.
        runs = _reduced(instruction, inside) * _called(program, instruction)
        return float(runs)
    return float(elements) if instruction.opcode in _ELEMENTWISE else 0.0


def traffic(program: Program, instruction: Instruction, computation: str) -> int:
    """Returns the bytes of an instruction's inputs and results."""
    inside = program.computations[computation]
    inputs = sum(
        inside[name].result_bytes for name in instruction.operands if name in inside
    )
    return instruction.result_bytes + inputs


def origin(
    program: Program, instruction: Instruction, computation: str
) -> tuple[str, str]:
    """Says where an instruction comes from.

    XLA's own instructions, such as copies and fusions, lack a name: they get the one
    of their dearest part, of what uses them, or of what they use.

    Returns:
      Its full name and its source line, "" where unknown.
    """
    if instruction.op_name:
        return instruction.op_name, instruction.source
    parts = _dearest(program, instruction)
    if parts and parts[0].op_name:
        return parts[0].op_name, parts[0].source
    inside = program.computations[computation]
    fallback = "", ""
    seen, ring = {instruction.name}, [instruction]
    for _ in range(_REACH):
        for x in ring:
            for found in [x, *_dearest(program, x)]:
                # What belongs to a scope says more than, say, the call of the step.
                if scope_of(found.op_name):
                    return found.op_name, found.source
                if found.op_name and not fallback[0]:
                    fallback = found.op_name, found.source
        nearby = [y for x in ring for y in _neighbours(x, inside)]
        ring = [x for x in nearby if x.name not in seen]
        seen.update(x.name for x in ring)
    return fallback


def scope_of(op_name: str) -> str:
    """Returns the named scopes of an operation, without jax's own segments.

    Args:
      op_name: Such as `jit(step)/transpose(jvp(Net))/Conv_0/conv_general_dilated`.

    Returns:
      Such as `Net/Conv_0`; "" outside of any scope.
    """
    scopes = []
    for segment in _split(op_name)[:-1]:
        while _TRANSFORM.match(segment) and segment.endswith(")"):
            segment = segment[segment.index("(") + 1 : -1]
        for part in _split(segment):
            if part and not _PLUMBING.fullmatch(part):
                scopes.append(part)
    return "/".join(scopes)


def is_backward(op_name: str) -> bool:
    """Whether an operation is part of a gradient."""
    return "transpose(" in op_name


def _split(name: str) -> list[str]:
    """Splits at slashes that are in no parentheses."""
    parts, depth = [""], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _dearest(program: Program, instruction: Instruction) -> list[Instruction]:
    """Returns the parts of a fusion, those with most work first, then those named."""
    parts = [
        (count(program, x, name) or 0.0, bool(x.op_name), x)
        for name in instruction.called
        for x in program.computations.get(name, {}).values()
    ]
    return [x for *_, x in sorted(parts, key=lambda part: part[:2], reverse=True)]


def _neighbours(
    instruction: Instruction, inside: Mapping[str, Instruction]
) -> list[Instruction]:
    users = [x for x in inside.values() if instruction.name in x.operands]
    return users + [inside[name] for name in instruction.operands if name in inside]


def _contracted(dot: Instruction, inside: Mapping[str, Instruction]) -> int:
    dims = parse(dot.message[30][0]) if 30 in dot.message else {}
    left = inside[dot.operands[0]].shapes[0]
    return math.prod(left[i] for i in numbers(dims, 1))


def _called(program: Program, instruction: Instruction) -> float:
    """Counts one run of all that an instruction calls."""
    parts = [
        count(program, x, name)
        for name in instruction.called
        for x in program.computations.get(name, {}).values()
    ]
    return sum((x for x in parts if x is not None), 0.0)


def _reduced(instruction: Instruction, inside: Mapping[str, Instruction]) -> int:
    """Counts how often a reduction calls its function."""
    results = math.prod(instruction.shapes[0])
    inputs = [inside[x].shapes[0] for x in instruction.operands if x in inside]
    if instruction.opcode == "reduce":
        return math.prod(inputs[0]) - results
    if instruction.opcode == "scatter":
        # Arrays, indices, updates: as many updates as arrays.
        return math.prod(inputs[-1])
    window = parse(instruction.message[15][0]) if 15 in instruction.message else {}
    taps = math.prod(number(parse(x), 1) for x in window.get(1, []))
    if instruction.opcode == "select-and-scatter":
        results = math.prod(inputs[1])
    return results * max(0, taps - 1)


def _convolution(conv: Instruction, inside: Mapping[str, Instruction]) -> float:
    dims = parse(conv.message[16][0])
    window = parse(conv.message[15][0]) if 15 in conv.message else {}
    image, kernel = (inside[name].shapes[0] for name in conv.operands[:2])
    output = conv.shapes[0]
    taps = 1
    places = zip(numbers(dims, 11), numbers(dims, 12), window.get(1, []), strict=True)
    for source, target, dimension in places:
        taps *= valid_taps(image[source], output[target], parse(dimension))
    batch = image[number(dims, 7)] // number(conv.message, 58, 1)
    features = output[number(dims, 10)]
    return 2.0 * taps * batch * features * kernel[number(dims, 3)]


def valid_taps(size: int, outputs: int, window: Message) -> int:
    """Counts the products of a convolution along one axis, those with padding not.

    Args:
      size: Of the input.
      outputs: Number of results.
      window: XLA's description of the axis.

    Returns:
      The number of pairs of result and tap that meet an element of the input.
    """
    stride, low = number(window, 2, 1) or 1, number(window, 3)
    tap_step, gap = number(window, 5, 1) or 1, number(window, 6, 1) or 1
    total = 0
    for output in range(outputs):
        for tap in range(number(window, 1)):
            place = output * stride + tap * tap_step - low
            total += 0 <= place <= (size - 1) * gap and place % gap == 0
    return total
