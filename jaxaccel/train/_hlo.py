"""Programs as a trace holds them: XLA's protocol buffers, read without TensorFlow.

A field of a message is a number and a value; only the fields used here have names.
The numbers are those of `xplane.proto`, `hlo.proto` and `xla_data.proto`, which
never change their meaning.
"""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Message = Mapping[int, list[Any]]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation of a program.

    Attributes:
      name: Its name, unique in the program.
      opcode: What it does, such as `"fusion"`.
      shapes: Dimensions of its results.
      result_bytes: Size of its results.
      op_name: What it comes from, as jax names it; "" for XLA's own.
      source: `file:line` of the user's code that it comes from; "" if unknown.
      operands: Names of its inputs.
      called: Names of the computations that it calls.
      message: All fields, for what is rarely needed.
    """

    name: str
    opcode: str
    shapes: tuple[tuple[int, ...], ...]
    result_bytes: int
    op_name: str
    source: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    message: Message


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      name: Its name, such as `"jit_train_step"`.
      entry: Name of the computation that runs first.
      computations: Its computations, by name, and their instructions, by name.
    """

    name: str
    entry: str
    computations: Mapping[str, Mapping[str, Instruction]]


def read_programs(
    xspace: bytes, wanted: Collection[str] | None = None
) -> dict[str, Program]:
    """Finds programs in a trace, which holds all that the process has compiled.

    Args:
      xspace: The content of an `.xplane.pb` file.
      wanted: Their names, `name(program id)`; None means all.

    Returns:
      The programs by `name(program id)`.
    """
    programs = {}
    for plane in parse(memoryview(xspace)).get(1, []):
        plane = parse(plane)
        if text(plane, 2) != "/host:metadata":
            continue
        for entry in plane.get(4, []):
            metadata = parse(parse(entry)[2][0])
            if wanted is not None and text(metadata, 2) not in wanted:
                continue
            for stat in metadata.get(5, []):
                for value in parse(stat).get(6, []):
                    module = parse(value).get(1)
                    if module:
                        programs[text(metadata, 2)] = _program(parse(module[0]))
    return programs


def read_module(data: bytes) -> Program:
    """Reads a serialized `HloModuleProto`."""
    return _program(parse(memoryview(data)))


def parse(data: memoryview) -> dict[int, list[Any]]:
    """Splits a message into its fields; nested ones stay bytes."""
    fields: dict[int, list[Any]] = {}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, position = _varint(data, position)
            if kind not in (1, 2, 5) or position + size > len(data):
                raise ValueError("the trace is damaged; record it again")
            value, position = data[position : position + size], position + size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def text(message: Message, field: int) -> str:
    """Returns a text field, "" if it is not there."""
    values = message.get(field)
    return bytes(values[-1]).decode(errors="replace") if values else ""


def number(message: Message, field: int, default: int = 0) -> int:
    """Returns an integer field; negative ones are two's complement of 64 bits."""
    values = message.get(field)
    if not values:
        return default
    return values[-1] - (1 << 64) if values[-1] >> 63 else values[-1]


def numbers(message: Message, field: int) -> tuple[int, ...]:
    """Returns a repeated integer field, packed or not."""
    found: list[int] = []
    for value in message.get(field, []):
        found += [value] if isinstance(value, int) else _varints(value)
    return tuple(found)


def shape_dims(shape: Message) -> tuple[tuple[int, ...], ...]:
    """Returns the dimensions of a shape's arrays, more than one of a tuple."""
    parts = shape.get(4, [])
    if parts:
        return tuple(dims for part in parts for dims in shape_dims(parse(part)))
    return (numbers(shape, 3),)


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if position >= len(data):
            raise ValueError("the trace is damaged; record it again")
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position
        shift += 7


def _varints(data: memoryview) -> Iterator[int]:
    position = 0
    while position < len(data):
        value, position = _varint(data, position)
        yield value


def _program(module: Message) -> Program:
    frames = _Frames(module)
    parsed = [parse(x) for x in module.get(3, [])]
    names = {number(x, 5): text(x, 1) for x in parsed}
    computations = {
        text(x, 1): _instructions([parse(y) for y in x.get(2, [])], names, frames)
        for x in parsed
    }
    return Program(text(module, 1), text(module, 2), computations)


def _instructions(
    messages: list[dict[int, list[Any]]], computations: dict[int, str], frames: Any
) -> dict[str, Instruction]:
    by_id = {number(x, 35): text(x, 1) for x in messages}
    found = {}
    for message in messages:
        metadata = parse(message[7][0]) if 7 in message else {}
        shape = parse(message[3][0]) if 3 in message else {}
        found[text(message, 1)] = Instruction(
            name=text(message, 1),
            opcode=text(message, 2),
            shapes=shape_dims(shape),
            result_bytes=_bytes(shape),
            op_name=text(metadata, 2),
            source=frames.source(metadata),
            operands=tuple(by_id.get(i, "") for i in numbers(message, 36)),
            called=tuple(computations.get(i, "") for i in numbers(message, 38)),
            message=message,
        )
    return found


# Bits of an element by XLA's number of its type; others count one byte.
_BITS = {
    **dict.fromkeys((21, 22, 26, 27, 30, 31, 32), 4),
    **dict.fromkeys((3, 7, 10, 16), 16),
    **dict.fromkeys((4, 8, 11), 32),
    **dict.fromkeys((5, 9, 12, 15), 64),
    18: 128,
    **dict.fromkeys((13, 14, 17), 0),
}


def _bytes(shape: Message) -> int:
    parts = shape.get(4, [])
    if parts:
        return sum(_bytes(parse(part)) for part in parts)
    elements = 1
    for size in numbers(shape, 3):
        elements *= size
    return (elements * _BITS.get(number(shape, 2), 8) + 7) // 8


class _Frames:
    """The stacks of Python frames that instructions point into."""

    def __init__(self, module: Message):
        index = parse(module[17][0]) if 17 in module else {}
        self._files = [bytes(x).decode(errors="replace") for x in index.get(1, [])]
        self._places = [parse(x) for x in index.get(3, [])]
        self._frames = [parse(x) for x in index.get(4, [])]

    def source(self, metadata: Message) -> str:
        """Returns the innermost place that is in no installed package."""
        if text(metadata, 3):
            return f"{text(metadata, 3)}:{number(metadata, 4)}"
        frame, first = number(metadata, 15), ""
        seen = 0
        while 0 < frame <= len(self._frames) and seen < len(self._frames):
            place = self._places[number(self._frames[frame - 1], 1) - 1]
            file = self._files[number(place, 1) - 1]
            where = f"{file}:{number(place, 3)}"
            if not _is_library(file):
                return where
            first, frame = first or where, number(self._frames[frame - 1], 2)
            seen += 1
        return first


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _is_library(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_HERE)
