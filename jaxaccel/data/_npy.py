"""Stores of `.npy` and IDX files: a file of either, or a folder of `<column>.npy`."""

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxaccel.data import _class_names as class_names
from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._disk import sync, sync_folder
from jaxaccel.data._files import open_array
from jaxaccel.data._formats import Format, OpenOptions, WriteOptions
from jaxaccel.data._integers import can_cast, cast_integers
from jaxaccel.data._mapped import MappedStore
from jaxaccel.data._sidecar import BlockCrcs
from jaxaccel.data._store import ColumnSpec, Store

_CHUNK = 1 << 22


def open_columns(
    columns: Mapping[str, object],
    wanted: Mapping[str, ColumnSpec] | None,
    *,
    checksums: bool,
) -> Store:
    """Opens arrays and paths of `.npy` and IDX files as one store."""
    sources = {
        name: Path(column) if isinstance(column, (str, os.PathLike)) else column
        for name, column in columns.items()
    }
    sources = _chosen("the mapping", sources, wanted)
    if not any(isinstance(source, Path) for source in sources.values()):
        store = ArrayStore(sources)  # type: ignore
    else:
        store = MappedStore(sources, checksums=checksums)  # type: ignore
    return cast_integers(_checked("the mapping", store, wanted), wanted)


def _open(path: Path, options: OpenOptions) -> Store:
    if path.is_dir():
        files = {_column(file): file for file in sorted(path.glob("*.npy"))}
    elif path.suffix == ".npy":
        files = {_column(path): path}
    else:
        files = {"image" if open_array(path).ndim >= 3 else "label": path}
    files = _chosen(str(path), files, options.columns)
    store = MappedStore(files, checksums=options.checksums)
    names = path / class_names.FILE
    if path.is_dir() and names.is_file():
        store.class_names = class_names.read_names(names, names.read_bytes())
    return _checked(str(path), store, options.columns)


def _chosen(
    place: str, columns: Mapping[str, Any], wanted: Mapping[str, ColumnSpec] | None
) -> dict[str, Any]:
    missing = [name for name in wanted or () if name not in columns]
    if missing:
        raise ValueError(
            f"{place} has no column {missing}; columns must name some of "
            f"{sorted(columns)}"
        )
    return {name: columns[name] for name in (columns if wanted is None else wanted)}


def _checked(
    place: str, store: Store, wanted: Mapping[str, ColumnSpec] | None
) -> Store:
    for name, spec in (wanted or {}).items():
        if not can_cast(store.spec[name], spec):
            store.close()
            raise ValueError(
                f"{place}: column {name!r} is {_text(store.spec[name])}, not "
                f"{_text(spec)}; integers may be read in another width, nothing else"
            )
    return store


