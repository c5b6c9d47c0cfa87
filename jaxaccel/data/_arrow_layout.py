"""Which of the buffers of an Arrow column hold its numbers."""

import dataclasses
import math
from typing import Any

import numpy as np


def import_pyarrow() -> Any:
    """Imports pyarrow, or says how to install it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Arrow and Parquet files need pyarrow: pip install 'jaxaccel[formats]'"
        ) from error
    return pyarrow


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where the numbers of a column are, among its nodes and buffers.

    Attributes:
      kind: `"fixed"` (examples of equal size), `"bits"` (the same, eight booleans
        a byte) or `"binary"` (bytes with offsets).
      dtype: Of one element.
      shape: Of one example, as the type tells.
      raw: Whether the type tells no shape and dtype, only bytes.
      nodes: Index of each array on the way to the numbers, outermost first.
      values: Index of the buffer that holds them.
      offset_bytes: Size of one offset of a binary column; its offsets are in the
        buffer before `values`.
    """

    kind: str
    dtype: np.dtype
    shape: tuple[int, ...]
    raw: bool
    nodes: tuple[int, ...]
    values: int
    offset_bytes: int = 0


def find_leaf(type_: Any) -> Leaf:
    """Finds the numbers in a column of some type.

    Args:
      type_: A `pyarrow.DataType`.

    Returns:
      Where they are.

    Raises:
      ValueError: If there are none that a store could hold; the message continues
        "column 'x' ...".
    """
    return _leaf(type_, (), 0, ())


def _leaf(
    type_: Any,
    nodes: tuple[int, ...],
    buffer: int,
    shape: tuple[int, ...],
) -> Leaf:
    pa = import_pyarrow()
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        axes = list(getattr(type_, "permutation", None) or ())
        if axes != sorted(axes):
            raise ValueError(f"has permuted axes ({type_}); write it in their order")
        inner = _leaf(type_.storage_type, nodes, buffer, shape)
        tensor = tuple(getattr(type_, "shape", None) or ())
        if tensor and math.prod(tensor) == math.prod(inner.shape[len(shape) :]):
            return dataclasses.replace(inner, shape=shape + tensor)
        return inner
    nodes += (nodes[-1] + 1 if nodes else 0,)
    if types.is_fixed_size_list(type_):
        if type_.list_size < 1:
            raise ValueError("holds empty lists; leave it out")
        shape += (type_.list_size,)
        return _leaf(type_.value_type, nodes, buffer + 1, shape)
    if types.is_struct(type_):
        return _image_struct(type_, nodes, buffer, shape)
    if types.is_dictionary(type_):
        if not _is_text(type_.value_type):
            raise ValueError(f"is {type_}: write the values themselves")
        type_ = type_.index_type
    number = types.is_integer(type_) or types.is_floating(type_)
    if number or types.is_boolean(type_):
        kind = "fixed" if number else "bits"
        dtype = np.dtype(type_.to_pandas_dtype())
        return Leaf(kind, dtype, shape, False, nodes, buffer + 1)
    raw = np.dtype(np.uint8)
    if types.is_fixed_size_binary(type_) and type_.byte_width > 0:
        shape += (type_.byte_width,)
        return Leaf("fixed", raw, shape, True, nodes, buffer + 1)
    if not shape and (types.is_binary(type_) or types.is_large_binary(type_)):
        width = 4 if types.is_binary(type_) else 8
        return Leaf("binary", raw, (), True, nodes, buffer + 2, width)
    raise ValueError(_refusal(type_, types))


def _image_struct(
    type_: Any,
    nodes: tuple[int, ...],
    buffer: int,
    shape: tuple[int, ...],
) -> Leaf:
    # As `datasets` of Hugging Face stores images.
    names = [type_.field(i).name for i in range(type_.num_fields)]
    if shape or names.count("bytes") != 1:
        raise ValueError(f"is {type_}: write its fields as columns of their own")
    place = names.index("bytes")
    skipped = [count_parts(type_.field(i).type) for i in range(place)]
    node = nodes[-1] + sum(count[0] for count in skipped)
    buffer += 1 + sum(count[1] for count in skipped)
    inner = _leaf(type_.field(place).type, (node,), buffer, ())
    return dataclasses.replace(inner, nodes=nodes + inner.nodes[1:])


def _is_text(type_: Any) -> bool:
    types = import_pyarrow().types
    return types.is_string(type_) or types.is_large_string(type_)


def _refusal(type_: Any, types: Any) -> str:
    if _is_text(type_) or "string_view" in str(type_):
        return f"holds text ({type_}): encode it as integers, or as a dictionary"
    if types.is_list(type_) or types.is_large_list(type_):
        return (
            f"holds lists whose lengths may differ ({type_}): cast it to "
            "fixed_size_list, or pad"
        )
    return f"has type {type_}: cast it to integers, floats or booleans"


def count_parts(type_: Any) -> tuple[int, int]:
    """Counts the arrays and the buffers of a column in a record batch.

    Args:
      type_: A `pyarrow.DataType`.

    Returns:
      Number of nodes and of buffers.

    Raises:
      ValueError: If their number is not the same in all batches.
    """
    pa = import_pyarrow()
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return count_parts(type_.storage_type)
    if types.is_dictionary(type_):
        return count_parts(type_.index_type)
    if str(type_).endswith("_view"):
        raise ValueError(
            f"a column of type {type_} is not supported: cast it to binary or string "
            "(in polars: write_ipc(..., compat_level=CompatLevel.oldest()))"
        )
    children = [type_.field(i).type for i in range(type_.num_fields)]
    counts = [count_parts(child) for child in children]
    nodes = 1 + sum(count[0] for count in counts)
    return nodes, _own_buffers(type_, types) + sum(count[1] for count in counts)


def _own_buffers(type_: Any, types: Any) -> int:
    if types.is_null(type_) or str(type_).startswith("run_end_encoded"):
        return 0
    if types.is_union(type_):
        return 2 if type_.mode == "dense" else 1
    if types.is_struct(type_) or types.is_fixed_size_list(type_):
        return 1
    text = _is_text(type_) or types.is_binary(type_) or types.is_large_binary(type_)
    return 3 if text or "list_view" in str(type_)[:15] else 2
