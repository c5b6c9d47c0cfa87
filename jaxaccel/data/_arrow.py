"""Arrow IPC files (Feather version 2) and streams, memory-mapped where uncompressed."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._arrow_buffers import (
    Segments,
    Source,
    column_of,
    first_blob,
    missing_values,
    room,
)
from jaxaccel.data._arrow_columns import Column, read_columns
from jaxaccel.data._arrow_fields import ArrowRows, own_class_names
from jaxaccel.data._arrow_layout import Leaf, count_parts, import_pyarrow
from jaxaccel.data._arrow_messages import CONTINUATION, MAGIC, Batch, read_messages
from jaxaccel.data._arrow_stores import (
    ArrowStore,
    ChunkedStore,
    Stamp,
    file_stamp,
    translated,
)
from jaxaccel.data._arrow_words import read_words
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import Format, OpenOptions, WriteOptions
from jaxaccel.data._sidecar import Checksums, sync, write_checksums
from jaxaccel.data._store import ColumnSpec, Store

# No block of zstd or lz4 grows by more than this.
_MOST_GROWTH = 1 << 16


def _open(path: Path, options: OpenOptions) -> Store:
    file = _ArrowFile(path, options.checksums)
    if any(batch.compressed for batch in file.batches):
        return _open_compressed(file, options)
    source = Source(path, options, file.checksums)

    def peek(index: int, leaf: Leaf) -> np.ndarray:
        return first_blob(file.segments(index, leaf), source)

    columns = read_columns(path, file.schema, options, peek)
    file.check_columns(columns)
    segments = {c.name: file.segments(c.index, c.leaf) for c in columns}
    store = ArrowStore(_open, source, file.stamp, columns, file.counts(), segments)
    return file.named(store, columns)


def _open_compressed(file: "_ArrowFile", options: OpenOptions) -> Store:
    def peek(index: int, leaf: Leaf) -> np.ndarray:
        source = Source(file.path, options, offset=file.batches[0].start)
        array = _decompress(file, 0, {index: leaf}).column(0)
        return first_blob(column_of("", array, leaf, source), source)

    columns = read_columns(file.path, file.schema, options, peek)
    file.check_columns(columns)
    for column in columns:
        file.check_decoded_rows(column.index, column.leaf)
    source = Source(file.path, options)
    store = CompressedArrowStore(
        _open, source, file.stamp, columns, file.counts(), file
    )
    return file.named(store, columns)


class CompressedArrowStore(ChunkedStore):
    def __init__(
        self,
        opener: Any,
        source: Source,
        stamp: Stamp,
        columns: tuple[Column, ...],
        counts: np.ndarray,
        file: "_ArrowFile",
    ):
        super().__init__(opener, source, stamp, columns, counts)
        self._file = file

    def _chunk_source(self, chunk: int) -> Source:
        start = self._file.batches[chunk].start
        return dataclasses.replace(self._source, offset=start)

    def _load(self, chunk: int) -> dict[str, Segments]:
        leaves = {c.index: c.leaf for c in self._columns}
        batch, source = (
            _decompress(self._file, chunk, leaves),
            self._chunk_source(chunk),
        )
        return {
            c.name: column_of(c.name, batch.column(c.name), c.leaf, source)
            for c in self._columns
        }


def _decompress(file: "_ArrowFile", chunk: int, leaves: Mapping[int, Leaf]) -> Any:
    """Decodes some columns of one record batch, checking all that is used first."""
    pa, batch = import_pyarrow(), file.batches[chunk]
    file.check(np.array([batch.start]), np.array([batch.stop]))
    for index in leaves:
        file.check_decoded_size(batch, index)
    # A stream of its own: reading it needs no lock and no state.
    parts = [file.schema_range, *file.dictionaries, (batch.start, batch.stop)]
    stream = b"".join(file.data[start:stop].data for start, stop in parts)
    chosen = pa.ipc.IpcReadOptions(included_fields=sorted(leaves))
    with translated(file.path, batch.start):
        with pa.ipc.open_stream(pa.py_buffer(stream), options=chosen) as reader:
            decoded = reader.read_next_batch()
        decoded.validate()
    if decoded.num_rows != batch.rows:
        reason = f"a record batch of {decoded.num_rows} examples, not {batch.rows}"
        raise DataCorruptionError(file.path, None, batch.start, reason)
    return decoded


class _ArrowFile:
    """A mapped file, its schema, and where its record batches are."""

    def __init__(self, path: Path, checksums: bool):
        pa = import_pyarrow()
        self.path, self.stamp = path, file_stamp(path)
        self.data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        self.checksums = Checksums.load(path) if checksums else None
        messages = read_messages(path, self.data, self.checksums)
        self.schema_range, self.dictionaries = messages.schema, messages.dictionaries
        self.batches, self._replaced = messages.batches, messages.replaced
        start, stop = messages.schema
        with translated(path, start):
            content = self.data[start:stop].tobytes()
            self.schema = pa.ipc.read_schema(pa.py_buffer(content))
            # Names that are no UTF-8 are noticed only when they are used.
            list(self.schema.names)
        if not self.batches:
            raise ValueError(f"{path} holds no example; a store needs at least one")
        self._find_fields()

    def check(
        self, starts: np.ndarray, stops: np.ndarray, records: np.ndarray | None = None
    ) -> None:
        """Compares byte ranges with the checksums, if there are any."""
        if self.checksums:
            self.checksums.check(self.data, starts, stops, records)

    def counts(self) -> np.ndarray:
        """Number of examples in each record batch."""
        return np.array([batch.rows for batch in self.batches])

    def _find_fields(self) -> None:
        # The first node and the first buffer of each field.
        try:
            counts = [count_parts(field.type) for field in self.schema]
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        self._firsts = np.cumsum([(0, 0), *counts], axis=0).tolist()
        nodes, buffers = self._firsts[-1]
        for batch in self.batches:
            if len(batch.nodes) != nodes or len(batch.buffers) != buffers:
                raise self._damage(
                    batch, f"{len(batch.buffers)} buffers, expected {buffers}"
                )

    def named(self, store: Store, columns: tuple[Column, ...]) -> Store:
        """Tells a store what the numbers in its columns mean."""
        parts = [self.schema_range, *self.dictionaries]
        self.check(*np.array(parts).T)
        stream = b"".join(self.data[start:stop].tobytes() for start, stop in parts)
        words = read_words(self.path, stream, parts[-1][0], self.schema, columns)
        store._words = words
        store.class_names = own_class_names(self.path, self.schema)
        if store.class_names is None and None not in words.get("label", (None,)):
            store.class_names = words["label"]  # pyright: ignore
        return store

    def check_columns(self, columns: tuple[Column, ...]) -> None:
        """Checks that each example of each column is there."""
        for column in columns:
            node = self._firsts[column.index][0]
            kind = self.schema.field(column.index).type
            if self._replaced and "dictionary" in str(kind):
                raise ValueError(
                    f"{self.path}: the dictionary of column {column.name!r} changes, "
                    "so that its indices have no fixed meaning; write one dictionary"
                )
            for batch in self.batches:
                if batch.nodes[node, 0] != batch.rows:
                    found = batch.nodes[node, 0]
                    raise self._damage(
                        batch, f"{found} examples, expected {batch.rows}"
                    )
                if batch.nodes[[node + level for level in column.leaf.nodes], 1].any():
                    raise missing_values(self.path, column.name)

    def check_decoded_size(self, batch: Batch, index: int) -> None:
        """Checks that the buffers of a compressed column claim no absurd size."""
        first, last = (firsts[1] for firsts in self._firsts[index : index + 2])
        for buffer in range(first, last):
            size, claimed = int(batch.buffers[buffer, 1]), self._decoded(batch, buffer)
            if not 0 <= claimed <= size * _MOST_GROWTH:
                raise self._damage(
                    batch, f"a buffer of {size} bytes that claims to hold {claimed}"
                )

    def check_decoded_rows(self, index: int, leaf: Leaf) -> None:
        """Checks that compressed buffers claim to hold all examples."""
        values = self._firsts[index][1] + leaf.values
        for batch in self.batches:
            sizes = [self._decoded(batch, buffer) for buffer in (values, values - 1)]
            if room(leaf, *sizes) < batch.rows:
                raise self._damage(
                    batch, f"{batch.rows} examples that do not fit in {sizes[0]} bytes"
                )

    def _decoded(self, batch: Batch, buffer: int) -> int:
        # A compressed buffer begins with its length before the compression.
        start, size = batch.buffers[buffer].tolist()
        if size < 8:
            return 0
        place = batch.body + start
        self.check(np.array([place]), np.array([place + 8]))
        claimed = int.from_bytes(self.data[place : place + 8].tobytes(), "little")
        return size - 8 if claimed == 2**64 - 1 else claimed

    def segments(self, index: int, leaf: Leaf) -> Segments:
        """Where an uncompressed column is in all record batches."""
        values = self._firsts[index][1] + leaf.values
        spans = []
        for batch in self.batches:
            start, size = batch.buffers[values].tolist()
            before, before_size = batch.buffers[values - 1].tolist()
            if room(leaf, size, before_size) < batch.rows:
                raise self._damage(
                    batch, f"{batch.rows} examples that do not fit in {size} bytes"
                )
            spans.append((start, start + size, before, batch.body))
        starts, stops, offsets, bodies = np.array(spans).T
        return Segments(
            leaf,
            self.data,
            starts + bodies,
            stops + bodies,
            self.data,
            offsets + bodies,
        )

    def _damage(self, batch: Batch, reason: str) -> DataCorruptionError:
        reason = f"a record batch with {reason}"
        return DataCorruptionError(self.path, None, batch.start, reason)


class ArrowWriter:
    """Writes an Arrow IPC file and its checksums beside it; see `Writer`.

    Args:
      path: The file, which must not exist.
      spec: The columns.
      options: How to write it.
    """

    def __init__(
        self, path: Path, spec: Mapping[str, ColumnSpec], options: WriteOptions
    ):
        pa = import_pyarrow()
        self._path = path
        self._rows = ArrowRows(spec, tensors=True, class_names=options.class_names)
        self._file = path.open("xb")
        settings = pa.ipc.IpcWriteOptions(compression=options.compression)
        self._writer = pa.ipc.new_file(
            self._file, self._rows.schema, options=settings
        )  # fmt: skip

    def write(self, batch: Mapping[str, np.ndarray]) -> None:
        """See `Writer.write`."""
        for full in self._rows.add(batch):
            self._writer.write_batch(full)

    def finish(self) -> None:
        """See `Writer.finish`."""
        for rest in self._rows.rest():
            self._writer.write_batch(rest)
        self._writer.close()
        sync(self._file)
        self._file.close()
        write_checksums(self._path)

    def abort(self) -> None:
        """See `Writer.abort`."""
        # Closing writes the footer, for which there may be no room.
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()


def _recognizes(head: bytes) -> bool:
    if head.startswith(CONTINUATION):
        # A stream: the length of its first message, the schema.
        size = int.from_bytes(head[4:8], "little")
        return len(head) >= 16 and 0 < size < 1 << 28 and size % 8 == 0
    return head.startswith(MAGIC)


FORMAT = Format(
    "arrow",
    (".arrow", ".feather", ".ipc"),
    _recognizes,
    _open,
    ArrowWriter,
    ("lz4", "zstd"),
)