def _text(spec: ColumnSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _recognizes(head: bytes) -> bool:
    return head.startswith(b"\x93NUMPY")


def _create(
    path: Path, spec: Mapping[str, ColumnSpec], options: WriteOptions
) -> "NpyWriter":
    return NpyWriter(path, spec, options.length, options.class_names)


FORMAT = Format("npy", (".npy",), _recognizes, _open, _create)


class NpyWriter:
    """Writes a folder of `<column>.npy`, each with its checksums.

    A slash in a column's name becomes `%2F` in its file's name.

    Args:
      path: The folder, which must not exist.
      spec: The columns.
      length: How many examples will be written.
      names: Names of the labels, which become `class_names.json`.
    """

    def __init__(
        self,
        path: Path,
        spec: Mapping[str, ColumnSpec],
        length: int,
        names: Sequence[str] | None = None,
    ):
        path.mkdir()
        self._start(path, spec, length)
        try:
            if names is not None:
                with (path / class_names.FILE).open("xb") as file:
                    file.write(class_names.write_names(names))
                    sync(file)
            for name in spec:
                self._files[name] = _file(path, name).open("xb", buffering=0)
                self._append(name, _header(spec[name], length))
        except BaseException:
            self.abort()
            raise

    def _start(self, path: Path, spec: Mapping[str, ColumnSpec], length: int) -> None:
        self._path, self._spec, self._length = path, dict(spec), length
        self._files: dict[str, BinaryIO] = {}
        self._crcs = {name: BlockCrcs() for name in spec}
        self.rows = 0

    @classmethod
    def resume(
        cls,
        path: Path,
        spec: Mapping[str, ColumnSpec],
        length: int,
        rows: int,
        digests: Mapping[str, int],
    ) -> "NpyWriter | None":
        """Continues a folder that was left unfinished.

        Args:
          path: The folder.
          spec: The columns.
          length: How many examples there will be.
          rows: How many of them are known to be there; more are cut off.
          digests: What `checkpoint` returned at that time.

        Returns:
          The writer, or None where the files are not as they were.
        """
        writer = cls.__new__(cls)
        writer._start(path, spec, length)
        try:
            intact = all(writer._reopen(name, rows, digests.get(name)) for name in spec)
        except FileNotFoundError:
            intact = False
        except BaseException:
            writer.abort()
            raise
        if not intact:
            writer.abort()
            return None
        writer.rows = rows
        return writer

    def write(self, batch: Mapping[str, np.ndarray]) -> None:
        """See `Writer.write`."""
        lengths = {len(batch[name]) for name in self._spec}
        count = lengths.pop()
        if lengths or self.rows + count > self._length:
            raise ValueError(
                f"{self._length} examples of {list(self._spec)} were announced, got "
                f"batches that do not fit after {self.rows}"
            )
        marks = {name: crcs.mark() for name, crcs in self._crcs.items()}
        try:
            for name in self._spec:
                self._write_column(name, np.ascontiguousarray(batch[name]))
        except BaseException:
            # A torn batch is no part of what `checkpoint` vouches for; on a full disk
            # its room is needed to note the rest.
            for name, mark in marks.items():
                self._crcs[name].back(mark)
                with contextlib.suppress(OSError):
                    self._files[name].seek(self._crcs[name].size)
                    self._files[name].truncate()
            raise
        self.rows += count

    def _write_column(self, name: str, array: np.ndarray) -> None:
        spec = self._spec[name]
        if array.dtype != spec.dtype or array.shape[1:] != spec.shape:
            raise ValueError(
                f"column {name!r} must be {spec.dtype}{list(spec.shape)}, got "
                f"{array.dtype}{list(array.shape[1:])}"
            )
        self._append(name, array.reshape(-1).view(np.uint8).data)

    def checkpoint(self) -> dict[str, int]:
        """Brings all rows so far onto the disk; returns a number for each column."""
        for file in self._files.values():
            sync(file)
        return self.digests()

    def digests(self) -> dict[str, int]:
        """A number for each column that stands for its bytes so far."""
        return {name: crcs.digest() for name, crcs in self._crcs.items()}

    def finish(self) -> None:
        """See `Writer.finish`."""
        if self.rows != self._length:
            raise ValueError(f"{self._length} examples were announced, got {self.rows}")
        self.checkpoint()
        self.abort()
        for name, crcs in self._crcs.items():
            crcs.save(_file(self._path, name))
        sync_folder(self._path)

    def abort(self) -> None:
        """See `Writer.abort`."""
        for file in self._files.values():
            file.close()

    def _append(self, name: str, content: bytes | memoryview) -> None:
        self._crcs[name].update(content)
        rest = memoryview(content)
        while rest:
            # An unbuffered file may take less than it is given.
            rest = rest[self._files[name].write(rest) :]

    def _reopen(self, name: str, rows: int, digest: int | None) -> bool:
        spec = self._spec[name]
        header = _header(spec, self._length)
        row_bytes = int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
        size = len(header) + rows * row_bytes
        file = self._files[name] = _file(self._path, name).open("r+b", buffering=0)
        if file.seek(0, os.SEEK_END) < size:
            return False
        file.seek(0)
        crcs = self._crcs[name]
        while crcs.size < size:
            content = file.read(min(_CHUNK, size - crcs.size))
            if not crcs.size and content[: len(header)] != header:
                return False
            crcs.update(content)
        file.truncate()
        return crcs.digest() == digest


def _header(spec: ColumnSpec, length: int) -> bytes:
    content = io.BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(spec.dtype),
        "fortran_order": False,
        "shape": (length, *spec.shape),
    }
    np.lib.format.write_array_header_1_0(content, fields)
    return content.getvalue()


def _file(folder: Path, column: str) -> Path:
    return folder / (column.replace("%", "%25").replace("/", "%2F") + ".npy")


def _column(file: Path) -> str:
    return file.stem.replace("%2F", "/").replace("%25", "%")
