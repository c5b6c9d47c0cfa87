"""Numbers on edges: dot products of their ends, and softmax over each node's."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.graph import _ell
from jaxaccel.graph._graph import Graph
from jaxaccel.graph._spmm import check_features, dots, sum_over


def sddmm(graph: Graph, a: ArrayLike, b: ArrayLike) -> jax.Array:
    r"""Returns the dot product of the features at both ends of each edge.

    .. math:: z_e = \sum_f a_{d_e f}\, b_{s_e f}

    Args:
      graph: The graph.
      a: `(num_dst, features)`, floating.
      b: `(num_src, features)`.

    Returns:
      `(edges,)` float32 in the order of `graph.src`. Its gradients are `spmm`s.

    Raises:
      TypeError: If `a` or `b` is not floating.
      ValueError: If a shape does not fit the graph.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import graph
      >>> g = graph.Graph.from_edges([0, 1], [1, 0], num_nodes=2)
      >>> x = np.array([[1.0, 2.0], [3.0, 4.0]])
      >>> print(graph.sddmm(g, x, 10 * x))
      [110. 110.]
    """
    a = check_features("a", a, graph.num_dst)
    b = check_features("b", b, graph.num_src)
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a and b must have equally many features; got {a.shape[1]} and "
            f"{b.shape[1]}"
        )
    return _sddmm(graph, a, b)


@jax.custom_vjp
def _sddmm(graph, a, b):
    return dots(graph, a, b)


def _sddmm_forward(graph, a, b):
    return dots(graph, a, b), (graph, a, b)


def _sddmm_backward(residuals, cotangent):
    graph, a, b = residuals
    of_a = sum_over(graph.incoming, b, cotangent).astype(a.dtype)
    of_b = sum_over(graph.outgoing, a, cotangent).astype(b.dtype)
    return None, of_a, of_b


_sddmm.defvjp(_sddmm_forward, _sddmm_backward)


def edge_softmax(graph: Graph, logits: ArrayLike) -> jax.Array:
    r"""Softmax over the edges into each node, as attention on graphs needs.

    .. math:: p_e = \exp(l_e - m_{d_e}) \Big/ \sum_{f:\, d_f = d_e} \exp(l_f - m_{d_e})

    with the maximum :math:`m` of each node's logits.

    Args:
      graph: The graph.
      logits: `(edges,)` or `(edges, heads)`, floating, in the order of `graph.src`.

    Returns:
      Weights of the same shape and dtype, which add up to 1 at each node that has
      edges; computed in float32, without scatters, as their gradient is.

    Raises:
      TypeError: If the logits are not floating.
      ValueError: If there is not one, or one row, for each edge.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import graph
      >>> g = graph.Graph.from_edges([0, 1, 0], [2, 2, 1], num_nodes=3)
      >>> logits = g.edge_values(np.log(np.array([1.0, 1.0, 5.0])))
      >>> print(g.dst, graph.edge_softmax(g, logits))
      [1 2 2] [1.  0.5 0.5]

    References:
      Veličković et al., Graph Attention Networks, 2018, arXiv:1710.10903
    """
    if not jnp.issubdtype(jnp.result_type(logits), jnp.floating):
        raise TypeError(f"logits must be floating; got {jnp.result_type(logits)}")
    shape = np.shape(logits)
    if len(shape) not in (1, 2) or shape[0] != graph.num_edges:
        raise ValueError(
            f"logits must be of shape ({graph.num_edges},) or ({graph.num_edges}, "
            f"heads); got {shape}"
        )
    logits = jnp.asarray(logits)
    return _softmax(graph, logits) if graph.num_edges else logits


@jax.custom_vjp
def _softmax(graph, logits):
    wide = logits.astype(jnp.float32)
    largest = _over_edges(graph, wide, jnp.maximum, -np.inf)
    powers = jnp.exp(wide - _ell.take(largest, graph.dst))
    total = _over_edges(graph, powers, jnp.add, 0.0)
    return (powers / _ell.take(total, graph.dst)).astype(logits.dtype)


def _softmax_forward(graph, logits):
    weights = _softmax(graph, logits)
    return weights, (graph, weights)


def _softmax_backward(residuals, cotangent):
    graph, weights = residuals
    product = weights.astype(jnp.float32) * cotangent.astype(jnp.float32)
    total = _over_edges(graph, product, jnp.add, 0.0)
    gradient = product - weights.astype(jnp.float32) * _ell.take(total, graph.dst)
    return None, gradient.astype(weights.dtype)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _over_edges(graph, values, combine, start):
    """Combines the values of the edges into each node."""
    padding = jnp.full((1, *values.shape[1:]), start, values.dtype)
    table = jnp.concatenate([values, padding])

    def message(columns, edges, rows):
        del columns, rows
        return _ell.take(table, edges)

    return _ell.reduce_rows(graph.incoming, message, combine, start, values.shape[1:])
