"""The store of memory-mapped files, checked where they have a sidecar."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._files import open_array
from jaxaccel.data._sidecar import BLOCK, Checksums
from jaxaccel.data._store import slice_range


class MappedStore(ArrayStore):
    """Columns in `.npy` and IDX files.

    Where a file has a sidecar, a row is compared with its checksums the first time
    it is read. A pickled store refers to its files by their paths.

    Args:
      sources: The path of each column's file, or an array.
      checksums: False reads without comparing.
    """

    def __init__(self, sources: Mapping[str, Path | np.ndarray], *, checksums: bool):
        opened = {name: _open(source, checksums) for name, source in sources.items()}
        super().__init__({name: array for name, (array, _) in opened.items()})
        self._sources = {
            name: source.absolute() if isinstance(source, Path) else source
            for name, source in sources.items()
        }
        self._checked = checksums
        self._guards = {name: guard for name, (_, guard) in opened.items() if guard}
        self._rows = range(self._length)

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """The arrays by name, compared with their checksums as a whole."""
        for guard in self._guards.values():
            guard.check_all()
        return super().columns

    def __getitem__(self, rows: slice) -> "MappedStore":
        """A store over a slice of the rows, sharing their memory."""
        slice_range(rows, self._length)
        # Sharing the guards, too, with what they have seen.
        part = copy.copy(self)
        part._rows = self._rows[rows]
        part._columns = {name: c[rows] for name, c in self._columns.items()}
        part._length = len(part._rows)
        return part

    # The mapping would be pickled as an array, with all of its bytes.
    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self._sources, "checked": self._checked, "rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MappedStore.__init__(self, state["sources"], checksums=state["checked"])
        rows = state["rows"]
        if rows and max(rows[0], rows[-1]) >= self._length:
            raise ValueError(
                f"the files {self._sources} became shorter while the store was pickled"
            )
        if rows != self._rows:
            stop = rows.stop if rows.stop >= 0 else None
            vars(self).update(vars(self[rows.start : stop : rows.step]))

    def _checksum(self, name: str) -> object:
        if name not in self._guards:
            return super()._checksum(name)
        rows = (self._rows[0], self._rows[-1], len(self._rows))
        return [self._guards[name].checksums.digest(), rows]

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        if self._guards:
            places = self._rows.start + self._rows.step * rows
            for guard in self._guards.values():
                guard.check(places)
        return super()._read(rows)


class _Guard:
    """Compares rows of one file with its checksums."""

    def __init__(self, checksums: Checksums, data: np.ndarray):
        self.checksums, self._data = checksums, data
        self._header, self._row_bytes, self._contiguous = 0, 0, False

    def locate(self, array: np.ndarray) -> None:
        """Says where the rows are, once the file's own header is trusted."""
        self._header = len(self._data) - array.nbytes
        self._row_bytes = array[:1].nbytes
        self._contiguous = array.flags.c_contiguous
        if not isinstance(array.base, np.memmap):
            self.check_all()

    def check(self, rows: np.ndarray) -> None:
        if not self._contiguous:
            return self.check_all()
        starts = self._header + rows * self._row_bytes
        self.checksums.check(self._data, starts, starts + self._row_bytes, rows)

    def check_header(self) -> None:
        stop = np.minimum([len(self._data)], max(self._header, BLOCK))
        self.checksums.check(self._data, np.array([0]), stop)

    def check_all(self) -> None:
        self.checksums.check_all(self._data)


def _open(
    source: Path | np.ndarray, checksums: bool
) -> tuple[np.ndarray, _Guard | None]:
    if not isinstance(source, Path):
        return source, None
    found = Checksums.load(source) if checksums and source.is_file() else None
    if found is None or not found.size:
        return open_array(source), None
    guard = _Guard(found, np.memmap(source, np.uint8, "r"))
    # Before anything is believed that the header says.
    guard.check_header()
    array = open_array(source)
    guard.locate(array)
    guard.check_header()
    return array, guard
