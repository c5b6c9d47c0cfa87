"""Aggregation over neighbours: sparse matrix times dense matrix, without scatters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.graph import _ell
from jaxaccel.graph._graph import Graph

REDUCTIONS = ("sum", "mean", "max")
IMPLEMENTATIONS = ("ell", "segment")


def spmm(
    graph: Graph,
    x: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    reduce: str = "sum",
    implementation: str | None = None,
) -> jax.Array:
    r"""Combines for each node what its neighbours send.

    .. math:: y_d = \sum_{e:\, s_e \to d} w_e\, x_{s_e}

    or their mean over the number of edges, or their maximum, entry by entry. A node
    without incoming edges gets 0. Sums are float32, in a fixed order: results are the
    same from run to run, bit by bit. The gradient is a `spmm` of the transpose, made
    with the graph, and that of the weights an `sddmm`: no scatter, and no buffer of
    edges times features. Of equal maxima each gets an equal share of the gradient.

    Args:
      graph: The graph.
      x: `(num_src, features)`, floating.
      weights: `(edges,)` in the order of `graph.src`; None takes the graph's.
      reduce: `"sum"`, `"mean"` or `"max"`.
      implementation: `"ell"`, rows in buckets of equal width; `"segment"`, the
        reference by `jax.ops.segment_sum`; None takes the first.

    Returns:
      `(num_dst, features)` in the dtype of `x`.

    Raises:
      TypeError: If `x` or the weights are not floating.
      ValueError: If a shape does not fit the graph, or an option has no such value.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import graph
      >>> g = graph.Graph.from_edges([0, 1, 1], [2, 2, 0], num_nodes=3)
      >>> x = np.array([[1.0, -1.0], [3.0, -3.0], [0.0, 0.0]])
      >>> for reduce in ("sum", "mean", "max"):
      ...     print(graph.spmm(g, x, reduce=reduce)[2])
      [ 4. -4.]
      [ 2. -2.]
      [ 3. -1.]

    References:
      Peng et al., MaxK-GNN, 2024, arXiv:2312.08656, for what limits aggregation
    """
    _check_choice("reduce", reduce, REDUCTIONS)
    _check_choice("implementation", implementation or "ell", IMPLEMENTATIONS)
    x = check_features("x", x, graph.num_src)
    if weights is None:
        weights = graph.weights
    if weights is not None:
        weights = check_weights(weights, graph)
    if implementation == "segment":
        return _segment(graph, x, weights, reduce)
    if reduce == "max":
        return _max(graph, x, weights)
    y = _sum(graph, x, weights)
    return y if reduce == "sum" else (_wide(y) / _counts(graph)).astype(x.dtype)


def check_features(name: str, x: ArrayLike, rows: int) -> jax.Array:
    """Raises unless an array has one row of floating numbers for each node."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(f"{name} must be floating; got {jnp.result_type(x)}")
    if np.ndim(x) != 2 or np.shape(x)[0] != rows:
        raise ValueError(
            f"{name} must be of shape ({rows}, features), a row for each node; got "
            f"{np.shape(x)}"
        )
    return jnp.asarray(x)


def check_weights(weights: ArrayLike, graph: Graph) -> jax.Array:
    """Raises unless there is a floating weight for each edge."""
    if not jnp.issubdtype(jnp.result_type(weights), jnp.floating):
        raise TypeError(f"weights must be floating; got {jnp.result_type(weights)}")
    if np.shape(weights) != (graph.num_edges,):
        raise ValueError(
            f"weights must be of shape ({graph.num_edges},), one for each edge; got "
            f"{np.shape(weights)}"
        )
    return jnp.asarray(weights)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}"
        )


def _counts(graph: Graph) -> jax.Array:
    return _wide(jnp.maximum(graph.in_degrees, 1))[:, None]


# ------------------------------------------------------------------------------ sum


@jax.custom_vjp
def _sum(graph: Graph, x: jax.Array, weights: jax.Array | None) -> jax.Array:
    return sum_over(graph.incoming, x, weights)


