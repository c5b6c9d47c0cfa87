"""The work of convert: rows from a store to the files of a format."""

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data import _npy
from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._bar import Bar
from jaxaccel.data._disk import is_full, require_space, size_text
from jaxaccel.data._formats import Format, OpenOptions, WriteOptions
from jaxaccel.data._integers import IntegerStore
from jaxaccel.data._npy import NpyWriter
from jaxaccel.data._partial import Partial, locked, remove
from jaxaccel.data._sidecar import WITH_CHECKSUMS, sidecar_path, write_checksums
from jaxaccel.data._store import ConcatStore, SliceStore, Store

_BATCH_BYTES = 16 << 20
_SECONDS_BETWEEN_NOTES = 2.0


@dataclasses.dataclass(frozen=True)
class Target:
    """What a conversion makes.

    Attributes:
      destination: As in `convert`.
      parts: Names of the files beside it.
      known: Their format.
      compression: As in `WriteOptions`.
    """

    destination: Path
    parts: list[str]
    known: Format
    compression: str | None = None

    @property
    def finals(self) -> list[Path]:
        """The files' final paths."""
        return [self.destination.with_name(part) for part in self.parts]


def write_store(
    store: Store,
    target: Target,
    *,
    size: int,
    progress: bool,
    overwrite: bool = False,
    wait: bool = False,
) -> None:
    """Writes a store, going on where an earlier attempt stopped.

    Args:
      store: Where the examples come from.
      target: Where they go.
      size: Examples in a batch.
      progress: Whether to show how far it is.
      overwrite: Whether existing files are replaced.
      wait: Whether to wait for another process that writes the same, and to leave
        what it wrote; False raises.
    """
    job = {
        "version": 1,
        "source": store.fingerprint(),
        "length": len(store),
        "columns": {n: [str(s.dtype), s.shape] for n, s in store.spec.items()},
        "class_names": store.class_names,
        "format": target.known.name,
        "compression": target.compression,
        "parts": target.parts,
    }
    with locked(target.destination, wait=wait):
        partial = Partial(target.destination, job)
        try:
            if not partial.publishing:
                if wait and target.destination.exists():
                    return partial.discard()
                refuse_existing(target.finals, overwrite)
                work = _Conversion(store, partial, target, size)
                work.probe()
                work.run(progress)
            partial.publish(target.parts)
        except BaseException:
            if partial.is_fresh:
                partial.discard()
            raise


def refuse_existing(finals: list[Path], overwrite: bool) -> None:
    """Raises FileExistsError if a file exists that must not be replaced."""
    existing = [final for final in finals if final.exists()]
    if existing and not overwrite:
        raise FileExistsError(
            f"{existing[0]} exists; pass overwrite=True to replace it, or choose "
            "another destination"
        )


