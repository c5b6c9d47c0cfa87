"""Stores: named columns of equal length, read in batches."""

import math
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxaccel.data._checks import as_count
from jaxaccel.data._files import open_array


class ColumnSpec(NamedTuple):
    """What one example of a column looks like.

    Attributes:
      shape: Shape of one example, without the batch axis.
      dtype: Its dtype, in native byte order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


def open_store(
    source: str | os.PathLike[str] | Mapping[str, object],
) -> "ArrayStore":
    """Opens arrays and files as one store of named columns.

    Files are memory-mapped, but for gzip-compressed ones, which are read into
    memory. A mapped file must not be shortened while the store is in use: the
    operating system kills a process that reads behind the new end.

    Args:
      source: One of

        - a mapping from column name to an array or to the path of a `.npy` or
          IDX file (`*-ubyte`, `*-ubyte.gz`; recognized by content);
        - the path of one such file: a `.npy` file gives the column its own name
          (`image.npy`: `image`), an IDX file gives `image` where it has three
          axes or more, else `label`;
        - the path of a folder with one `<column>.npy` for each column.

    Returns:
      The store. Arrays are referenced, not copied; batches are always copies.

    Raises:
      DataCorruptionError: If a file is damaged.
      FileNotFoundError: If a file is missing.
      TypeError: If a column is neither array nor path, or has an unsupported
        dtype.
      ValueError: If the store would be empty, the columns differ in length, or a
        file is of another format.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import open_store
      >>> store = open_store({"image": np.zeros((6, 2, 2, 1), np.uint8),
      ...                     "label": np.arange(6, dtype=np.uint8)})
      >>> len(store), store.spec["image"].shape
      (6, (2, 2, 1))
      >>> store.take([4, 1])["label"].tolist()
      [4, 1]
    """
    if isinstance(source, Mapping):
        return ArrayStore({name: _open_column(c) for name, c in source.items()})
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"open_store takes a path or a mapping of columns, got "
            f"{type(source).__name__}; name the columns: open_store({{'image': x}})"
        )
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.npy"))
        if not files:
            raise ValueError(
                f"the folder {path} holds no <column>.npy file; pass a mapping of "
                "column names to paths for other names and formats"
            )
        return ArrayStore({file.stem: open_array(file) for file in files})
    array = open_array(path)
    name = "image" if array.ndim >= 3 else "label"
    return ArrayStore({path.stem if path.suffix == ".npy" else name: array})


class ArrayStore:
    """Columns of equal length, in memory or memory-mapped.

    Args:
      columns: Array of each column, `(examples, ...)`, booleans, integers or real
        floats. They are referenced, not copied.

    Attributes:
      columns: The arrays by name, read-only as a mapping.
      spec: `ColumnSpec` (shape of one example, dtype) by name.

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

    def __init__(self, columns: Mapping[str, np.ndarray]):
        _check_columns(columns)
        self.columns = types.MappingProxyType(dict(columns))
        self.spec = types.MappingProxyType(
            {
                name: ColumnSpec(array.shape[1:], array.dtype.newbyteorder("="))
                for name, array in columns.items()
            }
        )
        self._length = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name}: {spec.dtype}{list(spec.shape)}"
            for name, spec in self.spec.items()
        )
        return f"ArrayStore({self._length} examples, {columns})"

    def __getitem__(self, rows: slice) -> "ArrayStore":
        """A store over a slice of the rows, sharing their memory."""
        if not isinstance(rows, slice):
            raise TypeError(
                f"a store is sliced, as in store[:100], got store[{rows!r}]; read "
                "single examples with store.take([index])"
            )
        if not range(self._length)[rows]:
            raise ValueError(
                f"store[{rows.start}:{rows.stop}:{rows.step}] holds no example of the "
                f"{self._length}; choose a slice inside the store"
            )
        return ArrayStore({name: c[rows] for name, c in self.columns.items()})

    def take(self, indices: object) -> dict[str, np.ndarray]:
        """Reads the given rows into fresh arrays that nothing else refers to.

        Args:
          indices: One-dimensional integers in `0 <= index < len(store)`.

        Returns:
          One array for each column, `(len(indices), ...)`, in native byte order.

        Raises:
          IndexError: If an index is out of range (negative ones are, too).
          TypeError: If the indices are not integers.
          ValueError: If they are not one-dimensional.
        """
        rows = _as_rows(indices, self._length)
        return {name: _gather(c, rows) for name, c in self.columns.items()}

    def scan(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """Reads the whole store once, in order.

        Args:
          batch_size: Examples in a batch; the last batch may be smaller.

        Returns:
          An iterator over batches, fresh arrays like those of `take`.

        Raises:
          ValueError: If `batch_size` is not positive.
        """
        size = as_count("batch_size", batch_size, 1)
        starts = range(0, self._length, size)
        ends = (min(start + size, self._length) for start in starts)
        return (
            self.take(np.arange(start, end))
            for start, end in zip(starts, ends, strict=True)
        )


def _open_column(column: Any) -> Any:
    if isinstance(column, (str, os.PathLike)):
        return open_array(column)
    if isinstance(column, jax.Array):
        return np.asarray(column)
    return column


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


def _as_rows(indices: object, length: int) -> np.ndarray:
    rows = np.asarray(indices)
    if rows.ndim != 1:
        raise ValueError(f"indices must be one-dimensional, got shape {rows.shape}")
    if rows.size and rows.dtype.kind not in "iu":
        raise TypeError(
            f"indices must be integers, got dtype {rows.dtype}; turn a boolean mask "
            "into indices with np.flatnonzero"
        )
    if rows.size and (rows.min() < 0 or rows.max() >= length):
        bad = rows[(rows < 0) | (rows >= length)][0]
        raise IndexError(
            f"index {bad} is out of range: the store's rows are 0 to {length - 1}"
        )
    return rows.astype(np.intp, copy=False)


def _gather(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = _aligned_empty((len(rows), *column.shape[1:]), column.dtype.newbyteorder("="))
    flags = column.flags
    if flags.c_contiguous and flags.aligned and column.dtype.isnative:
        # "clip" spares NumPy a second buffer; the rows are known to be in range.
        np.take(column, rows, axis=0, out=out, mode="clip")
    else:
        # np.take would first make a contiguous native copy of the whole column.
        out[...] = column[rows]
    return out


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # The CPU backend adopts a 64-byte aligned buffer instead of copying it.
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
