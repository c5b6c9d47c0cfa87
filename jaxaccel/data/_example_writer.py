"""Columns as tf.Example messages that say themselves what they hold."""

import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxaccel.data._example_columns import DTYPE, SHAPE
from jaxaccel.data._store import ColumnSpec

_BYTES, _FLOATS, _INTEGERS = b"\x0a", b"\x12", b"\x1a"
_FIRST, _SECOND = b"\x0a", b"\x12"


class ExampleWriter:
    """Turns batches into records.

    Scalars become lists of one integer or float32, which any reader of tf.Example
    understands; arrays, 64-bit unsigned integers and other floats become
    little-endian bytes. Features `<name>/shape` and `<name>/dtype` say what they
    were.

    Args:
      spec: The columns.

    Raises:
      ValueError: If one column is named as those features of another one are.
    """

    def __init__(self, spec: Mapping[str, ColumnSpec]):
        for name in spec:
            for end in (SHAPE, DTYPE):
                if name + end in spec:
                    raise ValueError(
                        f"the columns {name!r} and {name + end!r} cannot be in one "
                        f"file of tf.Example records, where {end!r} has a meaning of "
                        "its own; rename one"
                    )
        self._spec = dict(sorted(spec.items()))
        self._kinds = {name: _kind(column) for name, column in self._spec.items()}
        self._constant = b"".join(
            _declaration(name, column, self._kinds[name])
            for name, column in self._spec.items()
        )

    def records(self, batch: Mapping[str, np.ndarray]) -> Iterator[bytes]:
        """Yields the record of each example."""
        columns = [self._features(name, batch[name]) for name in self._spec]
        for features in zip(*columns, strict=True):
            yield message(_FIRST, b"".join(features) + self._constant)

    def _features(self, name: str, array: np.ndarray) -> Iterator[bytes]:
        kind = self._kinds[name]
        if kind == "int64":
            return (integers(name, [value]) for value in array.astype(int).tolist())
        if kind == "float":
            return (_floats(name, value) for value in array.tolist())
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return (raw_bytes(name, row.tobytes()) for row in plain)


def raw_bytes(name: str, value: bytes) -> bytes:
    """Writes a feature of one bytes value, an entry of the message's map."""
    return _entry(name, message(_BYTES, message(_FIRST, value)))


def integers(name: str, values: Sequence[int]) -> bytes:
    """Writes a feature of integers."""
    packed = b"".join(varint(value % 2**64) for value in values)
    return _entry(name, message(_INTEGERS, message(_FIRST, packed)))


def message(tag: bytes, body: bytes) -> bytes:
    """Writes a field that holds bytes."""
    return tag + varint(len(body)) + body


def varint(value: int) -> bytes:
    """Writes an unsigned integer, seven bits a byte."""
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _floats(name: str, value: float) -> bytes:
    packed = message(_FIRST, struct.pack("<f", value))
    return _entry(name, message(_FLOATS, packed))


def _entry(name: str, feature: bytes) -> bytes:
    return message(_FIRST, message(_FIRST, name.encode()) + message(_SECOND, feature))


def _kind(column: ColumnSpec) -> str:
    if column.shape == () and column.dtype == np.float32:
        return "float"
    if column.shape == () and column.dtype.kind in "biu" and column.dtype != np.uint64:
        return "int64"
    return "raw"


def _declaration(name: str, column: ColumnSpec, kind: str) -> bytes:
    dtype = raw_bytes(name + DTYPE, column.dtype.name.encode())
    if kind == "raw":
        return dtype + integers(name + SHAPE, column.shape)
    return dtype if kind == "int64" and column.dtype != np.int32 else b""
