"""Stores of files with Arrow columns: memory-mapped, or decompressed in chunks."""

import abc
import bisect
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._arrow_buffers import (
    Segments,
    Source,
    read_rows,
    read_stretches,
    sample_rows,
)
from jaxaccel.data._arrow_columns import Column
from jaxaccel.data._errors import DataCorruptionError, empty_file
from jaxaccel.data._formats import OpenOptions
from jaxaccel.data._guards import DataWarning
from jaxaccel.data._store import Store, aligned_empty, closed_error, digest

Opener = Callable[[Path, OpenOptions], Store]
Stamp = tuple[str, int, int]


class FileStore(Store):
    """What stores of one file have in common.

    Args:
      opener: Function that opens the file again, in another process.
      source: The file.
      stamp: What `file_stamp` says of it.
      columns: What it holds.
      counts: Number of examples in each of its chunks, at least one.
    """

    def __init__(
        self,
        opener: Opener,
        source: Source,
        stamp: Stamp,
        columns: tuple[Column, ...],
        counts: np.ndarray,
    ):
        super().__init__({column.name: column.spec for column in columns})
        self._opener, self._source, self._stamp = opener, source, stamp
        self._columns, self._ends = columns, np.cumsum(counts)
        self._firsts = self._ends - counts

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self):
        path, options = self._source.path.absolute(), self._source.options
        kept = {"_address": self._address}
        return reopen, (self._opener, path, options, self._stamp), kept

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        columns = [[name, c.shape, c.dtype.str] for name, c in self.spec.items()]
        return digest([self._stamp, columns])


