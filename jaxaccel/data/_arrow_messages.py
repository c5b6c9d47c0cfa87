"""Where the record batches of an Arrow IPC file or stream lie, trusting none of it.

pyarrow gives neither the number of rows of a compressed batch without decompressing
it, nor the place of anything in the file. So the few tables of metadata that are
needed for that are read here, with all bounds checked.
"""

import dataclasses
import struct
from pathlib import Path

import numpy as np

from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._sidecar import Checksums

MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_BLOCK_BYTES = 24


@dataclasses.dataclass(frozen=True)
class Batch:
    """One record batch.

    Attributes:
      start: Where its message begins in the file.
      body: Where its buffers begin.
      stop: The byte behind its last one.
      rows: Number of examples.
      nodes: `(n, 2)` int64, length and number of nulls of each array, in the
        order of the schema, parents first.
      buffers: `(n, 2)` int64, offset from `body` and size of each buffer.
      compressed: Whether the buffers are compressed.
    """

    start: int
    body: int
    stop: int
    rows: int
    nodes: np.ndarray
    buffers: np.ndarray
    compressed: bool


@dataclasses.dataclass(frozen=True)
class Messages:
    """The messages of a file.

    Attributes:
      schema: Start and stop of the schema's message.
      dictionaries: Of the messages of dictionaries.
      replaced: Whether a dictionary is replaced by a later one.
      batches: The record batches that hold examples, in order.
    """

    schema: tuple[int, int]
    dictionaries: tuple[tuple[int, int], ...]
    replaced: bool
    batches: tuple[Batch, ...]


def read_messages(
    path: Path, data: np.ndarray, checksums: Checksums | None
) -> Messages:
    """Reads the metadata of all messages.

    Args:
      path: The file, for messages.
      data: All its bytes, `(size,)` uint8.
      checksums: Of the file; the metadata is compared with them first.

    Returns:
      The messages.

    Raises:
      DataCorruptionError: If the metadata is damaged.
      ValueError: If it is of a kind that is not supported.
    """
    reader = _Reader(path, data, checksums)
    if reader.take(0, 6) == MAGIC:
        blocks, end = reader.file_blocks()
        first = reader.message(8)
        messages = [reader.message(start) for start in blocks]
    else:
        messages, position = [], 0
        while (message := reader.message(position)).kind:
            messages.append(message)
            position = message.stop
        first, messages, end = messages[0] if messages else message, messages[1:], None
        reader.nothing_behind(message.stop)
    if first.kind != _SCHEMA:
        raise reader.damage(first.start, "the first message is not the schema")
    reader.check_schema(first)
    return reader.sort(first, messages, end)


@dataclasses.dataclass(frozen=True)
class _Message:
    start: int
    body: int
    stop: int
    kind: int
    table: int


