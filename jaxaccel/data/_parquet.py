"""Parquet files, decoded by row groups."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._arrow_buffers import Segments, Source, column_of, first_blob
from jaxaccel.data._arrow_columns import Column, read_columns
from jaxaccel.data._arrow_fields import ArrowRows, own_class_names
from jaxaccel.data._arrow_layout import Leaf, import_pyarrow
from jaxaccel.data._arrow_stores import ChunkedStore, file_stamp, translated
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import Format, OpenOptions, WriteOptions
from jaxaccel.data._sidecar import Checksums, sync, write_checksums
from jaxaccel.data._store import ColumnSpec, Store

_MAGIC = b"PAR1"


def _open(path: Path, options: OpenOptions) -> Store:
    file = _ParquetFile(path, options.checksums)

    def peek(index: int, leaf: Leaf) -> np.ndarray:
        name = file.schema.names[index]
        source = Source(path, options, offset=file.spans[0][0])
        return first_blob(file.load(0, {name: leaf}, source)[name], source)

    columns = read_columns(path, file.schema, options, peek)
    for column in columns:
        if "dictionary" in str(file.schema.field(column.index).type):
            raise ValueError(
                f"{path}: column {column.name!r} is a dictionary, whose indices may "
                "differ between row groups; write the indices themselves, or leave it "
                "out with columns={...}"
            )
    store = ParquetStore(columns, Source(path, options), file)
    store.class_names = own_class_names(path, file.schema)
    return store


class ParquetStore(ChunkedStore):
    def __init__(
        self, columns: tuple[Column, ...], source: Source, file: "_ParquetFile"
    ):
        super().__init__(_open, source, file.stamp, columns, file.counts)
        self._file = file

    def _chunk_source(self, chunk: int) -> Source:
        return dataclasses.replace(self._source, offset=self._file.spans[chunk][0])

    def _load(self, chunk: int) -> dict[str, Segments]:
        leaves = {column.name: column.leaf for column in self._columns}
        return self._file.load(chunk, leaves, self._chunk_source(chunk))


class _ParquetFile:
    """The metadata of a file, and the way to its row groups."""

    def __init__(self, path: Path, checksums: bool):
        pq = _import_parquet()
        self.path, self.stamp, self._verified = path, file_stamp(path), checksums
        self._sidecar = Checksums.load(path) if checksums else None
        self._check_footer()
        with translated(path, self.stamp[1]), pq.ParquetFile(path) as file:
            self._metadata = file.metadata
            self.schema = file.schema_arrow
            # Names that are no UTF-8 are noticed only when they are used.
            list(self.schema.names)
            groups = [self._metadata.row_group(i) for i in range(file.num_row_groups)]
            counts = [group.num_rows for group in groups]
        total = self._metadata.num_rows
        if min(counts, default=0) < 0 or sum(counts) != total:
            raise self._damage(
                f"row groups of {sum(counts)} examples, expected {total}"
            )
        # The numbers of row groups that hold examples.
        self._groups = [i for i, count in enumerate(counts) if count]
        if not self._groups:
            raise ValueError(f"{path} holds no example; a store needs at least one")
        self.spans = [self._span(groups[i]) for i in self._groups]
        self.counts = np.array([counts[i] for i in self._groups])

    def _check_footer(self) -> None:
        size = self.stamp[1]
        with self.path.open("rb") as file:
            head = file.read(4)
            file.seek(max(0, size - 8))
            tail = file.read(8)
        if head != _MAGIC or tail[4:] != _MAGIC or size < 12:
            raise self._damage(
                f"truncated or damaged: it must begin and end with {_MAGIC!r}"
            )
        length = int.from_bytes(tail[:4], "little")
        if not 0 < length <= size - 12:
            raise self._damage(f"the footer's length is {length}, of {size} bytes")
        self._check_bytes(size - 8 - length, size)

    def _check_bytes(self, start: int, stop: int) -> None:
        if self._sidecar:
            data = np.memmap(self.path, np.uint8, mode="r").view(np.ndarray)
            self._sidecar.check(data, np.array([start]), np.array([stop]))

    def _span(self, group: Any) -> tuple[int, int]:
        start, stop, size = self.stamp[1], 4, self.stamp[1]
        for i in range(group.num_columns):
            column = group.column(i)
            first = column.data_page_offset
            # Some writers say 0 where there is none.
            if column.has_dictionary_page and column.dictionary_page_offset > 0:
                first = min(first, column.dictionary_page_offset)
            last = first + column.total_compressed_size
            if not 4 <= first <= last <= size:
                raise self._damage(f"a column at bytes {first} to {last} of {size}")
            start, stop = min(start, first), max(stop, last)
        return start, stop

    def load(
        self, chunk: int, leaves: Mapping[str, Leaf], source: Source
    ) -> dict[str, Segments]:
        """Decodes some columns of one row group."""
        pq = _import_parquet()
        start, stop = self.spans[chunk]
        self._check_bytes(start, stop)
        with translated(self.path, start):
            # Opened anew, which costs little with the metadata at hand: one object
            # cannot be used by several threads.
            with pq.ParquetFile(
                self.path,
                metadata=self._metadata,
                page_checksum_verification=self._verified,
            ) as file:
                table = file.read_row_group(self._groups[chunk], columns=list(leaves))
            table.validate()
        if table.num_rows != self.counts[chunk]:
            reason = f"{table.num_rows} examples, expected {self.counts[chunk]}"
            raise DataCorruptionError(self.path, None, start, reason)
        return {
            name: column_of(name, _whole(self.path, table, name), leaf, source)
            for name, leaf in leaves.items()
        }

    def _damage(self, reason: str) -> DataCorruptionError:
        return DataCorruptionError(self.path, None, max(0, self.stamp[1] - 8), reason)


class ParquetWriter:
    """Writes a Parquet file and its checksums beside it; see `Writer`.

    Args:
      path: The file, which must not exist.
      spec: The columns.
      options: How to write it.
    """

    def __init__(
        self, path: Path, spec: Mapping[str, ColumnSpec], options: WriteOptions
    ):
        pq = _import_parquet()
        self._path = path
        self._rows = ArrowRows(spec, tensors=False, class_names=options.class_names)
        self._file = path.open("xb")
        self._writer = pq.ParquetWriter(
            self._file,
            self._rows.schema,
            compression=options.compression or "none",
            # Pixels do not repeat; a dictionary only costs time.
            use_dictionary=False,
            # Else the footer holds two whole images for each row group.
            write_statistics=False,
            write_page_checksum=True,
        )

    def write(self, batch: Mapping[str, np.ndarray]) -> None:
        """See `Writer.write`."""
        for full in self._rows.add(batch):
            self._writer.write_batch(full, row_group_size=self._rows.rows)

    def finish(self) -> None:
        """See `Writer.finish`."""
        for rest in self._rows.rest():
            self._writer.write_batch(rest, row_group_size=self._rows.rows)
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


def _whole(path: Path, table: Any, name: str) -> Any:
    column = table.column(name)
    if column.num_chunks > 1:
        pa = import_pyarrow()
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            raise ValueError(
                f"{path}: a row group has more than 2 GiB in column {name!r}; write "
                "smaller ones (row_group_size=1000)"
            )
        return column
    return column.chunk(0)


def _import_parquet() -> Any:
    import_pyarrow()
    import pyarrow.parquet

    return pyarrow.parquet


def _recognizes(head: bytes) -> bool:
    return head.startswith(_MAGIC)


FORMAT = Format(
    "parquet",
    (".parquet",),
    _recognizes,
    _open,
    ParquetWriter,
    ("lz4", "snappy", "zstd"),
)
