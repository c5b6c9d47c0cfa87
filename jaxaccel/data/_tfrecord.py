"""TFRecord files, read and written without TensorFlow."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._example_reader import ExampleReader
from jaxaccel.data._example_writer import ExampleWriter
from jaxaccel.data._formats import Format, OpenOptions, WriteOptions
from jaxaccel.data._record_index import MappedFile, cached_index
from jaxaccel.data._sidecar import Checksums, sync, write_checksums
from jaxaccel.data._store import ColumnSpec, Store, digest
from jaxaccel.data._tfrecord_frames import (
    FOOTER,
    HEADER,
    Frames,
    frame,
    is_header,
    require_crc32c,
    walk,
)

_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")


class TFRecordStore(Store):
    """The records of one TFRecord file; `ExampleReader` says what they may hold."""

    _sampled = "spread"

    def __init__(self, path: Path, options: OpenOptions):
        self._file, self._options = MappedFile(path), options
        head = bytes(self._file.data[:2])
        if head == b"\x1f\x8b" or path.name.endswith(".gz"):
            raise ValueError(
                f"{path} is compressed as a whole, so its records cannot be found "
                "without reading all of it; decompress it: gunzip <file>"
            )
        if options.checksums:
            require_crc32c("reading a TFRecord file with checksums")
            # The file's own checksums do not tell that it was cut between records.
            Checksums.load(path)
        index = cached_index(self._file, self._index, self._fits)
        self._starts, self._lengths = index["starts"], index["lengths"]
        data, first = self._file.data, np.zeros(1, np.int64)
        self._frames(data, 0, first).check(options.checksums)
        start, length = int(self._starts[0]), int(self._lengths[0])
        record: Any = data[start : start + length]
        self._reader = ExampleReader(path, memoryview(record), start, options)
        super().__init__(self._reader.spec)

    def __len__(self) -> int:
        return len(self._starts)

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        file, options = self._file, self._options
        what = [repr(dict(self.spec)), options.image_size, options.image_mode]
        return digest([file.path.name, file.size, file.mtime_ns, what])

    def close(self) -> None:
        """See `Store.close`."""
        self._file.close()

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self._columns(self._file.data, 0, rows)

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        frames = self._frames(self._file.data, 0, rows)
        frames.check(self._options.checksums)
        place = frames.starts, frames.lengths, frames.where
        return self._reader.sample(self._file.data, *place)

    def _scan(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        # Reading into one buffer again and again is faster than the mapping, whose
        # pages each cost a fault.
        buffer = self._file.data[:0]  # An error where the store is closed.
        with self._file.path.open("rb", buffering=0) as file:
            for start in range(0, len(self), size):
                rows = np.arange(start, min(start + size, len(self)))
                begin = int(self._starts[rows[0]]) - HEADER
                end = int(self._starts[rows[-1]] + self._lengths[rows[-1]]) + FOOTER
                if len(buffer) < end - begin:
                    buffer = np.empty(end - begin, np.uint8)
                self._fill(file, buffer[: end - begin], begin)
                yield self._columns(buffer, begin, rows)

    def _fill(self, file: io.FileIO, buffer: np.ndarray, offset: int) -> None:
        file.seek(offset)
        while len(buffer):
            count = file.readinto(buffer.data)
            if not count:
                reason = f"{self._file.size} bytes when it was opened, now fewer"
                raise DataCorruptionError(self._file.path, None, file.tell(), reason)
            buffer = buffer[count:]

    def _columns(
        self, data: np.ndarray, base: int, rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        frames = self._frames(data, base, rows)
        frames.check(self._options.checksums)
        return self._reader.read(data, frames.starts, frames.lengths, frames.where)

    def _frames(self, data: np.ndarray, base: int, rows: np.ndarray) -> Frames:
        starts, lengths = self._starts[rows] - base, self._lengths[rows]
        return Frames(self._file.path, data, base, rows, starts, lengths)

    def _index(self) -> dict[str, np.ndarray]:
        path, data = self._file.path, self._file.data
        starts, lengths, problem = walk(data)
        if self._options.checksums:
            # One damaged length leads to others; the first is to blame.
            rows = np.arange(len(starts))
            Frames(path, data, 0, rows, starts, lengths).check_lengths()
        if problem:
            raise DataCorruptionError(path, len(starts), *problem)
        return {"starts": starts, "lengths": lengths}

    def _fits(self, index: dict[str, np.ndarray]) -> bool:
        starts, lengths = index.get("starts"), index.get("lengths")
        if starts is None or lengths is None or index.keys() != {"starts", "lengths"}:
            return False
        kinds = starts.dtype == lengths.dtype == np.int64 and starts.ndim == 1
        if not kinds or starts.shape != lengths.shape or not len(starts):
            return False
        nexts = np.append(starts[1:], self._file.size + HEADER)
        good = lengths.min() >= 0 and starts[0] == HEADER
        return bool(good and (starts + lengths + FOOTER + HEADER == nexts).all())


class _Writer:
    def __init__(
        self, path: Path, spec: Mapping[str, ColumnSpec], options: WriteOptions
    ):
        del options
        require_crc32c("writing a TFRecord file")
        self._examples = ExampleWriter(spec)
        self._path, self._file = path, path.open("wb")

    def write(self, batch: Mapping[str, np.ndarray]) -> None:
        for record in self._examples.records(batch):
            self._file.write(frame(record))

    def finish(self) -> None:
        sync(self._file)
        self._file.close()
        # Its length alone tells that a file was cut between two records.
        write_checksums(self._path)

    def abort(self) -> None:
        self._file.close()


FORMAT = Format("tfrecord", _SUFFIXES, is_header, TFRecordStore, _Writer)