class _Reader:
    # Tables are FlatBuffers: a table begins with the distance back to its list of
    # field positions, and refers to others by distances forward.
    def __init__(self, path: Path, data: np.ndarray, checksums: Checksums | None):
        self._path, self._data, self._checksums = path, data, checksums

    def damage(self, offset: int, reason: str) -> DataCorruptionError:
        offset = min(max(offset, 0), len(self._data))
        return DataCorruptionError(self._path, None, offset, reason)

    def take(self, start: int, count: int) -> bytes:
        """Checked bytes of the file."""
        stop = start + count
        if not 0 <= start <= stop <= len(self._data):
            raise self.damage(
                start,
                f"truncated or damaged: bytes {start} to {stop} are needed, the file "
                f"has {len(self._data)}",
            )
        if self._checksums:
            self._checksums.check(self._data, np.array([start]), np.array([stop]))
        return self._data[start:stop].tobytes()

    def number(self, code: str, position: int) -> int:
        raw = self.take(position, struct.calcsize("<" + code))
        return struct.unpack("<" + code, raw)[0]

    def field(self, table: int, index: int) -> int | None:
        """Position of a table's field, None where it has its default."""
        fields = table - self.number("i", table)
        entry = 4 + 2 * index
        if entry + 2 > self.number("H", fields):
            return None
        distance = self.number("H", fields + entry)
        return table + distance if distance else None

    def value(self, table: int, index: int, code: str) -> int:
        position = self.field(table, index)
        return 0 if position is None else self.number(code, position)

    def child(self, table: int, index: int) -> int | None:
        position = self.field(table, index)
        return None if position is None else position + self.number("I", position)

    def vector(self, table: int, index: int, size: int) -> bytes:
        """The bytes of a vector of structures, each of `size` bytes."""
        position = self.child(table, index)
        if position is None:
            return b""
        return self.take(position + 4, self.number("I", position) * size)

    def pairs(self, table: int, index: int) -> np.ndarray:
        return np.frombuffer(self.vector(table, index, 16), "<i8").reshape(-1, 2)

    def file_blocks(self) -> tuple[list[int], int]:
        """Starts of the messages that the footer names, and where the footer is."""
        size = len(self._data)
        if size < 8 + 10 or self.take(size - 6, 6) != MAGIC:
            raise self.damage(
                max(size - 6, 0),
                f"truncated or damaged: an Arrow file ends with {MAGIC!r}",
            )
        length = self.number("i", size - 10)
        footer = size - 10 - length
        if length <= 0 or footer < 8:
            raise self.damage(
                size - 10, f"the footer's length is {length}, of {size} bytes"
            )
        root = footer + self.number("I", footer)
        starts = []
        for index in (2, 3):
            raw = self.vector(root, index, _BLOCK_BYTES)
            starts += np.frombuffer(raw, "<i8").reshape(-1, 3)[:, 0].tolist()
        return starts, footer

    def message(self, start: int) -> _Message:
        """The message at a position; of kind 0 where a stream ends."""
        if start == len(self._data):
            raise self.damage(start, "truncated: the end-of-stream marker is missing")
        if self.take(start, 4) != CONTINUATION:
            raise self.damage(start, "no message of Arrow 0.15 or newer begins here")
        length = self.number("i", start + 4)
        body = start + 8 + length
        if length == 0:
            return _Message(start, body, body, 0, 0)
        self.take(start + 8, length)
        table = start + 8 + self.number("I", start + 8)
        stop = body + self.value(table, 3, "q")
        if not body <= stop <= len(self._data):
            raise self.damage(
                body,
                f"truncated or damaged: the message at {start} ends at {stop}, the "
                f"file at {len(self._data)}",
            )
        return _Message(start, body, stop, self.value(table, 1, "B"), table)

    def nothing_behind(self, stop: int) -> None:
        if stop != len(self._data):
            raise self.damage(
                stop, f"{len(self._data) - stop} bytes after the end-of-stream"
            )

    def check_schema(self, message: _Message) -> None:
        schema = self.child(message.table, 2)
        if schema is None:
            raise self.damage(message.start, "the schema is missing")
        if self.value(schema, 0, "h"):
            raise ValueError(
                f"{self._path} is big-endian, which is not supported; write it anew "
                "on a little-endian machine"
            )

    def sort(
        self, first: _Message, messages: list[_Message], end: int | None
    ) -> Messages:
        dictionaries, batches, seen, replaced = [], [], set(), False
        for message in messages:
            if end is not None and message.stop > end:
                raise self.damage(message.start, "a message reaches into the footer")
            content = self.child(message.table, 2)
            if content is None:
                raise self.damage(message.start, "a message without content")
            if message.kind not in (_DICTIONARY, _BATCH):
                raise self.damage(message.start, f"a message of kind {message.kind}")
            if message.kind == _BATCH:
                batches.append(self.batch(message, content))
                continue
            name, delta = self.value(content, 0, "q"), self.value(content, 2, "B")
            replaced |= name in seen and not delta
            seen.add(name)
            dictionaries.append((message.start, message.stop))
        return Messages(
            (first.start, first.stop),
            tuple(dictionaries),
            replaced,
            tuple(batch for batch in batches if batch.rows),
        )

    def batch(self, message: _Message, table: int) -> Batch:
        rows = self.value(table, 0, "q")
        nodes, buffers = self.pairs(table, 1), self.pairs(table, 2)
        size = message.stop - message.body
        starts, sizes = buffers[:, 0], buffers[:, 1]
        if rows < 0 or (nodes < 0).any():
            raise self.damage(message.start, f"a record batch of {rows} rows")
        # By subtraction, as a sum of absurd values would overflow.
        if (starts < 0).any() or (sizes < 0).any() or (sizes > size - starts).any():
            raise self.damage(
                message.start, f"a buffer lies outside the {size} bytes of data"
            )
        compressed = self.field(table, 3) is not None
        return Batch(
            message.start, message.body, message.stop, rows, nodes, buffers, compressed
        )  # fmt: skip
