"""The interface of all stores: named columns of equal length, read in batches."""

import abc
import ctypes
import hashlib
import json
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxaccel.data._checks import as_count
from jaxaccel.data._errors import fetched_from
from jaxaccel.data._fresh import checked_copy

_SMALL = 1 << 14
_SAMPLES = ("none", "first", "spread")


class ColumnSpec(NamedTuple):
    """What one example of a column looks like.

    Attributes:
      shape: Shape of one example, without the batch axis.
      dtype: Its dtype, in native byte order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


class Store(abc.ABC):
    """Columns of equal length, in memory, in files or computed from other stores.

    `open_store` makes one of arrays and files; a store of your own defines
    `__len__`, `fingerprint` and `_read(rows)`, and passes its columns to `__init__`.
    Rows are int64, one-dimensional and in range; what `_read` returns is compared
    with the columns and copied, so it may be views of arrays that the store keeps.
    Several threads may call it at once.

    Args:
      spec: `ColumnSpec` (shape of one example, dtype) by name.

    Attributes:
      class_names: Name of each label; None where nobody has said. `convert` and
        `disk_cache` keep it, in formats that can.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ColumnSpec, Store
      >>> class Squares(Store):
      ...     def __init__(self):
      ...         super().__init__({"x": ColumnSpec((), np.dtype(np.int64))})
      ...     def __len__(self):
      ...         return 5
      ...     def fingerprint(self):
      ...         return "squares, 5"
      ...     def _read(self, rows):
      ...         return {"x": rows**2}
      >>> Squares()[1:].take([0, 3])["x"].tolist()
      [1, 16]
    """

    class_names: tuple[str, ...] | None = None
    # Where its files were fetched from.
    _address: str | None = None
    # Whether a subclass is not of this package, so that it may return what it keeps.
    _copies: bool
    # What the indices in a column stand for, where the file says so.
    _words: Mapping[str, tuple[str | None, ...]] = {}
    # Which rows are cheap to sample for `sample_content`: "none" of them, the "first"
    # ones where they come in chunks, or those "spread" over all.
    _sampled: str = "none"

    def __init__(self, spec: Mapping[str, ColumnSpec]):
        # A plain dict, because stores are pickled and a read-only view cannot be.
        self._spec = dict(spec)

    @property
    def spec(self) -> Mapping[str, ColumnSpec]:
        """`ColumnSpec` (shape of one example, dtype) by name, read-only."""
        return types.MappingProxyType(self._spec)

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A short text that differs where the content may differ.

        Of files it covers names, sizes and modification times, not every byte.
        """

    @abc.abstractmethod
    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        # Rows are int64, one-dimensional and in range. In this package the arrays
        # are fresh.
        ...

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls._copies = not all(
            method.__module__.startswith("jaxaccel.data.")
            for method in (cls._read, cls._scan)
        )

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name}: {spec.dtype}{list(spec.shape)}"
            for name, spec in self.spec.items()
        )
        return f"{type(self).__name__}({len(self)} examples, {columns})"

    def __getitem__(self, rows: slice) -> "Store":
        """A store over a slice of the rows, reading them from this one."""
        return SliceStore(self, slice_range(rows, len(self)))

    # Otherwise Python would iterate through __getitem__ with integers.
    __iter__ = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """Frees files and threads; the store must not be read any more."""

    def take(self, indices: object) -> dict[str, np.ndarray]:
        """Reads the given rows into fresh arrays that nothing else refers to.

        Args:
          indices: One-dimensional integers in `0 <= index < len(store)`.

        Returns:
          One array for each column, `(len(indices), ...)`, in native byte order.

        Raises:
          DataCorruptionError: If a file turns out to be damaged.
          IndexError: If an index is out of range (negative ones are, too).
          TypeError: If the indices are not integers.
          ValueError: If they are not one-dimensional.
        """
        return self._checked_read(_as_rows(indices, len(self)))

    def scan(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """Reads the whole store once, in order.

        Args:
          batch_size: Examples in a batch; the last batch may be smaller.

        Returns:
          An iterator over batches, fresh arrays like those of `take`.

        Raises:
          ValueError: If `batch_size` is not positive.
        """
        return self._checked_scan(as_count("batch_size", batch_size, 1))

    def _checked_read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        # What stores that read from this one call.
        try:
            batch = self._read(rows)
        except ValueError as error:
            raise self._located(error) from error.__cause__
        return checked_copy(self, batch, len(rows)) if self._copies else batch

    def _checked_scan(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        if not self._copies:
            try:
                yield from self._scan(size)
            except ValueError as error:
                raise self._located(error) from error.__cause__
            return
        batches = iter(self._scan(size))
        for start in range(0, len(self), size):
            count = min(size, len(self) - start)
            # A scan that ends early gives None, which is refused.
            batch = next(batches, None)
            yield checked_copy(self, batch, count)
        if next(batches, None) is not None:
            raise ValueError(
                f"{type(self).__name__}._scan({size}) goes on after the store's "
                f"{len(self)} examples; it must read each once"
            )

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        # For each column, and each row, bytes that are the same on any machine.
        # Stores that decode images give these as they are, under `encoded_name`.
        return dict(self._checked_read(rows))

    def _located(self, error: ValueError) -> ValueError:
        if self._address is None or self._address in str(error):
            return error
        return fetched_from(self._address, error)

    def _scan(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        # Formats that read faster in order override this.
        for start in range(0, len(self), size):
            yield self._read(np.arange(start, min(start + size, len(self))))


class SliceStore(Store):
    """Some rows of another store; `store[rows]` makes one."""

    def __init__(self, store: Store, rows: range):
        super().__init__(store.spec)
        self._store, self._rows = store, rows
        self.class_names, self._words = store.class_names, store._words
        self._sampled = store._sampled

    def __len__(self) -> int:
        return len(self._rows)

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        return digest([self._store.fingerprint(), repr(self._rows)])

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self._store._checked_read(self._rows.start + self._rows.step * rows)

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        return self._store._sample(self._rows.start + self._rows.step * rows)


class ConcatStore(Store):
    """Stores with the same columns, one after the other, as of sharded files.

    Args:
      stores: The parts, at least one.

    Raises:
      ValueError: If there is none, or their columns differ, or the names of their
        classes do.
    """

    def __init__(self, stores: Sequence[Store]):
        if not stores:
            raise ValueError("ConcatStore needs at least one store, got none")
        for number, store in enumerate(stores):
            if dict(store.spec) != dict(stores[0].spec):
                raise ValueError(
                    "all parts must have the same columns, but part 0 is "
                    f"{stores[0]!r} and part {number} is {store!r}"
                )
            _check_words(stores[0], number, store)
        super().__init__(stores[0].spec)
        self._stores, self._words = tuple(stores), stores[0]._words
        self._sampled = min((store._sampled for store in stores), key=_SAMPLES.index)
        if len({store.class_names for store in stores}) == 1:
            self.class_names = stores[0].class_names
        self._ends = np.cumsum([len(store) for store in stores])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        return digest([store.fingerprint() for store in self._stores])

    def close(self) -> None:
        """See `Store.close`."""
        for store in self._stores:
            store.close()

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.searchsorted(self._ends, rows, side="right")
        used = np.unique(parts)
        if len(used) == 1:
            return self._part(int(used[0]), rows)
        out = {
            name: aligned_empty((len(rows), *spec.shape), spec.dtype)
            for name, spec in self.spec.items()
        }
        for part in used:
            places = np.flatnonzero(parts == part)
            for name, array in self._part(int(part), rows[places]).items():
                out[name][places] = array
        return out

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for row in rows.tolist():
            part = int(np.searchsorted(self._ends, row, side="right"))
            start = int(self._ends[part]) - len(self._stores[part])
            sample = self._stores[part]._sample(np.array([row - start]))
            for name, values in sample.items():
                found.setdefault(name, []).extend(values)
        # Where one part has encoded images and another one pixels, neither is whole.
        return {name: x for name, x in found.items() if len(x) == len(rows)}

    def _part(self, part: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        start = int(self._ends[part]) - len(self._stores[part])
        return self._stores[part]._checked_read(rows - start)


def _check_words(first: Store, number: int, store: Store) -> None:
    both = first.class_names is not None and store.class_names is not None
    pairs: dict[str, tuple[Any, Any]] = {}
    if both:
        pairs["class_names"] = first.class_names, store.class_names
    for name in first._words.keys() | store._words.keys():
        found = first._words.get(name), store._words.get(name)
        pairs[f"the dictionary of column {name!r}"] = found
    for what, (old, new) in sorted(pairs.items()):
        if old != new:
            raise ValueError(
                "the same number must mean the same in all parts, but "
                f"{what} is {_shortened(old)} in part 0 and {_shortened(new)} in part "
                f"{number}; write all parts with one list of names"
            )


def _shortened(words: Sequence[str | None] | None) -> str:
    if words is None or len(words) <= 8:
        return repr(words and list(words))
    return f"{list(words[:8])} and {len(words) - 8} more"


def check_store(caller: str, store: object) -> None:
    """Checks that an argument is a store, for a function of the given name."""
    if not isinstance(store, Store):
        raise TypeError(
            f"{caller} takes a Store, got {type(store).__name__}; open_store makes one "
            "of arrays and files"
        )


def closed_error(what: object) -> ValueError:
    """The error for reading from what was closed."""
    return ValueError(f"the store of {what} is closed; open it again")


def slice_range(rows: object, length: int) -> range:
    """Returns the rows of a slice, which must hold at least one."""
    if not isinstance(rows, slice):
        raise TypeError(
            f"a store is sliced, as in store[:100], got store[{rows!r}]; read "
            "single examples with store.take([index])"
        )
    if not range(length)[rows]:
        raise ValueError(
            f"store[{rows.start}:{rows.stop}:{rows.step}] holds no example of the "
            f"{length}; choose a slice inside the store"
        )
    return range(length)[rows]


def encoded_name(name: str) -> str:
    """What samples call a column of images that were not decoded."""
    return f"{name} (encoded)"


def digest(parts: Any) -> str:
    """Short text that stands for JSON-able values, as fingerprints are made of."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
    return rows.astype(np.int64, copy=False)


def gather(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Copies rows of an array into a fresh aligned one, in native byte order."""
    out = aligned_empty((len(rows), *column.shape[1:]), column.dtype.newbyteorder("="))
    flags = column.flags
    if flags.c_contiguous and flags.aligned and column.dtype.isnative:
        # "clip" spares NumPy a second buffer; the rows are known to be in range.
        np.take(column, rows, axis=0, out=out, mode="clip")
    else:
        # np.take would first make a contiguous native copy of the whole column.
        out[...] = column[rows]
    return out


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array, on a 64-byte boundary where it is large."""
    # The CPU backend adopts a 64-byte aligned buffer instead of copying it. A small
    # one is copied sooner than aligned.
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return np.empty(shape, dtype)
    raw = np.empty(size + 64, np.uint8)
    # As raw.ctypes.data, in a third of the time.
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw.data))
    return np.ndarray(shape, dtype, raw, -address % 64)
