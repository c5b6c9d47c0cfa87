"""Reading many records at once, each a tf.Example, an array or an image."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._decode import Where, decode_images
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._example_columns import (
    ExampleColumn,
    Record,
    check_record,
    choose_columns,
    whole_record,
)
from jaxaccel.data._formats import OpenOptions
from jaxaccel.data._store import aligned_empty, encoded_name
from jaxaccel.data._tf_example import (
    ExampleError,
    Feature,
    Records,
    Template,
    parse_example,
    read_numbers,
)

_MOST_TEMPLATES = 256


class ExampleReader:
    """Which columns the records of a file hold, and how to read them.

    A record is a tf.Example, or the bytes of one array or image and nothing else.
    Without `options.columns`, the first record says what there is:

    - bytes with `<name>/shape` and `<name>/dtype` beside them, as this library
      writes them, are an array, little-endian;
    - bytes that are a JPEG, PNG, GIF or WebP image are decoded to uint8;
    - bytes as long as `height`, `width` and `channels` (or `depth`) under the same
      prefix say are a uint8 image;
    - integers are int32, floats float32; a list of one is a scalar. An integer that
      does not fit is an error, which asking for a wider dtype avoids;
    - other bytes, such as file names, are left out.

    Args:
      path: The file, for messages.
      record: Its first record.
      offset: Where that begins.
      options: How to read it.

    Attributes:
      spec: `ColumnSpec` by name.

    Raises:
      DataCorruptionError: If the first record is damaged.
      ValueError: If it does not hold the columns that are asked for, or none.
    """

    def __init__(
        self, path: Path, record: memoryview, offset: int, options: OpenOptions
    ):
        self._path, self._options = path, options
        self._columns = choose_columns(path, record, offset, options)
        self._whole = any(not column.feature for column in self._columns.values())
        self._templates: dict[int, Template] = {}
        self.spec = {name: column.spec for name, column in self._columns.items()}

    def read(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, where: Where
    ) -> dict[str, np.ndarray]:
        """Reads records.

        Args:
          data: The buffer that holds them, uint8.
          starts: Where each record begins in it, int64.
          lengths: Bytes in each, int64.
          where: Function from the position of a record to its path, number and
            byte offset, for messages.

        Returns:
          A fresh array for each column.

        Raises:
          DataCorruptionError: If a record is damaged.
          ValueError: If a record holds something else than the first.
        """
        out, blobs = self._gathered(data, starts, lengths, where)
        for name, encoded in blobs.items():
            spec = self.spec[name]
            out[name] = aligned_empty((len(starts), *spec.shape), spec.dtype)
            decode_images(
                encoded,
                out[name],
                mode=self._options.image_mode,
                image_size=self._options.image_size,
                num_threads=self._options.num_threads,
                where=where,
            )
        return {name: out[name] for name in self.spec}

    def sample(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, where: Where
    ) -> dict[str, Any]:
        """Reads records as `read` does, but images without decoding them."""
        out, blobs = self._gathered(data, starts, lengths, where)
        return out | {encoded_name(name): found for name, found in blobs.items()}

    def _gathered(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, where: Where
    ) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        blobs: dict[str, list[Any]] = {}
        out: dict[str, Any] = {}
        for name, column in self._columns.items():
            if column.kind == "image":
                blobs[name] = [None] * len(starts)
            else:
                shape, dtype = column.spec
                out[name] = aligned_empty((len(starts), *shape), dtype)
        for rows, features, records in self._groups(data, starts, lengths, where):
            for name, column in self._columns.items():
                feature = features[column.feature]
                if name in blobs:
                    for row, blob in zip(rows, _blobs(records, feature), strict=True):
                        blobs[name][row] = blob
                else:
                    # All rows at once spare a copy.
                    places = rows if len(rows) < len(starts) else slice(None)
                    values = self._values(column, records, feature, where, rows)
                    out[name][places] = values
        return out, blobs

    def _groups(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, where: Where
    ) -> Iterator[tuple[np.ndarray, Mapping[str, Feature], Records]]:
        # Rows whose records have their values at the same places, and those places.
        order = np.argsort(lengths, kind="stable")
        cuts = np.flatnonzero(np.diff(lengths[order])) + 1
        for rows in np.split(order, cuts) if len(order) else []:
            records = Records(data, starts[rows], int(lengths[rows[0]]))
            template = self._templates.get(records.length) if len(rows) > 1 else None
            while len(rows) > 1:
                template = template or self._learn(records, where(int(rows[0])))
                same = template.matches(records)
                if same.any():
                    yield rows[same], template.features, records[same]
                rows, records, template = rows[~same], records[~same], None
            if len(rows):
                yield rows, self._parsed(records, where(int(rows[0]))).features, records

    def _learn(self, records: Records, place: tuple[Any, int | None, int]) -> Template:
        record = self._parsed(records, place)
        constant = {name for c in self._columns.values() for name in c.declared}
        template = Template(record.data, record.features, constant)
        if len(self._templates) < _MOST_TEMPLATES:
            self._templates[records.length] = template
        return template

    def _parsed(self, records: Records, place: tuple[Any, int | None, int]) -> Record:
        # The first of the records, known to hold what the columns promise.
        data = records.first()
        record = whole_record(*place, data)
        if not self._whole:
            try:
                record = record._replace(features=parse_example(data))
            except ExampleError as error:
                path, number, offset = place
                raise DataCorruptionError(
                    path, number, offset + error.offset, f"no tf.Example: {error}"
                ) from None
        check_record(record, self._columns)
        return record

    def _values(
        self,
        column: ExampleColumn,
        records: Records,
        feature: Feature,
        where: Where,
        rows: np.ndarray,
    ) -> np.ndarray:
        shape, dtype = (len(records), *column.spec.shape), column.spec.dtype
        if column.kind == "raw":
            raw = records.bytes(*feature.spans[0])
            if dtype.itemsize > 1:
                raw = np.ascontiguousarray(raw)
            if dtype.kind == "b":
                return (raw != 0).reshape(shape)
            return raw.view(dtype.newbyteorder("<")).reshape(shape)
        values = read_numbers(records, feature)
        if dtype.kind in "biu":
            low, high = _limits(dtype)
            if values.min() < low or values.max() > high:
                bad = np.argwhere((values < low) | (values > high))
                path, number, offset = where(int(rows[bad[0, 0]]))
                raise ValueError(
                    f"{path}: feature {column.feature!r} of record {number} (byte "
                    f"offset {offset}) is {values[tuple(bad[0])]}, outside {dtype}; "
                    f"pass columns={{{column.feature!r}: ColumnSpec(shape, dtype)}} "
                    "with a wider dtype"
                )
        return values.reshape(shape).astype(dtype)


def _blobs(records: Records, feature: Feature) -> Iterator[np.ndarray]:
    first, last = feature.spans[0]
    for start in records.starts.tolist():
        yield records.data[start + first : start + last]


def _limits(dtype: np.dtype) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    # The file's integers are int64.
    return max(info.min, -(2**63)), min(info.max, 2**63 - 1)