def batch_rows(store: Store) -> int:
    """How many examples of a store are a batch of some megabytes."""
    return max(1, min(4096, _BATCH_BYTES // max(1, row_bytes(store))))


def row_bytes(store: Store) -> int:
    """Bytes of one decoded example."""
    return sum(
        math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
        for spec in store.spec.values()
    )


def _is_plain(store: Store) -> bool:
    # Reading it again costs no more than reading what was staged.
    if isinstance(store, ConcatStore):
        return all(_is_plain(part) for part in store._stores)
    if isinstance(store, (SliceStore, IntegerStore)):
        return _is_plain(store._store)
    return isinstance(store, ArrayStore)


class _Conversion:
    """Writes all parts of a target into its partial folder."""

    def __init__(self, store: Store, partial: Partial, target: Target, size: int):
        self._store, self._partial, self._size = store, partial, size
        self._known, self._compression = target.known, target.compression
        # An npy folder is its own stage.
        self._in_place = self._known is _npy.FORMAT
        self._staged = not self._in_place and not _is_plain(store)
        count = len(target.parts)
        ends = [len(store) * (i + 1) // count for i in range(count)]
        ranges = zip([0, *ends[:-1]], ends, strict=True)
        self._parts = dict(zip(target.parts, ranges, strict=True))
        self._row_bytes = row_bytes(store)
        self._feed = _Feed(store, size)

    def run(self, progress: bool) -> None:
        """Writes what is missing."""
        missing = {
            part: rows
            for part, rows in self._parts.items()
            if not self._partial.is_finished(part)
        }
        steps = len(self._store) * (2 if self._staged else 1)
        description = f"convert to {self._known.name}"
        with self._explained(), Bar(steps, description, enabled=progress) as self._bar:
            self._require_space(missing)
            self._done = steps - self._steps(missing)
            for part, (start, stop) in missing.items():
                if self._in_place or self._staged:
                    self._stage(part, start, stop)
                self._write(part, start, stop)
                self._partial.finish(part)

    def _steps(self, missing: Mapping[str, tuple[int, int]]) -> int:
        rows = sum(stop - start for start, stop in missing.values())
        return rows * (2 if self._staged else 1)

    def _stage(self, part: str, start: int, stop: int) -> None:
        writer = self._open_stage(part, stop - start)
        noted = time.monotonic()
        self._advance(writer.rows)
        try:
            for batch in self._feed.batches(start + writer.rows, stop):
                writer.write(batch)
                self._advance(_length(batch))
                if time.monotonic() - noted >= _SECONDS_BETWEEN_NOTES:
                    self._note(part, writer)
                    noted = time.monotonic()
            writer.finish()
        except BaseException:
            # What is there is worth keeping, but this must not hide the cause.
            with contextlib.suppress(OSError):
                self._note(part, writer)
            raise
        finally:
            writer.abort()
        self._note(part, writer, synced=True)

    def _open_stage(self, part: str, length: int) -> NpyWriter:
        folder, spec = self._partial.staging, self._store.spec
        rows, digests = self._partial.staged(part)
        if rows:
            writer = NpyWriter.resume(folder, spec, length, rows, digests)
            if writer is not None:
                return writer
        shutil.rmtree(folder, ignore_errors=True)
        names = self._store.class_names if self._in_place else None
        return NpyWriter(folder, spec, length, names)

    def _note(self, part: str, writer: NpyWriter, *, synced: bool = False) -> None:
        digests = writer.digests() if synced else writer.checkpoint()
        self._partial.note_staged(part, writer.rows, digests)

    def _write(self, part: str, start: int, stop: int) -> None:
        path = self._partial.output / part
        self._partial.remove_output(part)
        if self._in_place:
            os.rename(self._partial.staging, path)
            return
        if self._staged:
            staged = _npy.FORMAT.open(self._partial.staging, OpenOptions())
            batches = staged.scan(self._size)
        else:
            batches = self._feed.batches(start, stop)
        writer = self._create(path, stop - start)
        try:
            for batch in batches:
                writer.write(batch)
                self._advance(_length(batch))
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        if self._known.name not in WITH_CHECKSUMS and not sidecar_path(path).exists():
            write_checksums(path)

    def probe(self) -> None:
        """Raises what the format has against the columns, before anything is done."""
        path = self._partial.folder / f"probe-{next(iter(self._parts))}"
        # An earlier attempt may have been killed right here.
        remove(path)
        self._create(path, len(self._store)).abort()
        remove(path)

    def _create(self, path: Path, length: int) -> Any:
        assert self._known.create is not None
        options = WriteOptions(self._compression, length, self._store.class_names)
        return self._known.create(path, self._store.spec, options)

    def _advance(self, rows: int) -> None:
        self._done += rows
        self._bar.update(self._done)

    def _require_space(self, missing: Mapping[str, tuple[int, int]]) -> None:
        lengths = [stop - start for start, stop in missing.values()]
        # A compressed size is not known before.
        rows = sum(lengths) if self._compression is None else 0
        if self._staged:
            rows += max(lengths, default=0)
        there = sum(self._partial.staged(part)[0] for part in missing)
        needed = max(0, rows - there) * self._row_bytes
        require_space(self._partial.folder, needed, f"{self._partial.destination}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not is_full(error) or error.filename == str(self._partial.folder):
                raise
            size = size_text(len(self._store) * self._row_bytes)
            room = ", and as much again for staging" if self._staged else ""
            raise OSError(
                error.errno,
                f"{error.strerror}. {self._partial.destination} takes about {size} "
                f"uncompressed{room}; make room and make the same call again, which "
                "goes on where this one stopped",
                str(self._partial.folder),
            ) from error


class _Feed:
    """Batches of consecutive rows, cut where a part ends."""

    def __init__(self, store: Store, size: int):
        self._store, self._size = store, size
        self._next = -1
        self._rest: dict[str, np.ndarray] = {}
        self._batches: Iterator[dict[str, np.ndarray]] = iter(())

    def batches(self, start: int, stop: int) -> Iterator[dict[str, np.ndarray]]:
        """Reads the rows from `start` to `stop`, cheapest after those before."""
        if start >= stop:
            return
        if start != self._next:
            store = self._store[start:] if start else self._store
            self._batches, self._rest = store.scan(self._size), {}
            self._next = start
        while self._next < stop:
            batch = self._rest or next(self._batches)
            count = min(_length(batch), stop - self._next)
            self._rest = {}
            if count < _length(batch):
                self._rest = {name: array[count:] for name, array in batch.items()}
                batch = {name: array[:count] for name, array in batch.items()}
            self._next += count
            yield batch


def _length(batch: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(batch.values())))
