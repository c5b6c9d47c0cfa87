"""What the indices of dictionary columns stand for in an Arrow file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxaccel.data._arrow_columns import Column
from jaxaccel.data._arrow_layout import import_pyarrow
from jaxaccel.data._arrow_stores import translated

Words = tuple[str | None, ...]


def read_words(
    path: Path, stream: bytes, offset: int, schema: Any, columns: Sequence[Column]
) -> dict[str, Words]:
    """Reads the dictionaries of the columns that have one.

    Args:
      path: The file, for messages.
      stream: The messages of its schema and of its dictionaries.
      offset: Where they begin, for messages.
      schema: Its `pyarrow.Schema`.
      columns: The columns.

    Returns:
      The word for each index, by column.

    Raises:
      DataCorruptionError: If a dictionary is damaged.
    """
    types = {c.name: schema.field(c.index).type for c in columns}
    chosen = [c.index for c in columns if "dictionary" in str(types[c.name])]
    if not chosen:
        return {}
    pa = import_pyarrow()
    with translated(path, offset):
        # pyarrow hands out dictionaries only with a batch: one without examples.
        arrays = [array.combine_chunks() for array in schema.empty_table().columns]
        empty = pa.record_batch(arrays, schema=schema).serialize()
        content = pa.py_buffer(stream + empty.to_pybytes())
        options = pa.ipc.IpcReadOptions(included_fields=sorted(chosen))
        with pa.ipc.open_stream(content, options=options) as reader:
            batch = reader.read_next_batch()
        found = {name: _dictionary(batch.column(name)) for name in batch.schema.names}
        for words in found.values():
            words.validate(full=True)
        return {name: tuple(words.to_pylist()) for name, words in found.items()}


def _dictionary(array: Any) -> Any:
    while not hasattr(array, "dictionary"):
        # An extension, or lists of a fixed size: nothing else may hold indices.
        array = array.storage if hasattr(array, "storage") else array.values
    return array.dictionary
