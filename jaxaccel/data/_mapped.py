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
        return {
            "sources": self._sources,
            "checked": self._checked,
            "rows": self._rows,
            "class_names": self.class_names,
            "address": self._address,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        MappedStore.__init__(self, state["sources"], checksums=state["checked"])
        self.class_names, self._address = state["class_names"], state["address"]
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
        for guard in self._guards.values():
            if not guard.checksums.complete:
                guard.check(self._places(rows))
        return super()._read(rows)

    def _places(self, rows: np.ndarray) -> np.ndarray:
        if (self._rows.start, self._rows.step) == (0, 1):
            return rows
        return self._rows.start + self._rows.step * rows


class _Guard:
    """Compares rows of one file with its checksums.

    Rows are remembered in groups of about a block: one look-up for each row tells
    a batch that was read before.
    """

    def __init__(self, checksums: Checksums, data: np.ndarray):
        self.checksums, self._data = checksums, data
        # Before anything is believed that the file's own header says.
        self._check(np.array([0]), np.minimum([len(data)], BLOCK))

    def locate(self, array: np.ndarray) -> None:
        """Says where the rows are, once the header may be believed."""
        self._header = len(self._data) - array.nbytes
        self._row_bytes, self._rows = max(1, array[:1].nbytes), len(array)
        self._shift = (BLOCK // self._row_bytes).bit_length()
        self._seen = np.zeros((self._rows >> self._shift) + 1, bool)
        self._contiguous = array.flags.c_contiguous
        if not isinstance(array.base, np.memmap):
            self.check_all()
        self._check(np.array([0]), np.array([self._header]))

    def check(self, rows: np.ndarray) -> None:
        if not self._contiguous:
            return self.check_all()
        groups = rows >> self._shift
        if np.count_nonzero(self._seen[groups]) == len(groups):
            return None
        self._check(*self._range(rows, rows + 1), rows)
        groups = np.unique(groups[~self._seen[groups]])
        first, size = groups << self._shift, 1 << self._shift
        whole = self._range(first, np.minimum(first + size, self._rows))
        self._seen[groups] = self.checksums.seen(*whole)

    def check_all(self) -> None:
        self.checksums.check_all(self._data)

    def _range(
        self, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        start = self._header
        return start + first * self._row_bytes, start + last * self._row_bytes

    def _check(
        self, starts: np.ndarray, stops: np.ndarray, rows: np.ndarray | None = None
    ) -> None:
        self.checksums.check(self._data, starts, stops, rows)


def _open(
    source: Path | np.ndarray, checksums: bool
) -> tuple[np.ndarray, _Guard | None]:
    if not isinstance(source, Path):
        return source, None
    found = Checksums.load(source) if checksums and source.is_file() else None
    if found is None or not found.size:
        return open_array(source), None
    guard = _Guard(found, np.memmap(source, np.uint8, "r"))
    array = open_array(source)
    guard.locate(array)
    return array, guard
