"""Integers read in another width than a file has them, none changed silently."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._store import ColumnSpec, Store, aligned_empty, digest


def can_cast(found: ColumnSpec, wanted: ColumnSpec) -> bool:
    """Whether a column may be read as what is wanted, each value being checked."""
    integers = found.dtype.kind in "iu" and wanted.dtype.kind in "iu"
    return found == wanted or (integers and found.shape == wanted.shape)


def cast_integers(
    store: Store, columns: Mapping[str, ColumnSpec] | None, path: Path | None = None
) -> Store:
    """Gives columns of integers the dtypes that were asked for.

    Args:
      store: A store with columns that `can_cast`.
      columns: What was asked for; None takes the store as it is.
      path: Its file, for messages.

    Returns:
      The store, or one that reads from it.
    """
    spec = {name: (columns or {}).get(name) or old for name, old in store.spec.items()}
    return store if spec == dict(store.spec) else IntegerStore(store, spec, path)


class IntegerStore(Store):
    """A store whose integers are checked and cast when they are read."""

    def __init__(
        self, store: Store, spec: Mapping[str, ColumnSpec], path: Path | None = None
    ):
        super().__init__(spec)
        self._store, self._path = store, path
        self.class_names, self._words = store.class_names, store._words
        self._sampled = store._sampled

    def __len__(self) -> int:
        return len(self._store)

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        columns = [[name, c.shape, c.dtype.str] for name, c in self.spec.items()]
        return digest([self._store.fingerprint(), columns])

    def close(self) -> None:
        """See `Store.close`."""
        self._store.close()

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self._cast(self._store._checked_read(rows), rows)

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        sample = self._store._sample(rows)
        known = {name: np.array(x) for name, x in sample.items() if name in self.spec}
        return sample | self._cast(known, rows)

    def _scan(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        for i, batch in enumerate(self._store._checked_scan(size)):
            count = len(next(iter(batch.values())))
            yield self._cast(batch, np.arange(i * size, i * size + count))

    def _cast(
        self, batch: Mapping[str, np.ndarray], rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        return {name: self._column(name, x, rows) for name, x in batch.items()}

    def _column(self, name: str, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        dtype = self.spec[name].dtype
        if values.dtype == dtype:
            return values
        limits = np.iinfo(dtype)
        if values.size and not (
            limits.min <= int(values.min()) and int(values.max()) <= limits.max
        ):
            # As Python's integers: NumPy would compare int64 and uint64 as floats.
            flat = values.reshape(len(rows), -1).tolist()
            record, value = next(
                (row, value)
                for row, record in zip(rows.tolist(), flat, strict=True)
                for value in record
                if not limits.min <= value <= limits.max
            )
            raise ValueError(
                f"{self._path or 'the store'}: column {name!r} of record {record} is "
                f"{value}, outside {dtype}; pass columns={{{name!r}: ColumnSpec(shape, "
                "dtype), ...} with a wider dtype"
            )
        out = aligned_empty(values.shape, dtype)
        out[...] = values
        return out
