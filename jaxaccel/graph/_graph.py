"""A graph, prepared once on the host for aggregation in both directions."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.graph import _ell

NORMALIZATIONS = ("none", "mean", "symmetric")
_MOST = 2**31 - 2


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["src", "dst", "indptr", "weights", "incoming", "outgoing", "order"],
    meta_fields=["num_src", "num_dst"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    r"""A directed graph as a sparse matrix: messages flow from `src` to `dst`.

    .. math:: y_d = \sum_{e:\, s_e \to d} w_e\, x_{s_e}

    Immutable, a pytree of int32 arrays: hand it to jitted functions as an argument.
    Its edges are sorted by `dst`, and those of one `dst` stay in the order given.

    Attributes:
      src: `(edges,)` int32, where each edge begins.
      dst: `(edges,)` int32, where it ends, not falling.
      indptr: `(num_dst + 1,)` int32: edges into node d are `indptr[d]` up to
        `indptr[d + 1]`.
      weights: `(edges,)` float32, or None where all are 1.
      incoming: The matrix by its rows, for `spmm`.
      outgoing: Its transpose, for the gradient.
      order: `(edges,)` int32: edge e was number `order[e]` of those given; -1 for a
        self-loop that was added.
      num_src: Number of nodes that edges may begin at.
      num_dst: Number of nodes that they may end at; another one in bipartite graphs.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import graph
      >>> g = graph.Graph.from_edges([0, 1, 2], [1, 2, 1], num_nodes=3)
      >>> g
      Graph(3 nodes, 3 edges)
      >>> print(graph.spmm(g, np.array([[1.0], [10.0], [100.0]])).ravel())
      [  0. 101.  10.]
    """

    src: Any
    dst: Any
    indptr: Any
    weights: Any
    incoming: _ell.Ell
    outgoing: _ell.Ell
    order: Any
    num_src: int
    num_dst: int

    @classmethod
    def from_edges(
        cls,
        src: ArrayLike | Sequence[int],
        dst: ArrayLike | Sequence[int],
        *,
        num_nodes: int | tuple[int, int],
        weights: ArrayLike | Sequence[float] | None = None,
        normalize: str = "none",
        self_loops: bool = False,
        undirected: bool = False,
    ) -> "Graph":
        r"""Builds a graph from two lists of nodes.

        Args:
          src: Where each edge begins, integers.
          dst: Where it ends.
          num_nodes: Number of nodes, or `(num_src, num_dst)` of a bipartite graph.
            Edges may occur several times; each counts.
          weights: Of the edges, finite; None for 1.
          normalize: `"none"`; `"mean"` divides by the sum of the weights into `dst`;
            `"symmetric"` by :math:`\sqrt{d_s d_d}`, the weights out of and into the
            ends, as GCN does.
          self_loops: Whether to add an edge of weight 1 from each node to itself,
            before normalizing.
          undirected: Whether to add each edge in the other direction too, unless it is
            a loop.

        Returns:
          The graph, on the default device.

        Raises:
          TypeError: If nodes are not integers.
          ValueError: If lengths differ, a node is out of range, a weight is not finite
            or negative where it is normalized by, there are 2**31 edges, or a
            bipartite graph shall have loops or be undirected.

        Examples:
          >>> from jaxaccel import graph
          >>> g = graph.Graph.from_edges(
          ...     [0], [1], num_nodes=2, self_loops=True, normalize="mean")
          >>> g.src.tolist(), g.dst.tolist(), g.weights.tolist()
          ([0, 0, 1], [0, 1, 1], [1.0, 0.5, 0.5])
        """
        num_src, num_dst = _node_counts(num_nodes)
        starts = _as_nodes("src", src, num_src)
        ends = _as_nodes("dst", dst, num_dst)
        if len(starts) != len(ends):
            raise ValueError(
                f"src and dst must be equally long; got {len(starts)} and {len(ends)}"
            )
        values = _as_weights(weights, len(starts))
        order = np.arange(len(starts))
        if self_loops or undirected:
            if num_src != num_dst:
                raise ValueError(
                    "self_loops and undirected need nodes of one kind; got a bipartite "
                    f"graph of {num_src} and {num_dst}"
                )
            starts, ends, values, order = _completed(
                starts, ends, values, order, num_src, self_loops, undirected
            )
        values = _normalized(normalize, starts, ends, values, num_src, num_dst)
        return _assemble(starts, ends, values, order, num_src, num_dst)

    @property
    def num_edges(self) -> int:
        """Number of edges, added ones included."""
        return self.src.shape[0]

    @property
    def in_degrees(self) -> Any:
        """`(num_dst,)` int32: number of edges into each node."""
        return self.indptr[1:] - self.indptr[:-1]

    def __repr__(self) -> str:
        nodes = str(self.num_src)
        if self.num_src != self.num_dst:
            nodes += f" to {self.num_dst}"
        weighted = "" if self.weights is None else ", weighted"
        return f"Graph({nodes} nodes, {self.num_edges} edges{weighted})"

    def renumbered(self, numbers: np.ndarray) -> "Graph":
        """Returns the graph with other numbers for the edges it was made of."""
        order = jnp.asarray(np.asarray(numbers, np.int32)[np.asarray(self.order)])
        return dataclasses.replace(self, order=order)

    def validate(self) -> None:
        """Checks that the arrays fit each other; for graphs from elsewhere.

        Raises:
          ValueError: If `indptr`, `dst` or a node's number is wrong, or a weight is
            not finite.
        """
        src, dst, indptr = (np.asarray(x) for x in (self.src, self.dst, self.indptr))
        _as_nodes("src", src, self.num_src)
        _as_nodes("dst", dst, self.num_dst)
        wanted = np.concatenate(
            [[0], np.cumsum(np.bincount(dst, minlength=self.num_dst))]
        )
        if (np.diff(dst) < 0).any() or not np.array_equal(indptr, wanted):
            raise ValueError(
                "indptr does not count the edges of dst, which must not fall; build "
                "graphs with Graph.from_edges"
            )
        if self.weights is not None:
            _as_weights(self.weights, len(src))

    def edge_values(self, values: ArrayLike) -> jax.Array:
        """Brings an array of one entry for each given edge into the graph's order.

        Args:
          values: `(edges, ...)` in the order given to `from_edges`; graphs with added
            edges have none for those.

        Returns:
          The entries in the order of `graph.src` and `graph.dst`.

        Raises:
          ValueError: If the length is another, or edges were added.

        Examples:
          >>> import numpy as np
          >>> from jaxaccel import graph
          >>> g = graph.Graph.from_edges([0, 1], [1, 0], num_nodes=2)
          >>> print(g.edge_values(np.array([5.0, 7.0])))
          [7. 5.]
        """
        order = np.asarray(self.order)
        if (order < 0).any() or len(np.unique(order)) != len(order):
            raise ValueError(
                "the graph has edges that were added (self_loops, undirected); give "
                "values in the order of graph.src and graph.dst"
            )
        if np.shape(values)[:1] != (len(order),):
            raise ValueError(
                f"values must have one entry for each of {len(order)} edges; got the "
                f"shape {np.shape(values)}"
            )
        return jnp.asarray(values)[order]


def _node_counts(num_nodes: Any) -> tuple[int, int]:
    counts = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
    if len(counts) != 2:
        raise ValueError(f"num_nodes must be one number or two; got {num_nodes!r}")
    for count in counts:
        if isinstance(count, bool) or not hasattr(count, "__index__"):
            raise TypeError(f"num_nodes must be integers; got {count!r}")
        if not 0 <= operator.index(count) <= _MOST:
            raise ValueError(f"num_nodes must be from 0 to {_MOST}; got {count}")
    return operator.index(counts[0]), operator.index(counts[1])


def _as_nodes(name: str, nodes: Any, count: int) -> np.ndarray:
    found = np.asarray(nodes)
    if found.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional; got shape {found.shape}")
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers; got {found.dtype}")
    if found.size > _MOST:
        raise ValueError(f"{name} holds {found.size} edges; {_MOST} at most")
    bad = np.flatnonzero((found < 0) | (found >= count)) if found.size else []
    if len(bad):
        raise ValueError(
            f"{name}[{bad[0]}] is {found[bad[0]]}, but the {count} nodes are 0 to "
            f"{count - 1}"
        )
    return found.astype(np.int64)


def _as_weights(weights: Any, edges: int) -> np.ndarray | None:
    if weights is None:
        return None
    found = np.asarray(weights, np.float64)
    if found.shape != (edges,):
        raise ValueError(
            f"weights must be of shape {(edges,)}, one for each edge; got {found.shape}"
        )
    if not np.isfinite(found).all():
        bad = np.flatnonzero(~np.isfinite(found))[0]
        raise ValueError(f"weights must be finite; weights[{bad}] is {found[bad]}")
    return found


def _completed(starts, ends, values, order, count, self_loops, undirected):
    weights = np.ones(len(starts)) if values is None else values
    if undirected:
        other = starts != ends
        starts, ends = (
            np.concatenate([starts, ends[other]]),
            np.concatenate([ends, starts[other]]),
        )
        weights = np.concatenate([weights, weights[other]])
        order = np.concatenate([order, order[other]])
    if self_loops:
        nodes = np.arange(count)
        starts, ends = np.concatenate([starts, nodes]), np.concatenate([ends, nodes])
        weights = np.concatenate([weights, np.ones(count)])
        order = np.concatenate([order, np.full(count, -1)])
    return starts, ends, None if values is None else weights, order


def _normalized(normalize, starts, ends, values, num_src, num_dst):
    if normalize not in NORMALIZATIONS:
        raise ValueError(
            f"normalize must be one of {', '.join(map(repr, NORMALIZATIONS))}; got "
            f"{normalize!r}"
        )
    if normalize == "none":
        return values
    weights = np.ones(len(starts)) if values is None else values
    if (weights < 0).any():
        raise ValueError(
            f"normalize={normalize!r} divides by sums of weights, which must not be "
            f"negative; got {weights.min()}"
        )
    into = np.bincount(ends, weights, num_dst)
    if normalize == "mean":
        return _ratio(weights, into[ends])
    out_of = np.bincount(starts, weights, num_src)
    return _ratio(weights, np.sqrt(out_of[starts] * into[ends]))


def _ratio(weights: np.ndarray, total: np.ndarray) -> np.ndarray:
    # Where all weights are 0 their share is 0 as well.
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def _assemble(starts, ends, values, order, num_src, num_dst) -> Graph:
    if len(starts) > _MOST:
        raise ValueError(f"the graph has {len(starts)} edges; {_MOST} at most")
    by_dst = np.argsort(ends, kind="stable")
    src, dst, order = starts[by_dst], ends[by_dst], order[by_dst]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=num_dst))])
    by_src = np.argsort(src, kind="stable")
    out_of = np.concatenate([[0], np.cumsum(np.bincount(src, minlength=num_src))])
    graph = Graph(
        src=src.astype(np.int32),
        dst=dst.astype(np.int32),
        indptr=indptr.astype(np.int32),
        weights=None if values is None else values[by_dst].astype(np.float32),
        incoming=_ell.build(indptr, src, np.arange(len(src))),
        outgoing=_ell.build(out_of, dst[by_src], by_src),
        order=order.astype(np.int32),
        num_src=num_src,
        num_dst=num_dst,
    )
    return jax.tree.map(jnp.asarray, graph)
