"""Which columns of an Arrow schema are read, and as what."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._arrow_fields import own_spec
from jaxaccel.data._arrow_layout import Leaf, find_leaf
from jaxaccel.data._decode import is_image, probe_image
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import OpenOptions
from jaxaccel.data._integers import can_cast
from jaxaccel.data._store import ColumnSpec


@dataclasses.dataclass(frozen=True)
class Column:
    """A column as it will be read.

    Attributes:
      name: Its name.
      index: Its place among the top-level fields of the schema.
      leaf: Where its numbers are.
      spec: What one example is.
      encoded: Whether each example is an encoded image.
    """

    name: str
    index: int
    leaf: Leaf
    spec: ColumnSpec
    encoded: bool = False

    @functools.cached_property
    def size(self) -> int:
        """Bytes of one example; bits of one with `kind == "bits"`."""
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize


# The bytes of the first example of a binary column.
Peek = Callable[[int, Leaf], np.ndarray]


def read_columns(
    path: Path, schema: Any, options: OpenOptions, peek: Peek
) -> tuple[Column, ...]:
    """Decides how the columns of a file are read.

    Args:
      path: The file, for messages.
      schema: Its `pyarrow.Schema`.
      options: `columns` selects some of them, and says what raw bytes hold.
      peek: Function of a field's index and its leaf that returns the bytes of the
        first example, called for binary columns only.

    Returns:
      The columns, in the order of `options.columns` or of the file.

    Raises:
      DataCorruptionError: If what the file says of a column is contradictory.
      ValueError: If a column cannot be read, or there is no such column.
    """
    names = list(schema.names)
    wanted = {
        name: spec and ColumnSpec(tuple(spec.shape), np.dtype(spec.dtype))
        for name, spec in (options.columns or dict.fromkeys(names)).items()
    }
    for name in wanted:
        if names.count(name) != 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns named {name!r}, needed is "
                f"one; its columns are {names}"
            )
    columns, problems = [], {}
    for name, spec in wanted.items():
        index = names.index(name)
        try:
            columns.append(
                _column(path, index, schema.field(index), spec, options, peek)
            )
        except DataCorruptionError:
            raise
        except ValueError as error:
            why = str(error).removeprefix(f"{path}: column {name!r} ")
            problems[name] = why + _not_embedded(schema.field(index), why)
    if problems or not columns:
        raise ValueError(_complaint(path, problems, columns))
    return tuple(columns)


def _not_embedded(field: Any, why: str) -> str:
    """What else to say of images that are named in a file, but not in it."""
    missing = "missing values" in why or "(0 in the first example)" in why
    children = [field.type.field(i).name for i in range(field.type.num_fields)]
    if not (missing and {"bytes", "path"} <= set(children)):
        return ""
    return (
        ". The file may hold paths in place of images. Write it again with the "
        "content of each image as 'bytes' (Hugging Face: map "
        "datasets.table.embed_table_storage over the data set in the format 'arrow', "
        "then to_parquet), or open the folder of images itself"
    )


def _complaint(path: Path, problems: Mapping[str, str], columns: list[Column]) -> str:
    if not problems:
        return f"{path} has no column; write it with at least one"
    reasons = "; ".join(f"column {name!r} {why}" for name, why in problems.items())
    text = f"{path}: {reasons}"
    if columns:
        usable = ", ".join(
            f"{column.name!r}: ColumnSpec({column.spec.shape}, "
            f"np.dtype({column.spec.dtype.name!r}))"
            for column in columns
        )
        text += f". Without it: open_store(..., columns={{{usable}}})"
    return text


def _column(
    path: Path,
    index: int,
    field: Any,
    spec: ColumnSpec | None,
    options: OpenOptions,
    peek: Peek,
) -> Column:
    leaf = find_leaf(field.type)
    if not leaf.raw:
        return Column(field.name, index, leaf, _reshaped(leaf, spec))
    if leaf.kind == "binary":
        return _binary_column(path, index, field.name, leaf, spec, options, peek)
    own, size = own_spec(path, field), math.prod(leaf.shape)
    if own and _bytes(own) != size:
        reason = f"column {field.name!r} has {size} bytes an example, but says {own}"
        raise DataCorruptionError(path, None, 0, reason)
    if spec and own and can_cast(own, spec):
        spec = own
    if spec and _bytes(spec) != size:
        raise ValueError(f"holds {size} bytes an example, which are not a {spec}")
    chosen = spec or own
    if chosen is None:
        raise ValueError(
            f"holds {size} bytes an example, of unknown meaning: say which in "
            f"columns={{{field.name!r}: ColumnSpec(shape, dtype)}}"
        )
    return Column(field.name, index, leaf, chosen)


def _binary_column(
    path: Path,
    index: int,
    name: str,
    leaf: Leaf,
    spec: ColumnSpec | None,
    options: OpenOptions,
    peek: Peek,
) -> Column:
    first = peek(index, leaf)
    if spec and len(first) == _bytes(spec):
        return Column(name, index, leaf, spec)
    if not is_image(first):
        raise ValueError(
            f"holds bytes that are no JPEG or PNG ({len(first)} in the first example)"
            + (
                f", which are not a {spec}"
                if spec
                else ": if all have one length, say what they are in "
                f"columns={{{name!r}: ColumnSpec(shape, dtype)}}"
            )
        )
    try:
        height, width, channels = probe_image(first, options.image_mode)
    except ValueError as error:
        reason = f"the image in column {name!r} cannot be decoded: {error}"
        raise DataCorruptionError(path, 0, 0, reason) from None
    shape = (*(options.image_size or (height, width)), channels)
    decoded = ColumnSpec(shape, np.dtype(np.uint8))
    if spec and spec != decoded:
        raise ValueError(f"holds images that decode to {decoded}, not to {spec}")
    return Column(name, index, leaf, decoded, encoded=True)


def _reshaped(leaf: Leaf, spec: ColumnSpec | None) -> ColumnSpec:
    if spec is None:
        return ColumnSpec(leaf.shape, leaf.dtype)
    # In another shape, but as wide as it is: the values are cast afterwards.
    found = ColumnSpec(spec.shape, leaf.dtype)
    if math.prod(spec.shape) != math.prod(leaf.shape) or not can_cast(found, spec):
        raise ValueError(f"holds {leaf.dtype}{list(leaf.shape)}, not {spec}")
    return found


def _bytes(spec: ColumnSpec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