def sum_over(ell: _ell.Ell, x: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns the weighted sums of rows of features, in the dtype of `x`."""
    table = slot_weights(weights, ell)

    def message(columns, edges, rows):
        del rows
        return _wide(_ell.take(x, columns)) * _ell.take(table, edges)[:, None]

    sums = _ell.reduce_rows(ell, message, jnp.add, 0.0, x.shape[1:])
    return sums.astype(x.dtype)


def slot_weights(weights: jax.Array | None, ell: _ell.Ell) -> jax.Array:
    """Returns the weights with one more, 0, for the padding of buckets."""
    if weights is None:
        weights = jnp.ones(ell.num_edges, jnp.float32)
    return jnp.append(weights.astype(jnp.float32), jnp.float32(0))


def _sum_forward(graph, x, weights):
    return _sum(graph, x, weights), (graph, x, weights)


def _sum_backward(residuals, cotangent):
    graph, x, weights = residuals
    gradient = sum_over(graph.outgoing, cotangent, weights).astype(x.dtype)
    if weights is None:
        return None, gradient, None
    return None, gradient, dots(graph, cotangent, x).astype(weights.dtype)


_sum.defvjp(_sum_forward, _sum_backward)


def dots(graph: Graph, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `sum(a[dst] * b[src])` of each edge, float32."""

    def value(columns, edges, rows):
        del edges
        product = _wide(_ell.take(a, rows)) * _wide(_ell.take(b, columns))
        return product.sum(axis=1)

    if not graph.num_edges:
        return jnp.zeros(0, jnp.float32)
    return _ell.map_edges(graph.incoming, value)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


# ------------------------------------------------------------------------------ max


@jax.custom_vjp
def _max(graph: Graph, x: jax.Array, weights: jax.Array | None) -> jax.Array:
    return _max_and_empty(graph, x, weights)[0].astype(x.dtype)


def _max_and_empty(graph, x, weights):
    ell, message = graph.incoming, _max_message(graph, x, weights)

    def padded(columns, edges, rows):
        # Padding repeats an edge of the row itself, which changes no maximum.
        return message(columns, edges, rows)

    start = -np.inf
    found = _ell.reduce_rows(ell, padded, jnp.maximum, start, x.shape[1:])
    empty = (graph.in_degrees == 0)[:, None]
    return jnp.where(empty, 0.0, found), empty


def _max_message(graph, x, weights):
    if weights is None:
        return lambda columns, edges, rows: _wide(_ell.take(x, columns))
    table = weights.astype(jnp.float32)
    last = graph.num_edges - 1

    def message(columns, edges, rows):
        del rows
        values = (
            _wide(_ell.take(x, columns))
            * _ell.take(table, jnp.minimum(edges, last))[:, None]
        )
        return jnp.where((edges <= last)[:, None], values, -np.inf)

    return message


def _max_forward(graph, x, weights):
    found, _ = _max_and_empty(graph, x, weights)
    return found.astype(x.dtype), (graph, x, weights, found)


def _max_backward(residuals, cotangent):
    graph, x, weights, found = residuals
    ones = jnp.ones(graph.num_edges, jnp.float32)
    table = slot_weights(weights if weights is not None else ones, graph.incoming)
    real = slot_weights(ones, graph.incoming)

    def is_largest(sent, largest, edges):
        value = _wide(sent) * _ell.take(table, edges)[:, None]
        return _wide(value == largest) * _ell.take(real, edges)[:, None]

    def hits(columns, edges, rows):
        return is_largest(_ell.take(x, columns), _ell.take(found, rows), edges)

    count = _ell.reduce_rows(graph.incoming, hits, jnp.add, 0.0, x.shape[1:])
    share = _wide(cotangent) / jnp.maximum(count, 1.0)

    def back(columns, edges, rows):
        hit = is_largest(_ell.take(x, rows), _ell.take(found, columns), edges)
        return hit * _ell.take(share, columns) * _ell.take(table, edges)[:, None]

    gradient = _ell.reduce_rows(graph.outgoing, back, jnp.add, 0.0, x.shape[1:])
    gradient = gradient.astype(x.dtype)
    if weights is None:
        return None, gradient, None

    def of_weight(columns, edges, rows):
        sent = _ell.take(x, columns)
        hit = is_largest(sent, _ell.take(found, rows), edges)
        return (hit * _ell.take(share, rows) * _wide(sent)).sum(axis=1)

    if not graph.num_edges:
        return None, gradient, jnp.zeros_like(weights)
    slopes = _ell.map_edges(graph.incoming, of_weight)
    return None, gradient, slopes.astype(weights.dtype)


_max.defvjp(_max_forward, _max_backward)


# ------------------------------------------------------------------------ reference


@functools.partial(jax.jit, static_argnames="reduce")
def _segment(graph, x, weights, reduce):
    messages = _wide(x)[graph.src]
    if weights is not None:
        messages = messages * weights.astype(jnp.float32)[:, None]
    count = graph.num_dst
    if reduce == "max":
        y = jax.ops.segment_max(messages, graph.dst, count, indices_are_sorted=True)
        y = jnp.where((graph.in_degrees == 0)[:, None], 0.0, y)
    else:
        y = jax.ops.segment_sum(messages, graph.dst, count, indices_are_sorted=True)
        y = y / _counts(graph) if reduce == "mean" else y
    return y.astype(x.dtype)
