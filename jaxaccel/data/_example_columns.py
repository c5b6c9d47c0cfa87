"""The columns of files of records: what the first record says, and the others must."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxaccel.data._decode import is_image, probe_image
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import OpenOptions
from jaxaccel.data._integers import can_cast
from jaxaccel.data._store import ColumnSpec
from jaxaccel.data._tf_example import (
    ExampleError,
    Feature,
    Records,
    parse_example,
    read_numbers,
)

# Behind the name of a feature of bytes, those of the features that say what they are.
SHAPE, DTYPE = "/shape", "/dtype"
_SIDES = (("height",), ("width",), ("channels", "depth"))
_NUMBERS = {"int64": np.dtype(np.int32), "float": np.dtype(np.float32)}
_DTYPES = {np.dtype(code).name: np.dtype(code) for code in "?bhilqBHILQefd"}


class ExampleColumn(NamedTuple):
    """One column of a file of records.

    Attributes:
      feature: Its name in the records; empty where it is all of a record.
      kind: `"raw"` bytes of an array, an encoded `"image"`, `"int64"` or `"float"`.
      spec: What it becomes.
      declared: Features that say what raw bytes are, the same in all records.
    """

    feature: str
    kind: str
    spec: ColumnSpec
    declared: tuple[str, ...] = ()


class Record(NamedTuple):
    """One record, for messages and for its values.

    Attributes:
      path: Its file.
      number: Its number in it.
      offset: Where it begins.
      data: Its bytes.
      features: Where the values are in `data`.
    """

    path: Path
    number: int | None
    offset: int
    data: memoryview
    features: Mapping[str, Feature]

    def __str__(self) -> str:
        return f"{self.path}: record {self.number} (byte offset {self.offset})"

    def bytes(self, name: str) -> memoryview | None:
        """The only value of a feature of bytes; None where it is something else."""
        feature = self.features.get(name)
        if feature is None or feature.kind != "bytes" or len(feature.spans) != 1:
            return None
        return self.data[slice(*feature.spans[0])]

    def integers(self, name: str) -> list[int] | None:
        """The values of a feature of integers; None where it is something else."""
        feature = self.features.get(name)
        if feature is None or feature.kind != "int64":
            return None
        if not feature.spans:
            return []
        data = np.frombuffer(self.data, np.uint8)
        records = Records(data, np.zeros(1, np.int64), len(data))
        return read_numbers(records, feature)[0].tolist()

    def count(self, name: str) -> int:
        """Numbers, or bytes, in a feature."""
        feature = self.features[name]
        size = sum(stop - start for start, stop in feature.spans)
        if feature.kind == "int64":
            spans = (self.data[start:stop] for start, stop in feature.spans)
            return sum(byte < 128 for span in spans for byte in span)
        return size // 4 if feature.kind == "float" else size


def whole_record(
    path: Path, number: int | None, offset: int, data: memoryview
) -> Record:
    """A record whose only feature, without a name, is all of it."""
    feature = Feature("bytes", ((0, len(data)),))
    return Record(path, number, offset, data, {"": feature})


def choose_columns(
    path: Path, data: memoryview, offset: int, options: OpenOptions
) -> dict[str, ExampleColumn]:
    """Decides on the columns of a file.

    Args:
      path: The file.
      data: Its first record.
      offset: Where that begins.
      options: How to read it.

    Returns:
      The columns by name; `ExampleReader` says what there is without
      `options.columns`.

    Raises:
      DataCorruptionError: If the record is an image and damaged.
      ValueError: If it does not hold the columns asked for, or none.
    """
    wanted = options.columns
    if wanted is not None and not wanted:
        raise ValueError("columns names no column; leave it out to read all")
    try:
        record = Record(path, 0, offset, data, parse_example(data))
    except ExampleError:
        record = Record(path, 0, offset, data, {})
    names = {name: name for name in wanted or _visible(record)}
    if not record.features:
        record = whole_record(path, 0, offset, data)
        names = dict.fromkeys(wanted or ["image"], "")
        if len(names) > 1 or (wanted is None and not is_image(data)):
            raise ValueError(
                f"{path}: its records are no tf.Example; say what they hold with one "
                "column: columns={'token': ColumnSpec((1024,), np.dtype(np.uint16))}"
            )
    columns = {}
    for name, feature in names.items():
        column = _found(record, feature, options)
        if wanted is not None:
            column = _as_wanted(record, name, feature, column, wanted[name])
        if column:
            columns[name] = column
    if not columns:
        raise ValueError(
            f"{path}: no feature of {sorted(record.features)} is a number, an image or "
            "an array; say what they hold: columns={'x': ColumnSpec(shape, dtype)}"
        )
    return columns


def check_record(record: Record, columns: Mapping[str, ExampleColumn]) -> None:
    """Checks that a record holds what the columns promise.

    Args:
      record: The record.
      columns: The columns by name.

    Raises:
      ValueError: If it does not.
    """
    for name, column in columns.items():
        if column.feature not in record.features:
            raise ValueError(
                f"{record} has no feature {column.feature!r}, only "
                f"{sorted(record.features)}; leave it out: name the others in columns"
            )
        if not _agrees(record, column):
            kind = record.features[column.feature].kind
            count = record.count(column.feature)
            raise ValueError(
                f"{record}: column {name!r} holds {_meaning(column)} in the first "
                f"record, but here {count} {_UNITS[kind]}; a column has one shape: "
                "leave it out by naming the others in columns"
            )


def _meaning(column: ExampleColumn) -> str:
    count = math.prod(column.spec.shape)
    if column.kind in _NUMBERS:
        return f"{count} {_UNITS[column.kind]}"
    if column.kind == "image":
        return f"an encoded image ({_text(column.spec)})"
    return f"{count * column.spec.dtype.itemsize} bytes ({_text(column.spec)})"


_UNITS = {"bytes": "bytes", "int64": "integers", "float": "floats"}


def _visible(record: Record) -> list[str]:
    features = record.features
    hidden = {name + end for name in features for end in (SHAPE, DTYPE)}
    return sorted(features.keys() - hidden)


def _found(record: Record, name: str, options: OpenOptions) -> ExampleColumn | None:
    if name not in record.features:
        raise ValueError(
            f"{record.path}: there is no feature {name!r}; its first record holds "
            f"{sorted(record.features)}"
        )
    kind = record.features[name].kind
    if kind in _NUMBERS:
        count = record.count(name)
        shape = () if count == 1 else (count,)
        spec = ColumnSpec(shape, _dtype(record, name) or _NUMBERS[kind])
        return ExampleColumn(name, kind, spec) if count else None
    declared = _declared_array(record, name) or _declared_sides(record, name)
    if declared:
        return ExampleColumn(name, "raw", *declared)
    data = record.bytes(name)
    if data is None or not is_image(data):
        return None
    try:
        shape = probe_image(data, options.image_mode)
    except ValueError as error:
        raise DataCorruptionError(
            record.path, 0, record.offset, f"the image cannot be decoded: {error}"
        ) from error
    shape = (*(options.image_size or shape[:2]), shape[2])
    return ExampleColumn(name, "image", ColumnSpec(shape, np.dtype(np.uint8)))


def _as_wanted(
    record: Record,
    name: str,
    feature: str,
    column: ExampleColumn | None,
    spec: ColumnSpec,
) -> ExampleColumn:
    if spec.dtype.kind not in "biuf":
        raise ValueError(f"a column holds numbers, got dtype {spec.dtype} for {name!r}")
    kind, count = record.features[feature].kind, record.count(feature)
    size = math.prod(spec.shape)
    if column and column.kind in ("image", "raw"):
        fits, found = column.spec == spec, f"{column.kind} {_text(column.spec)}"
        fits = fits or (column.kind == "raw" and can_cast(column.spec, spec))
    elif kind == "bytes":
        fits = record.bytes(feature) is not None and count == size * spec.dtype.itemsize
        found, column = f"{count} bytes", ExampleColumn(feature, "raw", spec)
    else:
        fits = count == size and (kind == "int64" or spec.dtype.kind == "f")
        found, column = f"{count} {_UNITS[kind]}", ExampleColumn(feature, kind, spec)
    if not fits:
        raise ValueError(
            f"{record.path}: column {name!r} should be {_text(spec)}, but the first "
            f"record holds {found}; change columns, or image_size and image_mode"
        )
    return column


def _agrees(record: Record, column: ExampleColumn) -> bool:
    name, (shape, dtype) = column.feature, column.spec
    if column.kind in _NUMBERS:
        same = record.features[name].kind == column.kind
        return same and record.count(name) == math.prod(shape)
    data = record.bytes(name)
    if data is None or column.kind == "image":
        return data is not None and is_image(data)
    if column.declared:
        declared = _declared_array(record, name) or _declared_sides(record, name)
        return declared == (column.spec, column.declared)
    return len(data) == math.prod(shape) * dtype.itemsize


def _declared_array(
    record: Record, name: str
) -> tuple[ColumnSpec, tuple[str, ...]] | None:
    shape, dtype = record.integers(name + SHAPE), _dtype(record, name)
    if shape is None or dtype is None or min(shape, default=0) < 0:
        return None
    spec = ColumnSpec(tuple(shape), dtype)
    fits = record.count(name) == math.prod(shape) * dtype.itemsize
    return (spec, (name + SHAPE, name + DTYPE)) if fits else None


def _declared_sides(
    record: Record, name: str
) -> tuple[ColumnSpec, tuple[str, ...]] | None:
    prefix, shape, declared = name[: name.rfind("/") + 1], [], []
    for side in _SIDES:
        known = [prefix + word for word in side if prefix + word in record.features]
        values = record.integers(known[0]) if known else None
        if values is None and len(shape) == 2 and not known:
            values = [1]
        if values is None or len(values) != 1 or values[0] < 1:
            return None
        shape.append(values[0])
        declared += known[:1]
    fits = record.count(name) == math.prod(shape)
    spec = ColumnSpec(tuple(shape), np.dtype(np.uint8))
    return (spec, tuple(declared)) if fits else None


def _dtype(record: Record, name: str) -> np.dtype | None:
    data: Any = record.bytes(name + DTYPE)
    if data is None:
        return None
    return _DTYPES.get(bytes(data).decode("ascii", "replace"))


def _text(spec: ColumnSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
