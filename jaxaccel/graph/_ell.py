"""Rows of a sparse matrix in buckets of equal width, and the loops over them.

A row of d entries is padded to the next width 1, 2, 4 ... 128; a longer one, a hub, is
cut into pieces of 128, whose sums a second, smaller matrix of the same kind adds up.
Every loop gathers whole rows of features and adds them in place: there is no scatter,
no buffer of edges times features, and the order of additions is fixed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDEST = 128
# Slots a turn of the loop: XLA makes one pass over the sums for all of them.
UNROLL = 8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns", "edges", "rows", "places", "edge_places", "hubs"],
    meta_fields=["num_rows", "num_edges"],
)
class Ell:
    """A sparse matrix by buckets; all arrays int32.

    Args:
      columns: For each bucket `(width, pieces)`: column of each slot; a padded slot
        repeats the first of its row.
      edges: Likewise, the number of the edge; `num_edges` in padded slots.
      rows: For each bucket `(pieces,)`: the row that a piece belongs to.
      places: `(num_rows,)`: which piece holds the row's result, counted through all
        buckets, then through the hubs; one more for an empty row.
      edge_places: `(num_edges,)`: which slot, of all buckets in order, holds an edge.
      hubs: Matrix from the pieces of the hubs to their rows, or None.
      num_rows: Number of rows.
      num_edges: Number of edges.
    """

    def __init__(
        self,
        columns: Sequence[Any],
        edges: Sequence[Any],
        rows: Sequence[Any],
        places: Any,
        edge_places: Any,
        hubs: "Ell | None",
        num_rows: int,
        num_edges: int,
    ):
        self.columns, self.edges, self.rows = tuple(columns), tuple(edges), tuple(rows)
        self.places, self.edge_places, self.hubs = places, edge_places, hubs
        self.num_rows, self.num_edges = num_rows, num_edges


def build(indptr: np.ndarray, columns: np.ndarray, edges: np.ndarray) -> Ell:
    """Makes buckets of a CSR matrix, on the host.

    Args:
      indptr: `(rows + 1,)` int64.
      columns: Column of each entry.
      edges: Number of the edge of each entry, a permutation.

    Returns:
      The matrix, of NumPy arrays.
    """
    starts, degrees = indptr[:-1], np.diff(indptr)
    rows, starts, lengths = _pieces(starts, degrees)
    widths = 1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    order = np.lexsort((np.arange(len(rows)), widths))
    bucket_columns, bucket_edges, bucket_rows = [], [], []
    edge_places = np.zeros(len(columns), np.int64)
    piece_of = np.empty(len(rows), np.int64)
    piece_of[order] = np.arange(len(rows))
    slots = 0
    for width in np.unique(widths):
        chosen = order[widths[order] == width]
        offsets = np.arange(width)[:, None]
        real = offsets < lengths[chosen]
        entries = np.where(real, starts[chosen] + offsets, starts[chosen])
        bucket_columns.append(columns[entries].astype(np.int32))
        numbers = np.where(real, edges[entries], len(columns))
        bucket_edges.append(numbers.astype(np.int32))
        bucket_rows.append(rows[chosen].astype(np.int32))
        edge_places[numbers[real]] = slots + np.flatnonzero(real)
        slots += real.size
    places, hubs = _gather_pieces(rows, piece_of, degrees)
    return Ell(
        bucket_columns,
        bucket_edges,
        bucket_rows,
        places.astype(np.int32),
        edge_places.astype(np.int32),
        hubs,
        len(degrees),
        len(columns),
    )


def _pieces(
    starts: np.ndarray, degrees: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = -(-degrees // WIDEST)
    rows = np.repeat(np.arange(len(degrees)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = starts[rows] + within * WIDEST
    return rows, firsts, np.minimum(degrees[rows] - within * WIDEST, WIDEST)


def _gather_pieces(
    rows: np.ndarray, piece_of: np.ndarray, degrees: np.ndarray
) -> tuple[np.ndarray, Ell | None]:
    pieces = len(rows)
    is_hub = degrees > WIDEST
    hub_rows = np.flatnonzero(is_hub)
    places = np.full(len(degrees), pieces + len(hub_rows), np.int64)
    single = ~is_hub[rows]
    places[rows[single]] = piece_of[single]
    places[hub_rows] = pieces + np.arange(len(hub_rows))
    if not len(hub_rows):
        return places, None
    counts = -(-degrees[hub_rows] // WIDEST)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    of_hubs = piece_of[is_hub[rows]]
    return places, build(indptr, of_hubs, np.arange(len(of_hubs)))


def reduce_rows(
    ell: Ell,
    message: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    start: float,
    width: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Combines the messages of each row's entries.

    Args:
      ell: The matrix.
      message: `message(columns, edges, rows) -> (pieces, *width)`, of one slot.
      combine: `jnp.add` or `jnp.maximum`.
      start: What an empty row holds, neutral for `combine`.
      width: Shape of a message.
      dtype: Of the result.

    Returns:
      `(num_rows, *width)`.
    """
    parts = [
        _reduce_bucket(message, combine, start, width, dtype, *bucket)
        for bucket in zip(ell.columns, ell.edges, ell.rows, strict=True)
    ]
    empty = jnp.full((1, *width), start, dtype)
    if not parts:
        return jnp.broadcast_to(empty, (ell.num_rows, *width))
    if ell.hubs is not None:
        pieces, count = jnp.concatenate(parts), ell.hubs.num_edges
        lead = (slice(None),) + (None,) * len(width)

        def piece(columns, edges, rows):
            del rows
            return jnp.where((edges < count)[lead], take(pieces, columns), start)

        parts.append(reduce_rows(ell.hubs, piece, combine, start, width, dtype))
    return take(jnp.concatenate([*parts, empty]), ell.places)


def _reduce_bucket(message, combine, start, width, dtype, columns, edges, rows):
    slots, pieces = columns.shape
    turn = min(UNROLL, slots)

    def body(i, sums):
        for j in range(turn):
            slot = i * turn + j
            sums = combine(
                sums,
                message(
                    jax.lax.dynamic_index_in_dim(columns, slot, keepdims=False),
                    jax.lax.dynamic_index_in_dim(edges, slot, keepdims=False),
                    rows,
                ),
            )
        return sums

    sums = jnp.full((pieces, *width), start, dtype)
    return jax.lax.fori_loop(0, slots // turn, body, sums)


def map_edges(
    ell: Ell, value: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Returns a number for each edge, in the order of their numbers.

    Args:
      ell: The matrix.
      value: `value(columns, edges, rows) -> (pieces,) or (pieces, heads)`, of a slot.

    Returns:
      `(num_edges, ...)`.
    """
    parts = []
    for columns, edges, rows in zip(ell.columns, ell.edges, ell.rows, strict=True):
        one_slot = functools.partial(_value_of_slot, value, rows)
        found = jax.lax.map(one_slot, (columns, edges))
        parts.append(found.reshape(-1, *found.shape[2:]))
    return take(jnp.concatenate(parts), ell.edge_places)


def _value_of_slot(value, rows, pair):
    columns, edges = pair
    return value(columns, edges, rows)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Gathers rows by indices that were checked when the graph was built."""
    return x.at[indices].get(mode="promise_in_bounds")
