"""tf.Example messages: where their values lie, in one record and in many at once.

An Example is a map from names to lists of bytes, floats or integers, in protocol
buffers' wire format. Records of one file mostly differ in their values alone, so a
`Template` made of one record finds the values of all others that look the same.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_VARINT, _FIXED64, _MESSAGE, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: "bytes", 2: "float", 3: "int64"}


class Feature(NamedTuple):
    """Where the values of one feature lie in a record.

    Attributes:
      kind: `"bytes"`, `"float"` or `"int64"`.
      spans: (start, stop) of each bytes value, or of each run of numbers.
    """

    kind: str
    spans: tuple[tuple[int, int], ...]


class ExampleError(ValueError):
    """A record is no tf.Example; `offset` says where in it that was noticed."""

    def __init__(self, offset: int, reason: str):
        super().__init__(reason)
        self.offset = offset


def parse_example(data: memoryview) -> dict[str, Feature]:
    """Finds the values of all features.

    Args:
      data: The record.

    Returns:
      Each feature by name; of equal names, the last.

    Raises:
      ExampleError: If the record is no tf.Example.
    """
    features = {}
    for field, wire, start, stop in _fields(data, 0, len(data)):
        if (field, wire) == (1, _MESSAGE):
            for entry in _fields(data, start, stop):
                if entry[:2] == (1, _MESSAGE):
                    name, feature = _entry(data, *entry[2:])
                    if feature.kind:
                        features[name] = feature
    return features


class Records:
    """Records of one length in a buffer, all read at once.

    Args:
      data: The buffer, uint8.
      starts: Where each record begins, int64.
      length: Bytes in each.
    """

    def __init__(self, data: np.ndarray, starts: np.ndarray, length: int):
        self.data, self.starts, self.length = data, starts, length
        steps = np.diff(starts)
        even = len(steps) and steps[0] >= 0 and (steps == steps[0]).all()
        self._step = int(steps[0]) if even else None

    def __getitem__(self, rows: np.ndarray) -> "Records":
        return Records(self.data, self.starts[rows], self.length)

    def __len__(self) -> int:
        return len(self.starts)

    def first(self) -> memoryview:
        """Bytes of the first record."""
        start = int(self.starts[0])
        record: Any = self.data[start : start + self.length]
        return memoryview(record)

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """The same range of each record: `(len(self), stop - start)`, maybe a view."""
        width = stop - start
        if self._step is not None:
            shape, strides = (len(self), width), (self._step, 1)
            offset = int(self.starts[0]) + start
            return np.ndarray(shape, np.uint8, self.data, offset, strides)
        # All ranges of this width there are, of which NumPy copies some.
        shape = (len(self.data) - width + 1, width)
        return np.ndarray(shape, np.uint8, self.data, 0, (1, 1))[self.starts + start]


class Template:
    """What records with the same features and the same sizes have in common.

    Args:
      record: One of them.
      features: Where its values lie.
      constant: Names of features whose values must be the same, too.
    """

    def __init__(
        self,
        record: memoryview,
        features: Mapping[str, Feature],
        constant: Collection[str] = (),
    ):
        self.features = features
        varying = [f for name, f in features.items() if name not in constant]
        data = np.frombuffer(record, np.uint8)
        self._fixed, self._ends, at = [], [], 0
        spans = (span for feature in varying for span in feature.spans)
        for start, stop in sorted(spans):
            self._fixed.append((at, start, data[at:start].copy()))
            at = stop
        self._fixed.append((at, len(data), data[at:].copy()))
        for feature in varying:
            if feature.kind == "int64":
                # Which bytes are the last of an integer.
                self._ends += [(a, b, data[a:b] < 128) for a, b in feature.spans]

    def matches(self, records: Records) -> np.ndarray:
        """Which records have their values at the same places."""
        same = np.ones(len(records), bool)
        for start, stop, data in self._fixed:
            if stop > start:
                same &= (records.bytes(start, stop) == data).all(1)
        for start, stop, ends in self._ends:
            same &= ((records.bytes(start, stop) < 128) == ends).all(1)
        return same


def read_numbers(records: Records, feature: Feature) -> np.ndarray:
    """Reads the values of a feature of numbers.

    Args:
      records: Records that match one template.
      feature: The feature, of kind `"float"` or `"int64"`, with at least one span.

    Returns:
      `(len(records), values)`, float32 or int64.
    """
    if len(records) == 1:
        return _numbers(records.first(), feature)[None]
    runs = [records.bytes(start, stop) for start, stop in feature.spans]
    data = np.ascontiguousarray(runs[0] if len(runs) == 1 else np.hstack(runs))
    if feature.kind == "float":
        return data.view("<f4").astype(np.float32, copy=False)
    # All rows have the integers' ends at the same places.
    ends = np.flatnonzero(data[0] < 128)
    firsts = np.concatenate([[0], ends[:-1] + 1])
    places = np.arange(data.shape[1]) - np.repeat(firsts, ends - firsts + 1)
    bits = (data & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, firsts, axis=1).view(np.int64)


def _numbers(data: memoryview, feature: Feature) -> np.ndarray:
    # Of a single record, where NumPy's fixed costs would outweigh the rest.
    if feature.kind == "float":
        runs = [data[start:stop] for start, stop in feature.spans]
        return np.frombuffer(b"".join(runs), "<f4").astype(np.float32, copy=False)
    values = []
    for start, stop in feature.spans:
        while start < stop:
            value, start = _varint(data, start, stop)
            values.append(value & 0xFFFFFFFFFFFFFFFF)
    return np.array(values, np.uint64).view(np.int64)


def _entry(data: memoryview, start: int, stop: int) -> tuple[str, Feature]:
    name, kind, spans = "", "", []
    for field, wire, first, last in _fields(data, start, stop):
        if (field, wire) == (1, _MESSAGE):
            name = _name(data, first, last)
        elif (field, wire) == (2, _MESSAGE):
            for values in _fields(data, first, last):
                if values[1] != _MESSAGE or values[0] not in _KINDS:
                    continue
                if _KINDS[values[0]] != kind:
                    kind, spans = _KINDS[values[0]], []
                spans += _values(data, kind, *values[2:])
    return name, Feature(kind, tuple(spans))


def _name(data: memoryview, start: int, stop: int) -> str:
    try:
        return bytes(data[start:stop]).decode()
    except UnicodeDecodeError:
        raise ExampleError(start, "the name of a feature is no UTF-8") from None


def _values(
    data: memoryview, kind: str, start: int, stop: int
) -> Iterator[tuple[int, int]]:
    for field, wire, first, last in _fields(data, start, stop):
        if field != 1:
            continue
        single = {"float": _FIXED32, "int64": _VARINT}.get(kind)
        if wire not in (_MESSAGE, single):
            raise ExampleError(first, f"a value of kind {kind} has wire type {wire}")
        if kind == "float" and (last - first) % 4:
            raise ExampleError(first, f"{last - first} bytes of float32 values")
        if kind == "int64" and wire == _MESSAGE:
            _check_varints(data, first, last)
        if kind == "bytes" or last > first:
            yield first, last


def _check_varints(data: memoryview, start: int, stop: int) -> None:
    while start < stop:
        start = _varint(data, start, stop)[1]


def _fields(
    data: memoryview, start: int, stop: int
) -> Iterator[tuple[int, int, int, int]]:
    while start < stop:
        # Calls for integers of one byte, as most are, would take half of the time.
        tag, start = data[start], start + 1
        if tag > 127:
            tag, start = _varint(data, start - 1, stop)
        field, wire = tag >> 3, tag & 7
        if not field:
            raise ExampleError(start, "a field has the number 0")
        if wire == _MESSAGE:
            size, start = data[start] if start < stop else 128, start + 1
            if size > 127:
                size, start = _varint(data, start - 1, stop)
            end = start + size
        elif wire == _VARINT:
            end = _varint(data, start, stop)[1]
        elif wire in (_FIXED32, _FIXED64):
            end = start + (4 if wire == _FIXED32 else 8)
        else:
            raise ExampleError(start, f"a field has the unknown wire type {wire}")
        if end > stop:
            raise ExampleError(
                start, f"a field of {end - start} bytes, but only {stop - start} follow"
            )
        yield field, wire, start, end
        start = end


def _varint(data: Any, start: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(start, min(stop, start + 10)):
        byte = data[at]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + 1
        shift += 7
    raise ExampleError(start, "an integer does not end")
