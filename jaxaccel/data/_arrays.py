"""The store of arrays, in memory or memory-mapped."""

import types
import zlib
from collections.abc import Mapping

import numpy as np

from jaxaccel.data._store import ColumnSpec, Store, digest, gather, slice_range


class ArrayStore(Store):
    """Columns of equal length, in memory or memory-mapped.

    Args:
      columns: Array of each column, `(examples, ...)`, booleans, integers or real
        floats. They are referenced, not copied.

    Raises:
      TypeError: If a column is no NumPy array or has an unsupported dtype.
      ValueError: If there is no column or no example, or lengths differ.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore
      >>> store = ArrayStore({"label": np.arange(10, dtype=np.uint8)})
      >>> train, test = store[:8], store[8:]
      >>> [batch["label"].tolist() for batch in train.scan(3)]
      [[0, 1, 2], [3, 4, 5], [6, 7]]
      >>> test.take([0])["label"].tolist()
      [8]
    """

    _sampled = "spread"

    def __init__(self, columns: Mapping[str, np.ndarray]):
        _check_columns(columns)
        self._columns = dict(columns)
        super().__init__(
            {
                name: ColumnSpec(array.shape[1:], array.dtype.newbyteorder("="))
                for name, array in columns.items()
            }
        )
        self._length = len(next(iter(columns.values())))

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """The arrays by name, read-only as a mapping."""
        return types.MappingProxyType(self._columns)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: slice) -> "ArrayStore":
        """A store over a slice of the rows, sharing their memory."""
        slice_range(rows, self._length)
        part = ArrayStore({name: c[rows] for name, c in self._columns.items()})
        part.class_names = self.class_names
        return part

    def fingerprint(self) -> str:
        """See `Store.fingerprint`; here it covers every byte."""
        return digest(
            [
                [name, str(c.dtype), c.shape, self._checksum(name)]
                for name, c in self._columns.items()
            ]
        )

    def _checksum(self, name: str) -> object:
        return zlib.crc32(np.ascontiguousarray(self._columns[name]).data)

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {name: gather(c, rows) for name, c in self._columns.items()}


def _check_columns(columns: Mapping[str, np.ndarray]) -> None:
    if not columns:
        raise ValueError(
            "a store needs at least one column; pass for example {'image': images, "
            "'label': labels}"
        )
    for name, array in columns.items():
        _check_column(name, array)
    lengths = {name: len(array) for name, array in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name!r} has {n}" for name, n in lengths.items())
        raise ValueError(
            f"every column must hold the same number of examples, but {counts}; "
            "check that the files belong together"
        )


def _check_column(name: object, array: object) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a column's name must be a non-empty string, got {name!r}")
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"column {name!r} must be an array or a path, got "
            f"{type(array).__name__}; convert it: np.asarray(x, dtype=np.uint8)"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"column {name!r} is a masked array, whose mask would be lost; fill it: "
            "x.filled(0), and give the mask as a column of its own"
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"column {name!r} has dtype {array.dtype}; a store holds booleans, "
            "integers and floats. Encode it as numbers, in the narrowest dtype"
        )
    if array.ndim == 0:
        raise ValueError(
            f"column {name!r} is a scalar; a column needs a leading axis of examples"
        )
    if len(array) == 0:
        raise ValueError(
            f"column {name!r} is empty (shape {array.shape}); a store needs at least "
            "one example"
        )
