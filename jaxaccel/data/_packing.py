"""Documents of different lengths, packed into rows of one length."""

import bisect
import dataclasses

import numpy as np

from jaxaccel.data._checks import as_count
from jaxaccel.data._sampling import array_digest
from jaxaccel.data._sequences import as_source, check_names, fill_places
from jaxaccel.data._store import ColumnSpec, Store, aligned_empty, digest


def pack_sequences(
    tokens: np.ndarray | Store,
    lengths: np.ndarray,
    length: int,
    *,
    strategy: str = "best_fit",
    name: str = "tokens",
) -> "PackedStore":
    r"""Packs documents of different lengths into rows of one length.

    Every token is in exactly one row. `segment_ids` tells the documents of a row
    apart, for the mask of attention: position $a$ may see $b$ where both have the
    same id, not 0. A position has a target in its own row where the next one has
    the same id.

    Args:
      tokens: All documents, one after the other: an array `(total,)`, which may be
        memory-mapped, or a store with one column.
      lengths: Tokens of each document, `(documents,)`; they add up to all. Of a
        list of arrays: `np.concatenate(documents)` and
        `np.array([len(d) for d in documents])`.
      length: Tokens in a row.
      strategy: `"best_fit"` keeps documents whole where they fit into a row at all,
        cuts the others into rows and a rest, and puts each, the longest first, into
        the fullest row that has room. `"sequential"` keeps the order and fills row
        after row to the brim, cutting documents where a row ends; only the last row
        has padding.
      name: Name of the column of tokens.

    Returns:
      A store with the columns `name` (0 at the padding), `segment_ids` (from 1 in
      every row, 0 at the padding) and `positions` (from 0 in every segment), each
      `(length,)`, the latter two in the narrowest unsigned dtype. Its `efficiency`
      is the share of positions that are no padding.

    Raises:
      TypeError: If `tokens` is neither array nor store, or `lengths` are no
        integers.
      ValueError: If the lengths do not add up, or an option is out of range.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import pack_sequences
      >>> store = pack_sequences(np.arange(1, 10, dtype=np.uint8),
      ...                        np.array([2, 4, 3]), 5)
      >>> batch = store.take(np.arange(len(store)))
      >>> batch["tokens"].tolist()
      [[1, 2, 7, 8, 9], [3, 4, 5, 6, 0]]
      >>> batch["segment_ids"].tolist()
      [[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]]
      >>> batch["positions"].tolist(), store.efficiency
      ([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]], 0.9)

    References:
      Ding et al., [Fewer truncations improve language
      modeling](https://arxiv.org/abs/2404.10830), 2024.
    """
    source = as_source(tokens)
    length = as_count("length", length, 1)
    counts = _checked_lengths(lengths, len(source))
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"strategy must be one of {tuple(_STRATEGIES)}, got {strategy!r}"
        )
    if source.spec[next(iter(source.spec))].shape:
        raise ValueError(
            f"tokens must be one-dimensional to be packed, got {source!r}; use windows "
            "for time series of features"
        )
    check_names([name, "segment_ids", "positions"])
    return PackedStore(source, _STRATEGIES[strategy](counts, length), length, name)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Runs of tokens and the rows they go to.

    Attributes:
      start: Where each piece begins in the sequence.
      size: Its tokens.
      row: The row it goes to, from 0; no row is empty.
    """

    start: np.ndarray
    size: np.ndarray
    row: np.ndarray


class PackedStore(Store):
    """Documents packed into rows; `pack_sequences` makes one.

    Attributes:
      efficiency: Share of the positions that are no padding.
    """

    def __init__(self, source: Store, pieces: _Pieces, length: int, name: str):
        # In a row, and among the rows, as in the sequence: what is read together
        # then lies together, where the order is not shuffled.
        first = np.full(pieces.row.max() + 1, len(source))
        np.minimum.at(first, pieces.row, pieces.start)
        row = np.argsort(np.argsort(first))[pieces.row]
        order = np.lexsort((pieces.start, row))
        self._source, self._length, self._name = source, length, name
        self._start, self._size = pieces.start[order], pieces.size[order]
        per_row = np.bincount(row)
        self._first = np.concatenate([[0], np.cumsum(per_row)])
        ((self._column, inner),) = source.spec.items()
        self._segment_type = np.min_scalar_type(int(per_row.max()))
        self._position_type = np.min_scalar_type(length - 1)
        super().__init__(
            {
                name: ColumnSpec((length,), inner.dtype),
                "segment_ids": ColumnSpec((length,), self._segment_type),
                "positions": ColumnSpec((length,), self._position_type),
            }
        )
        self._sampled = source._sampled
        self.efficiency = len(source) / (len(self) * length)

    def __len__(self) -> int:
        return len(self._first) - 1

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        layout = [self._first, self._start, self._size]
        parts = [array_digest(array) for array in layout]
        return digest([self._source.fingerprint(), self._length, self._name, parts])

    def close(self) -> None:
        """See `Store.close`."""
        self._source.close()

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        counts = self._first[rows + 1] - self._first[rows]
        number = _ramp(counts)
        pieces = np.repeat(self._first[rows], counts) + number
        sizes = self._size[pieces]
        position = _ramp(sizes)
        tokens = np.repeat(self._start[pieces], sizes) + position

        filled = np.bincount(np.repeat(np.arange(len(rows)), counts), sizes, len(rows))
        there = np.arange(self._length) < filled[:, None]
        places = self._spread(tokens, there, np.dtype(np.int64))
        return {
            self._name: fill_places(self._source, self._column, places, there),
            "segment_ids": self._spread(
                np.repeat(number + 1, sizes), there, self._segment_type
            ),
            "positions": self._spread(position, there, self._position_type),
        }

    def _spread(
        self, values: np.ndarray, there: np.ndarray, dtype: np.dtype
    ) -> np.ndarray:
        out = aligned_empty(there.shape, dtype)
        out[...] = 0
        out[there] = values
        return out


def _checked_lengths(lengths: np.ndarray, total: int) -> np.ndarray:
    array = np.asarray(lengths)
    if array.dtype.kind not in "iu":
        raise TypeError(f"lengths must be integers, got dtype {array.dtype}")
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"lengths must hold one number for each document, got shape {array.shape}"
        )
    array = array.astype(np.int64)
    if array.min() < 0:
        raise ValueError(f"lengths must not be negative, got {array.min()}")
    if array.sum() != total:
        raise ValueError(
            f"lengths must add up to the {total} tokens, but their sum is "
            f"{array.sum()}; of offsets take np.diff"
        )
    return array


def _ramp(counts: np.ndarray) -> np.ndarray:
    # 0, ..., counts[0] - 1, 0, ..., counts[1] - 1, ...
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _pack_sequential(counts: np.ndarray, length: int) -> _Pieces:
    total = int(counts.sum())
    cuts = np.union1d(np.cumsum(counts) - counts, np.arange(0, total, length))
    # Empty documents at the end begin where there is nothing any more.
    start = cuts[cuts < total]
    return _Pieces(start, np.diff(start, append=total), start // length)


def _pack_best_fit(counts: np.ndarray, length: int) -> _Pieces:
    begin = np.cumsum(counts) - counts
    full, rest = np.divmod(counts, length)
    full_start = np.repeat(begin, full) + _ramp(full) * length
    number = len(full_start)

    rest_start = (begin + full * length)[rest > 0]
    rest = rest[rest > 0]
    row = number + _best_fit_decreasing(rest, length)
    return _Pieces(
        np.concatenate([full_start, rest_start]),
        np.concatenate([np.full(number, length), rest]),
        np.concatenate([np.arange(number), row]),
    )


def _best_fit_decreasing(sizes: np.ndarray, length: int) -> np.ndarray:
    # All pieces of one size at once: each goes into the fullest row with room for it,
    # and that row stays the fullest one until it has no room left.
    row = np.empty(len(sizes), np.int64)
    open_rows = _OpenRows(length)
    order = np.argsort(-sizes, kind="stable")
    bounds = np.flatnonzero(np.diff(sizes[order])) + 1
    for group in np.split(order, bounds):
        while len(group):
            size = int(sizes[group[0]])
            room, rows = open_rows.fullest(size, len(group))
            each = room // size
            count = min(len(group), len(rows) * each)
            used = -(-count // each)
            row[group[:count]] = np.repeat(rows[:used], each)[:count]
            group = group[count:]
            open_rows.put(room, rows[used:])
            open_rows.put(room - each * size, rows[: used - 1])
            in_last = count - (used - 1) * each
            open_rows.put(room - in_last * size, rows[used - 1 : used])
    return row


class _OpenRows:
    """Rows that are not full, by the room they have left."""

    def __init__(self, length: int):
        self._length, self._count = length, 0
        self._rooms: list[int] = []
        self._rows: dict[int, list[np.ndarray]] = {}

    def fullest(self, size: int, number: int) -> tuple[int, np.ndarray]:
        """Takes out rows with the least room for a size; new ones, if none has."""
        at = bisect.bisect_left(self._rooms, size)
        if at == len(self._rooms):
            new = -(-number // (self._length // size))
            self._count += new
            return self._length, np.arange(self._count - new, self._count)
        room = self._rooms[at]
        rows = self._rows[room].pop()
        if not self._rows[room]:
            del self._rows[room], self._rooms[at]
        return room, rows

    def put(self, room: int, rows: np.ndarray) -> None:
        """Puts rows back with the room they have now."""
        if not room or not len(rows):
            return
        if room not in self._rows:
            bisect.insort(self._rooms, room)
        self._rows.setdefault(room, []).append(rows)


_STRATEGIES = {"best_fit": _pack_best_fit, "sequential": _pack_sequential}
