"""Columns as Arrow fields and arrays, and back."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._arrow_layout import import_pyarrow
from jaxaccel.data._class_names import KEY, read_names, write_names
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._store import ColumnSpec

_SHAPE, _DTYPE = b"jaxaccel.shape", b"jaxaccel.dtype"
_CHUNK_BYTES, _MOST_ROWS = 4 << 20, 1 << 16


def arrow_field(name: str, spec: ColumnSpec, *, tensors: bool) -> Any:
    """The field that a column is written as.

    Args:
      name: Its name.
      spec: What one example is.
      tensors: Whether examples with axes become fixed-shape tensors where Arrow
        can; else they become bytes, with shape and dtype beside them.

    Returns:
      A `pyarrow.Field`.

    Raises:
      ValueError: If an example would have no element.
    """
    pa = import_pyarrow()
    size = _bytes(spec)
    if size == 0:
        raise ValueError(
            f"column {name!r} has examples of shape {spec.shape}, which hold nothing; "
            "leave it out"
        )
    if not spec.shape:
        return pa.field(name, pa.from_numpy_dtype(spec.dtype), nullable=False)
    if tensors and spec.dtype != np.bool_:
        element = pa.from_numpy_dtype(spec.dtype)
        return pa.field(
            name, pa.fixed_shape_tensor(element, spec.shape), nullable=False
        )
    metadata = {
        _SHAPE: json.dumps(spec.shape).encode(),
        _DTYPE: spec.dtype.name.encode(),
    }
    return pa.field(name, pa.binary(size), nullable=False, metadata=metadata)


def arrow_array(field: Any, values: np.ndarray) -> Any:
    """An array as a column of an Arrow field that `arrow_field` made.

    Args:
      field: The `pyarrow.Field`.
      values: The examples.

    Returns:
      A `pyarrow.Array` that refers to them where it can.
    """
    pa = import_pyarrow()
    if values.ndim == 1:
        return pa.array(values, field.type)
    values = np.ascontiguousarray(values)
    if isinstance(field.type, pa.BaseExtensionType):
        flat = pa.array(values.reshape(-1))
        lists = pa.FixedSizeListArray.from_arrays(flat, math.prod(values.shape[1:]))
        return pa.ExtensionArray.from_storage(field.type, lists)
    buffers: Sequence[Any] = [None, pa.py_buffer(values)]
    return pa.Array.from_buffers(field.type, len(values), buffers)


def own_spec(path: Path, field: Any) -> ColumnSpec | None:
    """What `arrow_field` noted beside a field of bytes; None where nothing is.

    Args:
      path: The file, for messages.
      field: A `pyarrow.Field`.

    Raises:
      DataCorruptionError: If the note cannot be read.
    """
    metadata = field.metadata or {}
    if _SHAPE not in metadata or _DTYPE not in metadata:
        return None
    try:
        shape = tuple(int(n) for n in json.loads(metadata[_SHAPE]))
        dtype = np.dtype(metadata[_DTYPE].decode())
    except (ValueError, TypeError) as error:
        reason = f"column {field.name!r} says its shape and dtype unreadably: {error}"
        raise DataCorruptionError(path, None, 0, reason) from None
    if dtype.kind not in "biuf" or any(n < 1 for n in shape):
        reason = f"column {field.name!r} says it is {dtype}{list(shape)}"
        raise DataCorruptionError(path, None, 0, reason)
    return ColumnSpec(shape, dtype)


def own_class_names(path: Path, schema: Any) -> tuple[str, ...] | None:
    """The class names that `ArrowRows` noted in a schema; None where there are none.

    Args:
      path: The file, for messages.
      schema: Its `pyarrow.Schema`.

    Raises:
      DataCorruptionError: If the note cannot be read.
    """
    note = (schema.metadata or {}).get(KEY)
    return None if note is None else read_names(path, note)


class ArrowRows:
    """Collects examples into record batches of a sensible size.

    Args:
      spec: The columns.
      tensors: See `arrow_field`.
      class_names: Names of the labels, which become metadata of the schema.

    Attributes:
      schema: The `pyarrow.Schema`.
      rows: Examples in a record batch: about 4 MiB, so that a reader that must
        decompress one for a single example does not wait long.
    """

    def __init__(
        self,
        spec: Mapping[str, ColumnSpec],
        *,
        tensors: bool,
        class_names: Sequence[str] | None = None,
    ):
        pa = import_pyarrow()
        fields = [arrow_field(name, s, tensors=tensors) for name, s in spec.items()]
        notes = None if class_names is None else {KEY: write_names(class_names)}
        self.schema = pa.schema(fields, metadata=notes)
        self.rows = min(
            _MOST_ROWS, max(1, _CHUNK_BYTES // sum(map(_bytes, spec.values())))
        )
        self._spec = dict(spec)
        self._parts: list[dict[str, np.ndarray]] = []
        self._count = 0

    def add(self, batch: Mapping[str, np.ndarray]) -> Iterator[Any]:
        """Takes examples; yields the record batches that are full."""
        batch = {name: _checked(name, s, batch) for name, s in self._spec.items()}
        count, start = len(next(iter(batch.values()))), 0
        if any(len(array) != count for array in batch.values()):
            lengths = {name: len(array) for name, array in batch.items()}
            raise ValueError(f"columns of different lengths: {lengths}")
        while start < count:
            stop = min(count, start + self.rows - self._count)
            # A copy, as the caller may use its arrays again.
            part = {name: array[start:stop].copy() for name, array in batch.items()}
            self._parts.append(part)
            self._count += stop - start
            start = stop
            if self._count == self.rows:
                yield self._flush()

    def rest(self) -> Iterator[Any]:
        """Yields the last record batch, if examples are left."""
        if self._count:
            yield self._flush()

    def _flush(self) -> Any:
        arrays = []
        for field in self.schema:
            parts = [part[field.name] for part in self._parts]
            values = parts[0] if len(parts) == 1 else np.concatenate(parts)
            arrays.append(arrow_array(field, values))
        self._parts, self._count = [], 0
        return import_pyarrow().record_batch(arrays, schema=self.schema)


def _checked(
    name: str, spec: ColumnSpec, batch: Mapping[str, np.ndarray]
) -> np.ndarray:
    array = batch[name]
    if array.dtype != spec.dtype or array.shape[1:] != spec.shape:
        raise ValueError(
            f"column {name!r} must be {spec.dtype}{list(spec.shape)}, got "
            f"{array.dtype}{list(array.shape[1:])}"
        )
    return array


def _bytes(spec: ColumnSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