class ArrowStore(FileStore):
    """A file whose uncompressed buffers are memory-mapped; see `FileStore`.

    Args:
      opener: See `FileStore`.
      source: See `FileStore`.
      stamp: See `FileStore`.
      columns: See `FileStore`.
      counts: See `FileStore`.
      segments: Where each column is, by name.
    """

    _sampled = "spread"

    def __init__(
        self,
        opener: Opener,
        source: Source,
        stamp: Stamp,
        columns: tuple[Column, ...],
        counts: np.ndarray,
        segments: Mapping[str, Segments],
    ):
        super().__init__(opener, source, stamp, columns, counts)
        self._segments: dict[str, Segments] = dict(segments)
        # Numbers of Python are faster than NumPy's, one by one.
        self._edges = [0, *self._ends.tolist()]

    def close(self) -> None:
        """See `Store.close`."""
        self._segments = _Closed(self._source.path)

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        if len(rows) and not self._unchecked():
            if rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
                return self._read_stretch(int(rows[0]), int(rows[-1]) + 1)
        return self._read_rows(self._columns, rows)

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        chunks = np.searchsorted(self._ends, rows, side="right")
        place = chunks, rows - self._firsts[chunks], rows, self._source
        return dict(
            sample_rows(c, self._segments[c.name], *place) for c in self._columns
        )

    def _read_rows(
        self, columns: Iterable[Column], rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        chunks = np.searchsorted(self._ends, rows, side="right")
        within = rows - self._firsts[chunks]
        return {
            c.name: read_rows(
                c, self._segments[c.name], chunks, within, rows, self._source
            )
            for c in columns
        }

    def _scan(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            if self._unchecked():
                yield self._read_rows(self._columns, np.arange(start, stop))
            else:
                yield self._read_stretch(start, stop)

    def _unchecked(self) -> bool:
        checksums = self._source.checksums
        return checksums is not None and not checksums.complete

    def _read_stretch(self, start: int, stop: int) -> dict[str, np.ndarray]:
        chunk, edges = bisect.bisect_right(self._edges, start) - 1, self._edges
        if stop <= edges[chunk + 1]:
            parts = [(chunk, start - edges[chunk], stop - start)]
        else:
            parts = self._parts(chunk, start, stop)
        out = {}
        for c in self._columns:
            if c.leaf.kind == "fixed":
                out[c.name] = read_stretches(
                    c, self._segments[c.name], parts, stop - start
                )
            else:
                out |= self._read_rows([c], np.arange(start, stop))
        return out

    def _parts(self, chunk: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        parts = []
        while start < stop:
            end = min(self._edges[chunk + 1], stop)
            parts.append((chunk, start - self._edges[chunk], end - start))
            chunk, start = chunk + 1, end
        return parts


class _Closed(dict[str, Segments]):
    def __init__(self, path: Path):
        super().__init__()
        self._path = path

    def __missing__(self, name: str) -> Segments:
        raise closed_error(self._path)


class ChunkedStore(FileStore):
    """A file whose chunks are decoded as a whole; the last ones are kept.

    Files that are opened together share the memory for that.

    Args:
      opener: See `FileStore`.
      source: See `FileStore`.
      stamp: See `FileStore`.
      columns: See `FileStore`.
      counts: See `FileStore`.
    """

    _sampled = "first"

    def __init__(
        self,
        opener: Opener,
        source: Source,
        stamp: Stamp,
        columns: tuple[Column, ...],
        counts: np.ndarray,
    ):
        super().__init__(opener, source, stamp, columns, counts)
        self._lock, self._part = threading.Lock(), object()
        self._cache = source.options.cache
        self._cache.join(self._part, self._decoded_bytes())
        self._closed = False

    @abc.abstractmethod
    def _load(self, chunk: int) -> Mapping[str, Segments]:
        # Each column of one chunk, decoded.
        ...

    @abc.abstractmethod
    def _chunk_source(self, chunk: int) -> Source: ...

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True
            self._cache.leave(self._part)

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        chunks = np.searchsorted(self._ends, rows, side="right")
        used = np.unique(chunks)
        scattered = len(used) > 1 and (np.diff(rows) != 1).any()
        if scattered or self._cache.is_wasted:
            self._warn_of_random_reads()
        if len(used) == 1:
            return self._read_chunk(int(used[0]), rows)
        out = {
            name: aligned_empty((len(rows), *spec.shape), spec.dtype)
            for name, spec in self.spec.items()
        }
        for chunk in used:
            places = np.flatnonzero(chunks == chunk)
            for name, array in self._read_chunk(int(chunk), rows[places]).items():
                out[name][places] = array
        return out

    def _read_chunk(self, chunk: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        loaded = self._loaded(chunk, len(rows))
        first, source = self._firsts[chunk], self._chunk_source(chunk)
        zeros = np.zeros(len(rows), np.int64)
        return {
            c.name: read_rows(c, loaded[c.name], zeros, rows - first, rows, source)
            for c in self._columns
        }

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        chunks = np.searchsorted(self._ends, rows, side="right")
        out: dict[str, list[Any]] = {}
        # In order, so that each chunk is decoded once and the rows stay in theirs.
        for chunk in np.unique(chunks).tolist():
            mine = rows[chunks == chunk]
            loaded, source = self._loaded(chunk, len(mine)), self._chunk_source(chunk)
            place = np.zeros_like(mine), mine - self._firsts[chunk], mine, source
            for c in self._columns:
                name, values = sample_rows(c, loaded[c.name], *place)
                out.setdefault(name, []).extend(values)
        return dict(out)

    def _loaded(self, chunk: int, rows: int) -> Mapping[str, Segments]:
        # Two threads that need the same chunk decode it once.
        with self._lock:
            if self._closed:
                raise closed_error(self._source.path)
            loaded = self._cache.get(self._part, chunk, rows)
            if loaded is None:
                loaded, held = self._load(chunk), self._ends - self._firsts
                self._cache.put(
                    self._part,
                    chunk,
                    loaded,
                    nbytes=_size(loaded),
                    rows=int(held[chunk]),
                )
            return loaded

    def _warn_of_random_reads(self) -> None:
        rows = int((self._ends - self._firsts).max())
        if rows == 1 or not self._cache.is_too_small():
            return
        warnings.warn(
            f"{self._source.path} is read in random order, but is decoded in chunks of "
            f"up to {rows} examples, of which {self._cache.max_bytes >> 20} MiB are "
            "kept: almost every read decodes whole chunks. Convert it once to an Arrow "
            "file without compression, which is memory-mapped: "
            "jaxaccel.data.convert(src, dst, format='arrow')",
            DataWarning,
            stacklevel=2,
        )

    def _decoded_bytes(self) -> int:
        binary = any(column.leaf.kind == "binary" for column in self._columns)
        fixed = sum(c.size for c in self._columns if c.leaf.kind == "fixed")
        return len(self) * fixed + binary * self._stamp[1]


def file_stamp(path: Path) -> Stamp:
    """Name, size and modification time of a file that is not empty."""
    status = path.stat()
    if not status.st_size:
        raise empty_file(path)
    return path.name, status.st_size, status.st_mtime_ns


def reopen(opener: Opener, path: Path, options: OpenOptions, stamp: Stamp) -> Store:
    """Opens a file that a pickled store referred to; it must be the same."""
    if file_stamp(path) != stamp:
        raise ValueError(f"{path} was changed since it was opened; open it again")
    return opener(path, options)


@contextlib.contextmanager
def translated(path: Path, offset: int) -> Iterator[None]:
    """Makes DataCorruptionError of the errors that damage causes inside pyarrow.

    Args:
      path: The file.
      offset: What is read from it.
    """
    try:
        yield
    except (DataCorruptionError, ImportError):
        raise
    except NotImplementedError as error:
        raise ValueError(
            f"{path} cannot be read, as pyarrow does not support it: {error}"
        ) from error
    except MemoryError as error:
        reason = f"damaged, or too large for the memory: {error}"
        raise DataCorruptionError(path, None, offset, reason) from error
    except Exception as error:
        # A number is the operating system's: the file may be fine.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = f"damaged: {_first_line(error)}"
        raise DataCorruptionError(path, None, offset, reason) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _size(segments: Mapping[str, Segments]) -> int:
    # A column without offsets refers to its values twice.
    memories = {
        id(m): m for s in segments.values() for m in (s.memory, s.offset_memory)
    }
    return sum(map(len, memories.values()))
