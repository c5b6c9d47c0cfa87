"""ArrayRecord files, read in batches through the `array_record` package."""

import errno
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._decode import Where
from jaxaccel.data._errors import DataCorruptionError, empty_file
from jaxaccel.data._example_reader import ExampleReader
from jaxaccel.data._example_writer import ExampleWriter
from jaxaccel.data._formats import Format, OpenOptions, WriteOptions
from jaxaccel.data._store import ColumnSpec, Store, closed_error, digest

_SUFFIXES = (".array_record", ".arrayrecord")
# The first 24 bytes of a Riegeli file: a block's header, whose content is fixed.
_HEAD = bytes.fromhex("83af70d10d884a3f" + "00" * 8 + "40" + "00" * 7)
# Reading ahead would only pay where the records come in order.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class ArrayRecordStore(Store):
    """The records of one ArrayRecord file; `ExampleReader` says what they may hold.

    The format has checksums of its own, which are compared whenever it is read.
    """

    _sampled = "spread"

    def __init__(self, path: Path, options: OpenOptions):
        self._path, self._options = path, options
        status = path.stat()
        self._size, self._mtime_ns = status.st_size, status.st_mtime_ns
        self._reader: Any = None
        self._closed = False
        self._length = self._opened().num_records()
        if not self._length:
            raise empty_file(path)
        record = memoryview(self._records(np.zeros(1, np.int64))[0])
        self._examples = ExampleReader(path, record, 0, options)
        super().__init__(self._examples.spec)

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reader": None, "_path": self._path.absolute()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        status = self._path.stat()
        if (status.st_size, status.st_mtime_ns) != (self._size, self._mtime_ns):
            reason = f"the file changed after the store was pickled: {self._size} bytes"
            raise DataCorruptionError(self._path, None, 0, reason)

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        options = self._options
        what = [repr(dict(self.spec)), options.image_size, options.image_mode]
        return digest([self._path.name, self._size, self._mtime_ns, what])

    def close(self) -> None:
        """See `Store.close`."""
        reader, self._reader, self._closed = self._reader, None, True
        if reader is not None:
            reader.close()

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self._columns(self._records(rows), rows)

    def _scan(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, self._length, size):
            rows = np.arange(start, min(start + size, self._length))
            yield self._columns(self._records(rows, in_order=True), rows)

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        return self._examples.sample(*self._joined(self._records(rows), rows))

    def _columns(self, records: list[bytes], rows: np.ndarray) -> dict[str, np.ndarray]:
        return self._examples.read(*self._joined(records, rows))

    def _joined(
        self, records: list[bytes], rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Where]:
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        data = np.frombuffer(b"".join(records), np.uint8)
        starts = np.cumsum(lengths) - lengths
        # Where a record is in the file, the package does not say.
        return data, starts, lengths, lambda i: (self._path, int(rows[i]), 0)

    def _records(self, rows: np.ndarray, in_order: bool = False) -> list[bytes]:
        reader = self._opened()
        if not len(rows):
            return []
        try:
            if in_order:
                return reader.read(int(rows[0]), int(rows[-1]) + 1)
            return reader.read(rows.tolist())
        except RuntimeError as error:
            # From now on it would only repeat the error.
            self._reader = None
            raise self._damage(error, self._first_bad(rows)) from error

    def _first_bad(self, rows: np.ndarray) -> int | None:
        reader = self._opened()
        for row in rows.tolist():
            try:
                reader.read([row])
            except RuntimeError:
                self._reader = None
                return row
        return None

    def _opened(self) -> Any:
        if self._closed:
            raise closed_error(self._path)
        # Several threads may each make one, and read from it.
        reader = self._reader
        if reader is None:
            if not self._size:
                raise empty_file(self._path)
            reader = _module().ArrayRecordReader(str(self._path), _OPTIONS)
            if not reader.ok():
                # It says why only when it is closed.
                try:
                    reader.close()
                except RuntimeError as error:
                    raise self._damage(error, None) from error
            self._reader = reader
        return reader

    def _damage(self, error: RuntimeError, row: int | None) -> DataCorruptionError:
        text = " ".join(str(error).split())
        place = re.search(r"chunk at (\d+)|byte (\d+)", text)
        offset = int(place[1] or place[2]) if place else 0
        return DataCorruptionError(self._path, row, offset, text)


class _Writer:
    def __init__(
        self, path: Path, spec: Mapping[str, ColumnSpec], options: WriteOptions
    ):
        self._path, self._examples = path, ExampleWriter(spec)
        # Larger groups would have to be decompressed for each of their records.
        self._writer: Any = _module().ArrayRecordWriter(
            str(path), f"group_size:1,{options.compression or 'uncompressed'}"
        )

    def write(self, batch: Mapping[str, np.ndarray]) -> None:
        try:
            for record in self._examples.records(batch):
                self._writer.write(record)
        except RuntimeError as error:
            raise self._failure(error) from error

    def finish(self) -> None:
        self.abort()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def abort(self) -> None:
        try:
            self._writer.close()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> OSError:
        # The package says in words what the operating system said with a number.
        known = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        code = next((n for n in known if os.strerror(n) in str(error)), errno.EIO)
        return OSError(code, f"writing failed: {error}", str(self._path))


def _module() -> Any:
    # Slow to import. Of an extension, a type checker sees nothing.
    return importlib.import_module("array_record.python.array_record_module")


def _recognizes(head: bytes) -> bool:
    return head.startswith(_HEAD)


FORMAT = Format(
    "array_record", _SUFFIXES, _recognizes, ArrayRecordStore, _Writer, ("zstd",)
)
