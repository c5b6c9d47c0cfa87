"""Reading examples out of Arrow buffers, wherever these lie in memory."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._arrow_columns import Column
from jaxaccel.data._arrow_layout import Leaf
from jaxaccel.data._decode import decode_images
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import OpenOptions
from jaxaccel.data._sidecar import Checksums
from jaxaccel.data._store import aligned_empty, encoded_name

# Small enough for a core's cache, so that the second copy costs little.
_GATHER_BYTES = 1 << 18


@dataclasses.dataclass(frozen=True)
class Source:
    """What is common to all columns of a file.

    Attributes:
      path: The file, for messages.
      options: How images are decoded.
      checksums: Compared with the mapped file before bytes of it are used.
      offset: Where in the file the buffers come from, if they were decompressed;
        None if they lie in the mapped file itself.
    """

    path: Path
    options: OpenOptions
    checksums: Checksums | None = None
    offset: int | None = None


@dataclasses.dataclass(frozen=True)
class Segments:
    """The buffers of a column, in one or more chunks that follow each other.

    Attributes:
      leaf: What they hold.
      memory: Bytes that hold the values of all chunks.
      starts: `(chunks,)` int64, where the values of each chunk begin in it.
      stops: Where they end.
      offset_memory: Bytes that hold the offsets of a binary column.
      offset_starts: Where those of each chunk begin.
    """

    leaf: Leaf
    memory: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    offset_memory: np.ndarray
    offset_starts: np.ndarray


def column_of(name: str, array: Any, leaf: Leaf, source: Source) -> Segments:
    """The buffers of one decoded array.

    Args:
      name: The column's name, for messages.
      array: A `pyarrow.Array`.
      leaf: Where its numbers are.
      source: Where it comes from.

    Returns:
      One segment.

    Raises:
      DataCorruptionError: If the buffers are too short.
      ValueError: If examples are missing (null).
    """
    import pyarrow as pa

    if array.offset:
        array = pa.concat_arrays([array, array[:0]])
    parts = array.buffers()
    if _has_nulls(array):
        raise missing_values(source.path, name)
    memory = _bytes_of(parts[leaf.values])
    offsets = _bytes_of(parts[leaf.values - 1]) if leaf.kind == "binary" else memory
    if room(leaf, len(memory), len(offsets)) < len(array):
        reason = f"{len(array)} examples do not fit in {len(memory)} bytes"
        raise DataCorruptionError(source.path, None, source.offset or 0, reason)
    zero = np.zeros(1, np.int64)
    return Segments(leaf, memory, zero, zero + len(memory), offsets, zero)


def missing_values(path: Path, name: str) -> ValueError:
    """The error for nulls."""
    return ValueError(
        f"{path}: column {name!r} has missing values (null); fill them before "
        "writing it, or leave it out with columns={...}"
    )


def room(leaf: Leaf, size: int, offset_size: int) -> int:
    """How many examples buffers of some bytes can hold."""
    if leaf.kind == "binary":
        return offset_size // leaf.offset_bytes - 1
    elements = math.prod(leaf.shape)
    if leaf.kind == "bits":
        return 8 * size // elements
    return size // (elements * leaf.dtype.itemsize)


def read_rows(
    column: Column,
    segments: Segments,
    chunks: np.ndarray,
    within: np.ndarray,
    records: np.ndarray,
    source: Source,
) -> np.ndarray:
    """Reads examples into a fresh array.

    Args:
      column: What they are.
      segments: Where they are.
      chunks: Which segment each one is in.
      within: Its place there.
      records: Its index in the file, for messages.
      source: The file.

    Returns:
      `(len(chunks), *shape)`.

    Raises:
      DataCorruptionError: If one is damaged.
      ValueError: If one has another size than the first of the file.
    """
    out = aligned_empty((len(chunks), *column.spec.shape), column.spec.dtype)
    if not len(chunks):
        return out
    if segments.leaf.kind == "bits":
        out[...] = _read_bits(segments, column, chunks, within, records, source)
        return out
    if segments.leaf.kind == "fixed":
        positions = segments.starts[chunks] + within * column.size
        _check(segments.memory, source, positions, column.size, records)
        _copy(segments.memory, positions, _as_bytes(out))
        return out
    starts, stops = find_blobs(segments, chunks, within, records, source)
    if column.encoded:
        _decode(segments.memory, starts, stops, out, records, source)
        return out
    odd = np.flatnonzero(stops - starts != column.size)
    if len(odd):
        raise ValueError(
            f"{source.path}: record {records[odd[0]]} of column {column.name!r} has "
            f"{(stops - starts)[odd[0]]} bytes, not the {column.size} of {column.spec}"
        )
    _copy(segments.memory, starts, _as_bytes(out))
    return out


def read_stretches(
    column: Column,
    segments: Segments,
    stretches: Sequence[tuple[int, int, int]],
    count: int,
) -> np.ndarray:
    """Reads consecutive examples of equal size into a fresh array, unchecked.

    Args:
      column: What they are, `leaf.kind == "fixed"`.
      segments: Where they are.
      stretches: Chunk, first example in it and number of examples of each part.
      count: Number of examples in all.

    Returns:
      `(examples, *shape)`.
    """
    shape, dtype = column.spec
    size, memory, done = column.size, segments.memory, 0
    out = aligned_empty((count, *shape), dtype)
    raw = np.ndarray(count * size, np.uint8, out)
    for chunk, first, number in stretches:
        start, length = segments.starts.item(chunk) + first * size, number * size
        raw[done : done + length] = memory[start : start + length]
        done += length
    return out


def find_blobs(
    segments: Segments,
    chunks: np.ndarray,
    within: np.ndarray,
    records: np.ndarray,
    source: Source,
) -> tuple[np.ndarray, np.ndarray]:
    """Where examples of a binary column begin and end, checked; see `read_rows`."""
    width = segments.leaf.offset_bytes
    positions = segments.offset_starts[chunks] + within * width
    _check(segments.offset_memory, source, positions, 2 * width, records)
    raw = np.empty((len(positions), 2 * width), np.uint8)
    _copy(segments.offset_memory, positions, raw)
    low, high = raw.view(f"<i{width}").astype(np.int64).T
    space = segments.stops[chunks] - segments.starts[chunks]
    bad = np.flatnonzero((low < 0) | (high < low) | (high > space))
    if len(bad):
        i = bad[0]
        where = int(positions[i]) if source.offset is None else source.offset
        reason = f"an example at bytes {low[i]} to {high[i]} of {space[i]}"
        raise DataCorruptionError(source.path, int(records[i]), where, reason)
    starts = segments.starts[chunks] + low
    _check(segments.memory, source, starts, high - low, records)
    return starts, starts + high - low


def sample_rows(
    column: Column,
    segments: Segments,
    chunks: np.ndarray,
    within: np.ndarray,
    records: np.ndarray,
    source: Source,
) -> tuple[str, Any]:
    """A name, and examples as `read_rows` gives them, or images as they are."""
    place = chunks, within, records, source
    if not column.encoded:
        return column.name, read_rows(column, segments, *place)
    pairs = zip(*find_blobs(segments, *place), strict=True)
    return encoded_name(column.name), [segments.memory[i:j] for i, j in pairs]


def first_blob(segments: Segments, source: Source) -> np.ndarray:
    """The bytes of the first example of a binary column."""
    zero = np.zeros(1, np.int64)
    starts, stops = find_blobs(segments, zero, zero, zero, source)
    return segments.memory[int(starts[0]) : int(stops[0])]


def _decode(
    memory: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    out: np.ndarray,
    records: np.ndarray,
    source: Source,
) -> None:
    def where(i: int) -> tuple[Path, int, int]:
        offset = int(starts[i]) if source.offset is None else source.offset
        return source.path, int(records[i]), offset

    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    blobs: Sequence[np.ndarray] = [memory[start:stop] for start, stop in pairs]
    decode_images(
        blobs,
        out,
        mode=source.options.image_mode,
        image_size=source.options.image_size,
        num_threads=source.options.num_threads,
        where=where,
    )


def _read_bits(
    segments: Segments,
    column: Column,
    chunks: np.ndarray,
    within: np.ndarray,
    records: np.ndarray,
    source: Source,
) -> np.ndarray:
    count = column.size
    bits = 8 * segments.starts[chunks] + within * count
    sizes = ((bits + count + 7) >> 3) - (bits >> 3)
    _check(segments.memory, source, bits >> 3, sizes, records)
    bits = bits[:, None] + np.arange(count)
    values = segments.memory[bits >> 3] >> (bits & 7).astype(np.uint8) & 1
    return values.astype(bool).reshape(len(chunks), *column.spec.shape)


def _check(
    memory: np.ndarray,
    source: Source,
    starts: np.ndarray,
    sizes: np.ndarray | int,
    records: np.ndarray,
) -> None:
    if source.checksums:
        source.checksums.check(memory, starts, starts + sizes, records)


def _copy(memory: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    # Rows of bytes from any positions. One call copies many rows, whichever chunk
    # of the file they are in.
    count, size = out.shape
    apart = positions[1:] - positions[:-1] != size
    if 8 * np.count_nonzero(apart) < count:
        breaks = np.flatnonzero(apart) + 1
        edges = [0, *breaks.tolist(), count]
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            first = int(positions[start])
            stretch = memory[first : first + (stop - start) * size]
            out[start:stop] = stretch.reshape(-1, size)
        return
    if size == 1:
        np.take(memory, positions, out=out[:, 0], mode="clip")
        return
    phase = int(positions[0]) % size
    places, rest = np.divmod(positions - phase, size)
    if not np.count_nonzero(rest):
        grid = memory[phase:]
        grid = grid[: len(grid) // size * size].reshape(-1, size)
        np.take(grid, places, axis=0, out=out, mode="clip")
        return
    # Overlapping items, one at each byte of the memory; those needed are copied.
    item = np.dtype((np.void, size))
    items = np.ndarray((len(memory) - size + 1,), item, memory, strides=(1,))
    target, step = out.view(item)[:, 0], max(1, _GATHER_BYTES // size)
    for start in range(0, count, step):
        target[start : start + step] = items[positions[start : start + step]]


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1).view(np.uint8)


def _has_nulls(array: Any) -> bool:
    # At any level down to the numbers.
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        return _has_nulls(array.storage)
    if array.null_count:
        return True
    if pa.types.is_fixed_size_list(array.type):
        return _has_nulls(array.values)
    return pa.types.is_struct(array.type) and _has_nulls(array.field("bytes"))


def _bytes_of(buffer: Any) -> np.ndarray:
    if buffer is None or not buffer.size:
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)
